"""ZeRO: the same arithmetic, with optimizer state, gradients and parameters split over devices.

    PerReplica [N, *shape]  --reduce-scatter-->  gradient, split   (already reduced: only sliced)
    parameter, whole        --slice----------->  parameter, split
                              inner.update on global arrays: it sees whole, logical values, and
                              the compiler gives each device its part of the work
    update, split           --all-gather------>  update, whole     (stage 3: stays split)

| stage | optimizer state | gradients | parameters | sent, of P parameter bytes |
| --- | --- | --- | --- | --- |
| 1 | split | whole | whole | 2 P, as all-reduce |
| 2 | split | split | whole | 2 P, or (k + 1) P with k microbatches |
| 3 | split | split | split | 3 k P, or 2 k P without gathering again |

(each times (N-1)/N). Because `inner` works on global arrays, a global norm, a trust ratio or a
factored moment is that of the whole parameter. What is split where is decided in `jdp.split`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jdp import collectives
from jdp.mesh import AnyMesh, AxisNames, ambient_mesh, axis_size, data_axes, is_whole
from jdp.padded import is_padded, map_logical, stored_array, view
from jdp.replica import (
    is_gradient,
    is_per_replica,
    is_reduced,
    take_per_replica,
    take_reduced,
    widen,
)
from jdp.split import (
    MIN_SIZE,
    Part,
    Placement,
    ZeroState,
    abstract,
    check_axes,
    check_count,
    choose_part,
    constrain,
    explicit_part,
    find_placement,
    full_spec,
    is_explicit,
    mark,
    on_user_axes,
    spec_of_user,
    store,
)


class _Stage(NamedTuple):
    """What the user asked for; with the parameters it makes a `Placement`."""

    number: int
    axis: AxisNames | None
    wire_dtype: Any
    min_size: int
    reduce: str | None = "step"
    regather: bool = False


def zero1(
    inner: optax.GradientTransformation,
    axis: AxisNames | None = None,
    *,
    wire_dtype: Any = None,
    min_size: int = MIN_SIZE,
) -> optax.GradientTransformationExtraArgs:
    """Splits the optimizer state over the devices; gradients are reduce-scattered.

    With N devices, device i keeps 1/N of every moment, updates 1/N of every parameter, and the
    updates are gathered:

        g = (1/N) * sum_i g_i,    updates, state = inner.update(g, state, params)

    Guarantees:
        - `inner` sees whole gradients and parameters of their logical shapes, whatever it
          computes: any Optax transformation is exact, norms and clips included.
        - Each device sends 2(N-1)/N of the gradient's bytes, as an all-reduce does, when update
          and gradient have one dtype. Updates travel in the dtype of the parameter.
        - Gradients that come in already reduced are sliced, and nothing is sent for them.
        - Optimizer state is born split, and lies by its own shape, see `jdp.holdings`.

    Args:
        inner: A transformation of reduced gradients, such as
            `optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))`.
        axis: Axis, or axes, to split over; `None` takes all data axes. One of two ("device" on a
            ("node", "device") mesh) splits within a node and keeps a copy in each (HSDP).
        wire_dtype: float32, bfloat16 or float16, for gradients on their way; added up in float32.
            `None` sends them as they are.
        min_size: Arrays of fewer elements stay whole on every device.

    Returns:
        A transformation whose init needs a mesh (see `jdp.init_state`) and whose update takes
        `PerReplica` or reduced gradients.

    Raises:
        ValueError: If there is no mesh, the state is of another stage, or stages are nested.

    Example:
        >>> tx, mesh = jdp.zero1(optax.adam(0.1)), jdp.make_mesh()
        >>> state = jdp.init_state({"w": jnp.ones((64, 8))}, tx, mesh)
        >>> state.opt_state.inner_state[0].mu["w"].sharding.shard_shape((64, 8))
        (8, 8)

    References:
        Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models,
        2020. Xu et al., Automatic Cross-Replica Sharding of Weight Update in Data-Parallel
        Training, 2020.
    """
    return _zero(inner, _Stage(1, axis, wire_dtype, min_size))


def zero2(
    inner: optax.GradientTransformation,
    axis: AxisNames | None = None,
    *,
    reduce: str | None = None,
    wire_dtype: Any = None,
    min_size: int = MIN_SIZE,
) -> optax.GradientTransformationExtraArgs:
    """Splits gradients as well: each is reduced where it arises, and only 1/N of it is kept.

    As `zero1`, and with k microbatches a device, P parameters in float32:

    | reduce | accumulator of a device | each device sends |
    | --- | --- | --- |
    | "microbatch" | 4 P / N bytes | (k + 1)(N-1)/N * 4 P: one reduce-scatter a microbatch |
    | "step" | 4 P bytes | 2(N-1)/N * 4 P: one reduce-scatter at the end, as `zero1` |
    | `None` | "step" where it fits, see below | |

    `None` takes "step", which sends least, if parameters, a full accumulator and the split state
    fill at most half of the device's memory, and "microbatch" where they fill more or where the
    device does not tell its memory (CPU). With one microbatch both send the same.

    Guarantees:
        - Those of `zero1`; gradients are added up in float32.

    Args:
        inner: See `zero1`.
        axis: See `zero1`.
        reduce: "microbatch", "step" or `None`.
        wire_dtype: See `zero1`.
        min_size: See `zero1`.

    Returns:
        A transformation, see `zero1`.

    Raises:
        ValueError: See `zero1`.

    Example:
        >>> tx, mesh = jdp.zero2(optax.sgd(1.0)), jdp.make_mesh()
        >>> step = jdp.train_step(lambda p, batch: jnp.mean(batch @ p["w"]), tx, mesh, microbatch=1)
        >>> state, _ = step(jdp.init_state({"w": jnp.ones(512)}, tx, mesh), jnp.ones((16, 512)))
        >>> float(state.params["w"][0])
        0.0

    References:
        Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models,
        2020.
    """
    if reduce not in ("microbatch", "step", None):
        raise ValueError(
            f'jdp.zero2(reduce={reduce!r}): gradients are reduced after each "microbatch", which '
            'saves memory, or once a "step", which sends least; None picks by the device\'s memory.'
        )
    return _zero(inner, _Stage(2, axis, wire_dtype, min_size, reduce))


def zero3(
    inner: optax.GradientTransformation,
    axis: AxisNames | None = None,
    *,
    regather: bool = True,
    wire_dtype: Any = None,
    min_size: int = MIN_SIZE,
) -> optax.GradientTransformationExtraArgs:
    """Splits parameters too (FSDP): gathered just before use, and freed after.

    As `zero2` with "microbatch", and device i keeps 1/N of every parameter. The loss function
    stays as it is: it is given whole parameters, gathered leaf by leaf. One line,
    `layer = jdp.gather_params(layer)`, in the body of a scan over layers gathers a layer at a
    time instead.

    Guarantees:
        - Those of `zero1`. Parameters, too, are born split.
        - With k microbatches each device sends 3 k (N-1)/N of the parameters' bytes, or 2 k
          without `regather`, in the compute dtype (see `jdp.compute_in`).
        - With `regather` no gathered parameter is kept for the backward pass.

    Args:
        inner: See `zero1`.
        axis: See `zero1`.
        regather: Gather parameters once more in the backward pass instead of keeping them.
        wire_dtype: Dtype of gradients on their way, see `zero1`.
        min_size: See `zero1`.

    Returns:
        A transformation, see `zero1`; its updates are split like the parameters.

    Raises:
        ValueError: See `zero1`.

    Example:
        >>> tx, mesh = jdp.zero3(optax.adam(0.1)), jdp.make_mesh()
        >>> state = jdp.init_state({"w": jnp.ones((64, 8))}, tx, mesh)
        >>> state.params["w"].sharding.shard_shape((64, 8))
        (8, 8)

    References:
        Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models,
        2020. Zhao et al., PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel, 2023.
    """
    return _zero(inner, _Stage(3, axis, wire_dtype, min_size, "microbatch", regather))


def _zero(
    inner: optax.GradientTransformation, stage: _Stage
) -> optax.GradientTransformationExtraArgs:
    _check_arguments(inner, stage)
    inner = optax.with_extra_args_support(inner)

    def init(params: Any) -> Any:
        placement, mesh = _plan(params, stage)

        def compute(params: Any) -> Any:
            return _store_state(inner.init(map_logical(view, params)), placement)

        inner_state = _globally(compute, placement, mesh)(params)
        if find_placement(inner_state) is not None:
            find_placement((ZeroState(inner_state, placement), inner_state))  # says so
        return ZeroState(inner_state, placement)

    def run(updates: Any, state: Any, params: Any, extra: Any, finish: Any) -> tuple[Any, Any]:
        placement = _check_state(state, stage)
        grads, mesh = _reduce(updates, params, placement)
        shards = None if params is None else _split(params, placement, mesh)

        def compute(grads: Any, inner_state: Any, shards: Any, arrays: Any) -> Any:
            grads, state, whole = map_logical(view, (grads, inner_state, shards))
            new, state = inner.update(grads, state, whole, **extra | arrays)
            new = finish(whole, new)
            return _store(new, placement), _store_state(state, placement)

        arrays = {name: x for name, x in extra.items() if isinstance(x, jax.Array)}
        on_all = _globally(compute, placement, mesh)
        new, inner_state = on_all(grads, state.inner_state, shards, arrays)
        new = _gather(new, placement, mesh) if placement.stage < 3 else new
        return new, ZeroState(inner_state, placement)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        new, state = run(updates, state, params, extra, functools.partial(_as_sent, stage.number))
        return _as_updates(new, params) if stage.number < 3 else new, state

    def apply(updates: Any, state: Any, params: Any, **extra: Any) -> tuple[Any, Any]:
        return run(updates, state, params, extra, optax.apply_updates)

    return Applying(init, update, apply)


def _check_arguments(inner: Any, stage: _Stage) -> None:
    name = f"jdp.zero{stage.number}"
    if not hasattr(inner, "init") or not hasattr(inner, "update"):
        raise TypeError(
            f"{name} was given a {type(inner).__name__} where an optax transformation belongs, "
            f"such as {name}(optax.adamw(3e-4))."
        )
    if stage.axis is not None and not stage.axis:
        raise ValueError(
            f"{name}(axis={stage.axis!r}) would split over nothing. Name the axes, or leave axis "
            "out to split over all data axes."
        )
    collectives.check_wire_dtype(stage.wire_dtype)
    if not is_whole(stage.min_size) or stage.min_size < 0:
        raise ValueError(
            f"{name}(min_size={stage.min_size!r}) must be a whole number of "
            "elements; arrays of fewer stay whole on every device, and 0 splits all."
        )


class Applying(optax.GradientTransformationExtraArgs):
    """An optax transformation that can also give the new parameters themselves.

    `apply(updates, state, params, **extra) -> (params, state)` does what `update` and
    `optax.apply_updates` do one after the other. Where parameters are whole and updates are not,
    it gathers the new parameters straight into their place: a whole update is never made.
    """

    apply: Callable[..., tuple[Any, Any]]

    def __new__(cls, init: Any, update: Any, apply: Any) -> "Applying":
        """As of optax, and `apply`."""
        self = super().__new__(cls, init, update)
        self.apply = apply
        return self


def _plan(params: Any, stage: _Stage) -> tuple[Placement, AnyMesh]:
    """Decides where everything lies."""
    name = f"jdp.zero{stage.number}"
    mesh = ambient_mesh(params)
    if mesh is None:
        raise ValueError(
            f"{name} splits its state over a mesh, but the parameters lie on none. Use "
            "jdp.init_state, place the parameters with jdp.replicate(params, mesh) first, or call "
            "init within `with jax.set_mesh(mesh):`."
        )
    axes = data_axes(mesh, stage.axis)
    count = axis_size(mesh, axes)
    leaves = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_padded)[0]
    parts = tuple(
        choose_part(
            leaf.shape,
            spec_of_user(path, leaf, axes),
            count,
            stage=stage.number,
            min_size=stage.min_size,
        )
        for path, leaf in leaves
    )
    placement = Placement(
        stage=stage.number,
        mesh=abstract(mesh),
        axes=axes,
        paths=tuple(jax.tree_util.keystr(path) for path, _ in leaves),
        shapes=tuple(tuple(leaf.shape) for _, leaf in leaves),
        parts=parts,
        min_size=stage.min_size,
        in_backward=stage.number >= 2 and _in_backward(stage, leaves, count, mesh),
        regather=stage.regather,
        wire_dtype=stage.wire_dtype,
    )
    return placement, mesh


def _in_backward(stage: _Stage, leaves: Any, count: int, mesh: AnyMesh) -> bool:
    """Whether gradients are reduced in the backward pass: `zero2`'s default is decided here."""
    if stage.reduce is not None:
        return stage.reduce == "microbatch"
    limit = _memory_of_a_device(mesh)
    size = sum(leaf.size for _, leaf in leaves)
    params = sum(leaf.size * leaf.dtype.itemsize for _, leaf in leaves)
    # a full float32 accumulator; state as large as Adam's with a float32 copy of the parameters
    needed = params + 4 * size + 12 * size / count
    return limit is None or needed > limit / 2


