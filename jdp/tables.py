"""Tables for a terminal, drawn with rich.

    headers, rows      --rich_table-->  a table
    Report             --report-->      verdict, what is sent, memory
    Plan               --plan-->        strategies, advice, code
    Diagnosis          --diagnosis-->   where the time goes, what to change, what would pay

`print` shows the same as plain text without rich; notebooks show `jdp.page`. Words are those of the
objects; here they are put so that 80 columns hold them.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from jdp.alike import alike
from jdp.holdings import human
from jdp.memory import Memory
from jdp.reporting import SENT_HEADERS, SENT_NUMBERS, Report, microseconds, sent_cells

if TYPE_CHECKING:
    from rich.console import RenderableType

    from jdp.diagnosis import Diagnosis
    from jdp.findings import Finding
    from jdp.pays import Payoff
    from jdp.planned import Plan

_MOST_ROWS = 24  # collectives that are shown; those that send most
_BAR = 24  # characters
_LITTLE = 0.2  # of a device's memory


class _Fitting(Table):
    """A table that knows what to leave out where it is too wide, rather than break words.

    Attributes:
        needed: Characters that each column needs, by its head.
        spare: Heads of columns to leave out, in this order.
    """

    needed: dict[str, int]
    spare: Sequence[str]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        kept, room = list(self.columns), options.max_width
        for head in self.spare:
            if sum(self.needed[str(x.header)] + 1 for x in kept) - 1 <= room:
                break
            kept = [x for x in kept if x.header != head]
        all_of_them, self.columns = self.columns, kept
        self.padding = (0, 1, 0, 0)
        if self.__rich_measure__(console, options.update(width=1000)).maximum > room:
            self.padding = 0
        yield from super().__rich_console__(console, options)
        self.columns = all_of_them


def rich_table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numbers: Sequence[int] = (),
    wraps: int = -1,
    spare: Sequence[str] = (),
    title: str = "",
) -> Table:
    """A table, its text taken literally.

    Args:
        headers: A head for each column.
        rows: Cells, as many in each row.
        numbers: Columns that are set to the right.
        wraps: The column whose cells may take several lines.
        spare: Heads of columns to leave out, in this order, where all are too wide.
        title: What stands above.

    Example:
        >>> rich_table(["leaf", "bytes"], [["w", "8 kB"]], numbers=[1]).row_count
        1
    """
    made = _Fitting(
        title=escape(title) or None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        show_header=any(headers),
    )
    made.needed, made.spare = {}, spare
    for place, head in enumerate(headers):
        cells = [head, *(row[place] for row in rows)]
        wrapped = place == wraps % len(headers)
        made.add_column(
            escape(head),
            justify="right" if place in numbers else "left",
            no_wrap=not wrapped,
            overflow="fold",
        )
        words = [word for cell in cells for word in cell.split()] if wrapped else cells
        made.needed[escape(head)] = max(map(len, words), default=0)
    for row in rows:
        made.add_row(*map(escape, row))
    return made


def _hanging(lines: Sequence[tuple[str, Text]]) -> Table:
    """Lines with something before them, which stays alone in its column."""
    made = Table.grid(padding=(0, 1, 0, 0), pad_edge=False)
    for before, text in lines:
        made.add_row(Text(before), text)
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
        parts += [_sent(found), Text("")]
    parts += [Text(f"Sent: {found.floor.words}"), Text("")]
    if found.memory is not None:
        parts += [_memory(found.memory, found.memory_limit), Text("")]
    return Group(*parts, *_notes(found.notes))


def _notes(notes: Sequence[str]) -> list[Text]:
    return [Text(f"Note: {note}", style="yellow") for note in notes]


def _sent(found: Report) -> "RenderableType":
    """A row for those that are alike; columns in which nothing differs or stands are left out."""
    all_of_them = [x.sent for x in alike(found.collectives)]
    most = sorted(all_of_them, key=lambda x: -x.wire_bytes)[:_MOST_ROWS]
    shown = [x for x in all_of_them if x in most]
    rows = [sent_cells(x) for x in shown]
    left_out = {SENT_HEADERS.index("beside")}
    left_out |= {SENT_HEADERS.index("axes")} if len(found.mesh) == 1 else set()
    filled = {k for k, cells in enumerate(zip(*rows, strict=True)) if any(cells)}
    kept = sorted(filled - left_out)
    made = rich_table(
        [SENT_HEADERS[k] for k in kept],
        [[row[k] for k in kept] for row in rows],
        numbers=[place for place, k in enumerate(kept) if k in SENT_NUMBERS],
        spare=("time", "dtype", "x least", "axes"),
        title="What is sent",
    )
    more = len(all_of_them) - len(shown)
    return Group(made, Text(f"and {more} more, smaller ones\n", style="dim")) if more else made


def _memory(memory: Memory, limit: int | None) -> Table:
    """Bars as shares of what a device has, or of what is used where that is little."""
    used = max(memory.total, 1)
    whole = limit if limit and used > _LITTLE * limit else used
    rows = [(name, human(size), _bar(size / whole)) for name, size in memory.kinds.items()]
    of = f"of {human(limit)}" if limit else ""
    rows.append(("total", human(memory.total), of))
    return rich_table(["memory", "bytes", ""], rows, numbers=(1,), title="Bytes of a device")


def _bar(share: float) -> str:
    return "█" * round(_BAR * max(0.0, share))


def plan(found: "Plan") -> "RenderableType":
    """Strategies, best first, and what to write for the best."""
    lines = found.table()
    head = lines[0]
    # why is in the advice, of the best one; where memory is from, the marks tell
    kept = [k for k, name in enumerate(head) if name not in ("why", "memory from")]
    numbers = [k for k, name in enumerate(head) if name in ("", "memory", "step", "waits")]
    rows = [[line[k] for k in kept] for line in lines[1:]]
    wraps = kept.index(head.index("strategy"))
    made = rich_table([head[k] for k in kept], rows, numbers=numbers, wraps=wraps)
    style = "bold" if found.best else "bold red"
    advice = [Text(x, style=style if not k else "") for k, x in enumerate(found.advice)]
    code = [Text(f"    {line}") for line in found.best.code().split("\n")] if found.best else []
    ends = [Text(""), *code, *_notes(found.notes)]
    return Group(Text(found.title, style="dim"), made, Text(""), *advice, *ends)


def diagnosis(found: "Diagnosis") -> "RenderableType":
    """Where a step's time goes, what is worth a change, and what would pay."""
    lines = [(*line[:3], line[3].replace("#", "█")) for line in found.share_cells()]
    parts: list[RenderableType] = [rich_table([""] * 4, lines, numbers=(1, 2)), Text("")]
    parts += [Text(x) for x in found.remarks]
    processes = found.process_cells()
    if processes:
        numbers = range(1, len(processes[0]))
        parts += [Text(""), rich_table(processes[0], processes[1:], numbers=numbers), Text("")]
    parts += [Text(found.straggler)] if found.straggler else []
    parts += [Text(""), _findings(found.findings), Text("")]
    parts += _payoffs(found.payoffs) if found.payoffs else []
    return Group(*parts, *_notes(found.notes))


def _findings(found: Sequence["Finding"]) -> "RenderableType":
    lines = []
    for number, x in enumerate(found, 1):
        gain = f"-{microseconds(1e3 * x.gain_ms)}: " if x.gain_ms else ""
        lines.append((f"{number}.", Text(gain + x.what, style="bold" if number == 1 else "")))
        lines.append(("", Text(f"-> {x.change}", style="green")))
    return _hanging(lines) if found else Text("Nothing passes its threshold.", style="bold")


def _payoffs(found: Sequence["Payoff"]) -> "list[RenderableType]":
    """A row for each; below, what to write for those that pay."""
    rows = [
        (
            x.what,
            x.answer,
            "" if x.pays is None else microseconds(1e3 * x.then_ms),
            human(-x.saves) if x.saves else "",
            x.why,
        )
        for x in found
    ]
    now = microseconds(1e3 * found[0].now_ms)
    heads = ["does it pay", "", "a step", "memory", "why"]
    made = rich_table(heads, rows, numbers=(2, 3), title=f"A step takes {now} now")
    written = [(f"{x.what}:", Text(x.argument)) for x in found if x.pays]
    return [made, Text(""), *([_hanging(written), Text("")] if written else [])]
