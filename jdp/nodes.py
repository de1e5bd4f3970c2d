"""The mean over nodes of several devices each: per-device functions, as those of `collectives`.

    device (n, d) has     g                     [*shape]        its own value
    reduce-scatter        within each node      part d of the node's mean, 1/D of the bytes
    all-reduce            across the nodes      part d of the mean
    all-gather            within each node      the mean, whole, the same bits everywhere

In: what one device holds, and the names of the two kinds of axes. Out: the mean, and what this
device's values count as in it. They run inside `jax.shard_map`; nothing here knows a mesh, an
optimizer or a `PerReplica`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdp import collectives
from jdp.flat import buckets, join_leaves, take_apart
from jdp.mesh import AxisNames, names_of
from jdp.quantize import BLOCK, check_block, check_wire_dtype, codec_of, is_narrow

JOINED_BELOW = 2**14  # elements: at 64 KB three collectives of one leaf cost more than a copy


def mean(
    tree: Any,
    within: AxisNames,
    across: AxisNames,
    *,
    wire_dtype: Any = None,
    across_wire_dtype: Any = None,
    block: int = BLOCK,
    bucket_bytes: int = collectives.BUCKET_BYTES,
    join_all: bool = False,
) -> Any:
    """Averages a tree over the devices of all nodes: a per-device function for any `shard_map`.

    Args:
        tree: Pytree of floating-point arrays, the same shapes on every device.
        within: Axis, or axes, of the devices of a node.
        across: Axis, or axes, of the nodes.
        wire_dtype: See `jdp.hierarchical`.
        across_wire_dtype: See `jdp.hierarchical`.
        block: See `jdp.hierarchical`.
        bucket_bytes: See `jdp.hierarchical`.
        join_all: Join all leaves into flat buffers, not just those that must be.

    Returns:
        The tree of means, each leaf of the shape and dtype it came with.

    Raises:
        ValueError: If an argument cannot be meant.

    Example:
        >>> mesh = jdp.make_mesh(("node", "device"), (2, 4))
        >>> average = lambda x: jdp.nodes.mean(x[0], "device", "node")
        >>> x = jnp.arange(8.0)[:, None]
        >>> jax.shard_map(average, mesh=mesh, in_specs=P(("node", "device")), out_specs=P())(x)
        Array([3.5], dtype=float32)
    """
    nodes = plan(within, across, wire_dtype, across_wire_dtype, block, bucket_bytes)
    leaves, treedef = jax.tree.flatten(tree)
    means, _ = means_and_sent(leaves, nodes._replace(join_all=join_all))
    pairs = zip(means, leaves, strict=True)
    return treedef.unflatten([mean.astype(leaf.dtype) for mean, leaf in pairs])


class Nodes(NamedTuple):
    """The two kinds of wires and how values travel on each, see `jdp.hierarchical`; checked."""

    within: tuple[str, ...]
    across: tuple[str, ...]
    inside: collectives.Sending
    outside: collectives.Sending
    bucket_bytes: int
    join_all: bool = False

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes, nodes first."""
        return (*self.across, *self.within)


def plan(
    within: AxisNames,
    across: AxisNames,
    wire_dtype: Any,
    across_wire_dtype: Any,
    block: int,
    bucket_bytes: int,
) -> Nodes:
    """Checks the arguments, once and for all."""
    inside, outside = names_of(within), names_of(across)
    both = (*inside, *outside)
    if not inside or not outside or len(set(both)) < len(both):
        raise ValueError(
            f"jdp.hierarchical(within={within!r}, across={across!r}) must name at least one axis "
            "for each, and none twice: the devices of a node lie along the one, the nodes along "
            'the other. On jdp.make_mesh(("node", "device")) the defaults are right.'
        )
    wire, block = check_wire_dtype(wire_dtype), check_block(block)
    return Nodes(
        inside,
        outside,
        collectives.Sending(wire, block),
        collectives.Sending(check_wire_dtype(across_wire_dtype) or wire, block),
        collectives.check_bucket_bytes(bucket_bytes),
    )


