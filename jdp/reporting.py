"""The report of `jdp.explain` as a value: what a compiled step sends, keeps, computes and hides.

    Report  --to_json-->  text  --from_json-->  the same Report
    Report  --str-->  aligned text        --save_html-->  one file that needs nothing else

All bytes and times are those of one device and one step. Nothing here compiles.
"""

import json
import os
from typing import Any, NamedTuple

from jdp.holdings import Holding, Holdings, human, table
from jdp.memory import Memory
from jdp.sent import Sent, Span


class Floor(NamedTuple):
    """What is sent, beside the least that the strategy could send.

    Attributes:
        sent: Bytes that a device sends in a step, in rings.
        least: What this strategy needs, without compression. A compiler may do with less for stage
            3, where it keeps what it gathered last.
        ratio: sent / least; 1 where nothing has to be sent and nothing is.
        words: The formula, with its numbers.
    """

    sent: float
    least: float
    ratio: float
    words: str


class Report(NamedTuple):
    """What `jdp.explain` found out; printing it shows tables.

    Attributes:
        target: Name of the target; "" for the devices at hand.
        devices: How many.
        mesh: Size of each mesh axis.
        platform: "cpu", "gpu" or "tpu".
        chip: Name in `jdp.hardware.CHIPS`, or `None`.
        versions: Of what compiled it.
        compile_s: Seconds that compiling took.
        cached: Whether the report is one from before of the same program.
        fits: Whether it fits the device's memory; `None` if that is not known.
        collectives: What is sent, in the order it starts.
        memory: Bytes of a device by kind; `None` if the compiler gave up.
        memory_limit: Bytes that a device has for programs.
        flops: Of matrix products and convolutions, on a device.
        bytes_moved: Bytes that compute reads and writes in a device's memory.
        compute_us, sent_us, exposed_us, step_us: Microseconds of compute, of communication, of it
            that nothing hides, and of the step; as modelled, `None` on CPUs.
        mfu: FLOPs over what the chip could do in the time of the step.
        verdict: What bounds the step, in words.
        floor: What is sent beside the least possible.
        spans: The timeline.
        holdings: Who holds what of the state.
        notes: What else one should know.
    """

    target: str
    devices: int
    mesh: dict[str, int]
    platform: str
    chip: str | None
    versions: dict[str, str]
    compile_s: float | None
    cached: bool
    fits: bool | None
    collectives: tuple[Sent, ...]
    memory: Memory | None
    memory_limit: int | None
    flops: float | None
    bytes_moved: float | None
    compute_us: float | None
    sent_us: float | None
    exposed_us: float | None
    step_us: float | None
    mfu: float | None
    verdict: str
    floor: Floor
    spans: tuple[Span, ...]
    holdings: Holdings
    notes: tuple[str, ...]

    @property
    def where(self) -> str:
        """The target, or the devices at hand, in words."""
        return self.target or f"{self.devices} {self.platform} device{'s'[: self.devices != 1]}"

    @property
    def axes(self) -> str:
        """The mesh axes and their sizes, in words."""
        return ", ".join(f"{name} {size}" for name, size in self.mesh.items())

    @property
    def hidden(self) -> float | None:
        """Share of the time of communication that is under compute; 1 if nothing is sent."""
        if self.sent_us is None or self.exposed_us is None:
            return None
        return 1.0 if not self.sent_us else 1.0 - self.exposed_us / self.sent_us

    def to_json(self) -> str:
        """One JSON document."""
        return json.dumps(as_json(self))

    @classmethod
    def from_json(cls, text: str) -> "Report":
        """The report that `to_json` wrote.

        Raises:
            ValueError: If the text is of something else, or of another version of jdp.
        """
        try:
            found = json.loads(text)
            if set(found) != set(cls._fields):
                raise ValueError("other fields")
            return cls(**found)._rebuilt()
        except (TypeError, ValueError, KeyError) as error:
            raise ValueError(
                f"This is not the JSON of a report of this version of jdp: {error}. Make it anew "
                "with report.to_json()."
            ) from error

    def _rebuilt(self) -> "Report":
        """The same, with what JSON made lists and dicts of as it was."""
        holdings: Any = self.holdings
        rows = tuple(Holding(**x | {"shape": tuple(x["shape"])}) for x in holdings["rows"])
        return self._replace(
            collectives=tuple(_sent(x) for x in self.collectives),
            spans=tuple(Span(**_any(x)) for x in self.spans),
            floor=Floor(**_any(self.floor)),
            memory=None if self.memory is None else Memory(**_any(self.memory)),
            holdings=Holdings(rows, holdings["parts"], holdings["total"]),
            notes=tuple(self.notes),
        )

    def __str__(self) -> str:
        parts = [f"Compiled for {self.where} (mesh: {self.axes}).", self.verdict, ""]
        if self.collectives:
            parts += [sent_table(self.collectives), ""]
        parts += [f"Sent: {self.floor.words}", ""]
        if self.memory is not None:
            limit = f" of {human(self.memory_limit)}" if self.memory_limit else ""
            parts += [str(self.memory), f"total: {human(self.memory.total)}{limit}", ""]
        parts += [f"Note: {note}" for note in self.notes]
        return "\n".join(parts).rstrip()

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Writes the report as one file that needs nothing else.

        Args:
            path: Where to.
        """
        from jdp import page, page_parts

        page_parts.write(path, page.html(self))

    def _repr_html_(self) -> str:
        from jdp import page

        return page.fragment(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))

    def __rich__(self) -> Any:
        from jdp import tables

        return tables.report(self)


def _any(x: Any) -> Any:
    return x


def _sent(x: Any) -> Sent:
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in x.items()}
    return Sent(**fields)


def as_json(x: Any) -> Any:
    """Named tuples as dicts, so that their fields keep their names; tuples as lists."""
    if hasattr(x, "_asdict"):
        return {name: as_json(value) for name, value in x._asdict().items()}
    if isinstance(x, dict):
        return {str(name): as_json(value) for name, value in x.items()}
    return [as_json(value) for value in x] if isinstance(x, tuple | list) else x


def microseconds(us: float | None) -> str:
    """A time with a unit, three digits: 1.23 ms; "" for none."""
    if us is None:
        return ""
    value, units = us, ["µs", "ms", "s"]
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.3g} {units[0]}"


SENT_HEADERS = (
    *("collective", "dtype", "bytes", "times", "axes", "time", "exposed", "x least"),
    *("beside", "from"),
)
SENT_NUMBERS = frozenset({2, 3, 5, 6, 7})
"""Columns that are set to the right."""


def sent_cells(x: Sent) -> tuple[str, ...]:
    """A collective in words, in the columns of `SENT_HEADERS`."""
    return (
        x.kind + ("" if x.asynchronous else ", waits"),
        "+".join(x.dtypes),
        human(x.bytes),
        f"{x.times}{' in loop' if x.in_loop else ''}",
        ", ".join(x.axes),
        microseconds(x.us),
        microseconds(x.exposed_us),
        f"{x.floor:.3g}",
        ", ".join(x.beside[:2]),
        x.where,
    )


def sent_table(collectives: tuple[Sent, ...]) -> str:
    """The collectives as aligned text."""
    return table([SENT_HEADERS, *map(sent_cells, collectives)], numbers=tuple(SENT_NUMBERS))
