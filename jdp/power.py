"""PowerSGD: the mean gradient of a matrix, sent as the product of two thin ones.

    M_i [m, n]   this device's gradient with its residual
       |
       +-- M_i Q^ [m, r] ----- mean --> P, orthonormalised: P^      first all-reduce
       +-- M_i^T P^ [n, r] --- mean --> Q, the next step's Q^       second all-reduce
       |
       +-- mean of M_i ~ P^ Q^T      residual_i = M_i - P^ (M_i^T P^)^T

In: per-replica gradients. Out: their mean, of rank r where that pays and exact elsewhere. This
module decides which leaves are compressed and how; adding residuals and keeping what is left over
is the business of `jdp.feedback`.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdp import collectives
from jdp.feedback import compressed
from jdp.flat import take_apart
from jdp.mesh import AxisNames, is_whole
from jdp.quantize import check_wire_dtype

MIN_RATE = 2.0  # of the authors' code and of PyTorch's: below it the extra passes do not pay
FUSED_RANK = 8  # 16 operations for each entry, beside the 8 bytes that fusing saves
_SMALLEST = float(np.finfo(np.float32).tiny)  # of normal numbers; devices may flush others to 0


class PowerMemory(NamedTuple):
    """What `power_sgd` remembers, the same on every device.

    Attributes:
        factors: For each shape of compressed matrices, in order of first appearance, the warm start
            of all of them, float32: Q [matrices, n, r]; with `single` what was sent last, Q or P,
            [matrices, max(m, n), r], filled up with zero rows.
        turn: With `single`, what `factors` holds: 0 for Q, 1 for P, int32; otherwise `()`.
    """

    factors: tuple[jax.Array, ...]
    turn: Any


def power_sgd(
    rank: int,
    axis: AxisNames | None = None,
    *,
    min_rate: float = MIN_RATE,
    single: bool = False,
    error_feedback: bool = True,
    wire_dtype: Any = None,
    seed: int = 0,
) -> optax.GradientTransformation:
    """Averages per-replica gradients over the replicas, matrices by their rank-r approximation.

    A leaf of shape [..., n] is taken for a matrix of m = prod(...) rows. With M_i = g_i + e_i the
    gradient of replica i and its residual, 0 at first, and Q of the step before, at first random,

        P  = mean_i(M_i orth(Q))          P^ = orth(P)
        Q  = mean_i(M_i^T P^)             g  = P^ Q^T
        e_i = M_i - P^ (M_i^T P^)^T

    where `orth` makes columns orthonormal (Householder). These are the paper's algorithms 1 and 2:
    orth(Q) spans what Q does, so that P^ is the same, and keeps columns of very different size from
    vanishing. The residual is a replica's own error, as in algorithm 2; the authors' programs take
    M_i - g, with the same mean and so the same g, but what replicas do not have in common then adds
    up in it for ever.

    Guarantees:
        - Means are the same bits on every device, in float32 (or a wider dtype of the gradient).
        - Two all-reduces for the whole tree, of r(m + n) float32 numbers for a matrix; leaves that
          are not compressed travel in the first, in float32, and their mean is exact.
        - With a narrow `wire_dtype` all of that is rounded on the way, as `jdp.all_reduce` does it
          (an all-to-all and an all-gather in place of an all-reduce), and `orth` of the mean that
          arrives is the same on every device. What P^ rounded does not span, what rounding takes
          from Q and from leaves that are not compressed: all of it stays in the residual.
        - Per matrix 8mnr floating-point operations, 6mnr without error feedback, and O((m + n)r^2)
          for `orth`. Matrices of the same shape share one operation of `orth`.
        - Error feedback, skipped steps and other numbers of devices: see
          `jdp.feedback.compressed`.

    | leaf | what is done |
    | --- | --- |
    | a scalar or vector | not compressed |
    | a matrix with mn / (r(m + n)) below `min_rate` | not compressed |
    | rank >= min(m, n), compressed | r is min(m, n), and the mean is exact up to rounding, but \
