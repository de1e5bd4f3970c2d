"""Parts of a page: memory of a device, what is sent, who holds what.

    Memory  --memory-->   Report  --sent-->   Holdings  --held-->   sections of HTML

All text goes through `page_text`. Drawn sizes are shares of the largest, so that no script is
needed to lay them out.
"""

import math
import re
from collections.abc import Sequence
from html import escape

from jdp.holdings import Holding, Holdings, human
from jdp.memory import Memory
from jdp.reporting import SENT_HEADERS, SENT_NUMBERS, Report, microseconds, sent_cells
from jdp.sent import Sent

_MOST_ROWS = 14  # collectives that are shown at once; the others can be opened
_MOST_LEAVES = 12  # of each part of a state
_ROOM = 0.075  # of a bar: what a name and a size need
_TIMED = ("time", "exposed", "beside")  # columns that are empty without modelled times
_FAR = 1.05  # times the least: from here it is said aloud
_COLORS = {
    "parameters": "params",
    "optimizer state": "opt",
    "gradients": "grad",
    "activations": "act",
    "collectives": "comm",
}


def page_text(text: str) -> str:
    """Text that is shown as it is, between tags and in attributes."""
    return escape(text, quote=True)


def meter(parts: Sequence[tuple[str, float]], whole: float | None) -> str:
    """A thin bar of coloured parts; nothing if there is no whole.

    Args:
        parts: Colours and sizes, from the left.
        whole: The size of the bar; parts beyond are cut off.
    """
    if not whole:
        return ""
    drawn = "".join(
        f'<div class="c-{color}" style="width:{min(100.0, 100 * size / whole):.3f}%"></div>'
        for color, size in parts
        if size > 0
    )
    return f'<div class="meter" aria-hidden="true">{drawn}</div>'


def table(heads: Sequence[tuple[str, str]], body: str, kind: str = "") -> str:
    """A table that scrolls by itself where it is too wide.

    Args:
        heads: Name and CSS classes of each column.
        body: Its rows.
        kind: CSS classes of the table.
    """
    head = "".join(f'<th scope="col" class="{c}">{page_text(name)}</th>' for name, c in heads)
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def memory(found: Memory | None, limit: int | None) -> str:
    """One bar, as long as the device's memory or as what is asked for, whichever is more."""
    if found is None:
        return (
            "<section><h2>Memory of a device</h2><p>The compiler gave up before it told how much "
            "it needs.</p></section>"
        )
    sizes = {name: size for name, size in found.kinds.items() if size > 0}
    whole = max(limit or 0, sum(sizes.values()), 1)
    bar = "".join(_segment(name, size, whole) for name, size in sizes.items())
    if limit and found.total > limit:
        bar += (
            f'<div class="limit" style="left:{100 * limit / whole:.2f}%">the device has '
            f"{human(limit)}</div>"
        )
    elif limit and limit - found.total > 1.4 * _ROOM * whole:
        bar += f'<div class="free">{human(limit - found.total)} free</div>'
    of = f" of {human(limit)}" if limit else ""
    host = f"<p>Besides, {human(found.host)} in the host's memory.</p>" if found.host else ""
    return (
        f"<section><h2>Memory of a device: {human(found.total)}{of}</h2>{host}"
        f'<div class="bar" role="img" aria-label="{_aloud(sizes)}">{bar}</div>'
        f'<ul class="key">{_legend(sizes, found.total)}</ul></section>'
    )


def _segment(name: str, size: int, whole: int) -> str:
    share = size / whole
    needed = _ROOM + 0.006 * len(name)
    told = f"{name} {human(size)}" if share > needed else human(size) if share > _ROOM else ""
    thin = "" if told else " thin"
    return (
        f'<div class="c-{_COLORS.get(name, "rest")}{thin}" style="width:{100 * share:.3f}%" '
        f'title="{name}: {human(size)}">{told}</div>'
    )


def _aloud(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name} {human(size)}" for name, size in sizes.items())


