"""Per-device functions with an axis name, for jdp's transformations and anybody's `shard_map`.

In: what one device holds, and the name of the axis (or axes) it exchanges along. Out: what
that device holds afterwards. They run inside `jax.shard_map` and `jax.pmap`; nothing here knows
a mesh, an optimizer or a `PerReplica`.

    mean          average of a tree over the devices, as it is, in flat buckets, or narrowed
    coded_mean    average of a flat buffer in any code, and what each device contributed to it
    sum_scatter   sum of an array over the devices, each receiving its part
    join          every device's part of an array, put together; the inverse of splitting it
    all_gather    every device's rows, one after the other, with an exact gradient

A narrow dtype travels as unsigned integers of the same width, see `jdp.quantize`: XLA on CPU would
otherwise widen it to float32 first, and no backend computes on the bits while they are under way.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from jdp.flat import buckets, join_leaves, take_apart
from jdp.mesh import AxisNames, is_whole, on_auto_axes
from jdp.quantize import BLOCK, Codec, check_block, check_wire_dtype, codec_of, is_narrow

BUCKET_BYTES = 25 * 2**20  # what PyTorch DDP has used since 2020
_BITS = {2: jnp.uint16, 1: jnp.uint8}
_LANES = 128  # of a TPU: an all-gather of rows that do not fill them becomes an all-reduce there


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
    block: int = BLOCK,
    key: Any = None,
    exact_sum: bool = True,
) -> Any:
    """Averages a tree over the devices of an axis.

    With N devices holding x_1 ... x_N, every device ends with

        round((1/N) * sum_i round(x_i))

    where `round` is to the wire dtype, and nothing where that is 32 bits wide. What is narrower is
    added up in float32: each device receives its part of every x_i (all-to-all), adds them up, and
    the means are gathered. Dtypes of 8 bits, and float16, travel with a scale for each block of
    values, see `jdp.quantize.encode`: each sender's own on the way there, the mean's on the way
    back. With 8 bits a device adds its own values as they are, since they do not travel.

    Guarantees:
        - The result is the same bits on every device.
        - `wire_dtype=None` casts nothing that is 32 bits wide or wider.
        - With N devices, 2(N-1)/N of the tree's bytes at the wire dtype are sent by each; with
          scales, 4 bytes for each block besides.

    | values | mean |
    | --- | --- |
    | of very different size on different devices | each is rounded by its own scale |
    | eight times 20000, in float16 | 20000 |
    | all of them 1e-8 or 1e30, in float16 or 8 bits | to the dtype's relative precision |
    | inf, NaN | the same; with int8 NaN for the whole block, with float8_e4m3fn NaN |

    Args:
        tree: Pytree of floating-point arrays, the same shapes on every device.
        axis_name: Mesh axis, or axes.
        wire_dtype: Dtype sent between devices: float32, bfloat16, float16, float8_e4m3fn,
            float8_e5m2 or int8; `None` sends each leaf as it is.
        bucket_bytes: Join leaves into flat buffers of at most so many bytes at the wire dtype (a
            larger leaf has one of its own); `None` sends each leaf by itself. Which is faster
            depends on the backend, see `jdp.all_reduce`. Narrow dtypes are always joined.
        block: Values that share a scale, for dtypes of 8 bits.
        key: Random key, the same on every device, for stochastic rounding; `None` rounds to
            nearest.
        exact_sum: False adds up 16 bits in 16 bits, by a plain all-reduce of x_i / N: one
            operation in place of two, off by up to (N-1)/N * eps * sum_i |x_i| / N besides. Nothing
            is scaled: with float16 it is off by N * 2^-25 more, as entries below N * 2^-14 lose
            digits, and a mean above 65504 is inf. On CPU it saves no bytes: XLA widens it.

    Returns:
        The tree of means, each leaf of the shape and dtype it came with.

    Raises:
        ValueError: If a leaf is not floating point, naming it, or an argument cannot be meant.

    Example:
        >>> mesh = jdp.make_mesh()
        >>> average = lambda x: jdp.collectives.mean(x[0], "data")
        >>> x = jnp.arange(8.0)[:, None]
        >>> jax.shard_map(average, mesh=mesh, in_specs=P("data"), out_specs=P())(x)
        Array([3.5], dtype=float32)

    References:
        Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, 2016. Wang et al., ZeRO++:
        Extremely Efficient Collective Communication for Giant Model Training, 2023.
    """
    send = Sending(check_wire_dtype(wire_dtype), check_block(block), key, exact_sum)
    check_exact_sum("jdp.collectives.mean", send)
    if bucket_bytes is not None:
        check_bucket_bytes(bucket_bytes)
    leaves, treedef = jax.tree.flatten(jax.tree_util.tree_map_with_path(_check_leaf, tree))
    average = functools.partial(
        means_and_sent, axis_name=axis_name, send=send, bucket_bytes=bucket_bytes
    )
    means, _ = on_auto_axes(average, (leaves, leaves))(leaves)
    return treedef.unflatten(
        [mean.astype(leaf.dtype) for mean, leaf in zip(means, leaves, strict=True)]
    )


class Sending(NamedTuple):
    """How values travel, see `mean`; made and checked once, used for every bucket."""

    wire_dtype: Any = None
    block: int = BLOCK
    key: Any = None
    exact_sum: bool = True


def check_exact_sum(name: str, send: Sending) -> None:
    """Refuses sums in a wire dtype that cannot hold them."""
    wire = send.wire_dtype
    if not send.exact_sum and (wire is None or wire.itemsize != 2):
        raise ValueError(
            f"{name}(wire_dtype={wire if wire is None else wire.name}, exact_sum=False): only "
            "bfloat16 and float16 can be added up as they are sent; 8 bits have scales of their "
            "own, and 32 lose nothing that a float32 sum would keep. Leave exact_sum out."
        )
    if not send.exact_sum and send.key is not None:
        raise ValueError(
            f"{name}(exact_sum=False, key=...): a sum in the wire dtype rounds to nearest at every "
            "addition, whatever the key. Leave one of them out."
        )


def means_and_sent(
    leaves: list[jax.Array],
    axis_name: AxisNames,
    send: Sending,
    bucket_bytes: int | None = None,
    alone_above: float = math.inf,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Means of leaves, and what this device's values count as in them.

    The mean over devices of the latter is the former: a device answers for the rounding of its own
    values, and for that of the mean in the part that it has added up. Leaves of more than
    `alone_above` bytes, as sent, are not joined with others.
    """
    wires = [send.wire_dtype or leaf.dtype for leaf in leaves]
    narrow = [i for i, wire in enumerate(wires) if is_narrow(wire)]
    wide = [i for i in range(len(leaves)) if i not in narrow]
    found: dict[int, tuple[jax.Array, jax.Array]] = {}
    if bucket_bytes is None:
        # one call for all leaves, so that the compiler may combine them
        cast = [leaves[i].astype(wires[i]) for i in wide]
        found.update(zip(wide, zip(jax.lax.pmean(cast, axis_name), cast, strict=True), strict=True))
        wide = []
    sizes = [leaf.size * jnp.dtype(wire).itemsize for leaf, wire in zip(leaves, wires, strict=True)]
    for bucket in buckets({i: wires[i] for i in wide}, sizes, bucket_bytes, alone_above):
        average = functools.partial(_wide_mean, wire=wires[bucket[0]], axis_name=axis_name)
        found.update(_in_one_buffer(bucket, leaves, average))
    limit = bucket_bytes if bucket_bytes is not None else BUCKET_BYTES
    kinds = {i: wires[i] for i in narrow}
    for number, bucket in enumerate(buckets(kinds, sizes, limit, alone_above)):
        key = None if send.key is None else jax.random.fold_in(send.key, number)
        one = send._replace(wire_dtype=jnp.dtype(wires[bucket[0]]), key=key)
        average = functools.partial(_narrow_mean, axis_name=axis_name, send=one)
        found.update(_in_one_buffer(bucket, leaves, average))
    pairs = [found[i] for i in range(len(leaves))]
    return [mean for mean, _ in pairs], [sent for _, sent in pairs]


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