with `single` only over several steps |
    | a gradient of 0, or of lower rank than r | P^ is filled up with other directions; no NaN |
    | a convolution's kernel [h, w, in, out] | a matrix [h * w * in, out] |
    | stacked layers [layers, m, n] | one matrix [layers * m, n], of rank r in all |
    | inf or NaN in a matrix | its mean is NaN, with `single` a row or column at least; see \
`jdp.skip_nonfinite` |

    It costs 4 bytes a parameter on each device for the residual.

    Args:
        rank: r, at least 1. It is capped at min(m, n): no matrix has a higher rank, and what is
            sent beyond it would be noise.
        axis: The axes that gradients differ along; `None` takes all data axes of the mesh. To
            compress only what crosses nodes: `optax.chain(jdp.all_reduce("device"),
            jdp.power_sgd(4, "node"))`.
        min_rate: Least factor by which a matrix must shrink to be compressed; 0 compresses all.
        single: One all-reduce in a step, of r * max(m, n) numbers for a matrix: even steps send
            P for a fixed orth(Q), odd ones Q for a fixed orth(P), as in the authors' later
            program. It is behind at the same rank, but at twice the rank, and so for the same
            bytes, it trained as well as the two halves wherever it was tried, for half the latency.
        error_feedback: Keep what was not sent, and send it later. Without it what is orthogonal to
            P^ is lost, and training may stop short of its goal. What is sent later acts later:
            a learning rate that is only just stable without compression may be too high.
        wire_dtype: Dtype that factors, and leaves that are not compressed, are sent in, see
            `jdp.all_reduce`; `None` is float32. bfloat16 sends half the bytes.
        seed: Of the first Q.

    Returns:
        A transformation from `PerReplica` gradients to plain ones, with state
        `jdp.CompressedState`, whose memory is a `PowerMemory`; with error feedback its init needs
        a mesh (see `jdp.init_state`).

    Raises:
        ValueError: If an argument cannot be meant, or a gradient is already reduced, naming it.

    Example:
        >>> loss_fn = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
        >>> mesh, params = jdp.make_mesh(), {"w": jnp.ones((64, 32))}
        >>> tx = optax.chain(jdp.power_sgd(1), optax.sgd(1.0))
        >>> state = jdp.init_state(params, tx, mesh)
        >>> step = jdp.train_step(loss_fn, tx, mesh)
        >>> state, _ = step(state, jnp.ones((16, 64)))  # all gradients are 4, of rank 1
        >>> state.params["w"][0, :4]
        Array([-3., -3., -3., -3.], dtype=float32)

    References:
        Vogels, Karimireddy and Jaggi, PowerSGD: Practical Low-Rank Gradient Compression for
        Distributed Optimization, 2019.
    """
    rank, min_rate = _check_rank(rank), _check_min_rate(min_rate)
    send = collectives.Sending(check_wire_dtype(wire_dtype))
    plan = functools.partial(_plan, rank=rank, min_rate=min_rate)

    def init_memory(params: Any) -> PowerMemory:
        groups, _ = plan([jnp.shape(leaf) for leaf in jax.tree.leaves(params)])
        factors = _first_factors(groups, seed)
        if not single:
            return PowerMemory(tuple(factors), ())
        tall = [_tall(factor, group) for factor, group in zip(factors, groups, strict=True)]
        return PowerMemory(tuple(tall), jnp.zeros((), jnp.int32))

    def exchange(values: list[jax.Array], memory: Any, axes: tuple[str, ...]) -> Any:
        groups, rest = plan([value.shape for value in values])
        average = functools.partial(_means, axes=axes, send=send)
        if not groups:
            return *average(values), memory
        matrices = [[values[i].reshape(group.m, group.n) for i in group.leaves] for group in groups]
        half = _one_half if single else _both_halves
        approximations, own, rest_found, memory = half(
            groups, matrices, [values[i] for i in rest], memory, average
        )
        means, sent = (dict(zip(rest, found, strict=True)) for found in rest_found)
        for group, shared, mine in zip(groups, approximations, own, strict=True):
            for place, i in enumerate(group.leaves):
                means[i] = shared[place].reshape(values[i].shape)
                sent[i] = mine[place].reshape(values[i].shape)
        every = range(len(values))
        return [means[i] for i in every], [sent[i] for i in every], memory

    return compressed(
        "jdp.power_sgd", exchange, init_memory, axis=axis, error_feedback=error_feedback
    )


_Average: TypeAlias = Callable[[list[jax.Array]], tuple[list[jax.Array], list[jax.Array]]]


class _Group(NamedTuple):
    """Matrices of one shape [m, n], by the numbers of their leaves."""

    leaves: tuple[int, ...]
    m: int
    n: int
    rank: int


def _plan(
    shapes: Sequence[tuple[int, ...]], rank: int, min_rate: float
) -> tuple[list[_Group], list[int]]:
    """Which leaves are compressed, those of equal matrix shape together, and which are not."""
    alike: dict[tuple[int, int], list[int]] = {}
    rest = []
    for i, shape in enumerate(shapes):
        size = math.prod(shape)
        if len(shape) < 2 or not size:
            rest.append(i)
            continue
        m, n = math.prod(shape[:-1]), shape[-1]
        if size < min_rate * min(rank, m, n) * (m + n):
            rest.append(i)
            continue
        alike.setdefault((m, n), []).append(i)
    groups = [_Group(tuple(leaves), m, n, min(rank, m, n)) for (m, n), leaves in alike.items()]
    return groups, rest


def _first_factors(groups: list[_Group], seed: int) -> list[jax.Array]:
    """A random Q of each group, [matrices, n, r]; one draw for all, as each would be compiled."""
    like = [
        jax.ShapeDtypeStruct((len(group.leaves), group.n, group.rank), jnp.float32)
        for group in groups
    ]
    row = jax.random.normal(jax.random.key(seed), (sum(x.size for x in like),), jnp.float32)
    return take_apart(row, like)


def _both_halves(
    groups: list[_Group],
    matrices: list[list[jax.Array]],
    rest: list[jax.Array],
    memory: PowerMemory,
    average: _Average,
) -> Any:
    """A step that sends P and then Q: means, this device's parts, both of the rest, memory."""
    count = len(groups)
    thin = [_times(m, _orth(q)) for m, q in zip(matrices, memory.factors, strict=True)]
    found, sent = average([*thin, *rest])
    lefts = [_orth(p) for p in found[:count]]
    mine = [_transposed_times(m, p) for m, p in zip(matrices, lefts, strict=True)]
    rights, mine = average(mine)
    approximations = [_products(p, q) for p, q in zip(lefts, rights, strict=True)]
    own = [_products(p, q) for p, q in zip(lefts, mine, strict=True)]
    factors = tuple(_unless_zero(q, old) for q, old in zip(rights, memory.factors, strict=True))
    return approximations, own, (found[count:], sent[count:]), PowerMemory(factors, ())


