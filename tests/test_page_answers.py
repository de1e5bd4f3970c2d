"""The pages of `jdp.plan` and `jdp.doctor`, in a real browser: they show what was found."""

import re

import optax
import pytest
from test_page import looked_at, report, see, words

from jdp import page_answers
from jdp.diagnosis import Check, Diagnosis, Process, Replica
from jdp.findings import Finding
from jdp.pays import Payoff
from jdp.planned import Plan, Row
from jdp.strategy import Strategy

pytestmark = pytest.mark.alternate


def diagnosed():
    return Diagnosis(
        None, 20, 1.5, 40.0, 20.0, 10.0, 8.0, 2.0, 1.0, 3.0, 41.0, Check(40.0, 31.0, 9.0, 1, 0),
        (Process(0, 20.0, 10.0, 8.0, 2.0, 1.0), Process(1, 19.0, 11.0, 8.0, 2.0, 7.5)),
        (Replica(0, 0, 0, 20.0, 10.0), Replica(1, 0, 1, 18.0, 12.0)),
        (Finding("input 20 % <of> the step", 8.0, "jdp.feed(prefetch=2)"),),
        (Payoff("bfloat16 wire", "wire_dtype=...", "", True, 40.0, 36.0, 0.1, 8.0, 4.0, 0, "half"),
         Payoff("int8 wire", "jdp.all_reduce(wire_dtype=jnp.int8, error_feedback=True)", "",
                False, 40.0, 44.0, 0.1, 8.0, 4.0, 4096,
                "its exchange takes 14 ms, the present one 10")),
        ("a note",),
    )  # fmt: skip


def test_the_page_of_a_diagnosis_says_what_it_says(tmp_path):
    found = diagnosed()
    found.save_html(tmp_path / "saved.html")
    text = (tmp_path / "saved.html").read_text(encoding="utf-8")
    assert found._repr_html_() in text
    dom = see(text, tmp_path, "--dump-dom")
    seen = words(dom)
    for said in (*found.remarks, found.straggler, "input 20 % <of> the step", "8 ms", "✓ yes"):
        assert said in seen
    assert "40 ms a step" in seen
    assert "7.5 ms" in seen  # the second process waits for others
    assert re.search(r'class="c-sent" style="width:\s?25.00%', dom)  # 10 of 40 ms


def test_many_replicas_are_shown_slowest_first():
    rows = tuple(Replica(k, 0, k, float(k), 1.0) for k in range(40))
    text = page_answers.diagnosis(diagnosed()._replace(replicas=rows))
    shown, rest = text.split("<h2>Replicas")[1].split("<details>")
    assert [int(x) for x in re.findall(r"<tr><td class='number'>(\d+)<", shown)] == [
        *range(39, 23, -1)
    ]
    assert "24 that compute less" in rest


def strategy(stage, microbatch):
    return Strategy(
        stage, ("data",), (8,), None, microbatch, 1, False, "exact", False, optax.sgd(0.1)
    )


def planned(best):
    rows = (
        Row(strategy(1, 4), 40 * 10**9, True, 2000.0, 500.0, "compute", "so <many>", "compiled"),
        Row(strategy(0, 8), 160 * 10**9, False, 1000.0, 0.0, "memory", "too large", "formula"),
    )  # fmt: skip
    advice = ("Take zero1 on 8.", "It fits only in parts.")
    return Plan("h100:8", 32, 80 * 10**9, rows if best else rows[1:], advice if best else (),
                rows[0].strategy if best else None, 444, ("a note",))  # fmt: skip


def test_the_page_of_a_plan_says_what_it_says(tmp_path):
    found = planned(True)
    found.save_html(tmp_path / "saved.html")
    text = (tmp_path / "saved.html").read_text(encoding="utf-8")
    assert found._repr_html_() in text
    dom = see(text, tmp_path, "--dump-dom")
    seen = words(dom)
    cells = [cell for line in found.table() for cell in line]
    for said in (*found.advice, *found.notes, *cells, "25% of the step"):
        assert said in seen
    assert found.best.code().splitlines()[-1] in seen
    table = dom.split("<tbody>")[1]
    widths = re.findall(r'class="c-(act|bad|compute|sent)" style="width:\s?([\d.]+)%', table)
    assert widths == [
        ("act", "50.000"),
        ("compute", "75.000"),
        ("sent", "25.000"),
        ("bad", "100.000"),
    ]


def test_a_plan_in_which_nothing_fits_says_so():
    seen = words(planned(False)._repr_html_())
    assert "No strategy fits" in seen
    assert "jdp.train_step" not in seen


@pytest.mark.parametrize(
    "found", [planned(True), diagnosed(), report()], ids=["plan", "diagnosis", "report"]
)
def test_a_notebook_without_html_shows_what_print_shows(found):
    said = []
    found._repr_pretty_(type("Printer", (), {"text": said.append}), False)
    assert said == [str(found)]


def test_neither_runs_over_the_edge(tmp_path):
    long = "a_name_without_end_" * 30
    finding, plan = Finding(long, 1.0, long), planned(True)
    pages = {
        "plan": plan._replace(advice=(long, long), notes=(long,)),
        "diagnosis": diagnosed()._replace(findings=(finding,), notes=(long,)),
    }
    found = looked_at({name: x._repr_html_() for name, x in pages.items()}, tmp_path)
    assert len(found) == 4
    for name, seen in found.items():
        assert seen["widest"] <= seen["room"], name
