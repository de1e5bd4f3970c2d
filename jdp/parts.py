"""Between whole arrays and the parts of a ZeRO stage: reduced, sliced, computed with, gathered.

    PerReplica  --reduce_to_parts-->  parts  --on_global_arrays-->  parts  --gather_whole-->  whole

In: gradients, parameters and optimizer state, and a `Placement`. Out: the same where the stage has
them. The collectives of a stage's update are all here; what is computed between them is not.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jdp import collectives
from jdp.mesh import AnyMesh, ambient_mesh, on_auto_axes, on_devices
from jdp.padded import is_padded, stored_array
from jdp.replica import (
    is_gradient,
    is_per_replica,
    is_reduced,
    take_per_replica,
    take_reduced,
    wide,
    widen,
)
from jdp.split import (
    Part,
    Placement,
    check_axes,
    check_count,
    constrain,
    explicit_part,
    full_spec,
    is_explicit,
    lies,
    mark,
    on_user_axes,
    store,
)


def on_global_arrays(compute: Callable[..., Any], placement: Placement, mesh: AnyMesh) -> Any:
    """Runs a function of global arrays and says where its results lie.

    Optimizers are not written with Explicit axes in mind, so those become Auto meanwhile.
    """
    axes = placement.axes

    def spec(path: Any, leaf: Any) -> P:
        return full_spec(placement.part_of(path, leaf.shape), axes) if leaf.shape else P()

    def place(path: Any, leaf: Any) -> NamedSharding:
        return explicit_part(NamedSharding(mesh, spec(path, leaf)))

    def run(*args: Any) -> Any:
        if not is_explicit(mesh):
            results = compute(*args)
            return jax.tree_util.tree_map_with_path(
                lambda path, leaf: constrain(leaf, placement.part_of(path, leaf.shape), mesh, axes),
                results,
                is_leaf=is_padded,
            )
        # of arrays that lie nowhere yet: an Explicit type cannot be cut to an uneven length
        bare = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            results = jax.eval_shape(compute, *bare)
        places = jax.tree_util.tree_map_with_path(place, results, is_leaf=is_padded)
        # one placement for each stored array: a Padded node has one child
        places = jax.tree.unflatten(jax.tree.structure(results), jax.tree.leaves(places))
        names = [
            name
            for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
            if kind == AxisType.Explicit
        ]
        run = _on_auto_axes(compute, spec) if len(names) < len(mesh.axis_names) else compute
        return jax.sharding.auto_axes(run, axes=tuple(names), out_sharding=places)(*args)

    return run


def _on_auto_axes(compute: Callable[..., Any], axes_of: Callable[..., P]) -> Any:
    """The same function, its results split over the user's Auto axes as well."""

    def run(*args: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: jax.tree.map(
                lambda x: jax.lax.with_sharding_constraint(x, axes_of(path, leaf)), leaf
            ),
            compute(*args),
            is_leaf=is_padded,
        )

    return run


def store_updates(updates: Any, placement: Placement) -> Any:
    """Logical arrays, one for each parameter, as they are stored."""
    leaves, treedef = jax.tree.flatten(updates, is_leaf=is_padded)
    check_count(leaves, placement)
    pairs = zip(leaves, placement.parts, strict=True)
    return treedef.unflatten([store(leaf, part) for leaf, part in pairs])


