"""Local steps: replicas train apart for a while, and agree from time to time.

    every call     params_i, state_i = inner(g_i, state_i, params_i)    row i on replica i; silent
    one call in H  and then all replicas take the same parameters:

        local_sgd      params = mean_i params_i
        diloco         delta  = mean_i (anchor - params_i)              the outer gradient
                       anchor = anchor + outer(delta, outer_state, anchor)
                       params = anchor

In: per-replica gradients, taken at parameters that carry the replica axis themselves (the leaves
of `state.params` are `PerReplica`, which `jdp.init_state` arranges). Out: the next such
parameters. How differences are sent is said by another transformation, `reduce`; what the
optimizers compute is theirs.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jdp.fragments import choose, deal_out
from jdp.local_state import (
    LocalState,
    check_inside,
    check_numbers,
    check_state,
    check_transformation,
    mesh_of,
)
from jdp.local_step import Plan, agree, inner_step, over_others, own_gradients
from jdp.mesh import AxisNames, data_axes, names_of
from jdp.reduce import all_reduce
from jdp.replica import is_per_replica, map_per_replica, widen
from jdp.rows import agreed, rows_like, spread
from jdp.zero import Applying


def local_sgd(
    inner: optax.GradientTransformation,
    every: int,
    *,
    start: int = 0,
    axis: AxisNames | None = None,
    reduce: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Every replica takes steps of its own; every H-th call parameters are averaged.

    With g_i the gradient that `jdp.value_and_grad` takes at params_i on replica i's examples,

        params_i, state_i = inner(g_i, state_i, params_i)                in each call
        params_i = mean_j params_j                                       in every H-th

    For the first `start` calls (post-local SGD) g_i is replaced by mean_j g_j: replicas stay
    equal, and the H are counted from there.

    Guarantees:
        - `inner` is run for each replica alone: any Optax transformation does what it does on one
          device; a clip bounds the norm of one replica's gradient, a schedule counts local steps.
        - In a call that does not agree, nothing is sent but the scalars of loss and weight.
        - After one that does, all replicas hold the same bits.
        - `every=1` is synchronous training: `optax.chain(reduce, inner)`, nothing else.
        - g_i is scaled by the replica's part of the batch's weight, N w_i / W: to first order in
          the step size the mean of the parameters follows the gradient of the global loss.

    | | each device sends in every H-th call | and keeps besides `inner`'s state |
    | --- | --- | --- |
    | `reduce=None` | 2(N-1)/N of the parameters' bytes | nothing |
    | `reduce=...` | what it sends | the last agreed parameters, float32 |

    | edge | what happens |
    | --- | --- |
    | inf or NaN in one replica | reaches all when they agree; `jdp.skip_nonfinite` in `inner` \
skips that replica's step, around `outer` the whole agreement |
    | a replica without examples of any weight | its gradient is 0; it is averaged like the others |
    | `reduce` with error feedback, and `start` | what it still holds at `start` is dropped |
    | an optimizer with parameters of its own (`schedule_free`) | its copies are not averaged |
    | the run ends between agreements | `jdp.agreed` averages what there is |
    | another number of devices | `jdp.restage` gives each the mean |
    | parameters narrower than float32 | averaged in float32, rounded once |

    The optimizer states are not averaged. `jdp.agreed(state.params)` are the parameters to be
    evaluated or saved for others; `jdp.eval_step` takes them so by itself. Save a run with its
    rows as they are, and it goes on to the bit.

    Args:
        inner: A transformation of plain gradients, such as
            `optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))`.
        every: H, the number of calls from one agreement to the next, at least 1.
        start: Synchronous calls before the first local one.
        axis: Axes along which replicas differ; `None` takes all data axes. Gradients are averaged
            over the other data axes in each call: "node" on a ("node", "device") mesh makes each
            node one replica.
        reduce: A transformation from `PerReplica` to plain values, such as
            `jdp.all_reduce(wire_dtype=jnp.bfloat16)`, for the difference from the last agreed
            parameters (and for gradients before `start`); `None` averages exactly.

    Returns:
        A transformation that makes `jdp.init_state` give each replica its own parameters. It is
        the outermost. `jdp.train_step` sets the parameters that it gives; its `update` gives
        differences, which `optax.apply_updates` adds up to rounding.

    Raises:
        ValueError: If a number cannot be meant, a reduction or a ZeRO stage stands inside, or
            parameters do not carry the replica axis.
        TypeError: If what should be a transformation is none.

    Example:
        >>> tx, mesh = jdp.local_sgd(optax.sgd(1.0), every=2), jdp.make_mesh()
        >>> step = jdp.train_step(lambda p, x: jnp.mean(x * p["w"]), tx, mesh)
        >>> state, _ = step(jdp.init_state({"w": jnp.zeros(())}, tx, mesh), jnp.arange(8.0))
        >>> state.params["w"].value
        Array([ 0., -1., -2., -3., -4., -5., -6., -7.], dtype=float32)
        >>> state, _ = step(state, jnp.zeros(8))
        >>> state.params["w"].value[:2], jdp.agreed(state.params)["w"]
        (Array([-3.5, -3.5], dtype=float32), Array(-3.5, dtype=float32))

    References:
        Stich, Local SGD Converges Fast and Communicates Little, 2019. Lin et al., Don't Use Large
        Mini-Batches, Use Local SGD, 2020 (post-local SGD).
    """
    outer = None if reduce is None else optax.sgd(1.0)
    return _local_steps(Plan("jdp.local_sgd", inner, outer, every, start, axis, reduce, 1))