def means_and_sent(
    leaves: list[jax.Array], nodes: Nodes
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Means of leaves over all nodes, and what this device's values count as in them.

    The mean over devices of the latter is the former, up to what is rounded within the nodes.
    """
    limit = nodes.bucket_bytes if nodes.join_all else None
    count = jax.lax.axis_size(nodes.within)
    if count == 1 or jax.lax.axis_size(nodes.across) == 1:  # the other axis is all there is
        send = nodes.outside if count == 1 else nodes.inside
        return collectives.means_and_sent(leaves, nodes.axes, send, limit)
    buffers = _buffers(leaves, count, nodes)
    wholes = [_whole(buffer, leaves, count) for buffer in buffers]
    parts = [_scatter(whole, buffer, nodes) for whole, buffer in zip(wholes, buffers, strict=True)]
    # one call for all parts, so that the compiler may combine them
    means, sent = collectives.means_and_sent(parts, nodes.across, nodes.outside, limit)
    found: list[Any] = [None] * len(leaves)
    for buffer, whole, part, new, gone in zip(buffers, wholes, parts, means, sent, strict=True):
        mean = _gather(new, buffer, nodes, whole.dtype)
        # this device answers for what became of the node's mean, in its part
        start: list[Any] = [0] * whole.ndim
        start[buffer.dim] = jax.lax.axis_index(nodes.within) * part.shape[buffer.dim]
        own = jax.lax.dynamic_slice(whole, start, part.shape) + count * (gone - part)
        own = jax.lax.dynamic_update_slice(whole, own.astype(whole.dtype), start)
        for i, both in _take_apart(buffer, leaves, (mean, own)):
            found[i] = both
    return [mean for mean, _ in found], [own for _, own in found]


class _Buffer(NamedTuple):
    """What is scattered at once along a dim: one leaf, or several that are joined and padded."""

    leaves: tuple[int, ...]
    dim: int
    joined: bool
    dtype: Any


def _buffers(leaves: Sequence[jax.Array], count: int, nodes: Nodes) -> list[_Buffer]:
    """Large leaves alone, along a dim that `count` divides; the others joined, in order."""
    alone: list[_Buffer] = []
    others: dict[int, Any] = {}
    for i, leaf in enumerate(leaves):
        dims = [dim for dim, size in enumerate(leaf.shape) if size and size % count == 0]
        narrow = is_narrow(nodes.inside.wire_dtype or leaf.dtype)
        if dims and leaf.size >= JOINED_BELOW and not nodes.join_all and not narrow:
            alone.append(_Buffer((i,), dims[0], False, leaf.dtype))
        else:
            others[i] = leaf.dtype
    joined = buckets(
        others, [leaf.size * leaf.dtype.itemsize for leaf in leaves], nodes.bucket_bytes
    )
    return [*alone, *(_Buffer(tuple(each), 0, True, leaves[each[0]].dtype) for each in joined)]


def _whole(buffer: _Buffer, leaves: Sequence[jax.Array], count: int) -> jax.Array:
    """The buffer's contents."""
    if not buffer.joined:
        return leaves[buffer.leaves[0]]
    flat = join_leaves([leaves[i] for i in buffer.leaves])
    return jnp.pad(flat, (0, -flat.size % count if flat.size else count))


def _take_apart(buffer: _Buffer, leaves: Sequence[jax.Array], wholes: Sequence[jax.Array]) -> Any:
    """For each leaf of a buffer its number, and what it is in each of the whole arrays."""
    if not buffer.joined:
        return [(buffer.leaves[0], wholes)]
    some = [leaves[i] for i in buffer.leaves]
    rows = zip(*(take_apart(whole, some) for whole in wholes), strict=True)
    return list(zip(buffer.leaves, rows, strict=True))


def _scatter(whole: jax.Array, buffer: _Buffer, nodes: Nodes) -> jax.Array:
    """This device's part of the node's mean."""
    wire, block, *_ = nodes.inside
    total = collectives.sum_scatter(
        whole, nodes.within, dim=buffer.dim, wire_dtype=wire, block=block
    )
    part = total / jax.lax.axis_size(nodes.within)
    # sent across as it came, unless it is to be something else
    return part.astype(buffer.dtype) if nodes.outside.wire_dtype is None else part


def _gather(part: jax.Array, buffer: _Buffer, nodes: Nodes, dtype: Any) -> jax.Array:
    """The whole mean, of all parts."""
    wire = nodes.inside.wire_dtype or dtype
    if not is_narrow(wire):
        return collectives.join(part.astype(wire), nodes.within, dim=buffer.dim)
    codec = codec_of(wire, nodes.inside.block)
    codes = codec.encode(part.astype(jnp.float32), None)
    everyone = jax.lax.all_gather(codes, nodes.within, to="invarying")
    return codec.decode(everyone, part.size).ravel()