def store_state(state: Any, placement: Placement) -> Any:
    """Logical arrays of an optimizer state as they are stored."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: store(leaf, placement.part_of(path, leaf.shape)) if leaf.shape else leaf,
        jax.tree.map(jnp.asarray, state),
    )


def split_up(params: Any, placement: Placement, mesh: AnyMesh) -> Any:
    """Whole parameters, or reduced gradients, as they are stored when split; nothing is sent."""
    leaves, treedef = jax.tree.flatten(params, is_leaf=is_padded)
    check_count(leaves, placement)
    stored = [
        constrain(leaf if is_padded(leaf) else store(leaf, part), part, mesh, placement.axes)
        for leaf, part in zip(leaves, placement.parts, strict=True)
    ]
    return treedef.unflatten(stored)


def reduce_to_parts(updates: Any, params: Any, placement: Placement) -> tuple[Any, AnyMesh]:
    """Gradients split over the devices, in float32 or wider, and the mesh they lie on."""
    leaves = jax.tree.leaves(updates, is_leaf=is_gradient)
    if any(map(is_reduced, leaves)):
        updates = take_reduced(updates)
    if not any(map(is_per_replica, leaves)):
        mesh = ambient_mesh(updates) or ambient_mesh(params) or placement.mesh
        return split_up(widen(updates), placement, mesh), mesh
    values, axes, mesh = take_per_replica(updates, placement.name)
    check_axes(placement, axes)
    values, treedef = jax.tree.flatten(values)
    check_count(values, placement)

    def local(values: list[jax.Array]) -> list[jax.Array]:
        own = [value[0] for value in values]
        reduce = functools.partial(reduce_parts, placement=placement, axes=axes)
        return on_auto_axes(reduce, own)(own)

    run = on_devices(local, mesh, in_specs=P(axes), out_specs=placement.specs, axes=axes)
    stored = zip(run(values), placement.parts, strict=True)
    return treedef.unflatten([mark(value, part) for value, part in stored]), mesh


def reduce_parts(
    values: list[jax.Array], placement: Placement, axes: tuple[str, ...]
) -> list[jax.Array]:
    """On one device: from its gradients to its parts of their mean over `axes`, stored."""
    wire, split = placement.wire_dtype, placement.axes
    rest = tuple(name for name in axes if name not in split)
    whole = [i for i, part in enumerate(placement.parts) if part.dim is None]
    means = collectives.mean([values[i] for i in whole], axes, wire_dtype=wire)
    found = dict(zip(whole, means, strict=True))
    for i, part in enumerate(placement.parts):
        if part.dim is not None:
            scatter = functools.partial(
                collectives.sum_scatter, axis_name=split, dim=part.dim, wire_dtype=wire
            )
            total = on_user_axes(scatter, part.spec)(stored_array(store(values[i], part)))
            found[i] = total / jax.lax.axis_size(split)
    if rest:
        split_up = [i for i in found if placement.parts[i].dim is not None]
        found.update(
            zip(split_up, collectives.mean([found[i] for i in split_up], rest), strict=True)
        )
    return widen([found[i] for i in range(len(values))])


def gather_whole(stored: Any, placement: Placement, mesh: AnyMesh) -> Any:
    """Whole arrays, one for each parameter, on every device."""
    leaves, treedef = jax.tree.flatten(stored, is_leaf=is_padded)

    def local(leaves: list[jax.Array]) -> list[jax.Array]:
        return [
            leaf if part.dim is None else join_part(leaf, part, placement.axes)
            for leaf, part in zip(leaves, placement.parts, strict=True)
        ]

    run = on_devices(local, mesh, (placement.specs,), out_specs=P(), axes=placement.axes)
    return lie_whole(treedef.unflatten(run(list(map(stored_array, leaves)))), placement, mesh)


def lie_whole(tree: Any, placement: Placement, mesh: AnyMesh) -> Any:
    """Says of whole arrays that they are, but for what the user's own axes split."""
    leaves, treedef = jax.tree.flatten(tree)
    check_count(leaves, placement)
    pairs = zip(leaves, placement.parts, strict=True)
    return treedef.unflatten([lies(x, NamedSharding(mesh, P(*part.spec))) for x, part in pairs])


def join_part(
    part_of_it: jax.Array, part: Part, axes: tuple[str, ...], to: str = "invarying"
) -> jax.Array:
    """On one device: from its stored part to the whole, logical array."""
    dim = part.dim or 0
    join = functools.partial(collectives.join, axis_name=axes, dim=dim, to=to)
    whole = on_user_axes(join, part.spec)(part_of_it)
    return jax.lax.slice_in_dim(whole, 0, part.size, axis=dim) if part.padded else whole


def as_sent(stage: int, params: Any, updates: Any) -> Any:
    """Updates as they are sent: in the parameter's dtype.

    For a narrow dtype it is the new parameter that is sent, since its difference from the old one
    may not be a number of that dtype; see `as_updates`.
    """
    if params is None:
        return updates

    def one(update: jax.Array, param: jax.Array) -> jax.Array:
        if param.dtype.itemsize >= 4 or stage == 3:
            return update.astype(wide(param))
        return (param + update).astype(param.dtype)

    return jax.tree.map(one, updates, params)


def as_updates(sent: Any, params: Any) -> Any:
    """Whole updates from what was sent; float32 holds the difference of two narrow numbers."""
    if params is None:
        return sent

    def one(new: jax.Array, old: jax.Array) -> jax.Array:
        narrow = old.dtype.itemsize < 4
        return new.astype(jnp.float32) - old.astype(jnp.float32) if narrow else new

    return jax.tree.map(one, sent, params)
