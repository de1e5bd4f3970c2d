"""What a compiled program sends and holds, in bytes per device, read from the program itself.

    compiled.as_text()  --collectives-->  each collective: kind, dtypes, bytes, where, how often
    compiled            --costs-->        what it sends, holds and moves in a call

One in a loop counts once for each turn, if the compiler knows how many. All of it is exact: no
run, no noise. The tests count with the same code.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

from jdp.costs import floor_bytes
from jdp.groups import Groups, groups
from jdp.hlo import Instruction, Program, leaves, parse

_LOOPS = ("body", "condition")
_BRANCHES = ("branch_computations", "true_computation", "false_computation")
_CALLS = (*_LOOPS, *_BRANCHES, "calls", "to_apply")


class Costs(NamedTuple):
    """Bytes of one device.

    Attributes:
        payload: Sent in each call, counted as the size of what is sent.
        branch_payload: Sent besides if a branch is taken, such as the k-th call's update.
        arguments: Held between calls: state and batch.
        live: Held while the program runs: arguments, results and temporaries.
        moved: Read and written by all its operations, by the compiler's count.
    """

    payload: int
    branch_payload: int
    arguments: int
    live: int
    moved: float


@dataclasses.dataclass(frozen=True)
class Collective:
    """One communicating operation; `bytes` is the size of its largest side on one device.

    `times` says how often it runs in a call, `groups` which devices communicate, `branch` which
    branch of the program leads to it, "" if none does.
    """

    kind: str
    dtypes: tuple[str, ...]
    operands: int
    bytes: int
    in_loop: bool
    branch: str
    line: str
    times: int = 1
    groups: Groups = ()

    @property
    def in_branch(self) -> bool:
        """Whether it runs only in some calls."""
        return bool(self.branch)


def costs(compiled: Any) -> Costs:
    """What a compiled program (`jitted.lower(...).compile()`) costs."""
    arguments = compiled.memory_analysis().argument_size_in_bytes
    moved = compiled.cost_analysis()["bytes accessed"]
    sent = payload_bytes(compiled.as_text())
    return Costs(*sent, arguments, live_bytes(compiled), moved)


def payload_bytes(text: str) -> tuple[int, int]:
    """Bytes of all collectives, outside and inside of branches."""
    found = collectives(text)
    outside, inside = (
        sum(c.times * c.bytes for c in found if c.in_branch == branch) for branch in (False, True)
    )
    return outside, inside


def sent_bytes(found: Iterable[Collective], count: int) -> float:
    """Bytes each of `count` devices sends, by the ring algorithm; each collective once."""
    return sum(floor_bytes(c.kind, c.bytes, count) for c in found)


def live_bytes(compiled: Any) -> int:
    """Bytes a device holds while the program runs."""
    memory = compiled.memory_analysis()
    return (  # the peak that CPU reports leaves temporaries out
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )


def collectives(text: str) -> list[Collective]:
    """All collectives of a compiled program, with whether a loop or branch holds them."""
    program, found = parse(text), []
    for name, (times, in_loop, branch) in _executions(program).items():
        instructions = program.computations[name].instructions
        results = {instruction.name: instruction for instruction in instructions}
        for x in instructions:
            if x.collective is None or x.opcode.endswith("-done"):
                continue
            sizes = _sizes(x)
            given = [size for name in x.operands for size in _sizes(results[name])]
            largest = given if x.collective == "reduce-scatter" else sizes
            collective = Collective(
                kind=x.collective,
                dtypes=tuple(sorted({dtype for dtype, _ in sizes})),
                operands=len(sizes),
                bytes=sum(size for _, size in largest),
                in_loop=in_loop,
                branch=branch,
                line=f"{x.name} = {x.opcode}({', '.join(x.operands)}){x.attributes}",
                times=times,
                groups=groups(x, count=0),
            )
            found.append(collective)
    return found


def _sizes(instruction: Instruction) -> list[tuple[str, int]]:
    """Dtype and bytes, without padding, of the arrays that an instruction makes."""
    found = [(leaf.dtype, leaf.dense_bytes) for leaf in leaves(instruction.shape)]
    shape = instruction.shape
    # those of an all-reduce do so on GPUs from jax 0.12 on, as a tuple of its own
    apart = isinstance(shape, list) and shape and isinstance(shape[0], list)
    if instruction.opcode.endswith("-start") and (apart or instruction.collective != "all-reduce"):
        return found[len(found) // 2 :]  # such a start lists what goes in beside what comes out
    return found


def _executions(program: Program) -> dict[str, tuple[int, bool, str]]:
    """How often each computation runs in a call, whether a loop and which branch leads to it."""
    found: dict[str, tuple[int, bool, str]] = {}
    todo = [(program.entry, 1, False, "")]
    while todo:
        name, runs, in_loop, branch = todo.pop()
        before = found.get(name, (0, False, ""))
        found[name] = before[0] + runs, before[1] or in_loop, before[2] or branch
        for instruction in program.computations[name].instructions:
            turns = (program.trips(instruction) or 1) if instruction.opcode == "while" else 1
            for key in _CALLS:
                loop, forks = in_loop or key in _LOOPS, key in _BRANCHES
                todo += [
                    (callee, runs * turns, loop, branch or (callee if forks else ""))
                    for callee in instruction.called(key)
                    if callee in program.computations
                ]
    return found
