"""What a program asks to be sent, before a compiler decides how.

    lowered  --sends-->  kind and bytes of each collective of the StableHLO
    collectives as compiled, asked  --as_asked-->  the same, with the floor of what was asked

A reduce-scatter sends half of what an all-reduce does. libtpu makes an all-reduce and a slice of
one on square slices (v5e, jax 0.10 and 0.12), and only the StableHLO still tells.
"""

import math
from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir

from jdp.sent import Sent

_COLLECTIVES = {
    f"stablehlo.{kind}"
    for kind in (
        "all_gather",
        "all_reduce",
        "all_to_all",
        "collective_broadcast",
        "collective_permute",
        "reduce_scatter",
    )
}


def sends(lowered: Any) -> list[tuple[str, int]]:
    """Kind and bytes (of the larger side) of each collective of a lowered program, unread by XLA.

    What a loop or a function does that is called several times counts once.
    """

    def size(values: Any) -> int:
        types = [ir.RankedTensorType(value.type) for value in values]
        return sum(math.prod(x.shape) * _bits(x.element_type) // 8 for x in types)

    return [
        (
            op.name.removeprefix("stablehlo.").replace("_", "-"),
            max(size(op.operands), size(op.results)),
        )
        for op in collectives_of(lowered.compiler_ir("stablehlo"))
    ]


def collectives_of(module: Any) -> list[Any]:
    """The operations of a StableHLO module that communicate."""
    found: list[Any] = []

    def look(op: Any) -> Any:
        if op.name in _COLLECTIVES:
            found.append(op)
        return ir.WalkResult.ADVANCE

    module.operation.walk(look)
    return found


def _bits(element: Any) -> int:
    return max(8, getattr(element, "width", 8))


def as_asked(rows: Sequence[Sent], asked: Sequence[tuple[str, int]]) -> tuple[Sent, ...]:
    """Collectives with the floor of what was asked for: a reduce-scatter is half an all-reduce.

    An all-reduce of the bytes of a reduce-scatter, which no all-reduce was asked for, is that one.
    One that joins several holds reduce-scatters as far as all-reduces do not account for it.

    Example:
        >>> asked = [("reduce-scatter", 4096), ("all-reduce", 8)]
        >>> as_asked((), asked)
        ()
    """
    scattered = [size for kind, size in asked if kind == "reduce-scatter"]
    reduced = [size for kind, size in asked if kind == "all-reduce"]
    joined = range(sum(reduced) + 1, sum(reduced) + sum(scattered) + 1) if scattered else range(0)

    def least(x: Sent) -> float:
        """Its bytes, each reduced (2) or scattered (1)."""
        if x.bytes in scattered and x.bytes not in reduced:
            return x.bytes
        return x.bytes + sum(reduced) if x.bytes in joined else 2 * x.bytes

    return tuple(
        x._replace(floor=x.floor * 2 * x.bytes / least(x)) if x.kind == "all-reduce" else x
        for x in rows
    )
