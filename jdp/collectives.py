"""Per-device functions with an axis name, for jdp's transformations and anybody's `shard_map`.

In: what one device holds, and the name of the axis (or axes) it exchanges along. Out: what
that device holds afterwards. They run inside `jax.shard_map` and `jax.pmap`; nothing here knows
a mesh, an optimizer or a `PerReplica`.

    mean          average of a tree over the devices, as it is, in flat buckets, or narrowed
    sum_scatter   sum of an array over the devices, each receiving its part
    join          every device's part of an array, put together; the inverse of splitting it
    all_gather    every device's rows, one after the other, with an exact gradient

A narrow dtype travels as unsigned integers of the same width: XLA on CPU would otherwise widen
it to float32 first, and no backend computes on the bits while they are under way.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jdp.mesh import AxisNames, is_whole

_BITS = {2: jnp.uint16, 1: jnp.uint8}


def all_gather(x: jax.Array, axis_name: AxisNames) -> jax.Array:
    """Concatenates every device's rows, for losses that couple examples of different replicas.

    Device i's rows come at place i of dim 0. Its gradient is exact: each device receives what
    all devices' losses say about its own rows (a reduce-scatter in the backward pass).

    Args:
        x: This device's rows, shape [m, ...], any dtype.
        axis_name: Mesh axis, or axes, to gather along.

    Returns:
        Array of shape [N * m, ...] of the same dtype.

    Example:
        >>> mesh = jdp.make_mesh()
        >>> gather = lambda x: jdp.all_gather(x, "data").sum()[None]
        >>> jax.shard_map(gather, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(jnp.ones(16))
        Array([16., 16., 16., 16., 16., 16., 16., 16.], dtype=float32)
    """
    if jnp.ndim(x) == 0:
        raise ValueError(
            "jdp.all_gather joins rows, and a scalar has none. Gather x[None], or use "
            "jax.lax.psum for a sum."
        )
    return jax.lax.all_gather(x, axis_name, axis=0, tiled=True)


def mean(
    tree: Any,
    axis_name: AxisNames,
    *,
    wire_dtype: Any = None,
    bucket_bytes: int | None = None,
) -> Any:
    """Averages a tree over the devices of an axis.

    With N devices holding x_1 ... x_N, every device ends with

        (1/N) * sum_i cast(x_i)

    A dtype narrower than 32 bits on the wire is accumulated in float32: each device receives
    its part of every x_i (all-to-all), adds them up in float32, and the means are gathered.
    Their cast back to the wire dtype is the second and last rounding.

    Guarantees:
        - The result is the same bits on every device.
        - `wire_dtype=None` casts nothing that is 32 bits wide or wider.
        - With N devices, 2(N-1)/N of the tree's bytes at the wire dtype are sent by each.

    Args:
        tree: Pytree of floating-point arrays, the same shapes on every device.
        axis_name: Mesh axis, or axes.
        wire_dtype: Floating dtype sent between devices; `None` sends each leaf as it is.
        bucket_bytes: Join leaves into flat buffers of at most so many bytes at the wire dtype (a
            larger leaf has one of its own); `None` sends each leaf by itself. Which is faster
            depends on the backend, see `jdp.all_reduce`. Narrow dtypes are always joined.

    Returns:
        The tree of means, each leaf of the shape and dtype it came with.

    Raises:
        ValueError: If a leaf is not floating point, naming it, or the wire dtype is not a
            floating-point type of 16 or 32 bits.

    Example:
        >>> mesh = jdp.make_mesh()
        >>> average = lambda x: jdp.collectives.mean(x[0], "data")
        >>> x = jnp.arange(8.0)[:, None]
        >>> jax.shard_map(average, mesh=mesh, in_specs=P("data"), out_specs=P())(x)
        Array([3.5], dtype=float32)
    """
    wire_dtype = check_wire_dtype(wire_dtype)
    if bucket_bytes is not None:
        check_bucket_bytes(bucket_bytes)
    leaves, treedef = jax.tree.flatten(jax.tree_util.tree_map_with_path(_check_leaf, tree))
    wires = [wire_dtype or leaf.dtype for leaf in leaves]
    narrow = [i for i, wire in enumerate(wires) if jnp.dtype(wire).itemsize < 4]
    wide = [i for i in range(len(leaves)) if i not in narrow]
    means: dict[int, jax.Array] = {}
    if bucket_bytes is None:
        # one call for all leaves, so that the compiler may combine them
        sent = [leaves[i].astype(wires[i]) for i in wide]
        means.update(zip(wide, jax.lax.pmean(sent, axis_name), strict=True))
        wide = []
    for bucket in _buckets(wide, leaves, wires, bucket_bytes):
        means.update(_flat_mean(bucket, leaves, wires[bucket[0]], axis_name, jax.lax.pmean))
    limit = bucket_bytes if bucket_bytes is not None else 25 * 2**20
    for bucket in _buckets(narrow, leaves, wires, limit):
        means.update(_flat_mean(bucket, leaves, wires[bucket[0]], axis_name, _narrow_mean))
    return treedef.unflatten([means[i].astype(leaf.dtype) for i, leaf in enumerate(leaves)])


def check_wire_dtype(wire_dtype: Any) -> Any:
    """The dtype, or a sentence why it cannot be sent."""
    if wire_dtype is None:
        return None
    try:
        dtype = jnp.dtype(wire_dtype)
    except TypeError:
        raise ValueError(
            f"wire_dtype={wire_dtype!r} is no dtype; use jnp.bfloat16, jnp.float16, jnp.float32, "
            "or None to send each leaf as it is."
        ) from None
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize not in (2, 4):
        raise ValueError(
            f"wire_dtype={dtype.name} cannot carry a mean: it must be a floating-point type of 16 "
            "or 32 bits (float32, bfloat16, float16), or None to send each leaf as it is."
        )
    return dtype


def check_bucket_bytes(bucket_bytes: Any) -> int:
    """The number, or a sentence why it is not one of bytes."""
    if not is_whole(bucket_bytes) or bucket_bytes < 1:
        raise ValueError(
            f"bucket_bytes={bucket_bytes!r} must be a positive whole number of bytes, such as "
            "25 * 2**20."
        )
    return int(bucket_bytes)


def _check_leaf(path: Any, leaf: Any) -> jax.Array:
    leaf = jnp.asarray(leaf)
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        raise ValueError(
            f"The leaf {jax.tree_util.keystr(path)} has the dtype {leaf.dtype}; the mean of such "
            "values would be cut to that dtype. Cast it to float32, or sum with jax.lax.psum."
        )
    return leaf


def _buckets(
    indices: Sequence[int], leaves: Sequence[jax.Array], wires: Sequence[Any], limit: int | None
) -> list[list[int]]:
    """Groups leaves of one wire dtype, in order, up to the limit."""
    buckets: list[list[int]] = []
    open_buckets: dict[Any, tuple[list[int], int]] = {}
    for i in indices:
        size = leaves[i].size * jnp.dtype(wires[i]).itemsize
        bucket, filled = open_buckets.get(wires[i], ([], 0))
        if not bucket or filled + size > (limit or 0):
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(i)
        open_buckets[wires[i]] = (bucket, filled + size)
    return buckets


def _flat_mean(
    bucket: Sequence[int],
    leaves: Sequence[jax.Array],
    wire: Any,
    axis_name: AxisNames,
    average: Any,
) -> dict[int, jax.Array]:
    """Means of the leaves of one bucket, sent as one flat buffer."""
    parts = [leaves[i].astype(wire).ravel() for i in bucket]
    flat = average(jnp.concatenate(parts) if len(parts) > 1 else parts[0], axis_name)
    means, start = {}, 0
    for i in bucket:
        means[i] = flat[start : start + leaves[i].size].reshape(leaves[i].shape)
        start += leaves[i].size
    return means


def _narrow_mean(flat: jax.Array, axis_name: AxisNames) -> jax.Array:
    """Mean of a flat narrow buffer: reduce-scatter, adding up in float32, and all-gather."""
    if flat.size == 0:
        return jax.lax.pmean(flat, axis_name)
    count = jax.lax.axis_size(axis_name)
    # ceil division: the last device's part is filled up with zeros
    rows = jnp.pad(flat, (0, -flat.size % count))
    part = (sum_scatter(rows, axis_name, dim=0) / count).astype(flat.dtype)
    return join(part, axis_name, dim=0)[: flat.size]


def sum_scatter(
    x: jax.Array, axis_name: AxisNames, *, dim: int = 0, wire_dtype: Any = None
) -> jax.Array:
    """Sums an array over the devices of an axis and gives each device its part: reduce-scatter.

    With N devices holding x_1 ... x_N, device i ends with part i of N, along `dim`, of

        sum_j cast(x_j)

    added up in float32 where the wire is narrower than that.

    Guarantees:
        - Each device sends (N-1)/N of the array's bytes at the wire dtype.

    Args:
        x: Floating-point array; N divides its length in `dim`.
        axis_name: Mesh axis, or axes.
        dim: The dim to split.
        wire_dtype: Floating dtype sent between devices; `None` sends the array as it is.

    Returns:
        The device's part, in float32 or the wider dtype of the array.

    Raises:
        ValueError: If the wire dtype is not a floating-point type of 16 or 32 bits.

    Example:
        >>> mesh = jdp.make_mesh()
        >>> part = lambda x: jdp.collectives.sum_scatter(x[0], "data")
        >>> x = jnp.ones((8, 16)) * jnp.arange(16.0)
        >>> jax.shard_map(part, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(x)[:4]
        Array([ 0.,  8., 16., 24.], dtype=float32)
    """
    x = x.astype(check_wire_dtype(wire_dtype) or x.dtype)
    if x.dtype.itemsize >= 4:
        return jax.lax.psum_scatter(x, axis_name, scatter_dimension=dim, tiled=True)
    count, bits = jax.lax.axis_size(axis_name), _BITS[x.dtype.itemsize]
    rows = jnp.moveaxis(x.reshape(*x.shape[:dim], count, -1, *x.shape[dim + 1 :]), dim, 0)
    mine = jax.lax.all_to_all(
        jax.lax.bitcast_convert_type(rows, bits), axis_name, split_axis=0, concat_axis=0
    )
    return jnp.sum(jax.lax.bitcast_convert_type(mine, x.dtype).astype(jnp.float32), axis=0)


def join(
    part: jax.Array, axis_name: AxisNames, *, dim: int = 0, to: str = "invarying"
) -> jax.Array:
    """Puts the parts that the devices of an axis hold together, for each of them: all-gather.

    Guarantees:
        - Each device sends (N-1)/N of the whole array's bytes; a narrow dtype stays narrow.

    Args:
        part: This device's part, any dtype.
        axis_name: Mesh axis, or axes.
        dim: The dim that was split.
        to: "invarying" if the result is for all devices alike, "varying" if each shall go on with
            a copy of its own.

    Returns:
        The whole array, N times as long in `dim`, of the same dtype.

    Example:
        >>> join = lambda x: jdp.collectives.join(x, "data")
        >>> jax.shard_map(join, mesh=jdp.make_mesh(), in_specs=P("data"), out_specs=P())(
        ...     jnp.arange(8)
        ... )
        Array([0, 1, 2, 3, 4, 5, 6, 7], dtype=int32)
    """
    dtype, bits = part.dtype, _BITS.get(part.dtype.itemsize)
    if bits is None or not jnp.issubdtype(dtype, jnp.floating):
        return jax.lax.all_gather(part, axis_name, axis=dim, tiled=True, to=to)
    sent = jax.lax.bitcast_convert_type(part, bits)
    whole = jax.lax.all_gather(sent, axis_name, axis=dim, tiled=True, to=to)
    return jax.lax.bitcast_convert_type(whole, dtype)
