"""The state of a run: everything it consists of, born where the step will keep it.

    params, tx, mesh  --init_state-->  TrainState(step, params, opt_state, key, model_state)

A state is a plain pytree; saving, sharding and printing it is what one does with any pytree.
Nothing here takes a gradient or sends one.
"""

import functools
import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jdp.accumulate import MultiStepsState
from jdp.feedback import CompressedState
from jdp.finite import LossScaleState
from jdp.local_state import check_outermost as check_local_outermost
from jdp.local_state import spread_params
from jdp.loss import check_params
from jdp.mesh import replicate
from jdp.padded import logical
from jdp.precision import check_master
from jdp.processes import broadcast as broadcast_values
from jdp.processes import same_everywhere
from jdp.replica import PerReplica, find_nodes, is_per_replica
from jdp.rows import agreed
from jdp.split import (
    Placement,
    ZeroState,
    find_placement,
    split_params,
    store,
    stored_places,
    user_specs,
    whole_params,
    without,
)


class TrainState(NamedTuple):
    """Everything a run consists of, as a plain pytree.

    Attributes:
        step: Calls of the training step so far, int32. It numbers the batches, and with them the
            random keys. (`jdp.multi_steps` counts applied updates in `opt_state.num_updates`.)
        params: The parameters; `PerReplica` leaves where local steps let replicas differ.
        opt_state: State of the optax transformation.
        key: Random key of the run, or `None`. Step s uses fold_in(key, s).
        model_state: What the model keeps besides parameters (BatchNorm), or `None`.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    key: Any = None
    model_state: Any = None


def init_state(
    params: Any,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    key: Any = None,
    model_state: Any = None,
    broadcast: bool = False,
) -> TrainState:
    """Makes the state of a run, every leaf where the step will keep it.

    Guarantees:
        - The arrays are the state's own: the step may overwrite them, yours stay valid.
        - Leaves that already lie on `mesh` keep their placement, and optimizer state that mirrors
          them shares it.
        - Several processes start from the same values, or not at all.

    Args:
        params: Pytree of floating-point arrays; or a function without arguments that makes it,
            which is then run on the mesh; or of `jax.ShapeDtypeStruct`s, for a state of those,
            with which to lower a step or restore a checkpoint. Parameters that differ by replica
            are taken at their mean.
        tx: The transformation that the step will use.
        mesh: The mesh.
        key: A random key (`jax.random.key`), for losses that take one.
        model_state: What the model keeps besides parameters, for losses that take it.
        broadcast: Take process 0's values everywhere instead of comparing them.

    Returns:
        A `TrainState`.

    Raises:
        TypeError: If a parameter is not real floating point, naming it.
        ValueError: If processes hold different values, naming the leaf, or accumulation is not
            the outermost transformation.

    Example:
        >>> tx = optax.chain(jdp.all_reduce(), optax.adamw(3e-4))
        >>> state = jdp.init_state({"w": jnp.ones(3)}, tx, jdp.make_mesh())
        >>> int(state.step), state.params["w"].sharding.is_fully_replicated
        (0, True)
    """
    make = params if callable(params) and jax.tree.leaves(params) == [params] else None
    params = jax.eval_shape(make) if make else agreed(params)  # not a model, a function
    check_params(params)
    placement = _plan(tx, params, mesh)
    splits = placement if placement is not None and placement.stage == 3 else None
    params = params if splits else logical(params)
    if make:
        params = _born(make, splits, mesh)
    if key is not None and not hasattr(key, "dtype"):
        raise TypeError(
            f"jdp.init_state got key={key!r}, which is no random key. Use jax.random.key({key!r})."
        )
    given = {"params": params, "key": key, "model_state": model_state}
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(given)):
        return _shapes(tx, mesh, given, splits)
    if jax.process_count() > 1:
        drawn = {"params": given.pop("params")} if make and splits else {}  # compared by `_born`
        given = broadcast_values(given) if broadcast else given
        same_everywhere(given, "initial state")
        given |= drawn
    if splits is not None:
        given["params"] = split_params(given["params"], splits, mesh)
    elif placement is not None:
        given["params"] = whole_params(given["params"], placement)
    placed = replicate(given, mesh)
    with jax.set_mesh(mesh), user_specs(placed["params"]):
        return jax.jit(functools.partial(_init, tx, _split(placed["params"])))(**placed)


def _plan(tx: optax.GradientTransformation, params: Any, mesh: Mesh) -> Placement | None:
    """The placement of the ZeRO stage; `None` if there is none."""
    with jax.set_mesh(mesh), user_specs(params):
        shapes = jax.eval_shape(lambda: logical(params))
        opt_state = jax.eval_shape(tx.init, shapes)
    check_master(shapes, opt_state)
    placement = find_placement(opt_state)
    _check_whole(placement, shapes, opt_state)
    if placement is not None and placement.stage and placement.count == 1:
        warnings.warn(
            f"{placement.name} over a single device along {placement.axes} saves nothing: all of "
            "it lies there. The result is the same as without.",
            stacklevel=3,
        )
    return placement


def _check_whole(placement: Placement | None, params: Any, opt_state: Any) -> None:
    """A ZeRO stage places all parameters, and nothing may come behind one that pads them."""
    if placement is None:
        return
    paths = [
        jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]
    ]
    if missing := [path for path in paths if path not in placement.paths]:
        raise ValueError(
            f"{placement.name} stands inside another transformation that hides the parameter "
            f"{missing[0]} from it (optax.partition or optax.masked): it could not place all of "
            "the state. Put the stage outermost: it works around both of them."
        )
    padded = [
        path for path, part in zip(placement.paths, placement.parts, strict=True) if part.padded
    ]
    if placement.stage == 3 and padded and not _ends_in_zero(opt_state):
        raise ValueError(
            f"A transformation stands behind {placement.name}, whose updates are split, and that "
            f"of {padded[0]} is padded: a mean or a norm by rows would count what means nothing. "
            f"Put it inside: {placement.name}(optax.chain(..., the transformation))."
        )


def _ends_in_zero(opt_state: Any) -> bool:
    """Whether a ZeRO stage is the last link of the chain, or what stands around it acts as one."""
    if isinstance(opt_state, ZeroState):
        return True
    if hasattr(opt_state, "inner_state"):
        return _ends_in_zero(opt_state.inner_state)
    return isinstance(opt_state, tuple) and bool(opt_state) and _ends_in_zero(opt_state[-1])


def _born(make: Callable[[], Any], placement: Placement | None, mesh: Mesh) -> Any:
    """Parameters made by a function where they will lie; no device makes more than its part."""
    if placement is None:
        return jax.jit(lambda: make(), out_shardings=NamedSharding(mesh, P()))()

    traced = jax.jit(lambda: make()).trace()
    _check_generator(str(traced.jaxpr), placement)
    if jax.process_count() > 1:  # afterwards no process has a whole one to compare
        text = np.frombuffer(traced.lower().as_text().encode(), np.uint8)
        same_everywhere({"the function that makes params": text}, "initial state")

    def stored() -> Any:
        leaves, treedef = jax.tree.flatten(make())
        pairs = zip(leaves, placement.parts, strict=True)
        return treedef.unflatten([store(leaf, part) for leaf, part in pairs])

    places = stored_places(jax.eval_shape(stored), placement, mesh)
    return jax.jit(stored, out_shardings=places)()


def _check_generator(program: str, placement: Placement) -> None:
    """Some generators draw other values where an array is split otherwise, jax-ml/jax#40232."""
    if found := re.search(r"key<u?rbg>", program):
        name = {"key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}[found[0]]
        warnings.warn(
            f"The parameters are drawn by JAX's generator {name!r} where {placement.name} splits "
            "them, and on GPU and TPU its values depend on how an array is split: the same seed "
            "gives others on another number of devices. Draw them from jax.random.key(seed, "
            "impl='threefry2x32'), or give init_state the arrays instead of a function.",
            stacklevel=4,
        )


def _shapes(
    tx: optax.GradientTransformation, mesh: Mesh, given: Any, placement: Placement | None
) -> TrainState:
    """The state as shapes with shardings, found out by compiling its making."""
    everywhere = NamedSharding(mesh, P())
    if placement is not None:
        given["params"] = split_params(given["params"], placement, mesh)

    def place(leaf: Any) -> jax.ShapeDtypeStruct:
        sharding = getattr(leaf, "sharding", None)
        if not (isinstance(sharding, NamedSharding) and sharding.mesh == mesh):
            sharding = everywhere
        return jax.ShapeDtypeStruct(jnp.shape(leaf), leaf.dtype, sharding=sharding)

    given = jax.tree.map(place, given)
    with jax.set_mesh(mesh), user_specs(given["params"]):
        making = jax.jit(functools.partial(_init, tx, _split(given["params"])))
        lowered = making.lower(**given)
        shardings = lowered.compile().output_shardings
    return jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding),
        lowered.out_info,
        shardings,
    )


