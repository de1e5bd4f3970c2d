"""What `jdp.plan` returns: ranked strategies, advice, the one to take; as text, rich or JSON.

rows  --ranked-->  best first  --Plan-->  table, and advice that quotes the rows of the table
"""

import json
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from jdp.holdings import human, table
from jdp.reporting import microseconds
from jdp.strategy import Strategy

# Steps whose times differ by less, as a share or in microseconds, are taken for equal: formulas and
# compilers' cost models are no better than that.
ALIKE, ALIKE_US = 0.05, 5.0


class Row(NamedTuple):
    """A strategy and what is to be expected of it.

    Attributes:
        strategy: It.
        memory: Bytes of a device.
        fits: Whether the device has them.
        step_us: Microseconds of a step.
        exposed_us: Of these, microseconds of communication that nothing hides.
        bound: What limits it: "memory", "compute", "memory bandwidth", "communication",
            "latency", "update" or "offload".
        reason: Why, in words.
        source: Where the memory comes from: "formula", "probe" or "compiled".
        timed: Where the times come from: "formula", or "compiled" if the compiler models them.
    """

    strategy: Strategy
    memory: int
    fits: bool
    step_us: float
    exposed_us: float
    bound: str
    reason: str
    source: str
    timed: str = "formula"

    @property
    def share(self) -> float:
        """Share of a step that waits for communication."""
        return self.exposed_us / self.step_us if self.step_us else 0.0

    @property
    def step(self) -> str:
        """The time of a step as the table shows it, "~" before what is by formula."""
        return ("" if self.timed == "compiled" else "~") + microseconds(self.step_us)

    @property
    def waits(self) -> str:
        """The time that communication is waited for, as the table shows times."""
        if not self.exposed_us:
            return "none"
        return ("" if self.timed == "compiled" else "~") + microseconds(self.exposed_us)


class Plan(NamedTuple):
    """What `jdp.plan` found; printing it shows a table.

    Attributes:
        target: What it is for.
        global_batch: Rows of a step, over all devices.
        memory_limit: Bytes that a device has for programs.
        rows: Strategies, best first: compiled ones, then others, then those that do not fit.
        advice: What to know, in sentences; their figures are those of rows of the table.
        best: The strategy to take; `None` if none fits.
        considered: How many were enumerated.
        notes: How the figures came about.
    """

    target: str
    global_batch: int
    memory_limit: int
    rows: tuple[Row, ...]
    advice: tuple[str, ...]
    best: Strategy | None
    considered: int
    notes: tuple[str, ...]

    def table(self, most: int = 12) -> list[tuple[str, ...]]:
        """Rows of text, headers first: the first so many, and all that the advice speaks of."""
        lines: list[tuple[str, ...]] = [
            ("", "strategy", "memory", "step", "waits", "memory from", "bound by", "why")
        ]
        told = {id(row) for row in (*self.rows[:most], *spoken_of(self.rows))}
        for number, row in enumerate(self.rows, 1):
            if id(row) not in told:
                continue
            lines.append(
                (
                    str(number) if row.fits else "-",
                    str(row.strategy),
                    ("" if row.source == "compiled" else "~") + human(row.memory),
                    row.step,
                    f"{row.share:.0%}",
                    row.source,
                    row.bound,
                    row.reason,
                )
            )
        return lines

    @property
    def title(self) -> str:
        """What it is for, and how to read the table."""
        rows = f"{self.global_batch} row{'s' if self.global_batch > 1 else ''} a step"
        return (
            f"{self.target}: {rows}, {human(self.memory_limit)} for programs on each device; "
            f"{self.considered} strategies; ~ is modelled, the rest is the compiler's"
        )

    def __str__(self) -> str:
        text = table(self.table(), numbers=(0, 2, 3, 4))
        code = f"\n\n{self.best.code()}" if self.best else ""
        return "\n".join([self.title, "", text, "", *self.advice, *self.notes]) + code

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Writes it as one file that needs nothing else.

        Args:
            path: Where to.
        """
        from jdp import page_answers, page_parts

        page = page_parts.alone(page_answers.plan(self), f"jdp.plan: {self.target}")
        page_parts.write(path, page)

    def _repr_html_(self) -> str:
        from jdp import page_answers

        return page_answers.plan(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))

    def __rich__(self) -> Any:
        from jdp import tables

        return tables.plan(self)

    def to_json(self) -> str:
        """One JSON document."""
        rows = [
            {
                **row._asdict(),
                "strategy": {k: v for k, v in row.strategy._asdict().items() if k != "optimizer"},
                "name": str(row.strategy),
                "code": row.strategy.code(),
                "communication_share": row.share,
            }
            for row in self.rows
        ]
        best = None if self.best is None else {"name": str(self.best), "code": self.best.code()}
        return json.dumps({**self._asdict(), "rows": rows, "best": best})


def alike(slower_us: float, quicker_us: float) -> bool:
    """Whether two times differ by less than a model can tell."""
    return slower_us - quicker_us <= max(ALIKE * quicker_us, ALIKE_US)


def ranked(rows: Sequence[Row]) -> list[Row]:
    """Those that fit first, by time; of times that are alike the plainest. The others by memory."""
    left = sorted((row for row in rows if row.fits), key=lambda row: row.step_us)
    found: list[Row] = []
    while left:
        equals = [row for row in left if alike(row.step_us, left[0].step_us)]
        found += sorted(equals, key=_complications)
        left = left[len(equals) :]
    return found + sorted((r for r in rows if not r.fits), key=lambda r: (r.memory, r.step_us))


def _complications(row: Row) -> tuple[Any, ...]:
    """What is less plain is larger: what may cost accuracy, then time, then what must be set up."""
    s = row.strategy
    return (
        s.wire != "exact",
        s.offloaded,
        bool(s.remat),
        s.stage,
        len(s.shape),
        s.microbatches > 1,
        s.devices,
        row.step_us,
    )


def spoken_of(rows: Sequence[Row]) -> list[Row]:
    """Rows that advice may quote: the first for each number of devices, the quickest, lossy too."""
    exact, lossy = _by_wire(rows)
    quickest = [min(x, key=lambda row: row.step_us) for x in (exact, lossy) if x]
    return [*_first_by_count(exact).values(), *quickest]


def _by_wire(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Rows that fit: those that send gradients exactly, and the others."""
    fit = [row for row in rows if row.fits]
    exact = [row for row in fit if row.strategy.wire == "exact"]
    return exact, [row for row in fit if row.strategy.wire != "exact"]