def _memory_of_a_device(mesh: AnyMesh) -> int | None:
    """Bytes of memory, if a device tells."""
    # while the state is made the mesh is abstract; its devices are then those of this process
    device = mesh.devices.flat[0] if isinstance(mesh, Mesh) else jax.local_devices()[0]
    try:
        return (device.memory_stats() or {}).get("bytes_limit")
    except (RuntimeError, AttributeError, NotImplementedError):
        return None  # a device that is not there, of a topology compiled for


def _check_state(state: Any, stage: _Stage) -> Placement:
    name = f"jdp.zero{stage.number}"
    if not isinstance(state, ZeroState):
        raise ValueError(
            f"{name} was given a state that it did not make, a {type(state).__name__}. Make one "
            "with jdp.init_state(params, tx, mesh) for this tx, and move a restored state into "
            "its place with jdp.restage(state, like)."
        )
    placement = state.placement
    if placement.stage != stage.number:
        raise ValueError(
            f"{name} was given a state of {placement.name}: it lies elsewhere. Convert it with "
            "jdp.restage(state, like), where like is jdp.init_state(params, tx, mesh) for this tx."
        )
    return placement


def _globally(compute: Callable[..., Any], placement: Placement, mesh: AnyMesh) -> Any:
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


def _store(updates: Any, placement: Placement) -> Any:
    """Logical arrays, one for each parameter, as they are stored."""
    leaves, treedef = jax.tree.flatten(updates, is_leaf=is_padded)
    check_count(leaves, placement)
    pairs = zip(leaves, placement.parts, strict=True)
    return treedef.unflatten([store(leaf, part) for leaf, part in pairs])


