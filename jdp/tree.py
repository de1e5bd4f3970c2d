"""Sums over devices in a fixed order: a binary tree over their numbers, whatever their count.

    ((x0 + x1) + (x2 + x3)) + ((x4 + x5) + (x6 + x7))

    all_sum      every device ends with the sums of a tree of arrays
    scatter_sum  device i ends with part i of the sum of one array

Two devices that each hold four of the eight, added up in the same order, go on where they are: the
bits are the same on 1, 2, 4 or 8 devices. Per-device functions, for use inside `jax.shard_map`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jdp import collectives
from jdp.flat import join_leaves, take_apart
from jdp.mesh import AxisNames, on_auto_axes


def all_sum(tree: Any, axis_name: AxisNames) -> Any:
    """Sums a tree of arrays over the devices of an axis in the order of the tree of devices.

    All leaves travel in one buffer, to where a part of it is summed and back.

    Guarantees:
        - The same bits on every device, and the same as of the sum evaluated on one.
        - Each of N devices sends 2(N-1)/N of the bytes, in log2(N) + 1 collectives.

    Args:
        tree: This device's floating-point arrays, of one dtype.
        axis_name: Mesh axis, or axes; the number of devices is a power of two.

    Returns:
        The sums, of the same shapes and dtype.

    Raises:
        ValueError: If the number of devices is not a power of two.

    Example:
        >>> total = lambda x: all_sum(x[0], "data")
        >>> jax.shard_map(total, mesh=jdp.make_mesh(), in_specs=P("data"), out_specs=P())(
        ...     jnp.ones((8, 3))
        ... )
        Array([8., 8., 8.], dtype=float32)
    """
    leaves, treedef = jax.tree.flatten(tree)
    count = 2 ** _levels(axis_name)
    if count == 1 or not any(leaf.size for leaf in leaves):
        return jax.lax.psum(tree, axis_name)  # of one device, or nothing: nothing but a mark

    def total(leaves: list[jax.Array]) -> list[jax.Array]:
        flat = join_leaves(leaves)
        part = scatter_sum(jnp.pad(flat, (0, -flat.size % count)), axis_name)
        return take_apart(collectives.join(part, axis_name), leaves)

    return treedef.unflatten(on_auto_axes(total, leaves)(leaves))


def scatter_sum(x: jax.Array, axis_name: AxisNames, *, dim: int = 0) -> jax.Array:
    """Sums an array as `all_sum` does, but each device receives only its part along `dim`.

    Guarantees:
        - Each of N devices sends (N-1)/N of the bytes, in log2(N) collectives.

    Args:
        x: This device's array; the number of devices divides its length in `dim`.
        axis_name: See `all_sum`.
        dim: The dim to split.

    Returns:
        Part i on device i, of the same dtype.

    Raises:
        ValueError: See `all_sum`.

    Example:
        >>> part = lambda x: scatter_sum(x[0], "data")
        >>> jax.shard_map(part, mesh=jdp.make_mesh(), in_specs=P("data"), out_specs=P("data"))(
        ...     jnp.arange(8.0) * jnp.ones((8, 1))
        ... )
        Array([ 0.,  8., 16., 24., 32., 40., 48., 56.], dtype=float32)
    """
    levels, index = _levels(axis_name), jax.lax.axis_index(axis_name)
    x = jnp.moveaxis(x, dim, 0)
    rest = x.shape[1:]
    x = x.reshape(2**levels, -1, *rest)  # one row for each device
    for k in range(levels):
        pairs = x.reshape(-1, 2, *x.shape[1:])  # rows whose device numbers differ in bit k
        bit = (index >> k) & 1
        mine, theirs = (jax.lax.dynamic_index_in_dim(pairs, b, 1, False) for b in (bit, 1 - bit))
        x = mine + jax.lax.ppermute(theirs, axis_name, _partners(axis_name, k))
    return jnp.moveaxis(x[0], 0, dim)


def _levels(axis_name: AxisNames) -> int:
    count = jax.lax.axis_size(axis_name)
    if count & (count - 1):
        raise ValueError(
            f"A sum in a fixed binary tree needs a power of two of devices along {axis_name}, and "
            f"there are {count}. Use fewer, or the ordinary reduction."
        )
    return count.bit_length() - 1


def _partners(axis_name: AxisNames, k: int) -> list[tuple[int, int]]:
    """Who sends to whom: devices whose numbers differ in bit k."""
    return [(i, i ^ (1 << k)) for i in range(jax.lax.axis_size(axis_name))]
