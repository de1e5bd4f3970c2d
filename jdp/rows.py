"""Rows: values of which each replica has its own, made, computed with, and averaged.

    whole [*shape]  --rows_of-->  [N, *shape], row i on replica i  --on_rows-->  rows
                                                                   --agreed--->  their mean, whole

In and out: global arrays with a leading replica axis, or `PerReplica` nodes around them. Only
`agreed` sends anything.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jdp.mesh import AnyMesh, axis_size, on_devices
from jdp.microbatch import vary
from jdp.padded import turn_nodes
from jdp.replica import PerReplica, check_rows, is_per_replica, map_per_replica, wide


def agreed(tree: Any) -> Any:
    """The mean over replicas of parameters that differ by replica; other leaves stay.

    Accumulated in float32 and returned in the parameter's dtype. It is what there is to evaluate,
    to export, or to start another run from: `jdp.init_state(jdp.agreed(state.params), tx, mesh)`.
    Of counters and flags, which an optimizer state holds, it is the largest; of random keys the
    first.

    Args:
        tree: Parameters, with `PerReplica` leaves or without; arrays, NumPy arrays or shapes.

    Returns:
        The tree with plain arrays of the parameters' shapes.

    Example:
        >>> rows = jdp.PerReplica(jnp.arange(8.0), axes=("data",), mesh=jdp.make_mesh())
        >>> jdp.agreed({"w": rows})["w"]
        Array(3.5, dtype=float32)
    """
    return turn_nodes(tree, is_per_replica, _mean, _behind_rows, on_host=_mean)


def _mean(node: PerReplica) -> jax.Array:
    """The mean of floating-point rows; of keys the first; of other numbers the largest."""
    rows = jnp.asarray(node.value)
    if jnp.issubdtype(rows.dtype, jax.dtypes.extended):
        return rows[0]
    if not jnp.issubdtype(rows.dtype, jnp.inexact):
        return jnp.max(rows, axis=0)
    return jnp.mean(rows.astype(wide(rows)), axis=0).astype(rows.dtype)


def _behind_rows(node: PerReplica) -> NamedSharding | None:
    """Where one of the rows lies, by what splits its own dims."""
    place = node.value.sharding
    if not isinstance(place, NamedSharding):
        return None
    return NamedSharding(place.mesh, P(*place.spec[1:]))


def row_specs(params: Any, axes: tuple[str, ...], mesh: AnyMesh) -> Any:
    """How parameters, and a scalar, go to the replicas; `None` if replicas share all of them.

    Raises:
        ValueError: If parameters differ along other axes than these, those of the batch.
    """
    leaves = jax.tree.leaves(params, is_leaf=is_per_replica)
    for leaf in filter(is_per_replica, leaves):
        if not set(leaf.axes) <= set(axes):
            raise ValueError(
                f"The parameters differ along the mesh axes {leaf.axes}, but the batch is split "
                f"along {axes}: there would be parameters without examples. Give jdp.local_sgd or "
                "jdp.diloco the axis of jdp.train_step or jdp.value_and_grad."
            )
        check_rows(leaf, "A parameter", axis_size(mesh, leaf.axes))
    if not any(map(is_per_replica, leaves)):
        return None
    return map_per_replica(lambda x: P(x.axes) if is_per_replica(x) else P(), params), P()


def own_rows(params: Any) -> Any:
    """The parameters of the replica that asks, inside a `shard_map`."""
    return map_per_replica(lambda x: x.value[0] if is_per_replica(x) else x, params)


def on_rows(fn: Callable[[Any, Any], Any], mesh: AnyMesh, axes: tuple[str, ...]) -> Any:
    """Runs `fn(own, shared)` on each replica, which sees its row of the first; returns rows."""

    def local(rows: Any, shared: Any) -> Any:
        own = fn(jax.tree.map(lambda x: x[0], rows), vary(shared, axes))
        return jax.tree.map(lambda x: x[None], vary(jax.tree.map(jnp.asarray, own), axes))

    return on_devices(local, mesh, (P(axes), P()), P(axes), axes)


def rows_of(tree: Any, mesh: AnyMesh, axes: tuple[str, ...]) -> Any:
    """The same values for each replica, [N, *shape]; nothing is sent."""
    return on_rows(lambda _, shared: shared, mesh, axes)((), tree)


def spread(tree: Any, mesh: AnyMesh, axes: tuple[str, ...]) -> Any:
    """The same values for each replica, as `PerReplica`."""
    rows = rows_of(jax.tree.map(jnp.asarray, tree), mesh, axes)
    return jax.tree.map(lambda x: PerReplica(x, axes=axes, mesh=mesh), rows)


def rows_like(old: Any, values: Any) -> Any:
    """Rows as `PerReplica`, on the mesh that they are kept on."""
    return map_per_replica(lambda o, x: PerReplica(x, axes=o.axes, mesh=o.mesh), old, values)
