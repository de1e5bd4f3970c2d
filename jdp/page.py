"""A report as a page to look at: one HTML file that needs nothing else, or a part of a notebook.

    Report  --html-->  a whole page        Report  --fragment-->  what goes into a notebook's cell

Drawn are the figures that matter, the timeline of a step, the memory of a device against what it
has, each collective beside its floor, and who holds what. Text is escaped, nothing is loaded from
elsewhere, and light and dark follow the reader's system.
"""

import math
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from jdp.holdings import Holding, Holdings, human
from jdp.memory import Memory
from jdp.reporting import SENT_HEADERS, SENT_NUMBERS, Report, microseconds, sent_cells
from jdp.sent import Sent, Span

_MOST_SPANS = 4000  # what a browser draws at once; of more, the longest are shown
_MOST_LEAVES = 24
_MOST_DEVICES = 16
_SHOWN = [k for k, name in enumerate(SENT_HEADERS) if name != "beside"]  # that is the row's title
_KINDS = {
    "parameters": "params",
    "optimizer state": "opt",
    "activations": "act",
    "gradients": "grad",
    "collectives": "comm",
}


def html(report: Report) -> str:
    """A page that shows a report.

    Args:
        report: What `jdp.explain` returned.

    Returns:
        The text of an HTML file.
    """
    title = f"jdp.explain: {report.where}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title></head><body>\n{fragment(report)}\n</body></html>\n"
    )


def fragment(report: Report) -> str:
    """The same as a part of a page, with its own styles."""
    style = files("jdp").joinpath("page.css").read_text(encoding="utf-8")
    parts = [
        _head(report),
        _timeline(report.spans, report.step_us),
        _memory(report.memory, report.memory_limit),
        _sent(report),
        _held(report.holdings, report.devices),
        _foot(report),
    ]
    return f'<style>{style}</style><main class="jdp">{"".join(parts)}</main>'


def _head(report: Report) -> str:
    state = {True: "good", False: "bad", None: ""}[report.fits]
    used = human(report.memory.total) if report.memory else "not known"
    limit = f"of {human(report.memory_limit)}" if report.memory_limit else "of each device"
    fits = {True: "fits", False: "does not fit", None: "memory"}[report.fits]
    exposed = _share(report.exposed_us, report.step_us)
    mfu = f"{report.mfu:.0%}" if report.mfu is not None else "-"
    tiles = [
        (fits, used, limit, state),
        ("a step", microseconds(report.step_us) or "-", "as modelled", ""),
        ("exposed communication", exposed, "of the step", ""),
        ("sent by each device", human(round(report.floor.sent)), _times(report.floor.ratio), ""),
        ("of the chip's peak", mfu, "FLOPs, bf16", ""),
    ]
    drawn = "".join(
        f'<div class="tile {kind}"><b>{escape(value)}</b><span>{escape(name)}</span>'
        f"<small>{escape(note)}</small></div>"
        for name, value, note, kind in tiles
    )
    return (
        f"<header><h1>{escape(report.where)}</h1><p class=mesh>mesh: {escape(report.axes)}</p>"
        f'<p class="verdict {state}">{escape(report.verdict)}</p></header>'
        f'<section class="tiles">{drawn}</section>'
    )


def _share(part: float | None, whole: float | None) -> str:
    return "-" if part is None or not whole else f"{part / whole:.0%}"


def _times(ratio: float) -> str:
    return f"{ratio:.3g} x the least"


def _timeline(spans: Sequence[Span], step_us: float | None) -> str:
    """Two lanes: what is computed, and what is on the wire."""
    if not spans or not step_us:
        return (
            "<section><h2>Timeline</h2><p>The compiler for these devices models no times. Explain "
            "the step for a target, such as v5e:4x4 or h100:2x8.</p></section>"
        )
    shown = sorted(spans, key=lambda x: x.start_us - x.end_us)[:_MOST_SPANS]
    bars = []
    for span in sorted(shown, key=lambda x: x.start_us):
        sent = span.lane == "communication"
        left, width = 1000 * span.start_us / step_us, 1000 * (span.end_us - span.start_us) / step_us
        tip = f"{span.name}: {microseconds(span.end_us - span.start_us)}"
        bars.append(
            f'<rect class="{"comm" if sent else "compute"}" x="{left:.3f}" '
            f'width="{max(width, 0.2):.3f}" y="{34 if sent else 4}" height="26">'
            f"<title>{escape(tip)}</title></rect>"
        )
    ticks = "".join(
        f'<text x="{100 * k}" y="76" class="tick" text-anchor="{_anchor(k)}">'
        f"{escape(microseconds(step_us * k / 10) or '0')}</text>"
        for k in (0, 5, 10)
    )
    left_out = len(spans) - len(shown)
    note = f"<p>{left_out} short spans are not drawn.</p>" if left_out else ""
    return (
        '<section><h2>Timeline of a step</h2><p class="key"><i class="compute"></i>compute'
        '<i class="comm"></i>communication'
        '<label>zoom <input type="range" min="1" max="40" value="1" oninput="'
        "this.closest('section').querySelector('svg').style.width=100*this.value+'%'"
        '"></label></p><div class="scroll">'
        '<svg class="timeline" role="img" aria-label="Timeline of compute and communication" '
        f'viewBox="0 0 1000 80" preserveAspectRatio="none">{"".join(bars)}</svg></div>'
        f'<svg class="axis" viewBox="0 60 1000 20" aria-hidden="true">{ticks}</svg>{note}</section>'
    )


