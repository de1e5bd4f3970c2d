"""How long an instruction takes at a chip's peak, for chips whose compiler models no times.

The longer of its matrix products at the peak FLOP/s and its bytes at the bandwidth of the memory:
the roofline model (Williams et al., 2009). Real kernels take longer.
"""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from jdp.hlo import Instruction, Program, bits_of, leaves


class Roofline(NamedTuple):
    """What a chip can do at best.

    Attributes:
        flops: Peak FLOP/s by dtype, with "bf16" and "f32" among them.
        memory_rate: Bytes per second of the memory.
    """

    flops: Mapping[str, float]
    memory_rate: float

    def microseconds(
        self,
        instruction: Instruction,
        named: Mapping[str, Instruction],
        program: Program,
        moved: float,
    ) -> float:
        """Time of an instruction that reads and writes `moved` bytes.

        Args:
            instruction: One of a compiled program.
            named: The instructions of its computation by name, for the shapes of operands.
            program: The program, for what a fusion calls.
            moved: Bytes in the device's memory.
        """
        narrow, wide = products(instruction, named, program)
        computing = narrow / self.flops["bf16"] + wide / self.flops["f32"]
        return 1e6 * max(computing, moved / self.memory_rate)


def products(
    instruction: Instruction, named: Mapping[str, Instruction], program: Program
) -> tuple[float, float]:
    """FLOPs of the matrix products in an instruction: of 16 bits and fewer, and of more.

    Example:
        >>> from jdp.hlo import parse
        >>> text = jax.jit(jnp.dot).lower(jnp.ones((8, 16)), jnp.ones((16, 4))).compile().as_text()
        >>> program = parse(text)
        >>> named = {x.name: x for x in program.computations[program.entry].instructions}
        >>> sum(products(x, named, program)[1] for x in named.values())
        1024.0
    """
    narrow = wide = 0.0
    found = re.search(
        r'lhs_contracting_dim(?:ension)?s"?[=:][{\[]([^}\]]*)', instruction.attributes
    )
    if found and instruction.operands and instruction.operands[0] in named:
        given, made = (next(leaves(x.shape)) for x in (named[instruction.operands[0]], instruction))
        contracted = math.prod(given.dims[int(d)] for d in re.findall(r"\d+", found.group(1)))
        count = 2.0 * contracted * math.prod(made.dims)
        return (count, 0.0) if bits_of(given.dtype) <= 16 else (0.0, count)
    for name in instruction.called("calls"):
        inside = {x.name: x for x in program.computations[name].instructions}
        for x in inside.values():
            small, large = products(x, inside, program)
            narrow, wide = narrow + small, wide + large
    return narrow, wide
