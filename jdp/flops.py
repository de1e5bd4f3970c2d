"""Floating-point operations of a traced program, on each device.

    jaxpr  --flops-->  FLOPs of its matrix products and convolutions

Counted in the traced program, not the compiled one: the compilers count the body of a loop once,
and XLA:GPU hides products in calls of libraries. What the backward pass recomputes is counted, as
the device does it; sums, activations and the optimizer are not, as is the custom for MFU.
"""

import math
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr


def flops(jaxpr: ClosedJaxpr | Jaxpr, devices: int, *, narrow: bool = False) -> float:
    """FLOPs of one device.

    A product inside of `jax.shard_map` is what each device does; one outside is of whole arrays,
    and is taken to be divided among the devices. Of branches the largest counts; the body of a
    loop with an unknown number of runs counts once.

    Args:
        jaxpr: The traced program.
        devices: Devices that it runs on.
        narrow: Only those whose operands have 16 bits or fewer.

    Example:
        >>> product = jax.make_jaxpr(lambda x, y: x @ y)(jnp.ones((8, 16)), jnp.ones((16, 4)))
        >>> flops(product, devices=2)
        512.0
    """
    inner: Any = getattr(jaxpr, "jaxpr", jaxpr)
    return sum(_of(eqn, devices, narrow) for eqn in inner.eqns)


def _of(eqn: Any, devices: int, narrow: bool) -> float:
    name, params = eqn.primitive.name, eqn.params
    product = name in ("dot_general", "conv_general_dilated")
    if product and narrow and any(x.aval.dtype.itemsize > 2 for x in eqn.invars):
        return 0.0
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        shape = eqn.invars[0].aval.shape
        return 2.0 * eqn.outvars[0].aval.size * math.prod(shape[d] for d in contracted) / devices
    if name == "conv_general_dilated":
        weights = eqn.invars[1].aval
        out = params["dimension_numbers"].rhs_spec[0]
        return 2.0 * eqn.outvars[0].aval.size * (weights.size / weights.shape[out]) / devices
    if name == "cond":
        return max(
            (flops(branch, devices, narrow=narrow) for branch in params["branches"]), default=0.0
        )
    if name == "shard_map":
        return flops(params["jaxpr"], 1, narrow=narrow)
    times = params["length"] if name == "scan" else 1
    return times * sum(flops(inner, devices, narrow=narrow) for inner in _inner(params))


def _inner(params: dict[str, Any]) -> list[Any]:
    """The programs that an equation calls; of a custom derivative, what it computes now."""
    found = []
    for value in params.values():
        values = value if isinstance(value, tuple | list) else (value,)
        found += [x for x in values if hasattr(getattr(x, "jaxpr", x), "eqns")]
    return found
