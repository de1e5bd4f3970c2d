"""A collective of a compiled program, a stretch of its timeline, and what one instruction tells.

In: instructions as `jdp.hlo` reads them. Out: their bytes, dtypes, times and names in words. What
runs when is found in `jdp.schedule`.
"""

import re
from typing import NamedTuple

from jdp.hlo import Instruction, Leaf, leaves


class Sent(NamedTuple):
    """A collective of a program.

    Attributes:
        name: The instruction's name.
        kind: Such as "all-reduce".
        dtypes: Dtypes on the wire, as XLA writes them.
        bytes: Bytes of one run, of the largest side: what is gathered, or reduced.
        wire_bytes: Bytes that a device sends in all runs, around a ring.
        axes: Mesh axes along which it communicates.
        group: Devices that communicate with each other.
        times: Runs in a step.
        in_loop: Whether it is inside a loop.
        in_branch: Whether it is inside a branch.
        asynchronous: Whether something may be computed while it is under way.
        beside: What is computed meanwhile, longest first.
        us: Microseconds on the wire, all runs, as modelled; `None` if not known.
        exposed_us: Of these, microseconds that nothing is computed.
        source: The line of the user's code that it comes from, such as "model.py:41"; "" if none.
        made_by: What asked for it: a transformation or function of jdp, or "the compiler".
        floor: Bytes sent over the least that sends each of its values once; 2 for an all-reduce
            that the compiler put where a reduce-scatter was asked for.
    """

    name: str
    kind: str
    dtypes: tuple[str, ...]
    bytes: int
    wire_bytes: float
    axes: tuple[str, ...]
    group: int
    times: int
    in_loop: bool
    in_branch: bool
    asynchronous: bool
    beside: tuple[str, ...]
    us: float | None
    exposed_us: float | None
    source: str
    made_by: str
    floor: float

    @property
    def where(self) -> str:
        """The user's line, what made it, or both, in words."""
        return ", ".join(x for x in (self.source, self.made_by) if x)


class Span(NamedTuple):
    """A stretch of the timeline; `row` is the number of the collective, `None` for compute."""

    lane: str
    name: str
    start_us: float
    end_us: float
    row: int | None


class Walked(NamedTuple):
    """What was found: collectives in the order they start, the timeline, microseconds of a step.

    Times are `None` where the compiler models none. `bytes_moved` are the bytes that a device's
    compute reads and writes in its memory: whole operands and results, but of an operation whose
    time is known no more than the memory could move in it.
    """

    collectives: tuple[Sent, ...]
    spans: tuple[Span, ...]
    compute_us: float | None
    sent_us: float | None
    exposed_us: float | None
    step_us: float | None
    bytes_moved: float
    notes: tuple[str, ...]


def payload(
    core: Instruction, named: dict[str, Instruction], group: int
) -> tuple[int, tuple[str, ...]]:
    """Bytes of the largest side, without the padding of tiles, and the dtypes."""
    given = [leaf for x in core.operands if x in named for leaf in leaves(named[x].shape)]
    if given:
        gathers = core.collective == "all-gather"
        return sum(x.dense_bytes for x in given) * (group if gathers else 1), _dtypes(given)
    made = [x for x in leaves(core.shape) if x.dims or not isinstance(core.shape, list)]
    scatters = core.collective == "reduce-scatter"
    return sum(x.dense_bytes for x in made) * (group if scatters else 1), _dtypes(made)


FREE = frozenset(
    {"add-dependency", "after-all", "bitcast", "constant", "get-tuple-element", "iota"}
    | {"opt-barrier", "parameter", "partition-id", "replica-id", "tuple"}
)


def _dtypes(found: list[Leaf]) -> tuple[str, ...]:
    by_size: dict[str, int] = {}
    for leaf in found:
        by_size[leaf.dtype] = by_size.get(leaf.dtype, 0) + leaf.dense_bytes
    return tuple(sorted(by_size, key=lambda name: -by_size[name]))


def short(instruction: Instruction) -> str:
    """What computes, in a word or two: the traced operation, or else the instruction."""
    return instruction.op_name.split(":")[0].rstrip(")").rpartition("/")[2] or instruction.name


def finishes(instruction: Instruction, named: dict[str, Instruction]) -> str:
    """The name of the collective it waits for; "" if it waits for none."""
    if instruction.opcode.endswith("-done"):
        return instruction.operands[0] if instruction.operands else ""
    if instruction.name.startswith("async-collective-done"):
        return instruction.name.replace("-done", "-start")
    return ""


def told(instruction: Instruction) -> float | None:
    """Microseconds that XLA:GPU tells, at the speed of light if it knows."""
    found = re.findall(r'"exec_time_us":([\d.e+-]+)[^}]*"name":"([^"]*)"', instruction.attributes)
    by_model = {name: float(us) for us, name in found}
    return by_model.get("sol", by_model.get(""))