def _first_by_count(rows: Sequence[Row]) -> dict[int, Row]:
    found: dict[int, Row] = {}
    for row in rows:
        found.setdefault(row.strategy.devices, row)
    return found


def advice_on(rows: Sequence[Row], best: Row, devices: int, batch_rows: int) -> list[str]:
    """What to know of a plan that fits, in sentences; every figure is one of `rows`, as shown.

    Args:
        rows: All, ranked.
        best: The row to take.
        devices: How many there are.
        batch_rows: Rows of a step.
    """
    s = best.strategy
    said = [f"Take {s}: {best.reason}."]
    plain = s.wire == "exact" and not s.stage and not s.offloaded and not s.remat
    if plain and s.devices > 1:
        said.append(
            "Plain data parallelism is best: everything fits whole, and nothing that is less plain "
            "is quicker by more than such figures can tell."
        )
    exact, lossy = _by_wire(rows)
    said += [] if s.wire != "exact" else _quicker(exact, best)
    most = max(row.strategy.devices for row in rows)
    said += _worth_of_devices(_first_by_count(exact), best, most)
    if most < devices:
        more = -(-batch_rows // devices) * devices
        said.append(
            f"{batch_rows} rows divide among {most} of the {devices} devices only; all would work "
            f"with global_batch a multiple of {devices}, such as {more}."
        )
    quick = min(lossy, key=lambda row: row.step_us, default=best)
    if quick.step_us < 0.9 * best.step_us and not alike(best.step_us, quick.step_us):
        said.append(
            f"Rounded gradients would save time: {quick.strategy} is expected at {quick.step} "
            f"instead of {best.step}."
        )
    return said


def _quicker(exact: Sequence[Row], best: Row) -> list[str]:
    """Why the row that is quickest by the figures is not the one to take."""
    quickest = min(exact, key=lambda row: row.step_us)
    if quickest.step_us >= best.step_us or quickest.step == best.step:
        return []
    if alike(best.step_us, quickest.step_us):
        return [
            f"{quickest.strategy} comes out at {quickest.step} instead of {best.step}, which is "
            f"less than such figures can tell ({ALIKE:.0%}, or {ALIKE_US:g} µs): the plainer one "
            "is taken."
        ]
    return [
        f"{quickest.strategy} may be quicker, {quickest.step} by formula instead of {best.step}; "
        "it was not compiled, see compile_best."
    ]


def _worth_of_devices(by_count: dict[int, Row], best: Row, most: int) -> list[str]:
    """Whether fewer devices than there are do as well, or better."""
    few = best.strategy.devices
    if few == most or most not in by_count or by_count[most].step_us < best.step_us:
        return []
    wide = by_count[most]
    if alike(wide.step_us, best.step_us):
        return [
            f"More devices gain nothing: on {most} a step takes {wide.step}, on {few} {best.step}."
        ]
    return [
        f"The model is small: {most} devices will be slower than {few}, because on {most} a step "
        f"takes {wide.step}, {wide.waits} of it waiting to communicate, and on {few} {best.step}, "
        f"{best.waits} of it waiting."
    ]
