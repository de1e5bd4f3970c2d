"""The pages of `jdp.plan` and `jdp.doctor`, in a real browser: they show what was found."""

import re

import optax
from test_page import see, words

from jdp import page, page_answers
from jdp.diagnosis import Check, Diagnosis, Process, Replica
from jdp.findings import Finding
from jdp.pays import Payoff
from jdp.planned import Plan, Row
from jdp.strategy import Strategy


def test_the_page_of_a_diagnosis_says_what_it_says(tmp_path):
    found = Diagnosis(
        None, 20, 1.5, 40.0, 20.0, 10.0, 8.0, 2.0, 1.0, 3.0, 41.0, Check(40.0, 31.0, 9.0, 1, 0),
        (Process(0, 20.0, 10.0, 8.0, 2.0, 1.0),),
        (Replica(0, 0, 0, 20.0, 10.0), Replica(1, 0, 1, 18.0, 12.0)),
        (Finding("input 20 % <of> the step", 8.0, "jdp.feed(prefetch=2)"),),
        (Payoff("bfloat16 wire", "wire_dtype=...", True, 40.0, 36.0, 8.0, 4.0, 0, "half"),),
        ("a note",),
    )  # fmt: skip
    dom = see(page.alone(page_answers.diagnosis(found), "doctor"), tmp_path, "--dump-dom")
    seen = words(dom)
    for text in ("40 ms a step", "input 20 % <of> the step", "8 ms", "it adds 9 ms", "✓ yes"):
        assert text in seen
    assert re.search(r'class="c-sent" style="width:\s?25.00%', dom)  # 10 of 40 ms


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
    dom = see(page.alone(page_answers.plan(found), "plan"), tmp_path, "--dump-dom")
    seen = words(dom)
    for text in (*found.advice, *found.notes, "so <many>", "40.0 GB", "~160 GB", "2 ms"):
        assert text in seen
    assert found.best.code().splitlines()[-1] in seen
    widths = re.findall(r'class="c-(act|bad|compute|sent)" style="width:\s?([\d.]+)%', dom)
    assert widths == [
        ("act", "50.000"),
        ("compute", "75.000"),
        ("sent", "25.000"),
        ("bad", "100.000"),
    ]


def test_a_plan_in_which_nothing_fits_says_so(tmp_path):
    seen = words(see(page.alone(page_answers.plan(planned(False)), "plan"), tmp_path, "--dump-dom"))
    assert "No strategy fits" in seen
    assert "jdp.train_step" not in seen
