"""What `jdp.doctor` found, as a value: printed as tables, to JSON and back.

Nothing is measured or judged here.
"""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from jdp import findings as judging
from jdp import payoff as paying
from jdp.findings import Finding
from jdp.holdings import table
from jdp.links import as_json
from jdp.payoff import WIDTH, Payoff, fill, ms

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
        return self._text(WIDTH)

    def __repr__(self) -> str:
        return str(self)  # a state would fill the screen

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.text import Text

        del console
        yield Text(self._text(options.max_width))

    def _text(self, width: int) -> str:
        parts = [self._shares(width), self._others(), judging.show(self.findings, width)]
        if self.payoffs:
            parts.append(paying.show(self.payoffs, width))
        parts += [fill(f"Note: {note}", width) for note in self.notes]
        return "\n\n".join(filter(None, parts))

    def _shares(self, width: int) -> str:
        """The four parts of a step, with bars, and the check."""
        names = ("compute", "communication", "input", "host")
        shares = (self.compute_ms, self.communication_ms, self.input_ms, self.host_ms)
        lines = [
            (
                "a step",
                ms(self.step_ms),
                "",
                f"of {self.steps}; the first took {self.compile_s:.3g} s, with compiling",
            )
        ]
        for name, spent in zip(names, shares, strict=True):
            part = spent / self.step_ms
            lines.append((name, ms(spent), f"{100 * part:.0f} %", "#" * round(_BAR * part)))
        text = table(lines, numbers=(1, 2))
        if self.waiting_ms > 0.01 * self.step_ms:
            text += f"\nOf communication {ms(self.waiting_ms)} are waiting for slower devices."
        if self.hidden_ms and not self.shares_cores:
            text += f"\nAnother {ms(self.hidden_ms)} of communication run under compute."
        if self.check is not None:
            added = self.check.added_ms
            told = (
                f"Check: a step that is waited for takes {ms(self.check.step_ms)}, and "
                f"{ms(self.check.silent_ms)} without its communication: this adds "
                f"{ms(added) if added > 0 else 'nothing to be seen'}."
            )
            text += f"\n{fill(told, width)}"
        return text

    def _others(self) -> str:
        """Processes, if there are several, and the slowest replica, if it is for want of speed."""
        text = ""
        if len(self.processes) > 1:
            lines: list[tuple[str, ...]] = [
                ("process", "compute", "communication", "input", "host", "waits for others")
            ]
            for process, *spent in self.processes:
                lines.append((str(process), *map(ms, spent)))
            text = table(lines, numbers=(1, 2, 3, 4, 5))
        if self.slowest is not None and len(self.replicas) > 1 and not self.shares_cores:
            others = sorted(x.compute_ms for x in self.replicas if x is not self.slowest)
            middle = others[len(others) // 2]
            over = f", {100 * (self.slowest.compute_ms / middle - 1):.0f} % over the others' median"
            text += "\n" if text else ""
            text += (
                f"Slowest replica: {self.slowest.replica} (device {self.slowest.device}, process "
                f"{self.slowest.process}) computes {ms(self.slowest.compute_ms)}"
                + (over if middle else "")
            )
        return text
