"""Tables in a terminal: all is said, no word is broken, and names are taken literally."""

import collections
import io

import pytest
from test_page import report
from test_page_answers import diagnosed, planned

from jdp import tables
from jdp.reporting import SENT_HEADERS, sent_cells

pytestmark = pytest.mark.alternate

rich_console = pytest.importorskip("rich.console")

WIDE = 1000


def on_terminal(found, width):
    console = rich_console.Console(width=width, file=io.StringIO())
    console.print(found)
    return console.file.getvalue()


def said(found, width):
    """Words on a terminal, with how often they stand there; lines drawn are none."""
    text = on_terminal(found, width).replace("─", " ").replace("█", " ")
    return collections.Counter(text.split())


def crowded():
    """A report of 40 collectives of several axes, in loops, with two origins each."""
    found = report()
    one = found.collectives[0]._replace(
        axes=("node", "device"), in_loop=True, times=12, source="model.py:1234", us=123.4
    )
    rows = tuple(one._replace(bytes=2**k, wire_bytes=2.0**k) for k in range(40))
    return found._replace(mesh={"node": 2, "device": 4}, collectives=rows)


def sentences(found):
    if not hasattr(found, "advice"):
        changes = [text for x in found.findings for text in (x.what, x.change)]
        return [*found.notes, *found.remarks, found.straggler, *changes]
    return [*found.notes, *found.advice, *([found.best.code()] if found.best else [])]


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize(
    "found", [planned(True), planned(False), diagnosed()], ids=["plan", "no plan", "diagnosis"]
)
def test_plan_and_diagnosis_say_all_in_whole_words(found, width):
    assert said(found, width) == said(found, WIDE)
    for text in sentences(found):
        assert not collections.Counter(text.split()) - said(found, width), text
    assert max(map(len, on_terminal(found, width).split("\n"))) <= width


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("made", [report, crowded])
def test_a_report_leaves_out_columns_before_it_breaks_words(made, width):
    found = made()
    lost = said(found, WIDE) - said(found, width)
    assert not said(found, width) - said(found, WIDE)
    assert max(map(len, on_terminal(found, width).split("\n"))) <= width
    if width == 120 or made is report:
        assert not lost
    else:
        assert {"time", "dtype", "f32"} <= set(lost)
        assert not {"exposed", "from", "bytes", "model.py:1234,"} & set(lost)


def test_of_many_collectives_those_that_send_most_are_shown():
    text = on_terminal(crowded(), 120)
    assert "and 16 more, smaller ones" in text
    assert "550 GB" in text  # 2^39
    assert "65.5 kB" in text
    assert "32.8 kB" not in text  # 2^15


def test_a_row_is_what_the_report_says_it_is():
    found = report()
    line = next(x for x in on_terminal(found, 200).split("\n") if "all-reduce" in x and "kB" in x)
    cells = [
        cell
        for name, cell in zip(SENT_HEADERS, sent_cells(found.collectives[-1]), strict=True)
        if name not in ("beside", "axes")
    ]
    assert line.split() == " ".join(cells).split()


def test_names_are_taken_literally():
    one = report().collectives[-1]._replace(source="[bold]model.py:3")
    text = on_terminal(report()._replace(collectives=(one,), notes=("[red]note",)), 200)
    for part in ("[bold]model.py:3", "[red]note", "all-reduce", "optimizer state", "v5e:2x4"):
        assert part in text


def test_printing_narrow_leaves_the_table_whole():
    made = tables.rich_table(["a", "b"], [["x" * 50, "y" * 50]], spare=["a"])
    narrow, wide = on_terminal(made, 60), on_terminal(made, 120)
    assert "x" not in narrow
    assert "x" * 50 in wide
    assert "y" * 50 in narrow