Split = dict[str, tuple[tuple[int, ...], NamedSharding]]
"""Shape and placement of the parameters that are split over an axis of the user's, by path."""


def _split(params: Any) -> Split:
    return {
        jax.tree_util.keystr(path): (leaf.shape, leaf.sharding)
        for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]
        if not leaf.sharding.is_fully_replicated
    }


def _mirror(split: Split, path: Any, leaf: Any) -> Any:
    """Places a leaf of the optimizer state as the parameter that it belongs to.

    It belongs to the parameter whose path its own ends with, if it has the same shape (behind the
    replica axis, if it has one).
    """
    if isinstance(leaf, ZeroState):  # it has placed everything itself
        return leaf
    value, axes = (leaf.value, (leaf.axes,)) if is_per_replica(leaf) else (leaf, ())
    end = jax.tree_util.keystr(path)
    for name in sorted(filter(end.endswith, split), key=len, reverse=True):
        shape, sharding = split[name]
        if value.shape[len(axes) :] == shape:
            taken = leaf.axes if axes else ()  # those of the replicas may split it no further
            spec = P(*axes, *without(sharding.spec, taken))
            value = _lies(value, NamedSharding(sharding.mesh, spec))
            break
    return PerReplica(value, axes=leaf.axes, mesh=leaf.mesh) if axes else value


