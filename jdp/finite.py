"""What to do about inf and NaN: one decision for all devices, and then all of a step or none.

    gradients --> inner.update --> updates, new inner state
        |                             |         |
        +--- all finite? --- yes ---> these     these
                 |--------- no ----> -0        the old one, to the bit

In: gradients, per replica or reduced. Out: updates. `skip_nonfinite` is that and two counters;
`dynamic_loss_scale` is that and a number for float16. A loss is not looked at here, and it is
not scaled here either: that is done where it is differentiated.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from jdp.mesh import is_whole, on_devices
from jdp.replica import (
    find_nodes,
    give_per_replica,
    give_reduced,
    is_gradient,
    is_per_replica,
    is_reduced,
    take_per_replica,
    take_reduced,
    weight_of,
    widen,
)


class SkipState(NamedTuple):
    """State of `skip_nonfinite`.

    Attributes:
        skipped: Steps skipped so far, int32.
        consecutive: Steps skipped since the last one that was taken, int32.
        last_skipped: Whether the last step was skipped, bool.
        inner_state: State of the inner transformation.
    """

    skipped: jax.Array
    consecutive: jax.Array
    last_skipped: jax.Array
    inner_state: Any


class LossScaleState(NamedTuple):
    """State of `dynamic_loss_scale`.

    Attributes:
        scale: What the next loss is to be multiplied by, float32.
        good_steps: Steps taken since the scale last changed or a step was skipped, int32.
        skipped: Steps skipped so far, int32.
        consecutive: Steps skipped since the last one that was taken, int32.
        last_skipped: Whether the last step was skipped, bool.
        inner_state: State of the inner transformation.
    """

    scale: jax.Array
    good_steps: jax.Array
    skipped: jax.Array
    consecutive: jax.Array
    last_skipped: jax.Array
    inner_state: Any


def skip_nonfinite(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Skips a step whose gradients or updates hold inf or NaN, on all devices or on none.

    With g_i the gradient of replica i (or the one reduced gradient) and u, s' what the inner
    transformation makes of them,

        ok = isfinite of every entry of every g_i and of u
        update, state = (u, s') if ok else (-0, s)

    Adding -0 changes no bit of a parameter; adding 0 would turn -0 into 0.

    Guarantees:
        - One decision: for per-replica gradients it costs one all-reduce of 4 bytes.
        - A skipped step leaves parameters and inner state as they were, to the bit: moments,
          counters, schedules, per-replica residuals, random keys. It is counted.
        - Nothing is ever accepted because it keeps failing; watch `consecutive`.

    | where it stands | what a bad gradient costs |
    | --- | --- |
    | outermost, around the reduction, or inside a ZeRO stage | its step |
    | behind a reduction that keeps residuals | its step, and what had waited in those entries |
    | inside `jdp.multi_steps` | its whole window, counted once here and once in `num_updates` |
    | around `jdp.multi_steps` | refused: accumulation belongs outermost |

    Args:
        inner: A transformation, such as `optax.chain(jdp.all_reduce(), optax.adamw(3e-4))`.

    Returns:
        A transformation with state `SkipState`.

    Raises:
        ValueError: If `jdp.dynamic_loss_scale` stands inside: it skips by itself, and its scale
            could never fall.

    Example:
        >>> tx = jdp.skip_nonfinite(optax.chain(jdp.all_reduce(), optax.sgd(1.0)))
        >>> mesh = jdp.make_mesh()
        >>> step = jdp.train_step(lambda p, batch: jnp.mean(batch * p["w"]), tx, mesh)
        >>> state = jdp.init_state({"w": jnp.ones(())}, tx, mesh)
        >>> state, _ = step(state, jnp.arange(8.0).at[3].set(jnp.inf))
        >>> float(state.params["w"]), int(state.opt_state.skipped)
        (1.0, 1)
    """
    inner = optax.with_extra_args_support(inner)

    def init(params: Any) -> SkipState:
        inner_state = inner.init(params)
        if _nodes(inner_state):
            raise ValueError(
                "jdp.skip_nonfinite stands around jdp.dynamic_loss_scale, which must halve its "
                "scale after a bad step; kept as it was, it would fail in the same way for ever. "
                "Leave jdp.skip_nonfinite out: jdp.dynamic_loss_scale skips and counts by itself."
            )
        return SkipState(**_no_skips(), inner_state=inner_state)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, SkipState]:
        ok, new, inner_state = _all_or_nothing(
            inner, updates, state, params, extra, "jdp.skip_nonfinite"
        )
        return new, SkipState(**_count(state, ok), inner_state=inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def dynamic_loss_scale(
    inner: optax.GradientTransformation,
    initial: float = 2.0**15,
    *,
    growth_interval: int = 2000,
    factor: float = 2.0,
    min_scale: float = 1.0,
    max_scale: float = 2.0**24,
) -> optax.GradientTransformationExtraArgs:
    """Undoes the loss scale of float16 gradients, skips those that overflowed, and adapts it.

    For gradients of scale * loss, with u, s' what the inner transformation makes of g / scale,

        ok = isfinite of every entry of g / scale and of u
        update, state = (u, s') if ok else (-0, s)
        scale = min(scale * factor, max_scale)   after growth_interval steps without a skip
              = max(scale / factor, min_scale)   after a skipped one

    `jdp.train_step` finds the scale in its state and shows the loss itself among its metrics. In
    a loop of your own, give `jdp.finite.find_loss_scale(opt_state)` to the function made by
    `jdp.value_and_grad`, as `loss_scale`.

    Guarantees:
        - The inner transformation sees float32 gradients of the loss: a clip, a norm and a
          decay mean what they mean without a scale.
        - Skipping is that of `jdp.skip_nonfinite`, which is not needed beside it.
        - With a factor that is a power of two scaling rounds nothing.

    | where it stands | what travels |
    | --- | --- |
    | behind the reduction, or inside a ZeRO stage | scaled gradients, as narrow as they are |
    | around the reduction | float32 gradients of the loss, as residuals of a compressor need |
    | inside `jdp.multi_steps` | the same; the scale changes between windows only |

    Args:
        inner: What takes gradients of the loss, such as
            `optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))`.
        initial: The scale of the first step; 2^15 is half the largest power of two in float16.
        growth_interval: Steps without a skip after which the scale grows.
        factor: What it grows and falls by, above 1.
        min_scale: The scale never falls below this.
        max_scale: Nor does it rise above this; the default is that of NVIDIA Apex.

    Returns:
        A transformation with state `LossScaleState`.

    Raises:
        ValueError: If a number cannot be meant.

    Example:
        >>> tx = jdp.dynamic_loss_scale(optax.sgd(1.0), 1024.0)
        >>> params = {"w": jnp.ones(2, jnp.float32)}
        >>> state = tx.init(params)
        >>> updates, state = tx.update({"w": jnp.array([512.0, 2048.0])}, state, params)
        >>> updates["w"]
        Array([-0.5, -2. ], dtype=float32)
        >>> updates, state = tx.update({"w": jnp.array([512.0, jnp.inf])}, state, params)
        >>> float(find_loss_scale(state)), int(state.skipped)
        (512.0, 1)

    References:
        Micikevicius et al., Mixed Precision Training, 2018.
    """
    _check_scale(initial, growth_interval, factor, min_scale, max_scale)
    inner = optax.with_extra_args_support(inner)

    def init(params: Any) -> LossScaleState:
        return LossScaleState(
            scale=jnp.full((), initial, jnp.float32),
            good_steps=jnp.zeros((), jnp.int32),
            **_no_skips(),
            inner_state=inner.init(params),
        )

    def update(
        updates: Any, state: Any, params: Any = None, **extra: Any
    ) -> tuple[Any, LossScaleState]:
        ok, new, inner_state = _all_or_nothing(
            inner, _unscale(updates, state.scale), state, params, extra, "jdp.dynamic_loss_scale"
        )
        good_steps = jnp.where(ok, state.good_steps + 1, 0)
        grow = good_steps >= growth_interval
        higher = jnp.minimum(state.scale * factor, max_scale)
        lower = jnp.maximum(state.scale / factor, min_scale)
        return new, LossScaleState(
            scale=jnp.where(ok, jnp.where(grow, higher, state.scale), lower),
            good_steps=jnp.where(grow, 0, good_steps),
            **_count(state, ok),
            inner_state=inner_state,
        )

    return optax.GradientTransformationExtraArgs(init, update)


def find_loss_scale(opt_state: Any) -> jax.Array | None:
    """The scale that the loss is to be multiplied by before its gradient is taken.

    Args:
        opt_state: State of any optax transformation.

    Returns:
        The scale of the `jdp.dynamic_loss_scale` in it, float32; `None` if there is none.

    Raises:
        ValueError: If there are several.

    Example:
        >>> tx = optax.chain(jdp.all_reduce(), jdp.dynamic_loss_scale(optax.sgd(1.0), 256.0))
        >>> float(find_loss_scale(tx.init({"w": jnp.ones(3)})))
        256.0
    """
    nodes = _nodes(opt_state)
    if len(nodes) > 1:
        raise ValueError(
            f"The optimizer state holds {len(nodes)} loss scales, but a loss is scaled once. Put "
            "one jdp.dynamic_loss_scale around what they stand in (an optax.partition, say)."
        )
    return nodes[0].scale if nodes else None


def global_norm(tree: Any) -> jax.Array:
    """The Euclidean norm over all leaves, squared and added up in float32.

    In float16 the square of 256 is already infinite, and a clip by an infinite norm multiplies
    every gradient by 0.

    | tree | norm |
    | --- | --- |
    | without leaves | 0 |
    | entries beyond 1.8e19 | inf, their squares being too large for float32 |
    | inf or NaN among them | inf or NaN |

    Args:
        tree: Pytree of arrays of any dtype; wider ones than float32 are not narrowed.

    Returns:
        A float32 scalar (or of the widest leaf's dtype).

    Raises:
        ValueError: If the gradients are not reduced yet: replicas' norms are not their mean's.

    Example:
        >>> float(jdp.global_norm({"w": jnp.full(4, 5000.0, jnp.float16)}))
        10000.0
    """
    leaves = jax.tree.leaves(tree, is_leaf=is_gradient)
    if any(map(is_gradient, leaves)):
        raise ValueError(
            "jdp.global_norm received gradients that no reduction has taken yet; the norm of all "
            "replicas' gradients is not that of their mean. Reduce them first, "
            "optax.chain(jdp.all_reduce(), ...), or take the norm inside the ZeRO stage."
        )
    squares = [jnp.sum(jnp.square(jnp.abs(widen(x)))) for x in leaves]
    return jnp.sqrt(sum(squares, jnp.zeros((), jnp.float32)))


def _all_or_nothing(
    inner: optax.GradientTransformationExtraArgs,
    grads: Any,
    state: Any,
    params: Any,
    extra: dict[str, Any],
    caller: str,
) -> tuple[jax.Array, Any, Any]:
    """Whether all was finite, and the inner update and state, or none and the old one."""
    new, inner_state = inner.update(grads, state.inner_state, params, **extra)
    ok = _all_finite(grads, caller) & _finite(new)
    # selected, not branched: it fuses with the update, and a branch could not be donated into
    new = jax.tree.map(lambda u: jnp.where(ok, u, jnp.full_like(u, -0.0)), new)
    kept = jax.tree.map(
        lambda after, before: jnp.where(ok, after, before), inner_state, state.inner_state
    )
    return ok, new, kept


def _all_finite(grads: Any, caller: str) -> jax.Array:
    """Whether no replica's gradient holds inf or NaN, the same answer on every device."""
    leaves = jax.tree.leaves(grads, is_leaf=is_gradient)
    if any(map(is_reduced, leaves)):
        return _finite(take_reduced(grads))
    if not any(map(is_per_replica, leaves)):
        return _finite(grads)
    values, axes, mesh = take_per_replica(grads, caller)

    def local(values: Any) -> jax.Array:
        return jax.lax.pmin(_finite(values).astype(jnp.int32), axes)

    return on_devices(local, mesh, P(axes), P(), axes)(values) == 1


def _finite(tree: Any) -> jax.Array:
    """Whether every entry of every leaf is finite."""
    return functools.reduce(
        jnp.logical_and,
        [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)],
        jnp.ones((), bool),
    )