def _one_half(
    groups: list[_Group],
    matrices: list[list[jax.Array]],
    rest: list[jax.Array],
    memory: PowerMemory,
    average: _Average,
) -> Any:
    """A step that sends P or Q, in turn, in a buffer that has room for either."""
    fixed, sends_left = [_orth(factor) for factor in memory.factors], memory.turn == 0
    trios = list(zip(groups, matrices, fixed, strict=True))

    def left() -> list[jax.Array]:
        return [_tall(_times(m, q[:, : group.n]), group) for group, m, q in trios]

    def right() -> list[jax.Array]:
        return [_tall(_transposed_times(m, p[:, : group.m]), group) for group, m, p in trios]

    def products(sent: list[jax.Array]) -> list[list[jax.Array]]:
        made = []
        for group, old, new in zip(groups, fixed, sent, strict=True):
            p, q = jnp.where(sends_left, new, old), jnp.where(sends_left, old, new)
            made.append(_products(p[:, : group.m], q[:, : group.n]))
        return made

    mine = jax.lax.cond(sends_left, left, right)
    count = len(groups)
    found, sent = average([*mine, *rest])
    pairs = zip(found[:count], memory.factors, strict=True)
    factors = tuple(_unless_zero(new, old) for new, old in pairs)
    # all or none: one turn holds for all factors
    finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(factor)) for factor in factors]))
    after = PowerMemory(factors, 1 - memory.turn)
    after = jax.tree.map(functools.partial(jnp.where, finite), after, memory)
    rest_found = found[count:], sent[count:]
    return products(found[:count]), products(sent[:count]), rest_found, after


