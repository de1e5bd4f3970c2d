"""What `jdp.plan` and `jdp.doctor` answer, as parts of a page for a notebook or a file.

    Plan  --plan-->   Diagnosis  --diagnosis-->  HTML with its own styles

`jdp.page_parts.alone` makes a whole file of either. Words are those of `Plan.table` and of a
`Diagnosis`; this adds what is drawn.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jdp.holdings import human
from jdp.page_parts import Column, heading, meter, notes, page_text, percent, table, tile, wrapped
from jdp.reporting import microseconds

if TYPE_CHECKING:
    from jdp.diagnosis import Diagnosis, Replica
    from jdp.findings import Finding
    from jdp.pays import Payoff
    from jdp.planned import Plan, Row

_MOST_ROWS = 12
_MOST_REPLICAS = 16  # that are shown at once; the others can be opened
_NAMED = 0.12  # of the bar: room for a name


def plan(found: "Plan") -> str:
    """Strategies, best first: memory against what a device has, time, what of it is waiting.

    Args:
        found: What `jdp.plan` returned.

    Returns:
        A part of a page.
    """
    best, advice = found.best, [*found.advice] or ["No strategy fits."]
    note = f"{found.global_batch} rows a step, {found.considered} strategies considered"
    code = f"<pre>{page_text(best.code())}</pre>" if best else ""
    more = "".join(f"<p>{page_text(x)}</p>" for x in advice[1:])
    return wrapped(
        heading(f"Plan for {found.target}", note, advice[0], *_tiles(found), bad=best is None),
        code,
        more,
        _strategies(found),
        notes(found.notes),
    )


def _tiles(found: "Plan") -> list[str]:
    """The figures of the best strategy."""
    if found.best is None or not found.rows:
        return []
    row, mark = found.rows[0], "as compiled" if found.rows[0].source == "compiled" else "predicted"
    spent = [("compute", row.step_us - row.exposed_us), ("sent", row.exposed_us)]
    used, size = meter([("act", row.memory)], found.memory_limit), human(row.memory)
    waits = (microseconds(row.exposed_us), f"{percent(row.share)} of the step")
    limit = human(found.memory_limit)
    return [
        tile("memory of a device", size, f"✓ fits in {limit}, {mark}", used, "good"),
        tile("a step takes", microseconds(row.step_us), mark, meter(spent, row.step_us)),
        tile("it waits for communication", *waits, meter(spent[1:], row.step_us)),
        tile("devices", str(row.strategy.devices), f"bound by {row.bound}"),
    ]


def _strategies(found: "Plan") -> str:
    """The cells of `Plan.table`, with a bar before memory and step."""
    head, *lines = found.table(_MOST_ROWS)
    rows = found.rows[: len(lines)]
    slowest = max((x.step_us for x in rows if x.fits), default=1.0)
    columns = []
    for name in head:
        if name in ("memory", "step"):
            columns.append(Column("", "narrow framed" if name == "memory" else "narrow"))
        kind = {"strategy": "text", "bound by": "text", "why": "text"}.get(name, "number")
        columns.append(Column(name, kind))
    body = "".join(
        _strategy(row, dict(zip(head, line, strict=True)), found.memory_limit, slowest)
        for row, line in zip(rows, lines, strict=True)
    )
    return (
        "<section><h2>Strategies, best first</h2>"
        f'<ul class="key"><li><i class="c-act"></i>memory, of {human(found.memory_limit)}</li>'
        '<li><i class="c-compute"></i>compute</li>'
        '<li><i class="c-sent"></i>waits for communication</li>'
        f"<li>~ as predicted, not compiled</li></ul>{table(columns, body)}</section>"
    )


def _strategy(row: "Row", cells: dict[str, str], limit: int, slowest: float) -> str:
    spent = [("compute", row.step_us - row.exposed_us), ("sent", row.exposed_us)]
    bars = {
        "memory": ("framed", meter([("act" if row.fits else "bad", row.memory)], limit)),
        "step": ("", meter(spent, slowest) if row.fits else ""),
    }
    kinds = {"strategy": "text", "bound by": "text", "why": "text why"}
    drawn = ""
    for name, cell in cells.items():
        if name in bars:
            kind, bar = bars[name]
            drawn += f'<td class="meters narrow {kind}">{bar}</td>'
        over = " bad" if name == "memory" and not row.fits else ""
        drawn += f'<td class="{kinds.get(name, "number")}{over}">{page_text(cell)}</td>'
    return f'<tr class="{"" if row.fits else "faint"}">{drawn}</tr>'


def diagnosis(found: "Diagnosis") -> str:
    """Where a step's time goes, what is worth a change, and what would pay.

    Args:
        found: What `jdp.doctor` returned.

    Returns:
        A part of a page.
    """
    said = found.findings[0].what if found.findings else "Nothing passes its threshold."
    note = f"{found.steps} steps measured, the first took {found.compile_s:.3g} s"
    return wrapped(
        heading(f"{_ms(found.step_ms)} a step", note, said),
        _shares(found),
        _findings(found.findings),
        _processes(found),
        _replicas(found.replicas),
        _payoffs(found.payoffs),
        notes(found.notes),
    )


def _ms(spent: float) -> str:
    return microseconds(1000 * spent)


def _shares(found: "Diagnosis") -> str:
    """One bar of the parts that a step is made of."""
    colors = {"compute": "compute", "communication": "sent", "input": "grad", "host": "rest"}
    parts = found.shares
    whole = sum(parts.values()) or 1.0
    bar = "".join(
        f'<div class="c-{colors[name]}{"" if size > _NAMED * whole else " thin"}" '
        f'style="width:{100 * size / whole:.2f}%" title="{name}: {_ms(size)}">'
        f"{f'{name} {percent(size / whole)}' if size > _NAMED * whole else ''}</div>"
        for name, size in parts.items()
        if size > 0
    )
    keys = "".join(
        f'<li><i class="c-{colors[name]}"></i>{name} <b>{_ms(size)}</b> {percent(size / whole)}'
        "</li>"
        for name, size in parts.items()
    )
    remarks = [*found.remarks, *([found.straggler + "."] if found.straggler else [])]
    said = "".join(f"<p>{page_text(x)}</p>" for x in remarks)
    return (
        f'<section><h2>Where the time goes</h2><div class="bar" aria-hidden="true">{bar}</div>'
        f'<ul class="key">{keys}</ul>{said}</section>'
    )


def _findings(found: Sequence["Finding"]) -> str:
    if not found:
        return ""
    some = any(x.gain_ms for x in found)
    gain = lambda x: f"<b>{f'&minus;{_ms(x.gain_ms)}' if x.gain_ms else ''}</b>"  # noqa: E731
    items = "".join(
        f"<li>{gain(x) if some else ''}<div>{page_text(x.what)}<br>"
        f"<code>{page_text(x.change)}</code></div></li>"
        for x in found
    )
    what = "<p>With what a step would gain, as predicted.</p>" if some else ""
    return f'<section><h2>Worth a change</h2>{what}<ol class="found">{items}</ol></section>'


def _processes(found: "Diagnosis") -> str:
    lines = found.process_cells()
    if not lines:
        return ""
    columns = [Column(name, "number" if place else "") for place, name in enumerate(lines[0])]
    cell = lambda place, text: f'<td class="{columns[place].kind}">{page_text(text)}</td>'  # noqa: E731
    body = "".join(f"<tr>{''.join(map(cell, range(len(line)), line))}</tr>" for line in lines[1:])
    return f"<section><h2>Processes</h2>{table(columns, body)}</section>"


def _replicas(found: Sequence["Replica"]) -> str:
    if len(found) < 2:
        return ""
    most = max(x.compute_ms + x.communication_ms for x in found) or 1.0
    shown, rest = found[:_MOST_REPLICAS], found[_MOST_REPLICAS:]
    if rest:  # those that compute longest are what one looks for
        order = sorted(found, key=lambda x: -x.compute_ms)
        shown, rest = order[:_MOST_REPLICAS], order[_MOST_REPLICAS:]
    more = f"<details><summary>{len(rest)} that compute less</summary>{_of(rest, most)}</details>"
    body = _of(shown, most) + (more if rest else "")
    return f"<section><h2>Replicas</h2>{body}</section>"


def _of(found: Sequence["Replica"], most: float) -> str:
    columns = [
        Column("replica", "number"),
        Column("process", "number"),
        Column("computes", "number"),
        Column("communicates, or waits", "number"),
        Column(""),
    ]
    body = "".join(
        f"<tr><td class='number'>{x.replica}</td><td class='number'>{x.process}</td>"
        f'<td class="number">{_ms(x.compute_ms)}</td>'
        f'<td class="number">{_ms(x.communication_ms)}</td><td class="meters wide">'
        f"{meter([('compute', x.compute_ms), ('sent', x.communication_ms)], most)}</td></tr>"
        for x in found
    )
    return table(columns, body)


def _payoffs(found: Sequence["Payoff"]) -> str:
    if not found:
        return ""
    most = max(max(x.now_ms, x.then_ms) for x in found) or 1.0
    now = found[0].now_ms
    body = "".join(
        f'<tr class="{"" if x.pays else "faint"}"><td>{"✓ " if x.pays else ""}{x.answer}</td>'
        f'<td class="text">{page_text(x.what)}<br><small><code>{page_text(x.argument)}</code>'
        f'</small></td><td class="number">{"" if x.pays is None else _ms(x.then_ms)}</td>'
        '<td class="meters framed">'
        f"{meter([('act' if x.pays else 'rest', x.then_ms)], most, x.now_ms)}</td>"
        f'<td class="number">{human(x.saves) if x.saves else ""}</td>'
        f'<td class="text why">{page_text(x.why)}</td></tr>'
        for x in found
    )
    columns = [
        Column("pays"),
        Column("technique"),
        Column("a step with it", "number"),
        Column(""),
        Column("memory freed", "number"),
        Column("why"),
    ]
    return (
        f"<section><h2>Does it pay?</h2><p>A step takes {_ms(now)} now, which the line marks.</p>"
        f"{table(columns, body)}</section>"
    )
