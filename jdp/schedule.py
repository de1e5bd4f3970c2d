"""What a compiled program sends and computes, in the order it runs.

    compiled text, mesh  --walk-->  Walked: collectives, timeline, microseconds of each

A program is printed in the order it runs. Compute is done one thing after the other; a collective
is on the wire from its start, or from the end of the collective before it, and whoever needs it
waits. What is waited for is exposed, the rest is hidden. Times of compute are the compiler's:
cycles of a fusion (TPU), speed-of-light times (GPU, with `COST_MODEL`). Times of collectives are
the compiler's where it tells (GPU, all-gather and all-reduce), else bytes over the bandwidth of the
link. Where XLA:GPU knows no times at all, computing takes what a roofline says. Programs for CPUs
have no times. Nothing is compiled or run.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from jax.sharding import Mesh

from jdp.costs import floor_bytes
from jdp.groups import Groups, axes_of, groups, size_of
from jdp.hlo import Computation, Instruction, Program, leaves, parse
from jdp.origin import Frames, Origin, origin
from jdp.roofline import Roofline
from jdp.sent import FREE, Sent, Span, Walked, finishes, payload, short, told

COST_MODEL: dict[str, dict[str, Any]] = {
    "gpu": {"xla_gpu_collect_cost_model_stats": True},
    "cuda": {"xla_gpu_collect_cost_model_stats": True},
}
"""Compiler options that make a program tell times, by platform; others need none."""

Seconds = Callable[[str, int, int, Groups], float | None]
"""Seconds of a collective, from kind, bytes, devices of a group, and groups; `None`: unknown."""

# Cycles in a second: peak FLOP/s over those of a cycle (Google Cloud: 197 TFLOP/s of 4 units of
# 128 x 128 for v5e, 459 of 8 for v5p; 918 of 4 units of 256 x 256 for v6e).
_CYCLES_PER_S = {"TPU v5 lite": 1.5e9, "TPU v5": 1.75e9, "TPU v6 lite": 1.75e9, "TPU v4": 1.05e9}

_MOST_SPANS = 1500  # a page shows no more


def walk(
    text: str, mesh: Mesh, *, seconds: Seconds | None = None, roofline: Roofline | None = None
) -> Walked:
    """Walks a compiled program.

    Args:
        text: `compiled.as_text()`, compiled with the options `COST_MODEL` of its platform.
        mesh: The mesh it was compiled for.
        seconds: How long a collective takes that the compiler tells no time of.
        roofline: What the device can do at best, if known.

    Returns:
        What it sends and computes.
    """
    device = mesh.devices.flat[0]
    program, frames = parse(text), Frames(text)
    clock = _Walk(program, frames, mesh, seconds, roofline)
    clock.run(program.computations[program.entry])
    if device.platform == "gpu" and not clock.compute and roofline is not None:
        clock = _Walk(program, frames, mesh, seconds, roofline, modelled=True)
        clock.run(program.computations[program.entry])
        clock.notes.append(
            "Times of computing are those of a roofline, the least that products and memory allow: "
            "this chip's compiler has no model."
        )
    timed = device.platform != "cpu" and clock.compute > 0  # else nobody told any
    rows = tuple(clock.row(x, timed) for x in clock.rows.values())
    total = lambda of: sum(of(x) or 0.0 for x in rows) if timed else None  # noqa: E731
    return Walked(
        rows,
        tuple(clock.spans) if timed else (),
        clock.compute if timed else None,
        total(lambda x: x.us),
        total(lambda x: x.exposed_us),
        clock.now if timed else None,
        clock.moved,
        tuple(dict.fromkeys(clock.notes)),
    )


class _Row:
    """A collective as it is being counted."""

    def __init__(self, instruction: Instruction, core: Instruction, found: Origin) -> None:
        self.name, self.origin = instruction.name, found
        self.kind = core.collective or core.opcode
        self.number = self.times = self.bytes = self.group = 0
        self.axes: tuple[str, ...] = ()
        self.groups: Groups = ()
        self.dtypes: tuple[str, ...] = ()
        self.us = self.exposed = 0.0
        self.repeats = 1
        self.in_loop = self.in_branch = self.asynchronous = False
        self.beside: dict[str, float] = {}


class _Flight(NamedTuple):
    row: _Row
    us: float
    begin: float
    end: float


class _Walk:
    """The clock of a device, what is under way, and what it waits for."""

    def __init__(
        self,
        program: Program,
        frames: Frames,
        mesh: Mesh,
        seconds: Seconds | None,
        roofline: Roofline | None,
        modelled: bool = False,
    ) -> None:
        self.program, self.mesh = program, mesh
        self._frames, self._seconds = frames, seconds
        self._roofline, self._modelled = roofline, modelled
        self._cycles = _CYCLES_PER_S.get(mesh.devices.flat[0].device_kind, 1.5e9)
        self._tpu = mesh.devices.flat[0].platform == "tpu"
        self.now = self.compute = self._wire_free = self.moved = 0.0
        self._flights: dict[str, _Flight] = {}
        self._loops: list[tuple[Instruction, int]] = []
        self._branches = 0
        self.rows: dict[tuple[str, str], _Row] = {}
        self.spans: list[Span] = []
        self.notes: list[str] = []

    def run(self, computation: Computation) -> None:
        """Advances the clock by a computation."""
        named = {x.name: x for x in computation.instructions}
        for instruction in computation.instructions:
            start = finishes(instruction, named)
            if instruction.opcode == "while":
                self._loop(instruction)
            elif instruction.opcode == "conditional":
                self._branch(instruction)
            elif instruction.opcode == "call":
                self.run(self.program.computations[instruction.called("to_apply")[0]])
            elif start in self._flights:
                self._wait(start)
            elif core := self._starts(instruction):
                self._send(instruction, core, computation, named)
            elif not instruction.opcode.endswith("-done"):
                self._compute(instruction, named)

    def _loop(self, loop: Instruction) -> None:
        """Two runs are walked, the second as it goes on; the others are as it."""
        trips = self.program.trips(loop)
        if trips is None:
            self.notes.append(
                f"How often the loop {loop.name} runs is not known: its body is counted once."
            )
        body = self.program.computations[loop.called("body")[0]]
        self._loops.append((loop, trips or 1))
        walked = min(trips if trips is not None else 1, 2)
        for number in range(walked):
            before = self._figures()
            self.run(body)
            if number == 1:
                self._repeat(before, (trips or 1) - 2, loop.name)
        self._loops.pop()

    def _figures(self) -> tuple[float, float, float, dict[tuple[str, str], tuple[Any, ...]]]:
        rows = {key: (x.times, x.us, x.exposed, dict(x.beside)) for key, x in self.rows.items()}
        return self.now, self.compute, self.moved, rows

    def _repeat(self, before: Any, more: int, name: str) -> None:
        """Counts what happened since `before` another so many times."""
        if more < 1:
            return
        now, compute, moved, rows = before
        spent = more * (self.now - now)
        if spent:
            self._span("compute", f"{name}: {more} more like the last", spent, None)
        self.now += spent
        self._wire_free = max(self._wire_free, self.now)
        self.compute += more * (self.compute - compute)
        self.moved += more * (self.moved - moved)
        for key, row in self.rows.items():
            times, us, exposed, beside = rows.get(key, (0, 0.0, 0.0, {}))
            row.times += more * (row.times - times)
            row.us += more * (row.us - us)
            row.exposed += more * (row.exposed - exposed)
            for what, spent in row.beside.items():
                row.beside[what] = spent + more * (spent - beside.get(what, 0.0))

    def _branch(self, instruction: Instruction) -> None:
        """Branches are alternatives: all are looked at, the longest counts."""
        keys = ("branch_computations", "true_computation", "false_computation")
        begin, longest = (self.now, self.compute, self.moved), (self.now, self.compute, self.moved)
        self._branches += 1
        for name in (x for key in keys for x in instruction.called(key)):
            self.now, self.compute, self.moved = begin
            self.run(self.program.computations[name])
            longest = max(longest, (self.now, self.compute, self.moved))
        self.now, self.compute, self.moved = longest
        self._branches -= 1

    def _starts(self, instruction: Instruction) -> Instruction | None:
        """The collective that it is, begins, or wraps."""
        if instruction.opcode.endswith("-done"):
            return None
        if instruction.collective:
            return instruction
        if instruction.opcode not in ("fusion", "fusion-start", "async-start", "call-start"):
            return None
        called = instruction.called("calls") or instruction.called("to_apply")
        if not called or called[0].startswith("async_collective_fusion"):
            return None  # the latter goes on with one that has started
        inside = self.program.computations[called[0]].instructions
        return next((x for x in inside if x.collective), None)

    def _send(
        self,
        instruction: Instruction,
        core: Instruction,
        computation: Computation,
        named: dict[str, Instruction],
    ) -> None:
        key = (computation.name, instruction.name)
        if key not in self.rows:
            self.rows[key] = self._new_row(instruction, core, computation, named)
        row = self.rows[key]
        row.times += 1
        known = told(instruction)
        if known is None and self._seconds is not None:
            modelled = self._seconds(row.kind, row.bytes, row.group, row.groups)
            known = None if modelled is None else 1e6 * modelled
        cost = known or 0.0
        begin = max(self.now, self._wire_free)
        self._wire_free = begin + cost
        row.us += cost
        self._flights[instruction.name] = _Flight(row, cost, begin, begin + cost)
        if cost:
            self._span("communication", row.kind, cost, row.number, begin)
        if not row.asynchronous:
            self._wait(instruction.name)

    def _new_row(
        self,
        instruction: Instruction,
        core: Instruction,
        computation: Computation,
        named: dict[str, Instruction],
    ) -> _Row:
        row = _Row(instruction, core, self._origin(instruction, core, computation, named))
        row.groups = found = groups(core, self.mesh.size)
        row.number = len(self.rows)
        row.axes = axes_of(found, self.mesh)
        row.group = size_of(found, row.axes, self.mesh)
        inner = named if core is instruction else {}
        row.bytes, row.dtypes = payload(core, inner, row.group)
        row.in_loop, row.in_branch = bool(self._loops), self._branches > 0
        later = "-start" in instruction.opcode or "async-collective" in instruction.name
        row.asynchronous = later and '"is_sync":true' not in instruction.attributes
        # The loops outside of the differentiated function are over microbatches: what they send,
        # they send again. Those inside are the user's, over layers.
        name = core.op_name or instruction.op_name
        outer = name.split("jvp(")[0].count("while/body") if name else 0
        for _, trips in self._loops[:outer]:
            row.repeats *= trips
        return row

    def _origin(
        self,
        instruction: Instruction,
        core: Instruction,
        computation: Computation,
        named: dict[str, Instruction],
    ) -> Origin:
        """Its own, or that of what it is made of, or of what is made of it."""
        near = [named[x] for x in (*core.operands, *instruction.operands) if x in named]
        near += [x for x in computation.instructions if instruction.name in x.operands]
        near += [y for x in near for y in computation.instructions if x.name in y.operands]
        for x in (core, instruction, *near):
            found = origin(self._frames.of(x))
            if found.made_by or found.source:
                return found
        return Origin("", "the compiler")

    def _wait(self, name: str) -> None:
        flight = self._flights.pop(name)
        flight.row.exposed += max(0.0, min(flight.us, flight.end - self.now))
        self.now = max(self.now, flight.end)

    def _compute(self, instruction: Instruction, named: dict[str, Instruction]) -> None:
        if instruction.opcode in FREE:
            return
        moved = float(self._moved(instruction, named))
        if self._modelled and self._roofline is not None:
            spent = self._roofline.microseconds(instruction, named, self.program, moved)
        else:
            spent = self._compute_us(instruction)
        if spent and self._roofline is not None:  # operands may be read in part
            moved = min(moved, 1e-6 * spent * self._roofline.memory_rate)
        self.moved += moved
        for flight in self._flights.values():
            what = short(instruction)
            flight.row.beside[what] = flight.row.beside.get(what, 0.0) + spent
        if spent:
            self._span("compute", short(instruction), spent, None)
        self.now += spent
        self.compute += spent

    def _compute_us(self, instruction: Instruction) -> float:
        cycles = re.search(r'"estimated_cycles":"(\d+)"', instruction.attributes)
        if cycles:
            return 1e6 * int(cycles.group(1)) / self._cycles
        return told(instruction) or 0.0

    def _moved(self, instruction: Instruction, named: dict[str, Instruction]) -> int:
        """Bytes in the device's main memory that it reads and writes."""
        on_chip = {1} if self._tpu else set()
        made = sum(x.bytes for x in leaves(instruction.shape) if x.space not in on_chip)
        read = [leaf for x in instruction.operands if x in named for leaf in leaves(named[x].shape)]
        if self._root(instruction) in ("dynamic-slice", "dynamic-update-slice"):
            parts = [x.bytes for x in (*read, *leaves(instruction.shape)) if x.dims]
            return 2 * min(parts, default=0)  # of something larger that stays where it is
        return made + sum(x.bytes for x in read if x.space not in on_chip)

    def _root(self, instruction: Instruction) -> str:
        """What it does, or what comes out of it if it is a fusion."""
        called = instruction.called("calls") if "fusion" in instruction.opcode else []
        if not called:
            return instruction.opcode
        inside = self.program.computations[called[0]].instructions
        made = [x.opcode for x in inside if x.opcode not in FREE]
        return made[-1] if made else instruction.opcode

    def _span(
        self, lane: str, name: str, us: float, row: int | None, start: float | None = None
    ) -> None:
        begin = self.now if start is None else start
        last = self.spans[-1] if self.spans else None
        joins = (
            last is not None
            and lane == last.lane == "compute"
            and abs(last.end_us - begin) < 1e-9
            and len(self.spans) >= _MOST_SPANS // 2
        )
        if joins and last is not None:
            self.spans[-1] = last._replace(end_us=begin + us)
        elif len(self.spans) < _MOST_SPANS:
            self.spans.append(Span(lane, name, begin, begin + us, row))
        else:
            self.notes.append(f"The timeline shows the first {_MOST_SPANS} stretches only.")

    def row(self, row: _Row, timed: bool) -> Sent:
        """The finished record."""
        longest = sorted(row.beside, key=lambda name: -row.beside[name])[:3]
        once = floor_bytes(row.kind, row.bytes, row.group)
        known = timed and (row.us > 0 or row.group == 1)
        return Sent(
            name=row.name,
            kind=row.kind,
            dtypes=row.dtypes,
            bytes=row.bytes,
            wire_bytes=once * row.times,
            axes=row.axes,
            group=row.group,
            times=row.times,
            in_loop=row.in_loop,
            in_branch=row.in_branch,
            asynchronous=row.asynchronous,
            beside=tuple(longest),
            us=row.us if known else None,
            exposed_us=row.exposed if known else None,
            source=row.origin.source,
            made_by=row.origin.made_by,
            floor=float(row.repeats),
        )
