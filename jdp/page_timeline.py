"""The timeline of a step as HTML: what is computed, and what is on the wire meanwhile.

    Report  --timeline-->  a section of a page

Places are shares of the step, so that a wider track is a closer look. Communication is drawn strong
where nothing is computed, pale where compute hides it.
"""

from collections.abc import Sequence

from jdp.alike import alike
from jdp.page_parts import gave_up, page_text
from jdp.reporting import Report, microseconds
from jdp.sent import Sent, Span

_MOST_SPANS = 4000  # that can be pointed at; of more, the longest
_NAMED = 0.045  # of the track: room for a name where no script measures
_AGAIN = " more like the last"  # how `jdp.schedule` names the rounds of a loop that it did not walk

_Stretch = tuple[float, float]


def timeline(report: Report) -> str:
    """Two lanes over a step; says so if the compiler models no times.

    Args:
        report: What `jdp.explain` returned.

    Returns:
        A section of HTML.
    """
    if not report.spans or not report.step_us:
        why = (
            "The compiler for these devices models no times. Explain the step for a target, such "
            "as v5e:4x4 or h100:2x8, to see one."
        )
        if gave_up(report):
            why = "Not known: the compiler gave up before there was a program."
        return f"<section><h2>Timeline of a step</h2><p>{why}</p></section>"
    step = report.step_us
    compute, sent = (_of(report.spans, lane) for lane in ("compute", "communication"))
    busy = joined([(x.start_us, x.end_us) for x in compute], step * 1e-4)
    wire = joined([(x.start_us, x.end_us) for x in sent], 0.0)
    lanes = (
        ("compute", [("compute", busy)], compute),
        ("communication", [("hidden", wire), ("sent", outside(wire, busy))], sent),
    )
    drawn = "".join(_lane(name, layers, spans, report) for name, layers, spans in lanes)
    note = ""
    if any(_AGAIN in x.name for x in compute):
        note = (
            "<p><small>Striped: further rounds of a loop, which are like the one before; what they "
            "send is in the table, and not drawn.</small></p>"
        )
    return (
        f"<section><h2>Timeline of a step</h2>{_key()}"
        '<div class="scroll time" tabindex="0" role="group" aria-label="Timeline of a step: plus '
        'and minus zoom, arrows move">'
        f'<div class="track" data-us="{step:.6g}">{drawn}{_ticks(step)}</div></div>{note}</section>'
    )


def _of(spans: Sequence[Span], lane: str) -> list[Span]:
    return sorted((x for x in spans if x.lane == lane), key=lambda x: x.start_us)


def joined(stretches: Sequence[_Stretch], gap: float) -> list[_Stretch]:
    """Stretches in order, with those joined that touch, or nearly."""
    found: list[_Stretch] = []
    for begin, end in sorted(stretches):
        if found and begin <= found[-1][1] + gap:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def outside(stretches: Sequence[_Stretch], of: Sequence[_Stretch]) -> list[_Stretch]:
    """What of some stretches is in none of the others; both joined."""
    found = []
    for begin, end in stretches:
        for start, stop in of:
            if stop <= begin or start >= end:
                continue
            if start > begin:
                found.append((begin, start))
            begin = stop
        if begin < end:
            found.append((begin, end))
    return found


def _key() -> str:
    names = (
        ("compute", "compute"),
        ("sent", "communication that the step waits for"),
        ("hidden", "communication under compute"),
    )
    keys = "".join(f'<span><i class="c-{color}"></i>{name}</span>' for color, name in names)
    zooms = (
        ("1.6", "+", "closer"),
        ("0.625", "&minus;", "further away"),
        ("1", "all", "the whole step"),
    )
    buttons = " ".join(
        f'<button type="button" data-zoom="{by}" aria-label="{said}" hidden>{sign}</button>'
        for by, sign, said in zooms
    )
    return f'<div class="key">{keys}<span class="right">{buttons}</span></div>'


def _lane(
    lane: str,
    layers: Sequence[tuple[str, Sequence[_Stretch]]],
    spans: Sequence[Span],
    report: Report,
) -> str:
    """Colour where it is busy, and over it what there is to point at."""
    step = report.step_us or 1.0
    colors = "".join(
        f'<i class="c-{color}" style="{_place(begin, end, step)}"></i>'
        for color, stretches in layers
        for begin, end in stretches
    )
    rows = {k: row for row, x in enumerate(alike(report.collectives)) for k in x.numbers}
    longest = sorted(spans, key=lambda x: x.start_us - x.end_us)[:_MOST_SPANS]
    shown = sorted(longest, key=lambda x: x.start_us)
    return (
        f'<div class="lane {lane}" role="list" aria-label="{lane}">{colors}'
        f"{''.join(_span(x, report, rows) for x in shown)}</div>"
    )


def _place(begin: float, end: float, step: float) -> str:
    return f"left:{100 * begin / step:.4f}%;width:{100 * (end - begin) / step:.4f}%"


def _span(span: Span, report: Report, rows: dict[int, int]) -> str:
    step, spent = report.step_us or 1.0, span.end_us - span.start_us
    name, again = span.name, _AGAIN in span.name
    if again:
        loop, _, count = span.name.removesuffix(_AGAIN).partition(": ")
        name = f"{count} more rounds of {loop}"
    tip = f"{name}: {microseconds(spent)}, from {microseconds(span.start_us)}"
    row = ""
    if span.row in rows:
        row = f' data-row="{rows[span.row]}"'
        tip += _told(report.collectives[span.row])
    wide = spent / step > _NAMED
    classes = " ".join(x for x, on in (("wide", wide), ("again", again)) if on)
    return (
        f'<a role="listitem" class="{classes}" style="{_place(span.start_us, span.end_us, step)}" '
        f'title="{page_text(tip)}" data-name="{page_text(name)}"{row}>'
        f"{page_text(name) if wide else ''}</a>"
    )


def _told(x: Sent) -> str:
    """What a collective is, and what computes while it is under way."""
    where = f"; {x.where}" if x.where else ""
    return (
        f"\n{'+'.join(x.dtypes)} over {', '.join(x.axes) or 'unknown axes'}{where}"
        f"\nmeanwhile: {', '.join(x.beside) or 'nothing'}"
    )


def _ticks(step: float) -> str:
    """Both ends; a script puts round numbers between, as there is room."""
    return (
        '<div class="ticks" aria-hidden="true"><span style="left:0">0</span>'
        f'<span style="left:100%">{page_text(microseconds(step))}</span></div>'
    )
