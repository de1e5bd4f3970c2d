"""What per-replica gradients tell beside their mean: their norms, and how noisy they are.

    PerReplica g_i --+--> mean over i of |g_i|^2   one scalar is sent
                     |
                     +--reduction--> g, |g|^2      nothing is sent
                                       both --> |G|^2 and tr(Sigma), averaged over steps

With N replicas the gradient of a batch is there N times for parts of 1/N of it, and once for all
of it, which is all that an estimate of the gradient noise scale needs. In: per-replica gradients.
Out: the same reduced gradients as without. Batch sizes are not changed here.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from jdp.feedback import CompressedState
from jdp.mesh import axis_size, on_devices
from jdp.replica import find_nodes, is_per_replica, take_per_replica, weight_of, wide
from jdp.split import ZeroState


class NoiseScaleState(NamedTuple):
    """State of `gradient_noise_scale`.

    Attributes:
        steps: Steps that were averaged, int32.
        square: Running average of the estimate of |G|^2, float32.
        trace: Running average of the estimate of tr(Sigma), float32.
        inner_state: State of the reduction.
    """

    steps: jax.Array
    square: jax.Array
    trace: jax.Array
    inner_state: Any

    @property
    def noise_scale(self) -> jax.Array:
        """B_simple = tr(Sigma) / |G|^2: NaN before the first step, inf where |G|^2 is not above 0.

        Both averages start from 0 with one decay, so what they lack at first cancels.
        """
        known = jnp.where(self.steps > 0, jnp.inf, jnp.nan)
        return jnp.where(self.square > 0, self.trace / self.square, known)


def gradient_noise_scale(
    reduction: optax.GradientTransformation, *, decay: float = 0.99
) -> optax.GradientTransformationExtraArgs:
    """Estimates from the per-replica gradients how large a batch is worth its examples.

    With N replicas, g their mean, W the weight of the batch (its number of examples, or the summed
    weight of a `jdp.Mean`, such as tokens), and examples whose gradients have mean G and covariance
    Sigma,

        small  = (1/N) * sum_i |g_i|^2                     expected: |G|^2 + tr(Sigma) * N / W
        big    = |g|^2                                     expected: |G|^2 + tr(Sigma) / W
        square = (N * big - small) / (N - 1)               expected: |G|^2
        trace  = (small - big) * W / (N - 1)               expected: tr(Sigma)

    and `noise_scale` is the ratio of the running averages of trace and square, in examples (or
    tokens). About that many examples a step, the critical batch size, halve the speed-up that a
    larger batch still brings: training then takes twice the fewest possible steps and twice the
    fewest possible examples.

    Guarantees:
        - Gradients come out as the reduction gives them, to the bit.
        - One scalar is sent, 4 bytes.
        - Both estimates are unbiased, whatever the batch size and N, if replicas weigh alike and
          the reduction is exact.
        - A step with inf or NaN leaves the averages alone.

    | case | what holds |
    | --- | --- |
    | inside `jdp.multi_steps` | the window is the batch; W is its weight |
    | replicas that weigh unequally (masks, shares), of squared coefficient of variation c | trace \
