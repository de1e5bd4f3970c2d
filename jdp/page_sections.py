"""Parts of a page on a program: memory of a device, and what is sent.

    Memory, limit  --memory-->  a section of HTML        Report  --sent-->  another

The words are those of `Memory.kinds` and `jdp.reporting.sent_cells`; this adds what is drawn.
"""

from collections.abc import Sequence

from jdp.alike import Alike, alike
from jdp.holdings import human
from jdp.memory import Memory
from jdp.page_parts import Column, gave_up, meter, page_text, percent, table
from jdp.reporting import SENT_HEADERS, SENT_NUMBERS, Report, microseconds, sent_cells

_MOST_ROWS = 14  # collectives that are shown at once; the others can be opened
_MOST_NAMES = 4  # that a tip tells
_ROOM = 0.075  # of a bar: what a size needs; a name needs more
_LETTER = 0.006
_LITTLE = 0.2  # of a device's memory: what is used of it is drawn larger, apart
_FAR = 1.05  # times the least: from here it is said aloud
_TIMED = ("time", "exposed", "beside")  # columns that are empty without modelled times
_COLORS = {
    "parameters": "params",
    "optimizer state": "opt",
    "gradients": "grad",
    "activations": "act",
    "collectives": "comm",
}


def memory(found: Memory | None, limit: int | None) -> str:
    """One bar, as long as the device's memory or as what is asked for, whichever is more.

    Of a device that is nearly empty, a second one shows what little is used.

    Args:
        found: Bytes by kind; `None` if the compiler gave up.
        limit: Bytes that a device has; `None` if that is not known.
    """
    if found is None:
        return (
            "<section><h2>Memory of a device</h2><p>The compiler gave up before it told how much "
            "it needs.</p></section>"
        )
    sizes = {name: size for name, size in found.kinds.items() if size > 0}
    used = max(sum(sizes.values()), 1)
    little = limit is not None and used < _LITTLE * limit
    whole = used if limit is None or little else max(limit, used)
    bar = "".join(_segment(name, size, whole) for name, size in sizes.items())
    above = ""
    if limit and little:
        above = (
            f'<p class="soft">{percent(used / limit)} of it; below, what that is made of</p>'
            f'<div class="used">{meter([("rest", used)], limit)}</div>'
        )
    elif limit and used > limit:
        share = f"{100 * limit / whole:.2f}%"
        above = f'<p class="mark" style="width:{share}">the device has {human(limit)}</p>'
        bar += f'<div class="over" style="left:{share}"></div>'
    elif limit and limit - used > 1.4 * _ROOM * whole:
        bar += f'<div class="free">{human(limit - used)} free</div>'
    of = f" of {human(limit)}" if limit else ""
    host = f"<p>Besides, {human(found.host)} in the host's memory.</p>" if found.host else ""
    aloud = ", ".join(f"{name} {human(size)}" for name, size in sizes.items())
    return (
        f"<section><h2>Memory of a device: {human(found.total)}{of}</h2>{host}{above}"
        f'<div class="bar" role="img" aria-label="{aloud}">{bar}</div>'
        f'<ul class="key">{_legend(sizes, used)}</ul></section>'
    )


def _segment(name: str, size: int, whole: int) -> str:
    share = size / whole
    both = share > _ROOM + _LETTER * len(name)
    told = f"{name} {human(size)}" if both else human(size) if share > _ROOM else ""
    return (
        f'<div class="c-{_COLORS.get(name, "rest")}{"" if told else " thin"}" '
        f'style="width:{100 * share:.3f}%" title="{name}: {human(size)}">{told}</div>'
    )


def _legend(sizes: dict[str, int], total: int) -> str:
    """The kinds that can be seen; the others in one."""
    seen = {name: size for name, size in sizes.items() if size >= 0.001 * total}
    rest = total - sum(seen.values())
    keys = [
        f'<li><i class="c-{_COLORS.get(name, "rest")}"></i>{name} '
        f"<b>{human(size)}</b> {percent(size / total)}</li>"
        for name, size in seen.items()
    ]
    if rest:
        keys.append(f"<li>all else <b>{human(rest)}</b></li>")
    return "".join(keys)


