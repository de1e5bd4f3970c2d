"""What `jdp.doctor` found, as a value: printed as tables, to JSON and back.

Nothing is measured or judged here.
"""

import json
import os
from typing import Any, NamedTuple

from jdp import findings as judging
from jdp import payoff as paying
from jdp.findings import Finding
from jdp.holdings import table
from jdp.payoff import Payoff, fill, ms
from jdp.reporting import as_json

_BAR = 40  # characters for a whole step


class DiagnosisError(RuntimeError):
    """Measuring had to end.

    Attributes:
        state: The state after the last step that was done; go on with it.
    """

    def __init__(self, text: str, state: Any) -> None:
        super().__init__(text)
        self.state = state


class Process(NamedTuple):
    """Where a process's time goes, in milliseconds of a step.

    Attributes:
        process: Its number.
        compute_ms: See `Diagnosis`, as for the next three.
        communication_ms: In collectives.
        input_ms: Waiting for input.
        host_ms: The rest.
        waiting_ms: Of communication, waiting for others that come to the collectives later.
    """

    process: int
    compute_ms: float
    communication_ms: float
    input_ms: float
    host_ms: float
    waiting_ms: float


class Replica(NamedTuple):
    """What a replica's device does, in milliseconds of a traced step.

    Attributes:
        replica: Its number along the data axes.
        process: Its process.
        device: The id of its device; of several, the one that computes longest.
        compute_ms: It computes.
        communication_ms: It is in collectives: sends, or waits for others.
    """

    replica: int
    process: int
    device: int
    compute_ms: float
    communication_ms: float


class Check(NamedTuple):
    """The step in turns with itself without communication, each step waited for.

    Attributes:
        step_ms: With it, median.
        silent_ms: Without, median.
        added_ms: Median difference of neighbours in time.
        replaced: Collectives that were taken out.
        left: Bytes of collectives that the compiler adds by itself, which stayed.
    """

    step_ms: float
    silent_ms: float
    added_ms: float
    replaced: int
    left: int