is too large by c * W / (N - 1) * |G|^2, the noise scale by about c * W / (N - 1) |
    | a narrow wire or a compressor | big, and so the estimates, carry its error |
    | one replica | nothing can be told: NaN |
    | gradients that no `jdp.value_and_grad` weighed | in units of one replica's batch |

    Args:
        reduction: What takes per-replica gradients to their mean and does nothing else, such as
            `jdp.all_reduce()`. What follows stands behind it in the chain: `optax.chain(
            jdp.gradient_noise_scale(jdp.all_reduce()), optax.adamw(3e-4))`, and a `jdp.zero1(...)`
            there slices what is already reduced.
        decay: Of the running averages: 0.99 averages over about the last 100 steps.

    Returns:
        A transformation from `PerReplica` gradients to plain ones with state `NoiseScaleState`;
        read it with `jdp.find_noise_scale(opt_state)`.

    Raises:
        ValueError: If the decay is not in [0, 1), gradients are already reduced, or the reduction
            does more or less than reducing.

    Example:
        >>> tx = optax.chain(jdp.gradient_noise_scale(jdp.all_reduce()), optax.sgd(0.1))
        >>> mesh = jdp.make_mesh()
        >>> step = jdp.train_step(lambda p, batch: jnp.mean((p["w"] - batch) ** 2), tx, mesh)
        >>> state = jdp.init_state({"w": jnp.ones(())}, tx, mesh)
        >>> state, _ = step(state, 2.0 * jnp.arange(8.0) - 1.0)
        >>> round(float(jdp.find_noise_scale(state.opt_state)), 6)  # 96 / (100 - 96 / 8)
        1.090909

    References:
        McCandlish et al., An Empirical Model of Large-Batch Training, 2018, appendix A.
    """
    if not 0 <= decay < 1:
        raise ValueError(
            f"jdp.gradient_noise_scale got decay={decay!r}; it is the share of the old average "
            "that is kept in a step, at least 0 and less than 1, such as 0.99."
        )
    reduction = optax.with_extra_args_support(reduction)

    def init(params: Any) -> NoiseScaleState:
        inner_state = reduction.init(params)
        _check_reduces_only(inner_state)
        zero = jnp.zeros((), jnp.float32)
        return NoiseScaleState(jnp.zeros((), jnp.int32), zero, zero, inner_state)

    def update(
        updates: Any, state: Any, params: Any = None, **extra: Any
    ) -> tuple[Any, NoiseScaleState]:
        squares, count = _squares(updates, "jdp.gradient_noise_scale")
        new, inner_state = reduction.update(updates, state.inner_state, params, **extra)
        state = state._replace(inner_state=inner_state)
        if any(map(is_per_replica, jax.tree.leaves(new, is_leaf=is_per_replica))):
            raise ValueError(
                "jdp.gradient_noise_scale: the reduction left gradients that still differ by "
                "replica, so the gradient of the whole batch is not known. Reduce over all axes."
            )
        if squares is None or count == 1:
            return new, state
        weight = weight_of(updates)
        return new, _averaged(
            state,
            small=jnp.mean(squares),
            big=sum((_square(x) for x in jax.tree.leaves(new)), start=jnp.float32(0)),
            count=count,
            weight=jnp.float32(count if weight is None else weight),
            decay=decay,
        )

    return optax.GradientTransformationExtraArgs(init, update)


def find_noise_scale(opt_state: Any) -> jax.Array | None:
    """The gradient noise scale in an optimizer state; `None` if nothing estimates it.

    Args:
        opt_state: The state of a chain with `jdp.gradient_noise_scale` somewhere in it.

    Returns:
        A float32 scalar, in examples, or in what a `jdp.Mean` weighs by. See `NoiseScaleState`.

    Example:
        >>> tx = jdp.gradient_noise_scale(jdp.all_reduce())
        >>> jdp.find_noise_scale(tx.init({"w": jnp.ones(3)}))
        Array(nan, dtype=float32)
    """
    found = find_nodes(opt_state, NoiseScaleState)
    return found[0].noise_scale if found else None


def per_replica_norms(grads: Any) -> jax.Array:
    """The global norm of each replica's gradient; nothing is sent.

    One replica whose norm is far from the others' has bad data, or a device that computes wrongly.
    Where replicas weigh unequally, their gradients, and so their norms, are scaled by their weight.

    Args:
        grads: Per-replica gradients, as of `jdp.value_and_grad`.

    Returns:
        Float32 array of shape [N], each entry on its replica's device.

    Raises:
        ValueError: If a gradient is already reduced, naming it, or there is none.

    Example:
        >>> loss_fn = lambda params, batch: jnp.mean(batch * params)
        >>> _, grads = jdp.value_and_grad(loss_fn, jdp.make_mesh())(jnp.ones(()), jnp.arange(8.0))
        >>> jdp.per_replica_norms(grads)
        Array([0., 1., 2., 3., 4., 5., 6., 7.], dtype=float32)
    """
    squares, _ = _squares(grads, "jdp.per_replica_norms")
    if squares is None:
        raise ValueError("jdp.per_replica_norms was given no gradients at all; there is no norm.")
    return jnp.sqrt(squares)


def _squares(updates: Any, caller: str) -> tuple[jax.Array | None, int]:
    """|g_i|^2 of each replica, [N] split over the data axes, and N."""
    values, axes, mesh = take_per_replica(updates, caller)
    if not axes:
        return None, 0

    def local(values: Any) -> jax.Array:
        zero = jax.lax.pcast(jnp.float32(0), axes, to="varying")
        return sum((_square(x) for x in jax.tree.leaves(values)), start=zero)[None]

    run = on_devices(local, mesh, P(axes), P(axes), axes)
    return run(values), axis_size(mesh, axes)


def _square(x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(x.astype(wide(x))), dtype=jnp.float32)


def _averaged(
    state: NoiseScaleState,
    *,
    small: jax.Array,
    big: jax.Array,
    count: int,
    weight: jax.Array,
    decay: float,
) -> NoiseScaleState:
    """The state with one step's estimates in its averages."""
    square = (count * big - small) / (count - 1)
    trace = (small - big) * weight / (count - 1)
    ok = jnp.isfinite(square) & jnp.isfinite(trace)

    def average(old: jax.Array, new: jax.Array) -> jax.Array:
        return jnp.where(ok, decay * old + (1 - decay) * new, old)

    return state._replace(
        steps=jnp.where(ok, optax.safe_increment(state.steps), state.steps),
        square=average(state.square, square),
        trace=average(state.trace, trace),
    )


def _check_reduces_only(inner_state: Any) -> None:
    """Refuses an optimizer in the place of a reduction: it would give updates, not gradients."""
    is_known = lambda x: isinstance(x, (optax.EmptyState, CompressedState))  # noqa: E731
    others = [x for x in jax.tree.leaves(inner_state, is_leaf=is_known) if not is_known(x)]
    if others or find_nodes(inner_state, ZeroState):
        raise ValueError(
            "jdp.gradient_noise_scale is given the reduction alone, but this one keeps state as an "
            "optimizer, jdp.zero1 or jdp.multi_steps does: what it returns is not the gradient of "
            "the batch. Put the rest behind or around it: jdp.multi_steps(optax.chain("
            "jdp.gradient_noise_scale(jdp.all_reduce()), optax.adamw(3e-4)), every=4)."
        )
