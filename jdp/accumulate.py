"""Accumulation across calls: nothing is sent, and nothing moves, until the k-th call.

    call 1 ... k-1   acc += weight * g    [N, *shape], each replica its own row; updates are zero
    call k           inner.update(acc / sum of weights), which reduces, clips, steps; acc is cleared

In: per-replica gradients, as for `jdp.all_reduce`, or those that `jdp.zero2` and `jdp.zero3` have
reduced in the backward pass, of which each device adds up its part. Out: updates. The inner
transformation sees one call for every k, so its schedules and counters count applied updates.
`multi_steps` belongs outermost: what stands outside it would run on every call, on zeros.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdp.mesh import AxisNames, is_whole
from jdp.padded import is_padded
from jdp.replica import (
    PerReplica,
    check_rows,
    give_per_replica,
    give_reduced,
    is_gradient,
    is_per_replica,
    is_reduced,
    is_stored,
    map_per_replica,
    take_per_replica,
    take_reduced,
    weight_of,
    zeros_per_replica,
)
from jdp.split import find_placement, zeros_split


class MultiStepsState(NamedTuple):
    """State of `multi_steps`.

    Attributes:
        calls: Calls since the last applied update, int32.
        num_updates: Updates applied so far, int32.
        weight: Sum of the weights of those calls, float32.
        accumulated: Weighted sum of their gradients in float32: `PerReplica` leaves, or arrays
            split over the devices for gradients that come reduced.
        inner_state: State of the inner transformation.
    """

    calls: jax.Array
    num_updates: jax.Array
    weight: jax.Array
    accumulated: Any
    inner_state: Any


def multi_steps(
    inner: optax.GradientTransformation, every: int, *, axis: AxisNames | None = None
) -> optax.GradientTransformationExtraArgs:
    """Applies `inner` to the average gradient of every k calls.

    With W_c the total weight of call c and g_c its per-replica gradients, the k-th call gives
    the inner transformation

        sum_c W_c * g_c / sum_c W_c

    which is what one call with the k batches joined would have given. A loss with a weight of
    its own weighs by that, a plain mean by its number of examples.

    Guarantees:
        - Calls that do not complete a window send nothing and return zero updates.
        - Sums are kept in float32.
        - The inner transformation's schedules count applied updates.

    An incomplete window at the end is yours to choose about: `update(None, opt_state, params)`
    flushes it (`jdp.flush`, on a `TrainState`), `drop_window(opt_state)` forgets it.

    Args:
        inner: A transformation of per-replica gradients, such as
            `optax.chain(jdp.all_reduce(), optax.adamw(3e-4))`.
        every: k, the number of calls in a window, at least 1.
        axis: Data axes of the gradients; `None` finds them, see `jdp.data_axes`.

    Returns:
        A transformation whose init needs a mesh (see `jdp.init_state`) and whose update takes
        `PerReplica` gradients, or `None` to flush.

    Raises:
        ValueError: If `every` is not a positive whole number, or gradients are already reduced.

    Example:
        >>> tx = jdp.multi_steps(optax.chain(jdp.all_reduce(), optax.sgd(1.0)), every=2)
        >>> params, mesh = {"w": jnp.zeros(3)}, jdp.make_mesh()
        >>> state = jdp.init_state(params, tx, mesh)
        >>> step = jdp.train_step(lambda p, batch: jnp.mean(batch @ p["w"]), tx, mesh)
        >>> state, _ = step(state, jnp.ones((8, 3)))
        >>> state, _ = step(state, 3 * jnp.ones((8, 3)))
        >>> int(state.opt_state.num_updates), state.params["w"]
        (1, Array([-2., -2., -2.], dtype=float32))
    """
    if not is_whole(every) or every < 1:
        raise ValueError(
            f"jdp.multi_steps got every={every!r}; it must be a whole number of calls, at least 1."
        )
    inner = optax.with_extra_args_support(inner)

    def init(params: Any) -> MultiStepsState:
        inner_state = inner.init(params)
        placement = find_placement(inner_state)
        if placement is not None and placement.in_backward:
            accumulated = zeros_split(params, placement)
        else:
            accumulated = zeros_per_replica(params, "jdp.multi_steps", axis)
        return MultiStepsState(
            calls=jnp.zeros((), jnp.int32),
            num_updates=jnp.zeros((), jnp.int32),
            weight=jnp.zeros((), jnp.float32),
            accumulated=accumulated,
            inner_state=inner_state,
        )

    def update(
        updates: Any, state: Any, params: Any = None, **extra: Any
    ) -> tuple[Any, MultiStepsState]:
        if updates is None and params is None:
            raise ValueError(
                "jdp.multi_steps needs the parameters to flush a window: "
                "update(None, opt_state, params)."
            )
        if updates is None:
            gathered, due = state, state.calls > 0
        else:
            gathered = _gather(updates, state)
            due = gathered.calls >= every
        like = params if updates is None else updates

        def apply(state: MultiStepsState) -> tuple[Any, MultiStepsState]:
            mean = _mean(state, like)
            new, inner_state = inner.update(mean, state.inner_state, params, **extra)
            return new, drop_window(state)._replace(
                num_updates=optax.safe_increment(state.num_updates), inner_state=inner_state
            )

        def hold(state: MultiStepsState) -> tuple[Any, MultiStepsState]:
            shapes = jax.eval_shape(apply, state)[0]
            # -0.0 is what can be added to -0.0 without changing its bits
            return jax.tree.map(lambda s: jnp.full(s.shape, -0.0, s.dtype), shapes), state

        return jax.lax.cond(due, apply, hold, gathered)

    return optax.GradientTransformationExtraArgs(init, update)


def drop_window(opt_state: MultiStepsState) -> MultiStepsState:
    """Forgets the calls of an incomplete window; parameters and inner state stay.

    Args:
        opt_state: State of `multi_steps`.

    Returns:
        The state at the beginning of a window.

    Example:
        >>> tx = jdp.multi_steps(optax.chain(jdp.all_reduce(), optax.sgd(1.0)), every=2)
        >>> state = jdp.init_state({"w": jnp.zeros(3)}, tx, jdp.make_mesh())
        >>> int(jdp.drop_window(state.opt_state).calls)
        0
    """
    return opt_state._replace(
        calls=jnp.zeros_like(opt_state.calls),
        weight=jnp.zeros_like(opt_state.weight),
        accumulated=jax.tree.map(jnp.zeros_like, opt_state.accumulated),
    )


def _gather(updates: Any, state: MultiStepsState) -> MultiStepsState:
    """Adds one call to the window."""
    reduced = any(map(is_reduced, jax.tree.leaves(updates, is_leaf=is_gradient)))
    if reduced:
        values, axes = take_reduced(updates), None
    else:
        values, axes, _ = take_per_replica(updates, "jdp.multi_steps")
    if any(is_per_replica(total) == reduced for total in _sums(state)):
        raise ValueError(
            "jdp.multi_steps keeps sums of another kind than the gradients it was given: jdp.zero2 "
            "and jdp.zero3 add up gradients that are reduced already, other transformations those "
            "of each replica. In a step of your own pass placement=state.placement of the ZeRO "
            "stage to jdp.value_and_grad's function; otherwise make the state anew with "
            "jdp.init_state for this transformation."
        )
    weight = weight_of(updates)
    weight = jnp.asarray(1.0 if weight is None else weight, jnp.float32)

    def add(total: Any, value: Any) -> Any:
        if not is_per_replica(total):
            return jax.tree.map(lambda t, v: t + v.astype(jnp.float32) * weight, total, value)
        if total.axes != axes:
            raise ValueError(
                f"jdp.multi_steps keeps sums along the mesh axes {total.axes}, but the gradients "
                f"differ along {axes}. Give both the same: jdp.multi_steps(..., axis=...) and the "
                "axis of jdp.train_step or jdp.value_and_grad."
            )
        check_rows(total, "The sum of jdp.multi_steps")
        # a call without any weight has gradient 0, and its mean may be NaN
        new = total.value + value.astype(jnp.float32) * weight
        return PerReplica(new, axes=total.axes, mesh=total.mesh)

    accumulated = map_per_replica(add, state.accumulated, values)
    return state._replace(
        calls=state.calls + 1, weight=state.weight + weight, accumulated=accumulated
    )


def _sums(state: MultiStepsState) -> list[Any]:
    """The sums, one for each parameter."""
    return jax.tree.leaves(state.accumulated, is_leaf=is_stored)


def _mean(state: MultiStepsState, like: Any) -> Any:
    """The window's average gradient, in the dtypes of `like`."""
    scale = jnp.where(state.weight == 0, 0.0, 1.0 / state.weight)
    sums = _sums(state)
    if not sums:
        return state.accumulated
    if not is_per_replica(sums[0]):
        means = [jax.tree.map(lambda total: total * scale, total) for total in sums]
        treedef = jax.tree.structure(state.accumulated, is_leaf=is_padded)
        return give_reduced(means, state.weight, treedef)
    treedef = jax.tree.structure(state.accumulated, is_leaf=is_per_replica)
    first, likes = sums[0], jax.tree.leaves(like, is_leaf=is_per_replica)
    mesh = likes[0].mesh if is_per_replica(likes[0]) else first.mesh
    means = [
        (total.value * scale).astype(leaf.dtype) for total, leaf in zip(sums, likes, strict=True)
    ]
    return give_per_replica(treedef.unflatten(means), state.weight, first.axes, mesh)