def _in_one_buffer(
    bucket: Sequence[int], leaves: Sequence[jax.Array], average: Any
) -> dict[int, tuple[jax.Array, jax.Array]]:
    """Mean and sent of the leaves of one bucket, which travel as one flat buffer."""
    some = [leaves[i] for i in bucket]
    means, sent = (take_apart(row, some) for row in average(join_leaves(some)))
    return dict(zip(bucket, zip(means, sent, strict=True), strict=True))


def _wide_mean(flat: jax.Array, axis_name: AxisNames, wire: Any) -> tuple[jax.Array, jax.Array]:
    """Mean of a flat buffer of 32 bits or more, and what was sent of it."""
    sent = flat.astype(wire)
    return jax.lax.pmean(sent, axis_name), sent


def _narrow_mean(
    flat: jax.Array, axis_name: AxisNames, send: Sending
) -> tuple[jax.Array, jax.Array]:
    """Mean of a flat buffer of fewer than 32 bits a value, in float32, and what was sent of it."""
    flat, count = flat.astype(jnp.float32), jax.lax.axis_size(axis_name)
    if not send.exact_sum:
        sent = (flat / count).astype(send.wire_dtype)
        total = _plain_sum(sent, axis_name).astype(jnp.float32)
        return total, sent.astype(jnp.float32) * count
    return coded_mean(flat, axis_name, codec_of(send.wire_dtype, send.block), send.key)


