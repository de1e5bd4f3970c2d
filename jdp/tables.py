"""Tables for a terminal, drawn with rich.

    headers, rows  --rich_table-->  a table        Report  --report-->  all of a report's tables

`print` shows the same as plain text without rich; notebooks show `jdp.page`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from jdp.holdings import human
from jdp.memory import Memory
from jdp.reporting import Report, microseconds

if TYPE_CHECKING:
    from rich.console import RenderableType


def rich_table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numbers: Sequence[int] = (),
    title: str = "",
) -> Table:
    """A table, its text taken literally.

    Args:
        headers: A head for each column.
        rows: Cells, as many in each row.
        numbers: Columns that are set to the right.
        title: What stands above.

    Example:
        >>> rich_table(["leaf", "bytes"], [["w", "8 kB"]], numbers=[1]).row_count
        1
    """
    made = Table(
        title=escape(title) or None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
    )
    for place, head in enumerate(headers):
        last = place == len(headers) - 1
        made.add_column(
            escape(head),
            justify="right" if place in numbers else "left",
            no_wrap=not last,
            min_width=14 if last and place else None,
            overflow="fold",
        )
    for row in rows:
        made.add_row(*map(escape, row))
    return made


def report(found: Report) -> "RenderableType":
    """All that a report tells: verdict, collectives, memory, notes."""
    where = found.target or f"{found.devices} {found.platform} devices"
    axes = ", ".join(f"{name} {size}" for name, size in found.mesh.items())
    style = "bold red" if found.fits is False else "bold"
    parts: list[RenderableType] = [
        Text(f"{where}  (mesh: {axes})", style="dim"),
        Text(found.verdict, style=style),
        Text(""),
    ]
    if found.collectives:
        parts.append(_sent(found))
    parts += [Text(f"Sent: {found.floor.words}"), Text("")]
    if found.memory is not None:
        parts.append(_memory(found.memory, found.memory_limit))
    parts += [Text(f"Note: {note}", style="yellow") for note in found.notes]
    return Group(*parts)


def _sent(found: Report) -> Table:
    """A row for each collective; columns in which nothing differs or stands are left out."""
    headers = [
        "collective",
        "dtype",
        "bytes",
        "times",
        "axes",
        "time",
        "exposed",
        "x least",
        "from",
    ]
    rows = [
        (
            x.kind + ("" if x.asynchronous else ", waits"),
            "+".join(x.dtypes),
            human(x.bytes),
            f"{x.times}{' in loop' if x.in_loop else ''}",
            ", ".join(x.axes) if len(found.mesh) > 1 else "",
            microseconds(x.us),
            microseconds(x.exposed_us),
            f"{x.floor:.3g}",
            x.where,
        )
        for x in found.collectives
    ]
    kept = [k for k, cells in enumerate(zip(*rows, strict=True)) if any(cells)]
    numbers = [place for place, k in enumerate(kept) if k in (2, 3, 5, 6, 7)]
    shown = [[row[k] for k in kept] for row in rows]
    return rich_table([headers[k] for k in kept], shown, numbers=numbers, title="What is sent")


def _memory(memory: Memory, limit: int | None) -> Table:
    kinds = memory._fields[: memory._fields.index("total")]
    whole = limit or memory.total
    rows = []
    for kind in kinds:
        size = getattr(memory, kind)
        if size:
            bar = "█" * round(40 * max(0, size) / whole)
            rows.append((kind.replace("_", " "), human(size), bar))
    rows.append(("total", human(memory.total), ""))
    if limit:
        rows.append(("a device has", human(limit), ""))
    return rich_table(["memory", "bytes", ""], rows, numbers=(1,), title="Bytes of a device")