def sent(report: Report) -> str:
    """The collectives, those that are alike in one row; first what the step waits for longest.

    Args:
        report: What `jdp.explain` returned.
    """
    if not report.collectives:
        what = "Not known: there is no program." if gave_up(report) else "Nothing is sent."
        return f"<section><h2>Communication</h2><p>{what}</p></section>"
    numbered = list(enumerate(alike(report.collectives)))
    timed = any(x.sent.us for _, x in numbered)
    most = max(_weight(x) for _, x in numbered)
    order = sorted(numbered, key=lambda pair: _worst(pair[1]))
    count = len(order) if len(order) == _MOST_ROWS + 1 else _MOST_ROWS  # not a single one apart
    first, rest = order[:count], order[count:]
    body = _sent_table(first, timed, most)
    if rest:
        size = human(round(sum(x.sent.wire_bytes for _, x in rest)))
        lost = sum(x.sent.exposed_us or 0.0 for _, x in rest)
        waits = f", waited for {microseconds(lost)} in all" if timed else ""
        body += (
            f"<details><summary>{len(rest)} more rows, with {size} sent{waits}</summary>"
            f"{_sent_table(rest, timed, most)}</details>"
        )
    return f"<section><h2>Communication</h2><p>{page_text(report.floor.words)}</p>{body}</section>"


def _worst(x: Alike) -> tuple[float, float]:
    return -(x.sent.exposed_us or 0.0), -x.sent.wire_bytes


def _weight(x: Alike) -> float:
    return x.sent.wire_bytes if x.sent.us is None else x.sent.us


def _sent_table(rows: Sequence[tuple[int, Alike]], timed: bool, most: float) -> str:
    """The cells of `jdp.reporting.sent_cells`, with a bar before the last ones."""
    shown = [k for k, name in enumerate(SENT_HEADERS) if timed or name not in _TIMED]
    columns = [Column(SENT_HEADERS[k], _kind(k)) for k in shown]
    place = shown.index(SENT_HEADERS.index("x least"))
    columns.insert(place, Column("on the wire" if timed else "sent by a device"))
    body = "".join(_sent_row(number, x, shown, place, most) for number, x in rows)
    return table(columns, body, "lights")


def _kind(column: int) -> str:
    if column in SENT_NUMBERS:
        return "number"
    kinds = {"beside": "cut more", "from": "cut", "dtype": "least", "axes": "least"}
    return kinds.get(SENT_HEADERS[column], "")


def _sent_row(number: int, x: Alike, shown: Sequence[int], place: int, most: float) -> str:
    words, exposed = sent_cells(x.sent), x.sent.exposed_us or 0.0
    if x.sent.us is None:
        parts = [("sent", x.sent.wire_bytes)]
    else:
        parts = [("sent", exposed), ("hidden", x.sent.us - exposed)]
    cells = [f'<td class="{_kind(k)}">{page_text(words[k])}</td>' for k in shown]
    if x.sent.floor > _FAR:
        cells[place] = cells[place].replace("number", "number far")
    cells.insert(place, f'<td class="meters">{meter(parts, most)}</td>')
    faint = ' class="faint"' if _weight(x) < 0.01 * most else ""
    head = f'<tr{faint} data-row="{number}" tabindex="0" title="{page_text(_tip(x))}">'
    return f"{head}{''.join(cells)}</tr>"


def _tip(x: Alike) -> str:
    """What the row has no room for."""
    sent, more = x.sent, len(x.names) - _MOST_NAMES
    names = ", ".join(x.names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
    how = "asynchronous" if sent.asynchronous else "synchronous"
    branch = ", in a branch" if sent.in_branch else ""
    told = [
        f"{names}: {how}{branch}, {sent.group} devices together",
        f"{human(round(sent.wire_bytes))} sent by each device",
    ]
    if sent.us is not None:
        waits = microseconds(sent.exposed_us)
        told.append(f"{microseconds(sent.us)} on the wire, {waits} of it waited for")
        told.append(f"meanwhile: {', '.join(sent.beside) or 'nothing'}")
    return "\n".join([*told, *([f"from {sent.where}"] if sent.where else [])])