def _means(
    values: list[jax.Array], axes: tuple[str, ...], send: collectives.Sending
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Means of float32 arrays, by one all-reduce, and what this device's count as in them."""
    size = sum(value.size for value in values)
    return collectives.means_and_sent(values, axes, send, max(4 * size, 1))


def _tall(factor: jax.Array, group: _Group) -> jax.Array:
    """Filled up with zero rows to max(m, n) of them."""
    missing = max(group.m, group.n) - factor.shape[1]
    return jnp.pad(factor, ((0, 0), (0, missing), (0, 0)))


# float32 throughout: on TPU and GPU the default would round every M_i to 8 or 11 bits
_matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


def _times(matrices: list[jax.Array], right: jax.Array) -> jax.Array:
    """M Q of each matrix; they are not stacked, which would be a copy of the whole gradient."""
    return jnp.stack([_matmul(m, q) for m, q in zip(matrices, right, strict=True)])


def _transposed_times(matrices: list[jax.Array], left: jax.Array) -> jax.Array:
    return jnp.stack([_matmul(m.T, p) for m, p in zip(matrices, left, strict=True)])


def _products(left: jax.Array, right: jax.Array) -> list[jax.Array]:
    """P Q^T of each matrix; of few columns as a sum, so that it is made where it is used.

    A matmul's result would be written to memory and read again, by the residual and the optimizer.
    """
    pairs, rank = zip(left, right, strict=True), left.shape[-1]
    if rank > FUSED_RANK:
        return [_matmul(p, q.T) for p, q in pairs]
    return [
        functools.reduce(jnp.add, [jnp.outer(p[:, k], q[:, k]) for k in range(rank)])
        for p, q in pairs
    ]


def _orth(columns: jax.Array) -> jax.Array:
    """Orthonormal columns that span what [matrices, m, r] does, and more where that is less than r.

    Householder's reflections are orthonormal to rounding whatever they are given. Columns are
    first scaled to a largest entry of 1, so that no square of theirs vanishes.
    """
    largest = jnp.max(jnp.abs(columns), axis=-2, keepdims=True)
    return jnp.linalg.qr(columns / jnp.where(largest < _SMALLEST, 1, largest))[0]


def _unless_zero(new: jax.Array, old: jax.Array) -> jax.Array:
    """The new columns, but old ones for columns of zeros, which are no direction to start from.

    A layer whose gradient is 0 once (one that starts at 0, or is not reached) would otherwise
    have Q = 0, then P = 0, and send nothing ever after.
    """
    return jnp.where(jnp.any(new != 0, axis=-2, keepdims=True), new, old)


def _check_rank(rank: Any) -> int:
    if not is_whole(rank) or rank < 1:
        raise ValueError(
            f"jdp.power_sgd got rank={rank!r}; it must be a whole number, at least 1: the columns "
            "that each matrix is sent with. 1, 2 and 4 are usual; to send gradients whole use "
            "jdp.all_reduce()."
        )
    return int(rank)


def _check_min_rate(min_rate: Any) -> float:
    if isinstance(min_rate, bool) or not (isinstance(min_rate, (int, float)) and min_rate >= 0):
        raise ValueError(
            f"jdp.power_sgd got min_rate={min_rate!r}; it must be a number, at least 0: the factor "
            "by which a matrix must shrink to be worth compressing. The default is "
            f"{MIN_RATE:g}; 0 compresses every matrix."
        )
    return float(min_rate)