class Diagnosis(NamedTuple):
    """What `jdp.doctor` found; printing it shows it. Times are milliseconds of a step.

    Attributes:
        state: The state after the measured steps; `None` if read from JSON.
        steps: Steps measured.
        compile_s: Seconds of the first step.
        step_ms: A step, as in the loop, without a trace.
        compute_ms: Devices compute. This and the next three add up to the step.
        communication_ms: They are in collectives and do not compute.
        input_ms: They wait for the next batch.
        host_ms: The rest: dispatch, the loop's Python, gaps between operations.
        waiting_ms: Of communication, waiting for devices that come to the collectives later.
        hidden_ms: Of compute, that with collectives beside it.
        traced_ms: A step with a trace.
        check: What communication adds, found in another way; `None` if not asked for.
        processes: The same four figures for each process.
        replicas: What each replica's device does.
        findings: What is worth a change, largest gain first.
        payoffs: What each technique would do to the step.
        notes: What to know when reading the figures.
        shares_cores: Whether the devices take turns on the cores of one host.
    """

    state: Any
    steps: int
    compile_s: float
    step_ms: float
    compute_ms: float
    communication_ms: float
    input_ms: float
    host_ms: float
    waiting_ms: float
    hidden_ms: float
    traced_ms: float
    check: Check | None
    processes: tuple[Process, ...]
    replicas: tuple[Replica, ...]
    findings: tuple[Finding, ...]
    payoffs: tuple[Payoff, ...]
    notes: tuple[str, ...]
    shares_cores: bool = False

    @property
    def slowest(self) -> Replica | None:
        """The replica that computes longest; `None` if the trace shows none."""
        return max(self.replicas, key=lambda x: x.compute_ms) if self.replicas else None

    def to_json(self) -> str:
        """As JSON, all but the state; `from_json` reads it."""
        return json.dumps(as_json(self._replace(state=None)))

    @classmethod
    def from_json(cls, text: str) -> "Diagnosis":
        """Reads what `to_json` wrote."""
        told = json.loads(text)
        kinds = {
            "processes": Process,
            "replicas": Replica,
            "findings": Finding,
            "payoffs": Payoff,
        }
        lists = {name: tuple(kind(**row) for row in told[name]) for name, kind in kinds.items()}
        check = None if told["check"] is None else Check(**told["check"])
        return cls(**told | lists | {"check": check, "notes": tuple(told["notes"])})

    def __str__(self) -> str:
        cells = self.process_cells()
        others = [table(cells, numbers=(1, 2, 3, 4, 5))] if cells else []
        shares = [table(self.share_cells(), numbers=(1, 2))]
        shares += [fill(x) for x in self.remarks]
        others += [self.straggler] if self.straggler else []
        parts = ["\n".join(shares), "\n".join(others), judging.show(self.findings)]
        if self.payoffs:
            parts.append(paying.show(self.payoffs))
        parts += [fill(f"Note: {note}") for note in self.notes]
        return "\n\n".join(filter(None, parts))

    def __repr__(self) -> str:
        return str(self)  # a state would fill the screen

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Writes it as one file that needs nothing else.

        Args:
            path: Where to.
        """
        from jdp import page_answers, page_parts

        title = f"jdp.doctor: {ms(self.step_ms)} a step"
        page_parts.write(path, page_parts.alone(page_answers.diagnosis(self), title))

    def _repr_html_(self) -> str:
        from jdp import page_answers

        return page_answers.diagnosis(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))

    def __rich__(self) -> Any:
        from jdp import tables

        return tables.diagnosis(self)

    @property
    def shares(self) -> dict[str, float]:
        """The four parts of a step, in milliseconds."""
        return {
            "compute": self.compute_ms,
            "communication": self.communication_ms,
            "input": self.input_ms,
            "host": self.host_ms,
        }

    @property
    def remarks(self) -> tuple[str, ...]:
        """What there is to say of the parts: who waits, what is hidden, the check."""
        said = []
        if self.waiting_ms > 0.01 * self.step_ms:
            said.append(f"Of communication {ms(self.waiting_ms)} are waiting for slower devices.")
        if self.hidden_ms and not self.shares_cores:
            said.append(f"Another {ms(self.hidden_ms)} of communication run under compute.")
        if self.check is not None:
            adds = ms(self.check.added_ms) if self.check.added_ms > 0 else "nothing to be seen"
            said.append(
                f"Check: a step that is waited for takes {ms(self.check.step_ms)}, and "
                f"{ms(self.check.silent_ms)} without its communication: this adds {adds}."
            )
        return tuple(said)

    @property
    def straggler(self) -> str:
        """The slowest replica, in words; "" if there is no other, or it is for want of cores."""
        if self.slowest is None or len(self.replicas) < 2 or self.shares_cores:
            return ""
        others = sorted(x.compute_ms for x in self.replicas if x is not self.slowest)
        middle = others[len(others) // 2]
        over = f", {100 * (self.slowest.compute_ms / middle - 1):.0f} % over the others' median"
        return (
            f"Slowest replica: {self.slowest.replica} (device {self.slowest.device}, process "
            f"{self.slowest.process}) computes {ms(self.slowest.compute_ms)}"
            + (over if middle else "")
        )

    def share_cells(self) -> list[tuple[str, ...]]:
        """A step and its parts, with bars, as rows of text."""
        told = f"of {self.steps}; the first took {self.compile_s:.3g} s, with compiling"
        lines: list[tuple[str, ...]] = [("a step", ms(self.step_ms), "", told)]
        for name, spent in self.shares.items():
            part = spent / self.step_ms
            lines.append((name, ms(spent), f"{100 * part:.0f} %", "#" * round(_BAR * part)))
        return lines

    def process_cells(self) -> list[tuple[str, ...]]:
        """A row for each process, heads first; nothing if there is but one."""
        if len(self.processes) < 2:
            return []
        lines: list[tuple[str, ...]] = [
            ("process", "compute", "communication", "input", "host", "waits for others")
        ]
        for process, *spent in self.processes:
            lines.append((str(process), *map(ms, spent)))
        return lines
