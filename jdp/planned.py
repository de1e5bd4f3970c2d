"""What `jdp.plan` returns: ranked strategies, advice, the one to take; as text, rich or JSON."""

import json
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from jdp.holdings import human, table
from jdp.strategy import Strategy


class Row(NamedTuple):
    """A strategy and what is to be expected of it.

    Attributes:
        strategy: It.
        memory: Bytes of a device.
        fits: Whether the device has them.
        step_us: Microseconds of a step.
        exposed_us: Of these, microseconds of communication that nothing hides.
        bound: What limits it: "memory", "compute", "memory bandwidth", "communication",
            "latency" or "update".
        reason: Why, in words.
        source: "formula", "probe" or "compiled".
    """

    strategy: Strategy
    memory: int
    fits: bool
    step_us: float
    exposed_us: float
    bound: str
    reason: str
    source: str

    @property
    def share(self) -> float:
        """Share of a step that waits for communication."""
        return self.exposed_us / self.step_us if self.step_us else 0.0


class Plan(NamedTuple):
    """What `jdp.plan` found; printing it shows a table.

    Attributes:
        target: What it is for.
        global_batch: Rows of a step, over all devices.
        memory_limit: Bytes that a device has for programs.
        rows: Strategies, best first; those that do not fit last.
        advice: What to know, in sentences.
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
        """Rows of text, headers first."""
        head = ("", "strategy", "memory", "step", "waits", "bound by", "why")
        lines: list[tuple[str, ...]] = [head]
        for number, row in enumerate(self.rows[:most], 1):
            mark = {"formula": "~", "probe": "~", "compiled": ""}[row.source]
            lines.append(
                (
                    str(number) if row.fits else "-",
                    str(row.strategy),
                    mark + human(row.memory),
                    f"{mark}{time_of(row.step_us)}",
                    f"{row.share:.0%}",
                    row.bound,
                    row.reason,
                )
            )
        return lines

    def __str__(self) -> str:
        head = (
            f"{self.target}: {self.global_batch} rows a step, {human(self.memory_limit)} for "
            f"programs on each device; {self.considered} strategies, ~ as predicted"
        )
        text = table(self.table(), numbers=(0, 2, 3, 4))
        code = f"\n\n{self.best.code()}" if self.best else ""
        return "\n".join([head, "", text, "", *self.advice, *self.notes]) + code

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
        from jdp import tables  # a terminal's tables

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


def time_of(us: float) -> str:
    """Microseconds in words."""
    return f"{us / 1e3:.3g} ms" if us < 1e6 else f"{us / 1e6:.3g} s"


def worth_of_devices(rows: Sequence[Row], total: int) -> list[str]:
    """Whether fewer devices would be faster, by one measure for all: the formula's."""
    exact = [r for r in rows if r.fits and r.strategy.wire == "exact" and r.source != "compiled"]
    by_count: dict[int, Row] = {}
    for row in exact:
        count = row.strategy.devices
        if count not in by_count or row.step_us < by_count[count].step_us:
            by_count[count] = row
    if total not in by_count or len(by_count) < 2:
        return []
    quickest = min(by_count.values(), key=lambda row: row.step_us)
    few, most = quickest.strategy.devices, by_count[total]
    if few == total or quickest.step_us > 0.95 * most.step_us:
        return []
    return [
        f"The model is small: {total} devices will be slower than {few}, because on {total} a step "
        f"takes {time_of(most.step_us)}, {time_of(most.exposed_us)} of it waiting to communicate, "
        f"and on {few} {time_of(quickest.step_us)}, {time_of(quickest.exposed_us)} of it waiting."
    ]