def _store_state(state: Any, placement: Placement) -> Any:
    """Logical arrays of an optimizer state as they are stored."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: store(leaf, placement.part_of(path, leaf.shape)) if leaf.shape else leaf,
        jax.tree.map(jnp.asarray, state),
    )


def _split(params: Any, placement: Placement, mesh: AnyMesh) -> Any:
    """Whole parameters, or reduced gradients, as they are stored when split; nothing is sent."""
    leaves, treedef = jax.tree.flatten(params, is_leaf=is_padded)
    check_count(leaves, placement)
    stored = [
        constrain(leaf if is_padded(leaf) else store(leaf, part), part, mesh, placement.axes)
        for leaf, part in zip(leaves, placement.parts, strict=True)
    ]
    return treedef.unflatten(stored)


def _reduce(updates: Any, params: Any, placement: Placement) -> tuple[Any, AnyMesh]:
    """Gradients split over the devices, in float32 or wider, and the mesh they lie on."""
    leaves = jax.tree.leaves(updates, is_leaf=is_gradient)
    if any(map(is_reduced, leaves)):
        updates = take_reduced(updates)
    if not any(map(is_per_replica, leaves)):
        mesh = ambient_mesh(updates) or ambient_mesh(params) or placement.mesh
        return _split(widen(updates), placement, mesh), mesh
    values, axes, mesh = take_per_replica(updates, placement.name)
    check_axes(placement, axes)
    values, treedef = jax.tree.flatten(values)
    check_count(values, placement)

    def local(values: list[jax.Array]) -> list[jax.Array]:
        return reduce_parts([value[0] for value in values], placement, axes)

    run = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=P(axes),
        out_specs=[part.over(placement.axes) for part in placement.parts],
        axis_names=set(axes),
    )
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


def _as_sent(stage: int, params: Any, updates: Any) -> Any:
    """Updates as they are sent: in the parameter's dtype.

    For a narrow dtype it is the new parameter that is sent, since its difference from the old one
    may not be a number of that dtype; see `_as_updates`.
    """
    if params is None:
        return updates

    def one(update: jax.Array, param: jax.Array) -> jax.Array:
        if param.dtype.itemsize >= 4 or stage == 3:
            return update.astype(jnp.promote_types(param.dtype, jnp.float32))
        return (param + update).astype(param.dtype)

    return jax.tree.map(one, updates, params)


def _as_updates(sent: Any, params: Any) -> Any:
    """Whole updates from what was sent; float32 holds the difference of two narrow numbers."""
    if params is None:
        return sent

    def one(new: jax.Array, old: jax.Array) -> jax.Array:
        narrow = old.dtype.itemsize < 4
        return new.astype(jnp.float32) - old.astype(jnp.float32) if narrow else new

    return jax.tree.map(one, sent, params)


def _gather(stored: Any, placement: Placement, mesh: AnyMesh) -> Any:
    """Whole arrays, one for each parameter, on every device."""
    leaves, treedef = jax.tree.flatten(stored, is_leaf=is_padded)

    def local(leaves: list[jax.Array]) -> list[jax.Array]:
        return [
            leaf if part.dim is None else join_part(leaf, part, placement.axes)
            for leaf, part in zip(leaves, placement.parts, strict=True)
        ]

    run = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=([part.over(placement.axes) for part in placement.parts],),
        out_specs=P(),
        axis_names=set(placement.axes),
    )
    return treedef.unflatten(run([stored_array(leaf) for leaf in leaves]))


def join_part(
    part_of_it: jax.Array, part: Part, axes: tuple[str, ...], to: str = "invarying"
) -> jax.Array:
    """On one device: from its stored part to the whole, logical array."""
    dim = part.dim or 0
    join = functools.partial(collectives.join, axis_name=axes, dim=dim, to=to)
    whole = on_user_axes(join, part.spec)(part_of_it)
    return jax.lax.slice_in_dim(whole, 0, part.size, axis=dim) if part.padded else whole