def _legend(sizes: dict[str, int], total: int) -> str:
    """The kinds that can be seen; the others in one."""
    seen = {name: size for name, size in sizes.items() if size >= 0.001 * total}
    rest = sum(sizes.values()) - sum(seen.values())
    keys = [
        f'<li><i class="c-{_COLORS.get(name, "rest")}"></i>{name} '
        f"<b>{human(size)}</b> {size / total:.1%}</li>"
        for name, size in seen.items()
    ]
    if rest:
        keys.append(f"<li>all else <b>{human(rest)}</b></li>")
    return "".join(keys)


def sent(report: Report) -> str:
    """Each collective, those first that the step waits for longest."""
    if not report.collectives:
        return "<section><h2>Communication</h2><p>Nothing is sent.</p></section>"
    numbered = list(enumerate(report.collectives))
    timed = any(x.us for _, x in numbered)
    most = max((_weight(x) for _, x in numbered), default=0.0)
    order = sorted(numbered, key=lambda pair: (-(pair[1].exposed_us or 0.0), -pair[1].wire_bytes))
    first, rest = order[:_MOST_ROWS], order[_MOST_ROWS:]
    body = _sent_table(first, timed, most)
    if rest:
        lost = sum(x.exposed_us or 0.0 for _, x in rest)
        waits = f", waited for {microseconds(lost)} in all" if timed else ""
        body += (
            f"<details><summary>{len(rest)} more, with {human(round(_bytes(rest)))} sent{waits}"
            f"</summary>{_sent_table(rest, timed, most)}</details>"
        )
    return f"<section><h2>Communication</h2><p>{page_text(report.floor.words)}</p>{body}</section>"


def _bytes(rows: Sequence[tuple[int, Sent]]) -> float:
    return sum(x.wire_bytes for _, x in rows)


def _weight(x: Sent) -> float:
    return x.wire_bytes if x.us is None else x.us


def _sent_table(rows: Sequence[tuple[int, Sent]], timed: bool, most: float) -> str:
    """The cells of `jdp.reporting.sent_cells`, with a bar before the last ones."""
    shown = [k for k, name in enumerate(SENT_HEADERS) if timed or name not in _TIMED]
    heads = [(SENT_HEADERS[k], _kind(k)) for k in shown]
    place = shown.index(SENT_HEADERS.index("x least"))
    heads.insert(place, ("on the wire" if timed else "sent by a device", ""))
    body = "".join(_sent_row(number, x, shown, place, most) for number, x in rows)
    return table(heads, body, "lights")


def _kind(column: int) -> str:
    if column in SENT_NUMBERS:
        return "number"
    return {"beside": "text more", "from": "text"}.get(SENT_HEADERS[column], "")


def _sent_row(number: int, x: Sent, shown: Sequence[int], place: int, most: float) -> str:
    exposed = x.exposed_us or 0.0
    if x.us is None:
        parts, told = [("hidden", x.wire_bytes)], f"{human(round(x.wire_bytes))} by each device"
    else:
        parts = [("sent", exposed), ("hidden", x.us - exposed)]
        told = f"{microseconds(x.us)}, of which the step waits {microseconds(exposed)}"
    words = sent_cells(x)
    cells = [f'<td class="{_kind(k)}">{page_text(words[k])}</td>' for k in shown]
    cells.insert(place, f'<td class="meters">{meter(parts, most)}</td>')
    if x.floor > _FAR:
        cells[place + 1] = cells[place + 1].replace("number", "number far")
    how = "asynchronous" if x.asynchronous else "synchronous"
    branch = ", in a branch" if x.in_branch else ""
    beside = f"\nmeanwhile: {', '.join(x.beside)}" if x.beside else "\nnothing computes meanwhile"
    tip = f"{x.name}: {how}{branch}, {x.group} devices together\n{told}{beside}"
    faint = ' class="faint"' if most and _weight(x) < 0.01 * most else ""
    head = f'<tr{faint} data-row="{number}" tabindex="0" title="{page_text(tip)}">'
    return f"{head}{''.join(cells)}</tr>"


