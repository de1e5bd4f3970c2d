"""Compressors that send few of the numbers, or few bits of each: top-k, random-k and signs.

    PerReplica --top_k-----> the largest of each leaf, and where they are    all-gather
               --random_k--> the same random entries on every replica        all-reduce
               --sign------> one bit a value and a scale for each block      all-to-all, all-gather
                                                          --> array [*shape], the same everywhere

Each goes where `jdp.all_reduce` would: first in the chain. What is not sent is kept by
`jdp.feedback` and sent later; this module only says what a device sends in a step.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdp.collectives import coded_mean
from jdp.feedback import compressed
from jdp.flat import join_leaves, take_apart
from jdp.mesh import AxisNames
from jdp.quantize import check_block, sign_codec

SIGN_BLOCK = 1024  # 4 bytes of scale on 128 of signs: 0.0323 of float32


def top_k(
    ratio: float = 0.01, *, axis: AxisNames | None = None, error_feedback: bool = True
) -> optax.GradientTransformation:
    """Sends the largest entries of each leaf, those that each replica thinks largest.

    With v_i the gradient of replica i and its residual, n the size of a leaf and
    k = max(1, round(ratio * n)),

        sent_i = v_i where |v_i| is among the k largest (of equals the first), 0 elsewhere
        g = (1/N) * sum_i sent_i

    Guarantees:
        - The result is the same bits on every device: senders are added in their order.
        - One all-gather for the whole tree, of 8 bytes for each entry sent: its value in float32
          and its index. Each device sends 8 (N-1) K bytes, K entries of all leaves together; that
          is less than an all-reduce's 8 (N-1)/N P only for a ratio below 1/N.
        - With error feedback what is not sent is kept, 4 bytes a parameter on each device, see
          `jdp.feedback.compressed`: an entry that stays small is sent when it has added up.

    | entries | what is sent |
    | --- | --- |
    | fewer than k that are not 0 | those, and some zeros |
    | inf, NaN | they are the largest |
    | a leaf without entries | nothing |

    Finding the largest costs each device a partial sort of every leaf.

    Args:
        ratio: The part of the entries to send, above 0, at most 1.
        axis: The axes that gradients differ along; `None` takes all data axes.
        error_feedback: Without it what is not sent is lost for ever.

    Returns:
        A transformation from `PerReplica` gradients to plain ones in float32, with state
        `CompressedState`; its init needs a mesh (see `jdp.init_state`).

    Raises:
        ValueError: If the ratio is not in (0, 1], or a gradient is already reduced, naming it.

    Example:
        >>> mesh, tx = jdp.make_mesh(), jdp.top_k(0.25)
        >>> state = tx.init(jdp.replicate({"w": jnp.zeros(4)}, mesh))
        >>> value = jnp.tile(jnp.array([1.0, -4.0, 2.0, 3.0]), (8, 1))
        >>> grads = {"w": jdp.PerReplica(value, axes=("data",), mesh=mesh)}
        >>> tx.update(grads, state)[0]["w"]
        Array([ 0., -4.,  0.,  0.], dtype=float32)

    References:
        Aji and Heafield, Sparse Communication for Distributed Gradient Descent, 2017. Stich et al.,
        Sparsified SGD with Memory, 2018.
    """
    check_ratio("jdp.top_k", ratio)

    def exchange(values: list[jax.Array], memory: Any, axes: tuple[str, ...]) -> Any:
        flat = [value.ravel() for value in values]
        places = [jax.lax.top_k(jnp.abs(x), entries(x.size, ratio))[1] for x in flat]
        chosen = [x[place] for x, place in zip(flat, places, strict=True)]
        sent = [put_at(x, place, kept) for x, place, kept in zip(flat, places, chosen, strict=True)]
        sums = _sum_sparse(flat, places, chosen, axes)
        count = jax.lax.axis_size(axes)
        return _shaped([x / count for x in sums], values), _shaped(sent, values), memory

    return compressed("jdp.top_k", exchange, axis=axis, error_feedback=error_feedback)


def random_k(
    ratio: float = 0.01,
    *,
    axis: AxisNames | None = None,
    error_feedback: bool = True,
    seed: int = 0,
) -> optax.GradientTransformation:
    """Sends random entries of each leaf, the same ones on every replica.

    With v_i the gradient of replica i and its residual, n the size of a leaf and
    k = max(1, round(ratio * n)), the leaf, as one row, is cut into k strips of equal length (give
    or take one), and one entry of each is drawn anew in every step:

        sent_i = v_i at those entries, 0 elsewhere
        g = (1/N) * sum_i sent_i

    Without error feedback, sent_i is multiplied by the length of the strip, so that g is the mean
    gradient on average.

    Guarantees:
        - The result is the same bits on every device.
        - One all-reduce for the whole tree, of 4 bytes for each entry: each device sends
          `ratio` of what an all-reduce of float32 would. Indices are not sent: every device draws
          them from the same seed and the number of the step.
        - With error feedback what is not sent is kept, 4 bytes a parameter on each device, see
          `jdp.feedback.compressed`; an entry waits 1/ratio steps on average.

    Args:
        ratio: The part of the entries to send, above 0, at most 1.
        axis: The axes that gradients differ along; `None` takes all data axes.
        error_feedback: Without it the mean is right on average, with a variance that grows as
            1/ratio.
        seed: Of the random draws.

    Returns:
        A transformation from `PerReplica` gradients to plain ones in float32, with state
        `CompressedState`, whose memory counts steps.

    Raises:
        ValueError: If the ratio is not in (0, 1], or a gradient is already reduced, naming it.

    Example:
        >>> mesh, tx = jdp.make_mesh(), jdp.random_k(0.25)
        >>> state = tx.init(jdp.replicate({"w": jnp.zeros(8)}, mesh))
        >>> grads = {"w": jdp.PerReplica(jnp.ones((8, 8)), axes=("data",), mesh=mesh)}
        >>> means, state = tx.update(grads, state)
        >>> float(means["w"].sum()), float(state.residual["w"].value[0].sum())
        (2.0, 6.0)

    References:
        Stich et al., Sparsified SGD with Memory, 2018. Wangni et al., Gradient Sparsification for
        Communication-Efficient Distributed Optimization, 2018.
    """
    check_ratio("jdp.random_k", ratio)

    def exchange(values: list[jax.Array], memory: Any, axes: tuple[str, ...]) -> Any:
        step = jax.random.fold_in(jax.random.key(seed), memory)
        flat = [value.ravel() for value in values]
        drawn = [
            one_of_each_strip(jax.random.fold_in(step, i), x.size, entries(x.size, ratio))
            for i, x in enumerate(flat)
        ]
        chosen = [
            x[place] if error_feedback else x[place] * length
            for x, (place, length) in zip(flat, drawn, strict=True)
        ]
        means = take_apart(jax.lax.pmean(join_leaves(chosen), axes), chosen)
        means, sent = (
            [put_at(x, place, kept) for x, (place, _), kept in zip(flat, drawn, part, strict=True)]
            for part in (means, chosen)
        )
        return _shaped(means, values), _shaped(sent, values), memory + 1

    def init_memory(params: Any) -> jax.Array:
        del params
        return jnp.zeros((), jnp.int32)

    return compressed(
        "jdp.random_k", exchange, init_memory, axis=axis, error_feedback=error_feedback
    )


def sign(
    *, axis: AxisNames | None = None, block: int = SIGN_BLOCK, error_feedback: bool = True
) -> optax.GradientTransformation:
    """Sends one bit a value, its sign, and the mean magnitude of each block of values.

    All leaves are joined into one row, of which device d owns the d-th of N parts; parts are cut
    into blocks. With v_i the gradient of replica i and its residual, and
    S(x) = mean|x| of the block * (+1 where x >= 0, -1 elsewhere),

        on the owner:  m = (1/N) * (v_owner + sum of S(v_i) of the others)
        on every device:  g = S(m)

    The owner's own values do not travel. What the owner loses of m is N (m - S(m)) in its residual,
    what the others lose of v_i is in theirs, so that error feedback makes up for both.

    Guarantees:
        - The result is the same bits on every device.
        - One all-to-all and one all-gather, of 1/8 byte for each value and 4 bytes for each block,
          together 0.0323 of what an all-reduce of float32 sends with the default block.
        - With error feedback nothing is lost, 4 bytes a parameter on each device, see
          `jdp.feedback.compressed`.

    | block | what arrives |
    | --- | --- |
    | zeros | zeros |
    | with inf or NaN | inf or NaN, all of it |

    Args:
        axis: The axes that gradients differ along; `None` takes all data axes.
        block: Values that share a scale.
        error_feedback: Without it a sign step need not go downhill at all.

    Returns:
        A transformation from `PerReplica` gradients to plain ones in float32, with state
        `CompressedState`; its init needs a mesh (see `jdp.init_state`).

    Raises:
        ValueError: If the block is not a positive whole number, or a gradient is already reduced,
            naming it.

    Example:
        >>> mesh, tx = jdp.make_mesh(), jdp.sign()
        >>> state = tx.init(jdp.replicate({"w": jnp.zeros(16)}, mesh))
        >>> value = jnp.tile(jnp.array([1.0, -3.0]), (8, 8))
        >>> grads = {"w": jdp.PerReplica(value, axes=("data",), mesh=mesh)}
        >>> tx.update(grads, state)[0]["w"][:4]
        Array([ 2., -2.,  2., -2.], dtype=float32)

    References:
        Seide et al., 1-Bit Stochastic Gradient Descent, 2014. Karimireddy et al., Error Feedback
        Fixes SignSGD and other Gradient Compression Schemes, 2019. Tang et al., DoubleSqueeze:
        Parallel Stochastic Gradient Descent with Double-Pass Error-Compensated Compression, 2019.
    """
    codec = sign_codec(check_block(block))

    def exchange(values: list[jax.Array], memory: Any, axes: tuple[str, ...]) -> Any:
        pair = coded_mean(join_leaves(values), axes, codec)
        mean, sent = (take_apart(row, values) for row in pair)
        return mean, sent, memory

    return compressed("jdp.sign", exchange, axis=axis, error_feedback=error_feedback)


def entries(size: int, ratio: float) -> int:
    """k: how many entries of a leaf are sent, at least one if it has any."""
    return min(size, max(1, round(ratio * size)))


def one_of_each_strip(key: jax.Array, size: int, count: int) -> tuple[jax.Array, jax.Array]:
    """Random indices, one of each of `count` equal strips of a row, and the strips' lengths."""
    if count == 0:
        return jnp.zeros(0, jnp.int32), jnp.zeros(0, jnp.int32)
    # the first `longer` strips have one entry more; sizes stay below 2^31 this way
    length, longer = divmod(size, count)
    strip = jnp.arange(count, dtype=jnp.int32)
    lengths = length + (strip < longer).astype(jnp.int32)
    starts = strip * length + jnp.minimum(strip, longer)
    return starts + jax.random.randint(key, (count,), 0, lengths), lengths


