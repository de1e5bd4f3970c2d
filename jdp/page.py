"""A report as a page to look at: one HTML file that needs nothing else, or a part of a notebook.

    Report  --html-->  a whole page        Report  --fragment-->  what goes into a notebook's cell

At the top stand the verdict and the figures that matter; below, the timeline of a step
(`jdp.page_timeline`), the memory of a device against what it has, each collective beside the least
that it could send, and who holds what (`jdp.page_sections`). Text is escaped, nothing is loaded
from elsewhere, light and dark follow the reader's system, and without scripts all of it is there.
"""

from importlib.resources import files

from jdp.holdings import human
from jdp.page_sections import held, memory, meter, page_text, sent
from jdp.page_timeline import timeline
from jdp.reporting import Report, microseconds

__all__ = ["alone", "fragment", "html", "wrapped"]


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


def alone(part: str, title: str) -> str:
    """A whole page of a part of one."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{page_text(title)}</title></head>"
        f'<body class="jdp-page">\n{part}\n</body></html>\n'
    )


def wrapped(*sections: str) -> str:
    """Sections with the styles and the script that they need."""
    style, script = (_file(name) for name in ("page.css", "page.js"))
    body = "\n".join(sections)
    return f'<style>{style}</style>\n<main class="jdp">\n{body}\n</main>\n<script>{script}</script>'


def _file(name: str) -> str:
    return files("jdp").joinpath(name).read_text(encoding="utf-8")


def _head(report: Report) -> str:
    chips = f"{report.devices} x {report.chip}, " if report.target and report.chip else ""
    state = "bad" if report.fits is False else ""
    tiles = (_memory_tile, _step_tile, _exposed_tile, _sent_tile, _flops_tile)
    return (
        f"<header><h1>{page_text(report.where)}<small>{page_text(chips)}mesh: {page_text(report.axes)}</small></h1>"
        f'<p class="verdict {state}">{page_text(report.verdict)}</p></header>'
        f'<section class="tiles" aria-label="At a glance">{"".join(x(report) for x in tiles)}'
        "</section>"
    )


def _tile(name: str, value: str, note: str, bar: str = "", state: str = "") -> str:
    return (
        f'<div class="tile"><span>{page_text(name)}</span>'
        f'<b class="{state}">{page_text(value)}</b>{bar}<small>{page_text(note)}</small></div>'
    )


def _memory_tile(report: Report) -> str:
    found, limit = report.memory, report.memory_limit
    used = human(found.total) if found else "not known"
    state, mark = {True: ("good", "✓ fits"), False: ("bad", "✗ does not fit"), None: ("", "")}[
        report.fits
    ]
    bar = meter([("bad" if state == "bad" else "act", found.total)], limit) if found else ""
    of = f"of {human(limit)}" if limit else "at the fullest moment"
    return _tile("memory of a device", used, f"{mark + ' ' if mark else ''}{of}", bar, state)


def _step_tile(report: Report) -> str:
    if not report.step_us:
        return ""
    exposed = report.exposed_us or 0.0
    bar = meter([("compute", report.step_us - exposed), ("sent", exposed)], report.step_us)
    return _tile("a step takes", microseconds(report.step_us), "as modelled", bar)


def _exposed_tile(report: Report) -> str:
    if not report.step_us or report.exposed_us is None or report.sent_us is None:
        return ""
    hidden = report.sent_us - report.exposed_us
    bar = meter([("sent", report.exposed_us), ("hidden", hidden)], report.sent_us)
    share = f"{report.exposed_us / report.step_us:.0%} of the step"
    if report.sent_us:
        share += f"; of {microseconds(report.sent_us)}, {hidden / report.sent_us:.0%} hidden"
    return _tile("it waits for communication", microseconds(report.exposed_us), share, bar)


def _sent_tile(report: Report) -> str:
    sent, least, ratio, _ = report.floor
    bar = meter([("rest", least), ("sent", max(0.0, sent - least))], max(sent, least))
    note = f"{ratio:.3g} x the least possible" if least else "nothing has to be sent"
    return _tile("each device sends", human(round(sent)), note, bar)


def _flops_tile(report: Report) -> str:
    if report.mfu is None:
        if not report.flops:
            return ""
        return _tile(
            "each device computes", _count(report.flops), "floating-point operations a step"
        )
    bar = meter([("compute", report.mfu)], 1.0)
    return _tile("FLOPs used", f"{report.mfu:.0%}", "of the chip's peak in bfloat16", bar)


def _count(number: float) -> str:
    """A number in words that people say: 10.3 tera."""
    value, names = number, ["", "kilo", "mega", "giga", "tera", "peta"]
    while value >= 999.5 and len(names) > 1:
        value, names = value / 1000, names[1:]
    return f"{value:.3g} {names[0]}".strip()


def _foot(report: Report) -> str:
    notes = "".join(f"<li>{page_text(note)}</li>" for note in report.notes)
    said = f'<section><h2>Notes</h2><ul class="notes">{notes}</ul></section>' if notes else ""
    told = [f"{name} {number}" for name, number in report.versions.items()]
    if report.compile_s is not None:
        told.append(f"compiled in {report.compile_s:.1f} s")
    told.append("bytes and times are those of one device and one step; nothing was run")
    return f"{said}<footer>{page_text(' · '.join(told))}</footer>"