def held(found: Holdings, mesh: dict[str, int]) -> str:
    """Leaves by devices: a filled row is held whole by all, a staircase in parts."""
    parts: dict[str, list[Holding]] = {name: [] for name in found.parts}
    for row in found.rows:
        parts.setdefault(re.split(r"[.\[]", row.path, maxsplit=1)[0], []).append(row)
    count = math.prod(mesh.values())
    body = "".join(
        _part(name, rows, found.parts.get(name, 0), mesh)
        for name, rows in sorted(parts.items(), key=lambda x: _rank(x[0], found))
        if rows
    )
    ends = "<span>device 0</span>" + (f"<span>{count - 1}</span>" if count > 1 else "")
    return (
        f"<section><h2>Who holds what of the state: {human(found.total)} on each device</h2>"
        "<p>A column for each device, filled with what it holds of the leaf: all of it, or a "
        'part.</p><div class="scroll"><table class="held"><thead><tr><th scope="col">leaf</th>'
        '<th scope="col">shape</th><th scope="col"><div class="ends">'
        f'{ends}</div></th><th scope="col" class="number">each</th>'
        '<th scope="col" class="more">lies</th></tr>'
        f"</thead><tbody>{body}</tbody></table></div></section>"
    )


def _rank(part: str, found: Holdings) -> tuple[int, int]:
    """Parameters first, then their optimizer's state, then the largest."""
    first = ("params", "opt_state")
    return (first.index(part) if part in first else len(first), -found.parts.get(part, 0))


def _part(name: str, rows: Sequence[Holding], size: int, mesh: dict[str, int]) -> str:
    color = {"params": "params", "opt_state": "opt"}.get(name, "rest")
    order = sorted(rows, key=lambda x: -x.bytes)
    shown, rest = order[:_MOST_LEAVES], order[_MOST_LEAVES:]
    body = "".join(_leaf(x, name, color, mesh) for x in shown)
    if rest:
        small = human(sum(x.bytes for x in rest))
        body += (
            f'<tr class="faint"><th scope="row">{len(rest)} smaller leaves</th><td></td><td></td>'
            f'<td class="number">{small}</td><td class="more"></td></tr>'
        )
    if len(order) == 1 and order[0].path == name:
        return body
    return (
        f'<tr class="part"><th scope="row" colspan="3">{page_text(name)}</th>'
        f'<td class="number">{human(size)}</td><td class="more"></td></tr>{body}'
    )


def _leaf(row: Holding, part: str, color: str, mesh: dict[str, int]) -> str:
    name = row.path.removeprefix(part) if row.path != part else part
    where = f", in {row.memory_kind}" if row.memory_kind else ""
    shape = " &times; ".join(map(str, row.shape)) or "scalar"
    return (
        f'<tr><th scope="row" title="{page_text(row.path)}">{page_text(name.lstrip("."))}</th>'
        f"<td>{shape} <small>{page_text(row.dtype)}</small></td>"
        f'<td class="strip" title="{page_text(row.lies + where)}">{_strip(row, color, mesh)}</td>'
        f'<td class="number">{human(row.bytes)}</td>'
        f'<td class="more"><small>{page_text(row.lies + where)}</small></td></tr>'
    )


def _strip(row: Holding, color: str, mesh: dict[str, int]) -> str:
    """What each device holds, as a height between top and bottom of the leaf."""
    if not row.bytes:
        return ""
    count = math.prod(mesh.values())
    gap = 0.1 if count <= 64 else 0.0
    axes = [x for names in re.findall(r"over ([^()]+) \(", row.lies) for x in names.split(", ")]
    split = math.prod(mesh.get(name, 1) for name in axes)
    high = 100 / split
    path = "".join(
        f"M{k} {high * _place(k, axes, mesh):.2f}h{1 - gap:.1f}v{high:.2f}h-{1 - gap:.1f}z"
        for k in range(count)
    )
    return (
        f'<svg viewBox="0 0 {count} 100" preserveAspectRatio="none" aria-hidden="true">'
        f'<path class="f-{color}" d="{path}"/></svg>'
    )


def _place(device: int, axes: Sequence[str], mesh: dict[str, int]) -> int:
    """The number of the part that a device holds, from its place in the mesh."""
    at, rest = {}, device
    for name in reversed(mesh):
        rest, at[name] = divmod(rest, mesh[name])
    number = 0
    for name in axes:
        number = number * mesh.get(name, 1) + at.get(name, 0)
    return number
