"""What a compiled program sends and holds, in bytes per device, read from the program itself.

In: a compiled program. Out: the size of the results of its collectives, each as often as it
runs (one in a loop counts once for each turn, if the compiler knows how many), and the memory
it needs. Both are exact: no run, no noise.
"""

import math
import re
from typing import Any, NamedTuple

_KINDS = "all-reduce|reduce-scatter|all-gather|all-to-all|collective-permute"
_CALLS = "body|calls|to_apply|branch_computations|true_computation|false_computation"
_BYTES = {"f64": 8, "f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "u16": 2, "u8": 1, "s8": 1}


class Costs(NamedTuple):
    """Bytes of one device.

    Attributes:
        payload: Sent in each call.
        branch_payload: Sent besides if a branch is taken, such as the k-th call's update.
        live: Held while the program runs: arguments, results and temporaries.
        moved: Read and written by all its operations, by the compiler's count.
    """

    payload: int
    branch_payload: int
    live: int
    moved: float


def costs(compiled: Any) -> Costs:
    """What a compiled program (`jitted.lower(...).compile()`) costs."""
    memory = compiled.memory_analysis()
    live = (  # the peak that CPU reports leaves temporaries out
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )
    moved = compiled.cost_analysis()["bytes accessed"]
    return Costs(*payload_bytes(compiled.as_text()), live, moved)


def payload_bytes(text: str) -> tuple[int, int]:
    """Bytes of the results of all collectives, outside and inside of branches."""
    bodies = _computations(text)
    totals = [0, 0]
    for (name, branch), times in _executions(bodies).items():
        for line in bodies[name]:
            if found := re.search(rf" = (.*?) (?:{_KINDS})(-start)?\(", line):
                size = _size(found.group(1))
                # an asynchronous start lists what goes in beside what comes out
                totals[branch] += times * (size // 2 if found.group(2) else size)
    return totals[0], totals[1]


def _computations(text: str) -> dict[str, list[str]]:
    """The lines of each computation; the first one run is called ENTRY."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            lines = found["ENTRY" if head.group(1) else head.group(2)] = []
        lines.append(line)
    return found


def _executions(bodies: dict[str, list[str]]) -> dict[tuple[str, bool], int]:
    """How often each computation runs in one call, by its name and whether a branch leads to it."""
    times = {("ENTRY", False): 1}
    todo = [("ENTRY", False, 1)]
    while todo:
        name, branch, runs = todo.pop()
        for line in bodies[name]:
            turns = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line)
            each = int(turns.group(1)) if turns and " while(" in line else 1
            for key, group in re.findall(rf"({_CALLS})=(\{{.*?\}}|[^\s,]+)", line):
                inside = branch or "computation" in key
                for callee in re.findall(r"[\w.\-]+", group):
                    if callee in bodies:
                        times[callee, inside] = times.get((callee, inside), 0) + runs * each
                        todo.append((callee, inside, runs * each))
    return times


def _size(shapes: str) -> int:
    return sum(
        _BYTES.get(dtype, 0) * math.prod(int(d) for d in dims.split(",") if d)
        for dtype, dims in re.findall(r"\b([a-z]+[0-9]*)\[([0-9,]*)\]", shapes)
    )
