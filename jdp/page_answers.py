"""What `jdp.plan` and `jdp.doctor` answer, as parts of a page for a notebook or a file.

    Plan  --plan-->   Diagnosis  --diagnosis-->  HTML with its own styles, as `jdp.page.fragment`

`jdp.page.alone` makes a whole file of either.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jdp.holdings import human
from jdp.page import wrapped
from jdp.page_sections import meter, page_text
from jdp.reporting import microseconds

if TYPE_CHECKING:
    from jdp.diagnosis import Diagnosis
    from jdp.findings import Finding
    from jdp.pays import Payoff
    from jdp.planned import Plan, Row

_MOST_ROWS = 12


def plan(found: "Plan") -> str:
    """Strategies, best first: memory against what a device has, time, what of it is waiting.

    Args:
        found: What `jdp.plan` returned.

    Returns:
        A part of a page.
    """
    best, advice = found.best, [*found.advice] or ["No strategy fits."]
    slowest = max((x.step_us for x in found.rows[:_MOST_ROWS] if x.fits), default=1.0)
    heads = ("", "strategy", "memory of a device", "", "a step", "", "bound by", "why")
    numbers = (3, 5)
    rows = "".join(
        _plan_row(number, row, found.memory_limit, slowest)
        for number, row in enumerate(found.rows[:_MOST_ROWS], 1)
    )
    head = (
        f"<header><h1>Plan for {page_text(found.target)}<small>{found.global_batch} rows a step, "
        f"{found.considered} strategies considered</small></h1>"
        f'<p class="verdict{"" if best else " bad"}">{page_text(advice[0])}</p></header>'
    )
    code = f"<pre>{page_text(best.code())}</pre>" if best else ""
    more = "".join(f"<p>{page_text(x)}</p>" for x in advice[1:])
    table = (
        "<section><h2>Strategies, best first</h2>"
        '<ul class="key"><li><i class="c-act"></i>memory, of '
        f'{human(found.memory_limit)}</li><li><i class="c-compute"></i>compute</li>'
        '<li><i class="c-sent"></i>waits for communication</li><li>~ as predicted, not compiled'
        f"</li></ul>{_table(heads, rows, numbers)}</section>"
    )
    return wrapped(head, code, more, table, _notes(found.notes))


def _plan_row(number: int, row: "Row", limit: int, slowest: float) -> str:
    mark = "" if row.source == "compiled" else "~"
    used = meter([("act" if row.fits else "bad", row.memory)], limit)
    spent = [("compute", row.step_us - row.exposed_us), ("sent", row.exposed_us)]
    kind = "best" if number == 1 and row.fits else "" if row.fits else "faint"
    over = "" if row.fits else " bad"
    return (
        f'<tr class="{kind}"><td>{number if row.fits else "✗"}</td>'
        f'<td class="text">{page_text(str(row.strategy))}</td>'
        f'<td class="meters narrow framed">{used}</td>'
        f'<td class="number{over}">{mark}{human(row.memory)}</td>'
        f'<td class="meters narrow">{meter(spent, slowest) if row.fits else ""}</td>'
        f'<td class="number">{mark + microseconds(row.step_us) if row.fits else ""}</td>'
        f'<td class="text">{page_text(row.bound)}</td>'
        f'<td class="text why">{page_text(row.reason)}</td></tr>'
    )


def diagnosis(found: "Diagnosis") -> str:
    """Where a step's time goes, what is worth a change, and what would pay.

    Args:
        found: What `jdp.doctor` returned.

    Returns:
        A part of a page.
    """
    said = found.findings[0].what if found.findings else "Nothing passes its threshold."
    head = (
        f"<header><h1>{_ms(found.step_ms)} a step<small>{found.steps} steps measured, the first "
        f'took {found.compile_s:.3g} s</small></h1><p class="verdict">{page_text(said)}</p>'
        "</header>"
    )
    return wrapped(
        head,
        _shares(found),
        _findings(found.findings),
        _replicas(found),
        _payoffs(found.payoffs),
        _notes(found.notes),
    )


def _ms(spent: float) -> str:
    return microseconds(1000 * spent)


def _shares(found: "Diagnosis") -> str:
    """One bar of four parts."""
    parts = (
        ("compute", "compute", found.compute_ms),
        ("communication", "sent", found.communication_ms),
        ("waiting for input", "grad", found.input_ms),
        ("host and gaps", "rest", found.host_ms),
    )
    whole = sum(size for *_, size in parts) or 1.0
    bar = "".join(
        f'<div class="c-{color}{"" if size > 0.12 * whole else " thin"}" '
        f'style="width:{100 * size / whole:.2f}%" title="{name}: {_ms(size)}">'
        f"{f'{name} {size / whole:.0%}' if size > 0.12 * whole else ''}</div>"
        for name, color, size in parts
        if size > 0
    )
    keys = "".join(
        f'<li><i class="c-{color}"></i>{name} <b>{_ms(size)}</b> {size / whole:.0%}</li>'
        for name, color, size in parts
    )
    lines = []
    if found.waiting_ms > 0.01 * found.step_ms:
        lines.append(f"Of communication, {_ms(found.waiting_ms)} are waiting for slower devices.")
    if found.hidden_ms:
        lines.append(f"Another {_ms(found.hidden_ms)} of communication run under compute.")
    if found.check is not None:
        lines.append(
            f"Check: without its communication a step takes {_ms(found.check.silent_ms)}, with it "
            f"{_ms(found.check.step_ms)}: it adds {_ms(found.check.added_ms)}."
        )
    said = f"<p>{' '.join(lines)}</p>" if lines else ""
    return (
        f'<section><h2>Where the time goes</h2><div class="bar" aria-hidden="true">{bar}</div>'
        f'<ul class="key">{keys}</ul>{said}</section>'
    )


def _findings(found: Sequence["Finding"]) -> str:
    if not found:
        return ""
    items = "".join(
        f"<li><b>{f'&minus;{_ms(x.gain_ms)}' if x.gain_ms else ''}</b><div>{page_text(x.what)}<br>"
        f"<code>{page_text(x.change)}</code></div></li>"
        for x in found
    )
    return (
        "<section><h2>Worth a change</h2><p>With what a step would gain, as predicted.</p>"
        f'<ol class="found">{items}</ol></section>'
    )


def _replicas(found: "Diagnosis") -> str:
    rows = found.replicas
    if len(rows) < 2:
        return ""
    most = max(x.compute_ms + x.communication_ms for x in rows) or 1.0
    body = "".join(
        f'<tr><td>{x.replica}</td><td>{x.process}</td><td class="meters">'
        f"{meter([('compute', x.compute_ms), ('sent', x.communication_ms)], most)}</td>"
        f'<td class="number">{_ms(x.compute_ms)}</td>'
        f'<td class="number">{_ms(x.communication_ms)}</td></tr>'
        for x in rows
    )
    heads = ("replica", "process", "", "computes", "communicates, or waits")
    return f"<section><h2>Replicas</h2>{_table(heads, body, (3, 4))}</section>"


def _payoffs(found: Sequence["Payoff"]) -> str:
    if not found:
        return ""
    most = max(max(x.now_ms, x.then_ms) for x in found) or 1.0
    body = "".join(
        f'<tr class="{"" if x.pays else "faint"}"><td>{"✓ yes" if x.pays else "no"}</td>'
        f"<td>{page_text(x.what)}<br><small><code>{page_text(x.argument)}</code></small></td>"
        f'<td class="meters">{meter([("compute" if x.pays else "rest", x.then_ms)], most)}</td>'
        f'<td class="number">{_ms(x.then_ms)}</td>'
        f'<td class="number">{human(x.saves) if x.saves else ""}</td>'
        f'<td class="text why">{page_text(x.why)}</td></tr>'
        for x in found
    )
    heads = ("pays", "technique", "a step with it", "", "memory freed", "why")
    return (
        f"<section><h2>Does it pay?</h2><p>A step takes {_ms(found[0].now_ms)} now.</p>"
        f"{_table(heads, body, (3, 4))}</section>"
    )


def _table(heads: Sequence[str], body: str, numbers: Sequence[int]) -> str:
    head = "".join(
        f'<th scope="col" class="{"number" if place in numbers else ""}">{page_text(name)}</th>'
        for place, name in enumerate(heads)
    )
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        "</div>"
    )


def _notes(notes: Sequence[str]) -> str:
    if not notes:
        return ""
    items = "".join(f"<li>{page_text(x)}</li>" for x in notes)
    return f'<section><h2>Notes</h2><ul class="notes">{items}</ul></section>'