def _plain_sum(x: jax.Array, axis_name: AxisNames) -> jax.Array:
    """Sum in the dtype of 16 bits; on CPU, XLA adds up in float32 and rounds once.

    Here that is spelled out where other axes of the mesh are left to the compiler: there XLA:CPU
    (jax 0.10 and 0.12) ends the process while it widens such a sum itself.
    """
    plain = functools.partial(jax.lax.psum, axis_name=axis_name)
    if AxisType.Auto not in jax.sharding.get_abstract_mesh().axis_types:
        return plain(x)

    def widened(x: jax.Array) -> jax.Array:
        return plain(x.astype(jnp.float32)).astype(x.dtype)

    return jax.lax.platform_dependent(x, cpu=widened, default=plain)


def coded_mean(
    flat: jax.Array, axis_name: AxisNames, codec: Codec, key: Any = None
) -> tuple[jax.Array, jax.Array]:
    """Mean of a flat float32 buffer by reduce-scatter, adding up in float32, and all-gather.

    Args:
        flat: This device's values, [n].
        axis_name: Mesh axis, or axes.
        codec: How values travel.
        key: Random key, the same on every device; `None` rounds to nearest.

    Returns:
        The mean, and what this device's values count as in it, see `means_and_sent`.
    """
    if flat.size == 0:
        return jax.lax.pmean(flat, axis_name), flat
    count, own = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
    there = back = None
    if key is not None:
        there, back = jax.random.split(jax.random.fold_in(key, own))
    # ceil division: the last device's part is filled up with zeros
    rows = jnp.pad(flat, (0, -flat.size % count)).reshape(count, -1)
    total, sent = _exchange(rows, axis_name, codec, there)
    part = total / count
    codes = codec.encode(part, back)
    spare = -codes.size % _LANES if codes.size >= 512 * _LANES else 0  # at most 0.2 %
    everyone = jax.lax.all_gather(jnp.pad(codes, (0, spare)), axis_name, to="invarying")
    # this device answers for the rounding of the mean in its part
    sent = sent.at[own].add(count * (codec.decode(codes, part.size) - part))
    mean = codec.decode(everyone[:, : codes.size], part.size).ravel()
    return mean[: flat.size], sent.ravel()[: flat.size]


def _exchange(
    rows: jax.Array, axis_name: AxisNames, codec: Codec, key: Any = None
) -> tuple[jax.Array, jax.Array]:
    """Float32 sum over the devices of row i, on device i; and what the rows became on the way."""
    codes, own = codec.encode(rows, key), jax.lax.axis_index(axis_name)
    mine = jax.lax.all_to_all(codes, axis_name, split_axis=0, concat_axis=0)
    read, sent = (codec.decode(bits, rows.shape[-1]) for bits in (mine, codes))
    if codec.keeps_own:
        read, sent = (x.at[own].set(rows[own]) for x in (read, sent))
    return jnp.sum(read, axis=0), sent


def sum_scatter(
    x: jax.Array, axis_name: AxisNames, *, dim: int = 0, wire_dtype: Any = None, block: int = BLOCK
) -> jax.Array:
    """Sums an array over the devices of an axis and gives each device its part: reduce-scatter.

    With N devices holding x_1 ... x_N, device i ends with part i of N, along `dim`, of

        sum_j round(x_j)

    where `round` is to the wire dtype, see `mean`; added up in float32 where that is narrower.

    Guarantees:
        - Each device sends (N-1)/N of the array's bytes at the wire dtype; with scales, 4 bytes
          for each block besides.

    Args:
        x: Floating-point array; N divides its length in `dim`.
        axis_name: Mesh axis, or axes.
        dim: The dim to split; a negative one counts from the last.
        wire_dtype: Dtype sent between devices, see `mean`; `None` sends the array as it is.
        block: Values that share a scale, for dtypes of 8 bits.

    Returns:
        The device's part, in float32 or the wider dtype of the array.

    Raises:
        ValueError: If the wire dtype cannot carry a sum, or there is no such dim.

    Example:
        >>> mesh = jdp.make_mesh()
        >>> part = lambda x: jdp.collectives.sum_scatter(x[0], "data")
        >>> x = jnp.ones((8, 16)) * jnp.arange(16.0)
        >>> jax.shard_map(part, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(x)[:4]
        Array([ 0.,  8., 16., 24.], dtype=float32)
    """
    wire = jnp.dtype(check_wire_dtype(wire_dtype) or x.dtype)
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(
            f"jdp.collectives.sum_scatter(dim={dim}) was given an array of shape {x.shape}, which "
            f"has no such dim to split. Name one of its {x.ndim}, counted from 0."
        )
    dim %= x.ndim
    if not is_narrow(wire):
        x = x.astype(wire)
        return jax.lax.psum_scatter(x, axis_name, scatter_dimension=dim, tiled=True)
    count = jax.lax.axis_size(axis_name)
    split = (*x.shape[:dim], count, x.shape[dim] // count, *x.shape[dim + 1 :])
    rows = jnp.moveaxis(x.reshape(split), dim, 0)
    if x.size == 0:
        return rows[0].astype(jnp.float32)
    flat = rows.reshape(count, -1).astype(jnp.float32)
    total, _ = _exchange(flat, axis_name, codec_of(wire, check_block(block)))
    return total.reshape(rows.shape[1:])


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
