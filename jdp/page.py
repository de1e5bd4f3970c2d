"""A report as a page to look at: one HTML file that needs nothing else, or a part of a notebook.

    Report  --html-->  a whole page        Report  --fragment-->  what goes into a notebook's cell

At the top stand the verdict and the figures that matter; below, the timeline of a step
(`jdp.page_timeline`), the memory of a device against what it has, each collective beside the least
that it could send (`jdp.page_sections`), and who holds what (`jdp.page_holdings`). Text is escaped,
nothing is loaded from elsewhere, light and dark follow the reader's system, and without scripts all
of it is there.
"""

from jdp.holdings import human
from jdp.page_holdings import held
from jdp.page_parts import alone, gave_up, heading, meter, notes, page_text, percent, tile, wrapped
from jdp.page_sections import memory, sent
from jdp.page_timeline import timeline
from jdp.reporting import Report, microseconds

_LESS = 0.995  # of the least that full precision needs: something narrower is sent


def html(report: Report) -> str:
    """A page that shows a report.

    Args:
        report: What `jdp.explain` returned.

    Returns:
        The text of an HTML file.
    """
    return alone(fragment(report), f"jdp.explain: {report.where}")


def fragment(report: Report) -> str:
    """The same as a part of a page, with its own styles."""
    return wrapped(
        _head(report),
        timeline(report),
        memory(report.memory, report.memory_limit),
        sent(report),
        held(report.holdings, report.mesh),
        _foot(report),
    )


def _head(report: Report) -> str:
    chips = f"{report.devices} x {report.chip}, " if report.target and report.chip else ""
    drawn = (_memory_tile, _step_tile, _exposed_tile, _sent_tile, _flops_tile)
    note, bad = f"{chips}mesh: {report.axes}", report.fits is False
    return heading(report.where, note, report.verdict, *(x(report) for x in drawn), bad=bad)


def _memory_tile(report: Report) -> str:
    found, limit = report.memory, report.memory_limit
    used = human(found.total) if found else "not known"
    state = {True: "good", False: "bad", None: ""}[report.fits]
    bar = meter([(state if state == "bad" else "act", found.total)], limit) if found else ""
    has = human(limit) if limit else "the device"
    note = {
        True: f"✓ fits in {has}",
        False: f"✗ does not fit in {has}",
        None: "at the fullest moment",
    }
    return tile("memory of a device", used, note[report.fits], bar, state)


def _step_tile(report: Report) -> str:
    if not report.step_us:
        return ""
    exposed = report.exposed_us or 0.0
    bar = meter([("compute", report.step_us - exposed), ("sent", exposed)], report.step_us)
    return tile("a step takes", microseconds(report.step_us), "as modelled", bar)


def _exposed_tile(report: Report) -> str:
    if not report.step_us or report.exposed_us is None or report.sent_us is None:
        return ""
    share = f"{percent(report.exposed_us / report.step_us)} of the step"
    if report.hidden is not None and report.sent_us:
        share += f"; of {microseconds(report.sent_us)}, {percent(report.hidden)} hidden"
    hidden = report.sent_us - report.exposed_us
    bar = meter([("sent", report.exposed_us), ("hidden", hidden)], report.sent_us)
    return tile("it waits for communication", microseconds(report.exposed_us), share, bar)


def _sent_tile(report: Report) -> str:
    sent, least, ratio, _ = report.floor
    if gave_up(report):
        return tile("each device would send", human(round(least)), "at the least")
    bar = meter([("rest", min(sent, least)), ("sent", sent - least)], max(sent, least))
    note = f"{ratio:.3g} x the least possible" if least else "nothing has to be sent"
    if least and ratio < _LESS:
        note = f"{ratio:.3g} x the least in full precision"
    return tile("each device sends", human(round(sent)), note, bar)


def _flops_tile(report: Report) -> str:
    if report.mfu is not None:
        bar = meter([("compute", report.mfu)], 1.0)
        return tile("FLOPs used", percent(report.mfu), "of the chip's peak in bfloat16", bar)
    if not report.flops:
        return ""
    return tile("each device computes", _flops(report.flops), "a step: products, convolutions")


def _flops(number: float) -> str:
    """With a decimal unit: 10.3 TFLOP."""
    value, units = number, ["", "k", "M", "G", "T", "P"]
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.3g} {units[0]}FLOP"


def _foot(report: Report) -> str:
    told = [f"{name} {number}" for name, number in report.versions.items()]
    if report.compile_s is not None:
        told.append(f"compiled in {report.compile_s:.1f} s")
    told.append("bytes and times are those of one device and one step; nothing was run")
    return f"{notes(report.notes)}<footer>{page_text(' · '.join(told))}</footer>"