def _lies(x: jax.Array, place: NamedSharding) -> jax.Array:
    """The same, placed over Auto axes; what Explicit ones split is part of its type already."""
    auto = {
        name
        for name, kind in zip(place.mesh.axis_names, place.mesh.axis_types, strict=True)
        if kind == AxisType.Auto
    }
    if not auto:
        return x
    names = [entry if isinstance(entry, tuple) else (entry,) for entry in place.spec]
    kept = [tuple(name for name in entry if name in auto) for entry in names]
    spec = P(*(entry or None for entry in kept))
    return jax.lax.with_sharding_constraint(x, NamedSharding(place.mesh, spec))


def _init(
    tx: optax.GradientTransformation, split: Split, params: Any, key: Any, model_state: Any
) -> TrainState:
    opt_state = tx.init(params)
    check_outermost(opt_state)
    params = spread_params(params, opt_state)
    if split:
        params, opt_state = jax.tree_util.tree_map_with_path(
            functools.partial(_mirror, split),
            (params, opt_state),
            is_leaf=lambda x: is_per_replica(x) or isinstance(x, ZeroState),
        )
    state = TrainState(jnp.zeros((), jnp.int32), params, opt_state, key, model_state)
    return jax.tree.map(_own, state)


def _own(x: jax.Array) -> jax.Array:
    """A copy, so that the step may overwrite it, of a dtype that no later step promotes."""
    x = x if hasattr(x, "dtype") else jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return jnp.copy(x)
    return jnp.array(x, dtype=x.dtype, copy=True)


def flush(state: TrainState, tx: optax.GradientTransformation) -> TrainState:
    """Applies what an incomplete window of `jdp.multi_steps` has gathered, at the end of a run.

    Args:
        state: The state; it stays valid.
        tx: The `multi_steps` transformation.

    Returns:
        The state after the update; the same values if the window was empty.

    Raises:
        ValueError: If the state was not made for `multi_steps`.

    Example:
        >>> tx = jdp.multi_steps(optax.chain(jdp.all_reduce(), optax.sgd(1.0)), every=3)
        >>> mesh = jdp.make_mesh()
        >>> step = jdp.train_step(lambda p, batch: jnp.mean(batch * p["w"]), tx, mesh)
        >>> state, _ = step(jdp.init_state({"w": jnp.zeros(())}, tx, mesh), jnp.arange(8.0))
        >>> float(state.params["w"]), float(jdp.flush(state, tx).params["w"])
        (0.0, -3.5)
    """
    if not isinstance(state.opt_state, MultiStepsState):
        raise ValueError(
            "jdp.flush was given a state without an accumulation window: its transformation is not "
            "jdp.multi_steps, so nothing is waiting. Leave the call out."
        )

    return _flush(tx, state)


@functools.partial(jax.jit, static_argnums=0)
def _flush(tx: optax.GradientTransformation, state: TrainState) -> TrainState:
    nothing: Any = None  # by contract: no new gradients, the window ends here
    updates, opt_state = tx.update(nothing, state.opt_state, state.params)
    return state._replace(params=optax.apply_updates(state.params, updates), opt_state=opt_state)


def check_outermost(opt_state: Any) -> None:
    """Refuses transformations around `multi_steps`: they would run on every call, on zeros.

    And around local steps, see `jdp.local_state`.
    """
    check_local_outermost(opt_state)
    found = find_nodes(opt_state, (LossScaleState, CompressedState))
    outside = [node for node in found if isinstance(node, CompressedState)]
    if len(found) > len(outside) and any(jax.tree.leaves(node.residual) for node in outside):
        raise ValueError(
            "jdp.dynamic_loss_scale stands behind a compressor with error feedback, whose "
            "residuals are then in units of a scale that changes: what waits would be sent too "
            "large or too small. Put it around: "
            "jdp.dynamic_loss_scale(optax.chain(jdp.top_k(), ...))."
        )
    outermost = isinstance(opt_state, MultiStepsState)
    if find_nodes(opt_state.inner_state if outermost else opt_state, MultiStepsState):
        raise ValueError(
            "jdp.multi_steps stands inside another transformation, which would run on every call, "
            "also on those that only accumulate: weight decay would act k times, schedules run k "
            "times too fast. Make it the outermost: jdp.multi_steps(optax.chain(...), every=k)."
        )
