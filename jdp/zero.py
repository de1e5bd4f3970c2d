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

(each times (N-1)/N). `inner` works on global arrays: a norm, a trust ratio or a factored moment is
that of the whole parameter. What is split where is decided in `jdp.split`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from jdp import collectives
from jdp.mesh import (
    AnyMesh,
    AxisNames,
    axis_size,
    data_axes,
    found_mesh,
    memory_of_a_device,
)
from jdp.padded import is_padded, map_logical, view
from jdp.parts import (
    as_sent,
    as_updates,
    gather_whole,
    lie_whole,
    on_global_arrays,
    reduce_to_parts,
    split_up,
    store_state,
    store_updates,
)
from jdp.split import (
    MIN_SIZE,
    Placement,
    ZeroState,
    abstract,
    check_min_size,
    choose_part,
    find_placement,
    spec_of_user,
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
        wire_dtype: Of gradients on their way, also of 8 bits, see `jdp.all_reduce`; added up in
            float32. `None` sends them as they are. For error feedback put the reduction before:
            `optax.chain(jdp.all_reduce(wire_dtype=jnp.int8, error_feedback=True), jdp.zero1(...))`.
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
    | "backward" | 4 P bytes | the same, in the backward pass of the last microbatch |
    | "in order" | 4 P bytes for each doubling of k | the same, see `jdp.all_reduce_in_order` |
    | `None` | "step" where it fits, see below | |

    `None` takes "step", which sends least, if parameters, a full accumulator and the split state
    fill at most half of the device's memory, and "microbatch" where they fill more or where the
    device does not tell its memory (CPU). With one microbatch both send the same.

    Guarantees:
        - Those of `zero1`; gradients are added up in float32.

    Args:
        inner: See `zero1`.
        axis: See `zero1`.
        reduce: "microbatch", "step", "backward", "in order" or `None`. "backward" reduces each
            gradient as soon as its sum is there, under the rest of the backward pass, also in scans
            over layers (`jdp.layerwise`); the program holds the loss function twice.
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
    if reduce not in ("microbatch", "step", "backward", "in order", None):
        raise ValueError(
            f'jdp.zero2(reduce={reduce!r}): gradients are reduced after each "microbatch", which '
            'saves memory, or once a "step", which sends least, also in its last "backward" pass, '
            'or "in order", for the same bits on any number of devices; '
            "None picks by the device's memory."
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
            return store_state(inner.init(map_logical(view, params)), placement)

        state = ZeroState(on_global_arrays(compute, placement, mesh)(params), placement)
        find_placement(state)  # refuses nested stages
        return state

    def run(updates: Any, state: Any, params: Any, extra: Any, finish: Any) -> tuple[Any, Any]:
        placement = _check_state(state, stage)
        grads, mesh = reduce_to_parts(updates, params, placement)
        if placement.stage < 3 and params is not None:  # or a loop over steps might carry parts
            params = lie_whole(params, placement, mesh)
        shards = None if params is None else split_up(params, placement, mesh)

        def compute(grads: Any, inner_state: Any, shards: Any, arrays: Any) -> Any:
            grads, state, whole = map_logical(view, (grads, inner_state, shards))
            new, state = inner.update(grads, state, whole, **extra | arrays)
            new = finish(whole, new)
            return store_updates(new, placement), store_state(state, placement)

        arrays = {name: x for name, x in extra.items() if isinstance(x, jax.Array)}
        on_all = on_global_arrays(compute, placement, mesh)
        new, inner_state = on_all(grads, state.inner_state, shards, arrays)
        new = gather_whole(new, placement, mesh) if placement.stage < 3 else new
        return new, ZeroState(inner_state, placement)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        new, state = run(updates, state, params, extra, functools.partial(as_sent, stage.number))
        return as_updates(new, params) if stage.number < 3 else new, state

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
    check_min_size(name, stage.min_size)


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
    mesh = found_mesh(params, f"{name} splits its state over a mesh")
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
        once=stage.reduce == "backward",
        ordered=stage.reduce == "in order",
        regather=stage.regather,
        wire_dtype=stage.wire_dtype,
    )
    return placement, mesh


def _in_backward(stage: _Stage, leaves: Any, count: int, mesh: AnyMesh) -> bool:
    """Whether gradients are reduced in the backward pass: `zero2`'s default is decided here."""
    if stage.reduce is not None:
        return stage.reduce != "step"
    limit = memory_of_a_device(mesh)
    size = sum(leaf.size for _, leaf in leaves)
    params = sum(leaf.size * leaf.dtype.itemsize for _, leaf in leaves)
    # a full float32 accumulator; state as large as Adam's with a float32 copy of the parameters
    needed = params + 4 * size + 12 * size / count
    return limit is None or needed > limit / 2


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
