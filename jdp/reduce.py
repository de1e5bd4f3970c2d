"""The plain reduction: per-replica gradients in, their mean out, as an optax transformation.

    PerReplica [N, *shape]  --all_reduce-->  array [*shape], the same bits on every device

It goes where per-replica gradients are to become gradients, as a rule first in the chain:
`optax.chain(jdp.all_reduce(), optax.adamw(3e-4))`. It keeps no state, but for what error feedback
and random rounding need, and knows no optimizer. How buckets are made is decided here, from what
the mesh consists of; how numbers become bits is decided in `jdp.quantize`.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jdp import collectives
from jdp.feedback import check_axis, compressed
from jdp.mesh import AnyMesh, AxisNames, names_of, on_auto_axes, on_devices
from jdp.quantize import BLOCK, check_block, check_wire_dtype, is_narrow
from jdp.replica import give_per_replica, take_per_replica, weight_of, wide, widen

# Bytes above which a leaf is not joined with others on CPU. Four leaves of up to 16 MB joined by
# XLA:CPU in a step cost 194 ms where alone they took 18, and in bfloat16 20 ms more than alone; the
# wire gains nothing from larger buffers.
ALONE_ABOVE = 2**20


def all_reduce(
    axis: AxisNames | None = None,
    *,
    wire_dtype: Any = None,
    bucket_bytes: int = collectives.BUCKET_BYTES,
    block: int = BLOCK,
    stochastic: bool = False,
    error_feedback: bool = False,
    exact_sum: bool = True,
    seed: int = 0,
) -> optax.GradientTransformation:
    """Averages per-replica gradients over the replicas.

    With N replicas holding g_1 ... g_N, every device ends with

        g = round((1/N) * sum_i round(g_i))

    where `round` is to the wire dtype, and nothing where that is 32 bits wide. What is narrower is
    added up in float32 (all-to-all, local sum, all-gather; with 8 bits a device adds its own values
    as they are, since they do not travel).

    | wire dtype | bytes of float32's | a rounding is off by at most |
    | --- | --- | --- |
    | bfloat16 | 0.5 | 2^-8 of the value |
    | float16 | 0.5003 | 2^-11 of the value, above 2^-28 of the largest of 4096 |
    | float8_e4m3fn | 0.254 | 2^-4 of the value, above 2^-13 of its block's largest |
    | float8_e5m2 | 0.254 | 2^-3 of the value, above 2^-28 of its block's largest |
    | int8 | 0.254 | 1/254 of its block's largest |

    Guarantees:
        - The result is the same bits on every device, in the dtype of the gradient or, where that
          is narrower, in float32, in which norms and moments are to be taken.
        - With N devices each sends 2(N-1)/N of the gradient's bytes at the wire dtype.
        - Nothing is sent inside a loop, and a leaf is sent once.
        - With `wire_dtype=None` nothing is cast.
        - With `error_feedback` both roundings are made up for in the next step, see
          `jdp.feedback.compressed`; it costs 4 bytes a parameter on each device.
        - inf and NaN arrive, and are never clipped; see `jdp.collectives.mean`.

    | devices | how a bucket is made |
    | --- | --- |
    | TPU, GPU | by the compiler, and sent under the backward pass; see `jdp.xla_options` |
    | CPU, several processes | leaves up to 1 MiB joined in flat buffers: up to 20 times faster |
    | CPU, one process | not at all: joining copies, and there is no wire to save |

    Narrow dtypes are always joined.

    Args:
        axis: Mesh axis, or axes, to average over; `None` takes all that the gradients differ
            along. Over part of them the result is a `PerReplica` along the others; with
            `stochastic` or `error_feedback` they must be all that the gradients differ along.
        wire_dtype: float32, bfloat16, float16, float8_e4m3fn, float8_e5m2 or int8, sent between
            devices; `None` sends each leaf as it is.
        bucket_bytes: Size of a bucket at the wire dtype, where this transformation makes them;
            default 25 MiB. Where the compiler does, give the same number to `jdp.xla_options`. On
            CPU a leaf of more than 1 MiB has a bucket of its own: joining would be a copy.
        block: Values that share a scale, for dtypes of 8 bits; 4 bytes each.
        stochastic: Round up or down at random, so that the mean is right on average.
        error_feedback: Keep what a narrow dtype loses and add it to the next gradient.
        exact_sum: False adds up 16 bits in 16 bits, by a plain all-reduce, see
            `jdp.collectives.mean`: cheaper where the backend has one, and less exact, with float16
            above all for entries that are tiny or huge.
        seed: Of the random rounding.

    Blocks run across leaves: with int8 and without `error_feedback` an entry below 1/254 of its
    neighbours', such as a bias beside a large matrix, arrives as 0; float8_e4m3fn keeps it.

    Returns:
        A transformation from `PerReplica` gradients, leaves of shape `[N, *param.shape]`, to
        gradients of the parameters' shapes; stateless, or with `stochastic` or `error_feedback`
        of state `CompressedState`, whose memory counts steps.

    Raises:
        ValueError: If a gradient is already reduced, naming it, or an argument cannot be meant.

    Example:
        >>> loss_fn = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
        >>> params, batch = {"w": jnp.ones(3)}, jnp.ones((16, 3))
        >>> _, grads = jdp.value_and_grad(loss_fn, jdp.make_mesh())(params, batch)
        >>> tx = optax.chain(jdp.all_reduce(), optax.sgd(1.0))
        >>> tx.update(grads, tx.init(params))[0]["w"]
        Array([-6., -6., -6.], dtype=float32)

    References:
        Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, 2020.
        Alistarh et al., QSGD: Communication-Efficient SGD via Gradient Quantization, 2017.
    """
    send = collectives.Sending(
        wire_dtype=check_wire_dtype(wire_dtype), block=check_block(block), exact_sum=exact_sum
    )
    bucket_bytes = collectives.check_bucket_bytes(bucket_bytes)
    check_axis("jdp.all_reduce", axis)
    _check_rounding(send, stochastic, error_feedback)
    if stochastic or error_feedback:
        return _with_state(axis, send, bucket_bytes, stochastic, error_feedback, seed)

    def init(params: Any) -> optax.EmptyState:
        del params
        return optax.EmptyState()

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        values, axes, mesh = take_per_replica(updates, "jdp.all_reduce")
        if not axes:  # an empty tree
            return updates, state
        over = axes if axis is None else names_of(axis)
        if missing := [name for name in over if name not in axes]:
            raise ValueError(
                f"jdp.all_reduce(axis={axis!r}): the gradients differ along {axes}, not along "
                f"{missing[0]!r}. Name one or more of those, or leave axis out to average over all."
            )
        limit = bucket_bytes if joins_leaves(mesh) else None

        def means_of(leaves: list[jax.Array]) -> list[jax.Array]:
            return collectives.means_and_sent(leaves, over, send, limit, _alone_above())[0]

        return average_over(over, means_of, updates, values, axes, mesh), state

    return optax.GradientTransformation(init, update)


def _with_state(
    axis: AxisNames | None,
    send: collectives.Sending,
    bucket_bytes: int,
    stochastic: bool,
    error_feedback: bool,
    seed: int,
) -> optax.GradientTransformation:
    """The same with residuals, or a count of steps that gives each its random numbers."""

    def exchange(values: list[jax.Array], memory: Any, axes: tuple[str, ...]) -> Any:
        key = jax.random.fold_in(jax.random.key(seed), memory) if stochastic else None
        means, sent = collectives.means_and_sent(
            values, axes, send._replace(key=key), bucket_bytes, _alone_above()
        )
        return means, sent, memory + 1 if stochastic else memory

    def init_memory(params: Any) -> Any:
        del params
        return jnp.zeros((), jnp.int32) if stochastic else ()

    return compressed(
        "jdp.all_reduce", exchange, init_memory, axis=axis, error_feedback=error_feedback
    )


def _check_rounding(send: collectives.Sending, stochastic: bool, error_feedback: bool) -> None:
    """Refuses what has no meaning for the dtype on the wire."""
    wire = send.wire_dtype
    narrow = wire is not None and is_narrow(wire)
    given = f"wire_dtype={wire if wire is None else wire.name}"
    for name, asked in (("stochastic", stochastic), ("error_feedback", error_feedback)):
        if asked and not narrow:
            raise ValueError(
                f"jdp.all_reduce({given}, {name}=True): nothing is rounded on the way, so there is "
                "nothing to make up for. Give a narrow wire_dtype, such as jnp.int8, or leave it "
                "out."
            )
        if asked and not send.exact_sum:
            raise ValueError(
                f"jdp.all_reduce(exact_sum=False, {name}=True): a sum in the wire dtype rounds at "
                "every addition, which no device can make up for. Leave one of them out."
            )
    collectives.check_exact_sum("jdp.all_reduce", send)


def average_over(
    over: tuple[str, ...],
    means_of: Callable[[list[jax.Array]], list[jax.Array]],
    updates: Any,
    values: Any,
    axes: tuple[str, ...],
    mesh: AnyMesh,
) -> Any:
    """Means of per-replica values over some of their axes, made by `means_of` on each device.

    They are plain, in float32 or wider; or `PerReplica` along the axes that are left.
    """
    rest = tuple(name for name in axes if name not in over)

    def average(values: Any) -> Any:
        leaves, treedef = jax.tree.flatten(values)
        # what goes on to be sent again stays as narrow as it came
        dtypes = [leaf.dtype if rest else wide(leaf) for leaf in leaves]
        pairs = zip(on_auto_axes(means_of, leaves)(leaves), dtypes, strict=True)
        return treedef.unflatten([mean.astype(dtype) for mean, dtype in pairs])

    reduced = _on_each_device(average, mesh, axes, rest)(values)
    if not rest:
        return widen(reduced)
    return give_per_replica(reduced, weight_of(updates), rest, mesh)


def _on_each_device(
    average: Any, mesh: AnyMesh, axes: tuple[str, ...], rest: tuple[str, ...]
) -> Any:
    """Applies a per-device function to [N, *shape] arrays; keeps a replica axis along `rest`."""

    def local(values: Any) -> Any:
        means = average(jax.tree.map(lambda value: value[0], values))
        return jax.tree.map(lambda value: value[None], means) if rest else means

    return on_devices(local, mesh, P(axes), P(rest) if rest else P(), axes)


def joins_leaves(mesh: AnyMesh) -> bool:
    """Whether leaves are joined before they are sent: between CPU processes only.

    Gloo runs an all-reduce of many operands one operand at a time: 100 leaves of 100 KB took
    319 ms, joined 17 ms. Between devices of one process joining cost 4 times as much as it saved.
    """
    if not isinstance(mesh, Mesh):
        return jax.default_backend() == "cpu" and jax.process_count() > 1
    devices = mesh.devices.ravel()
    return devices[0].platform == "cpu" and len({d.process_index for d in devices}) > 1


def _alone_above() -> float:
    """Bytes above which a leaf travels alone, by the devices of the `shard_map` that asks."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return ALONE_ABOVE if device is not None and device.platform == "cpu" else math.inf
