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
from jdp.reporting import SENT_HEADERS, SENT_NUMBERS, Report, sent_cells

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
    style = "bold red" if found.fits is False else "bold"
    parts: list[RenderableType] = [
        Text(f"{found.where}  (mesh: {found.axes})", style="dim"),
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
    rows = [sent_cells(x) for x in found.collectives]
    left_out = {SENT_HEADERS.index("beside")}
    left_out |= {SENT_HEADERS.index("axes")} if len(found.mesh) == 1 else set()
    filled = {k for k, cells in enumerate(zip(*rows, strict=True)) if any(cells)}
    kept = sorted(filled - left_out)
    numbers = [place for place, k in enumerate(kept) if k in SENT_NUMBERS]
    shown = [[row[k] for k in kept] for row in rows]
    return rich_table([SENT_HEADERS[k] for k in kept], shown, numbers=numbers, title="What is sent")


def _memory(memory: Memory, limit: int | None) -> Table:
    whole = limit or memory.total
    rows = [
        (name, human(size), "█" * round(40 * max(0, size) / whole))
        for name, size in memory.kinds.items()
    ]
    rows.append(("total", human(memory.total), ""))
    if limit:
        rows.append(("a device has", human(limit), ""))
    return rich_table(["memory", "bytes", ""], rows, numbers=(1,), title="Bytes of a device")