def put_at(like: jax.Array, places: jax.Array, values: jax.Array) -> jax.Array:
    """A row of zeros with values at some places, each named once."""
    zeros = jnp.zeros(like.shape, values.dtype)
    return zeros.at[places].set(values, unique_indices=True)


def _sum_sparse(
    flat: list[jax.Array], places: list[jax.Array], chosen: list[jax.Array], axes: tuple[str, ...]
) -> list[jax.Array]:
    """Sums of what all devices chose, from one all-gather of values and indices."""
    values = jax.lax.bitcast_convert_type(jnp.concatenate(chosen), jnp.int32)
    ours = jnp.concatenate([values, *places])
    everyone = jax.lax.all_gather(ours, axes, to="invarying")
    sizes = [len(place) for place in places]
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    total = sum(sizes)

    def add(sums: list[jax.Array], theirs: jax.Array) -> tuple[list[jax.Array], None]:
        values = jax.lax.bitcast_convert_type(theirs[:total], jnp.float32)
        new = []
        for x, start, size in zip(sums, starts, sizes, strict=True):
            part = slice(start, start + size)
            place = theirs[total:][part]
            new.append(x.at[place].add(values[part], unique_indices=True))
        return new, None

    # one sender after the other: all at once, a GPU would add in no order of its own
    sums, _ = jax.lax.scan(add, [jnp.zeros(x.shape, x.dtype) for x in flat], everyone)
    return sums


def _shaped(rows: list[jax.Array], like: list[jax.Array]) -> list[jax.Array]:
    """Rows in the shapes of the leaves."""
    return [row.reshape(x.shape) for row, x in zip(rows, like, strict=True)]


def check_ratio(name: str, ratio: Any) -> None:
    """Refuses what is no part of the entries."""
    is_number = isinstance(ratio, (int, float, np.floating)) and not isinstance(ratio, bool)
    if not is_number or not math.isfinite(ratio) or not 0 < ratio <= 1:
        raise ValueError(
            f"{name} got ratio={ratio!r}, the part of the entries to send: it must be above 0, or "
            "nothing would ever arrive, and at most 1, which sends all. 0.01 sends one in a "
            "hundred; of each leaf at least one entry is sent."
        )