def _unscale(grads: Any, scale: jax.Array) -> Any:
    """Gradients of the loss, at least float32, from those of scale * loss."""
    divide = functools.partial(jax.tree.map, lambda g: widen(g) / scale)
    leaves, treedef = jax.tree.flatten(grads, is_leaf=is_gradient)
    if any(map(is_reduced, leaves)):
        return give_reduced(divide(take_reduced(leaves)), weight_of(grads), treedef)
    if not any(map(is_per_replica, leaves)):
        return divide(grads)
    # the same factor for all replicas: the mean of the quotients is the quotient of the mean
    values, axes, mesh = take_per_replica(grads, "jdp.dynamic_loss_scale")
    return give_per_replica(divide(values), weight_of(grads), axes, mesh)


def _no_skips() -> dict[str, jax.Array]:
    # each an array of its own, so that the state may be donated
    return {
        "skipped": jnp.zeros((), jnp.int32),
        "consecutive": jnp.zeros((), jnp.int32),
        "last_skipped": jnp.zeros((), bool),
    }


def _count(state: Any, ok: jax.Array) -> dict[str, jax.Array]:
    """The counters after a step."""
    more = optax.safe_increment
    return {
        "skipped": jnp.where(ok, state.skipped, more(state.skipped)),
        "consecutive": jnp.where(ok, 0, more(state.consecutive)),
        "last_skipped": ~ok,
    }


def _nodes(opt_state: Any) -> list[LossScaleState]:
    """All states of loss scales, also those inside others."""
    found = find_nodes(opt_state, LossScaleState)
    return found + [inside for node in found for inside in _nodes(node.inner_state)]


def _check_scale(
    initial: Any, growth_interval: Any, factor: Any, min_scale: Any, max_scale: Any
) -> None:
    if not is_whole(growth_interval) or growth_interval < 1:
        raise ValueError(
            f"jdp.dynamic_loss_scale got growth_interval={growth_interval!r}; it must be a whole "
            "number of steps, at least 1."
        )
    if not 1 < factor < np.inf:
        raise ValueError(
            f"jdp.dynamic_loss_scale got factor={factor!r}; a scale that is to grow and fall by it "
            "needs one above 1, such as 2."
        )
    if not 0 < min_scale <= initial <= max_scale < np.inf:
        raise ValueError(
            f"jdp.dynamic_loss_scale got initial={initial!r}, min_scale={min_scale!r} and "
            f"max_scale={max_scale!r}; they must be positive and finite, and the first must lie "
            "between the others, or the scale would jump at the first step."
        )