def diloco(
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation,
    every: int,
    *,
    start: int = 0,
    axis: AxisNames | None = None,
    reduce: optax.GradientTransformation | None = None,
    fragments: int = 1,
) -> optax.GradientTransformationExtraArgs:
    """Local steps, whose sum is every H-th call a gradient for a second optimizer.

    With the inner steps of `local_sgd`, in every H-th call

        delta  = mean_i (anchor - params_i)                              by `reduce`
        anchor = anchor + outer(delta, outer_state, anchor)
        params_i = anchor

    where the anchor is what replicas agreed on last, rounded to the parameters' dtype on their
    way to them. With `fragments` = P (Streaming DiLoCo) parameter leaves are dealt out to P
    fragments of about equal bytes, and fragment p does so in the calls c = 1, 2, ... with
    (c + p H // P) mod H = 0, never two in one call.

    Guarantees:
        - Those of `local_sgd`; inner clips are per replica, the outer one sees mean differences,
          those of one fragment.
        - The anchor is the same bits on every device, and what replicas hold after agreeing.
        - `every=1` is the synchronous `optax.chain(reduce, inner, optax.scale(-1.0), outer)`: the
          outer gradient is what `inner` subtracts from the parameters.
        - With P fragments a call sends at most the largest of them.

    Each device sends what `reduce` does for all parameters in every H calls, and keeps the anchor
    and the outer state besides: 8 bytes a parameter with momentum. `jdp.zero1(outer)` splits the
    outer state over the devices; without `reduce` it sends no more then (a reduce-scatter and an
    all-gather).

    Args:
        inner: See `local_sgd`; AdamW in the papers.
        outer: An optimizer of the outer gradient; `optax.sgd(0.7, momentum=0.9, nesterov=True)`
            in the papers.
        every: H, see `local_sgd`; 30 to 500 in the papers.
        start: Synchronous calls, without the outer optimizer, before the first local one. The
            papers' runs start from a model that was trained so.
        axis: See `local_sgd`.
        reduce: See `local_sgd`. One that keeps something for each parameter, such as error
            feedback, keeps it for each fragment.
        fragments: P, at most H and the number of parameter leaves. A leaf is not cut: layers
            stacked for a `jax.lax.scan` are one.

    Returns:
        A transformation, see `local_sgd`.

    Raises:
        ValueError: See `local_sgd`; or if there are too many fragments.
        TypeError: See `local_sgd`.

    Example:
        >>> outer = optax.sgd(0.5)
        >>> tx, mesh = jdp.diloco(optax.sgd(1.0), outer, every=2), jdp.make_mesh()
        >>> step = jdp.train_step(lambda p, x: jnp.mean(x * p["w"]), tx, mesh)
        >>> state, _ = step(jdp.init_state({"w": jnp.zeros(())}, tx, mesh), jnp.arange(8.0))
        >>> state, _ = step(state, jnp.arange(8.0))
        >>> jdp.agreed(state.params)["w"], state.opt_state.anchor["w"]
        (Array(-3.5, dtype=float32), Array(-3.5, dtype=float32))

    References:
        Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models, 2023.
        Douillard et al., Streaming DiLoCo with Overlapping Communication, 2025.
    """
    check_transformation(outer, "outer", "jdp.diloco")
    return _local_steps(Plan("jdp.diloco", inner, outer, every, start, axis, reduce, fragments))