def _anchor(tick: int) -> str:
    return {0: "start", 10: "end"}.get(tick, "middle")


def _memory(memory: Memory | None, limit: int | None) -> str:
    """One bar, its parts in the order of the kinds; the device's memory is its frame."""
    if memory is None:
        return "<section><h2>Memory</h2><p>The compiler gave up before it told.</p></section>"
    sizes = {name: size for name, size in memory.kinds.items() if size > 0}
    whole = max(limit or 0, memory.total, 1)
    bar = "".join(
        f'<div class="{_KINDS.get(name, "rest")}" style="width:{100 * size / whole:.3f}%" '
        f'title="{escape(name)}: {human(size)}"></div>'
        for name, size in sizes.items()
    )
    rows = "".join(
        f'<li><i class="{_KINDS.get(name, "rest")}"></i>{escape(name)} '
        f"<b>{human(size)}</b> <small>{size / max(memory.total, 1):.1%}</small></li>"
        for name, size in sizes.items()
    )
    of = f" of {human(limit)}" if limit else ""
    over = " over" if limit and memory.total > limit else ""
    mark = (
        f'<div class="limit" style="left:{100 * limit / whole:.2f}%"></div>'
        if limit and over
        else ""
    )
    return (
        f"<section><h2>Memory of a device: {human(memory.total)}{of}</h2>"
        f'<div class="bar{over}">{bar}{mark}</div><ul class="legend">{rows}</ul></section>'
    )


def _sent(report: Report) -> str:
    if not report.collectives:
        return "<section><h2>Communication</h2><p>Nothing is sent.</p></section>"
    head = "".join(f'<th scope="col"{_right(k)}>{SENT_HEADERS[k]}</th>' for k in _SHOWN)
    rows = "".join(map(_row, report.collectives))
    return (
        f'<section><h2>Communication</h2><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div><p>{escape(report.floor.words)}</p></section>"
    )


def _right(column: int) -> str:
    return ' class="number"' if column in SENT_NUMBERS else ""


def _row(x: Sent) -> str:
    cells, exposed = sent_cells(x), x.exposed_us or 0.0
    beside = f"Computed meanwhile: {', '.join(x.beside)}" if x.beside else "Nothing is computed"
    marks = "far" if x.floor > 1.05 else "waits" if x.us and exposed > 0.5 * x.us else ""
    body = "".join(
        f"<td{_right(k)}>{escape(cells[k]) or ('-' if k in SENT_NUMBERS else '')}</td>"
        for k in _SHOWN
    )
    return f'<tr class="{marks}" title="{escape(beside)}">{body}</tr>'


def _held(held: Holdings, devices: int) -> str:
    """Leaves by devices: what of a leaf a device holds is the filled part of its cell."""
    rows = sorted(held.rows, key=lambda x: -x.bytes)
    columns = min(devices, _MOST_DEVICES)
    head = "".join(f"<th>{k}</th>" for k in range(columns))
    body = "".join(
        f'<tr><th scope="row" title="{escape(x.lies)}">{escape(x.path)}</th>'
        f"{''.join(_cell(x, k) for k in range(columns))}"
        f'<td class="number">{human(x.bytes)}</td></tr>'
        for x in rows[:_MOST_LEAVES]
    )
    rest = rows[_MOST_LEAVES:]
    more = [f"{len(rest)} smaller leaves: {human(sum(x.bytes for x in rest))}."] if rest else []
    more += [f"The first {columns} of {devices} devices."] if columns < devices else []
    return (
        "<section><h2>Who holds what of the state</h2>"
        f'<div class="scroll"><table class="held"><thead><tr><th>leaf</th>{head}'
        f'<th class="number">each</th></tr></thead><tbody>{body}</tbody></table></div>'
        f"<p>{escape(' '.join(more))}</p></section>"
    )


def _cell(row: Holding, device: int) -> str:
    parts = _parts(row)
    left = 100 * (device % parts) / parts
    return (
        f'<td class="cell"><div style="margin-left:{left:.1f}%;width:{max(100 / parts, 4):.1f}%" '
        f'title="{escape(row.lies)}"></div></td>'
    )


def _parts(row: Holding) -> int:
    """Into how many parts a leaf is split."""
    digits = "".join(c for c in row.dtype if c.isdigit())
    if not row.bytes or not digits or not row.lies.startswith(("split", "padded")):
        return 1
    whole = math.prod(row.shape) * int(digits) / 8
    return max(1, round(whole / row.bytes))


def _foot(report: Report) -> str:
    notes = "".join(f"<li>{escape(note)}</li>" for note in report.notes)
    versions = ", ".join(f"{name} {number}" for name, number in report.versions.items())
    took = f" Compiled in {report.compile_s:.1f} s." if report.compile_s is not None else ""
    said = f"<h2>Notes</h2><ul>{notes}</ul>" if notes else ""
    return f"<section>{said}</section><footer>{escape(versions)}.{took}</footer>"
