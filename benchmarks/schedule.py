"""How much of its communication a compiled program hides, by the compiler's own estimates.

    compiled text  --walk-->  time of compute, time of communication, time spent waiting for it

A program for TPU or GPU is printed in the order it runs. Compute is done one thing after the
other; a collective is on the wire from its start, or from the end of the collective before it,
and whoever needs it waits. What is waited for is exposed, the rest is hidden. Times of compute
are the compiler's: cycles of a fusion (TPU), speed-of-light times (GPU, with
`xla_gpu_collect_cost_model_stats`). XLA:TPU tells no time of a collective, so that is bytes over
the bandwidth of the chip; XLA:GPU tells one for all-gather and all-reduce, and a reduce-scatter
counts as an all-gather of the same bytes, which sends as much. Nothing is run.
"""

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jdp.hlo import Computation, Instruction, Program, leaves, parse

COST_MODEL = {"gpu": {"xla_gpu_collect_cost_model_stats": True}, "tpu": {}}
"""Compiler options that make a program tell times."""

# Google Cloud, "TPU v5e": 197 TFLOP/s of 4 matrix units of 128 x 128, so 1.5e9 cycles a second;
# 1,600 Gbit/s of interconnect for each chip.
_CYCLES_PER_S = 1.5e9
_TPU_BYTES_PER_S = 200e9


class Sent(NamedTuple):
    """A collective: its kind, the bytes of the whole arrays, microseconds, and those exposed."""

    kind: str
    bytes: int
    us: float
    exposed_us: float


class Times(NamedTuple):
    """Microseconds of a program's compute, and its collectives in the order they end."""

    compute_us: float
    sent: list[Sent]

    @property
    def sent_us(self) -> float:
        """Microseconds that something is on the wire."""
        return sum(one.us for one in self.sent)

    @property
    def exposed_us(self) -> float:
        """Microseconds that compute waits for the wire."""
        return sum(one.exposed_us for one in self.sent)

    @property
    def hidden(self) -> float:
        """Share of the time of communication that is under compute."""
        return (self.sent_us - self.exposed_us) / self.sent_us


def read(text: str | None, devices: Sequence[Any]) -> Times:
    """Walks a compiled program.

    Args:
        text: `compiled.as_text()`, compiled with the options `COST_MODEL` of its platform.
        devices: Those it was compiled for; every collective is taken to be among all of them.

    Returns:
        Its times.
    """
    program = parse(text or "")
    walk = _Walk(program, devices)
    walk.run(program.computations[program.entry])
    return Times(walk.compute, walk.sent)


class _Walk:
    """The clock of a device, and what it waits for."""

    def __init__(self, program: Program, devices: Sequence[Any]) -> None:
        self._program = program
        self._computations = program.computations
        self._count = len(devices)
        self._cost: Callable[[str, int, Instruction], float] = (
            self._on_tpu if devices[0].platform == "tpu" else functools.partial(_on_gpu, devices)
        )
        self._now = self.compute = self._wire_free = 0.0
        self._under_way: dict[str, tuple[str, int, float, float]] = {}
        self.sent: list[Sent] = []

    def run(self, computation: Computation) -> None:
        named = {x.name: x for x in computation.instructions}
        for instruction in computation.instructions:
            if instruction.opcode == "while":
                for _ in range(self._program.trips(instruction) or 1):
                    self.run(self._computations[instruction.called("body")[0]])
                continue
            start = _finishes(instruction, named)
            if start in self._under_way:
                self._wait(start)
            elif found := self._starts(instruction, named):
                self._send(instruction, *found)
            elif not instruction.opcode.endswith("-done"):
                spent = _compute_us(instruction)
                self._now += spent
                self.compute += spent

    def _starts(
        self, instruction: Instruction, named: dict[str, Instruction]
    ) -> tuple[str, int] | None:
        """Kind and bytes of the collective that it is, or begins."""
        if instruction.opcode.endswith("-done"):
            return None
        if instruction.collective:
            given = [leaf for x in instruction.operands for leaf in leaves(named[x].shape)]
            inside = sum(leaf.bytes for leaf in given)
            gathers = instruction.collective == "all-gather"
            return instruction.collective, inside * (self._count if gathers else 1)
        called = instruction.called("calls") if instruction.opcode == "fusion" else []
        if not called or called[0].startswith("async_collective_fusion"):
            return None  # the latter goes on with one that has started
        for x in self._computations[called[0]].instructions:
            if x.collective:
                return x.collective, max(leaf.bytes for leaf in leaves(x.shape))
        return None

    def _send(self, instruction: Instruction, kind: str, num_bytes: int) -> None:
        cost = self._cost(kind, num_bytes, instruction)
        end = self._wire_free = max(self._now, self._wire_free) + cost
        self._under_way[instruction.name] = kind, num_bytes, cost, end
        later = instruction.opcode.endswith("-start") or "async-collective" in instruction.name
        if not later or '"is_sync":true' in instruction.attributes:
            self._wait(instruction.name)

    def _wait(self, name: str) -> None:
        kind, num_bytes, cost, end = self._under_way.pop(name)
        self.sent.append(Sent(kind, num_bytes, cost, max(0.0, end - self._now)))
        self._now = max(self._now, end)

    def _on_tpu(self, kind: str, num_bytes: int, _: Instruction) -> float:
        times = 2 if kind == "all-reduce" else 1
        share = (self._count - 1) / self._count
        return 1e6 * times * share * num_bytes / _TPU_BYTES_PER_S


def _finishes(instruction: Instruction, named: dict[str, Instruction]) -> str:
    """The name of the collective it waits for; "" if it waits for none."""
    if instruction.opcode.endswith("-done"):
        return instruction.operands[0]
    if instruction.name.startswith("async-collective-done"):
        return instruction.name.replace("-done", "-start")
    return ""


def _compute_us(instruction: Instruction) -> float:
    cycles = re.search(r'"estimated_cycles":"(\d+)"', instruction.attributes)
    return 1e6 * int(cycles.group(1)) / _CYCLES_PER_S if cycles else _told(instruction) or 0.0


def _told(instruction: Instruction) -> float | None:
    """Microseconds that XLA:GPU tells, at the speed of light if it knows."""
    found = re.findall(r'"exec_time_us":([\d.e+-]+)[^}]*"name":"([^"]*)"', instruction.attributes)
    by_model = {name: float(us) for us, name in found}
    return by_model.get("sol", by_model.get(""))


def _on_gpu(devices: Sequence[Any], kind: str, num_bytes: int, instruction: Instruction) -> float:
    told = _told(instruction)
    return _all_gather_us(tuple(devices), num_bytes) if told is None else told


@functools.cache
def _all_gather_us(devices: tuple[Any, ...], num_bytes: int) -> float:
    """What the compiler for GPUs says of one all-gather."""
    mesh = Mesh(np.array(devices), ("data",))
    count = max(1, math.ceil(num_bytes / 4 / len(devices))) * len(devices)
    part = jax.ShapeDtypeStruct((count,), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    whole = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))
    compiled = whole.lower(part).compile(compiler_options=COST_MODEL["gpu"])
    program = parse(compiled.as_text() or "")
    instructions = program.computations[program.entry].instructions
    return next(told for x in instructions if x.collective and (told := _told(x)))