def _local_steps(plan: Plan) -> optax.GradientTransformationExtraArgs:
    check_numbers(plan.name, plan.every, plan.start, plan.fragments)
    check_transformation(plan.inner, "inner", plan.name)
    if plan.reduce is not None:
        check_transformation(plan.reduce, "reduce", plan.name)
    plan = plan._replace(reduce=plan.reduce or all_reduce(), plain=plan.reduce is None)
    if plan.every == 1 and plan.start and plan.name == "jdp.diloco":
        raise ValueError(
            f"jdp.diloco got start={plan.start} and every=1, with which all calls are synchronous "
            "and the outer optimizer works in each. Leave start out, or use a larger `every`."
        )
    if plan.every == 1:
        outer = () if plan.name == "jdp.local_sgd" else (optax.scale(-1.0), plan.outer)
        others = () if plan.axis is None else (_over_others(plan.axis),)
        return optax.with_extra_args_support(optax.chain(*others, plan.reduce, plan.inner, *outer))
    support = optax.with_extra_args_support
    plan = plan._replace(inner=support(plan.inner), outer=plan.outer and support(plan.outer))

    def apply(updates: Any, state: Any, params: Any, **extra: Any) -> tuple[Any, LocalState]:
        check_state(plan.name, state, params)
        if not jax.tree.leaves(params):
            return params, state
        grads, mesh, state = own_gradients(plan, updates, state)
        values = map_per_replica(lambda leaf: leaf.value, params)
        values, state = inner_step(plan, grads, state, values, mesh, extra)
        values, state = agree(plan, values, state, mesh, extra)
        return rows_like(params, values), state

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        new, state = apply(updates, state, params, **extra)
        return jax.tree.map(lambda n, old: n - old, new, params), state

    return Applying(functools.partial(_init, plan), update, apply)


def _over_others(axis: AxisNames) -> optax.GradientTransformation:
    """Averages over the axes that are not named, so that `reduce` meets what it does with H > 1."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        leaves = jax.tree.leaves(updates, is_leaf=is_per_replica)
        given = leaves[0].axes if leaves else ()
        return over_others(updates, given, names_of(axis)), state

    def init(params: Any) -> optax.EmptyState:
        del params
        return optax.EmptyState()

    return optax.GradientTransformation(init, update)


def _init(plan: Plan, params: Any) -> LocalState:
    params = agreed(params)
    mesh = mesh_of(params, plan.name)
    axes = data_axes(mesh, plan.axis)
    inner_state = plan.inner.init(params)
    check_inside(plan.name, "inner", inner_state)
    like = params if plan.outer is None else widen(params)
    owners = deal_out(like, plan.fragments, plan.name)
    parts = [choose(like, owners, p) for p in range(plan.fragments)]
    outer_states = () if plan.outer is None else tuple(map(plan.outer.init, parts))
    check_inside(plan.name, "outer", outer_states, plan.fragments)
    return LocalState(
        calls=jnp.zeros((), jnp.int32),
        inner_state=spread(inner_state, mesh, axes),
        anchor=() if plan.outer is None else like,
        outer_states=outer_states,
        reduce_states=tuple(map(plan.reduce.init, parts)),
        gradient_state=plan.reduce.init(params) if plan.start else (),
        axes=axes,
    )
