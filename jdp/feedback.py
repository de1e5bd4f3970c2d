"""Error feedback: what a compressor does not send in one step, it sends in a later one.

    PerReplica g_i [N, *shape]                                  mean [*shape], on every device
            |                                                        ^
            +--> value_i = g_i + residual_i --> exchange --> means --+
                     |                             |
                     +------- minus what was sent -+--> residual_i   (each device its own row)

`compressed` is the shell that all of jdp's compressors share: it takes the gradients, adds the
residuals, runs the compressor's exchange on each device and keeps what is left over. What is sent,
and how, is the exchange's own business; nothing here compresses or communicates.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from jdp.mesh import AxisNames, names_of, on_auto_axes, on_devices
from jdp.replica import (
    check_rows,
    is_gradient,
    is_per_replica,
    is_reduced,
    take_per_replica,
    wide,
    zeros_per_replica,
)


class CompressedState(NamedTuple):
    """State of a compressor.

    Attributes:
        residual: What each replica has not sent yet: float32 `PerReplica` leaves, one for each
            parameter, each device holding its own row; `()` without error feedback.
        memory: What the compressor itself remembers, the same on every device: a counter, a warm
            start.
    """

    residual: Any
    memory: Any


class Exchange(Protocol):
    """The part that is a compressor's own: one device's view of one step."""

    def __call__(
        self, values: list[jax.Array], memory: Any, axes: tuple[str, ...]
    ) -> tuple[list[jax.Array], list[jax.Array], Any]:
        """Exchanges this device's values with the others along `axes`, inside a shard_map.

        Args:
            values: This device's gradients with its residuals, float32, one for each parameter.
            memory: What the compressor remembers, the same on every device.
            axes: The mesh axes to exchange along.

        Returns:
            The means, the same on every device; what this device's values count as in them, so
            that the mean of that over devices is `means`; and the new memory, of the same dtypes
            and shapes, the same on every device.
        """
        ...


def no_memory(params: Any) -> tuple[()]:
    """For compressors that remember nothing."""
    del params
    return ()


def compressed(
    name: str,
    exchange: Exchange,
    init_memory: Callable[[Any], Any] = no_memory,
    *,
    axis: AxisNames | None = None,
    error_feedback: bool = True,
) -> optax.GradientTransformation:
    """Makes an optax transformation of a compressor, with error feedback.

    With g_i the gradient of replica i and e_i its residual, 0 at first,

        v_i = g_i + e_i
        means, sent_i, memory = exchange(v_i, memory)        mean_i(sent_i) = means
        e_i = v_i - sent_i

    so that over any number of steps, up to rounding,

        sum of means + mean_i(e_i) = sum of mean_i(g_i)

    Guarantees:
        - Means are the same bits on every device, in float32 (or a wider dtype of the gradient).
        - A residual is float32, and of one replica: split over the devices, saved and restored to
          the bit like any array. `jdp.restage` keeps its mean for another number of devices.
        - Skipped steps (`jdp.skip_nonfinite` around it) leave residual and memory alone, and so do
          calls that only accumulate (`jdp.multi_steps` around it).

    | a gradient with inf or NaN | what becomes of the residual |
    | --- | --- |
    | within `jdp.skip_nonfinite` | everything stays as it was, on every replica |
    | otherwise | entries that would not be finite keep their old residual, and memory that would \
not be finite stays; the means show inf or NaN |

    It costs 4 bytes a parameter on each device for the residual.

    Args:
        name: Public name of the transformation, for messages.
        exchange: What one device does, see `Exchange`.
        init_memory: From parameters (arrays or shapes) to the first memory.
        axis: The axes that gradients differ along; `None` takes all data axes of the mesh.
        error_feedback: Whether to keep residuals.

    Returns:
        A transformation from `PerReplica` gradients to plain ones, with state `CompressedState`;
        with error feedback its init needs a mesh (see `jdp.init_state`).

    Raises:
        ValueError: If a gradient is already reduced, naming it, or differs along other axes.

    Example:
        >>> halves = lambda values, memory, axes: (
        ...     [jax.lax.pmean(v / 2, axes) for v in values], [v / 2 for v in values], memory)
        >>> mesh, tx = jdp.make_mesh(), compressed("halves", halves)
        >>> state = tx.init(jdp.replicate({"w": jnp.zeros(2)}, mesh))
        >>> grads = {"w": jdp.PerReplica(jnp.ones((8, 2)), axes=("data",), mesh=mesh)}
        >>> for _ in range(3): means, state = tx.update(grads, state)
        >>> means["w"], state.residual["w"].value[0]
        (Array([0.875, 0.875], dtype=float32), Array([0.875, 0.875], dtype=float32))

    References:
        Seide et al., 1-Bit Stochastic Gradient Descent, 2014. Karimireddy et al., Error Feedback
        Fixes SignSGD and other Gradient Compression Schemes, 2019.
    """
    check_axis(name, axis)

    def init(params: Any) -> CompressedState:
        residual = zeros_per_replica(params, name, axis) if error_feedback else ()
        return CompressedState(residual, init_memory(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, CompressedState]:
        del params
        _check_unreduced(name, updates)
        values, axes, mesh = take_per_replica(updates, name)
        if not axes:  # an empty tree
            return updates, state
        _check_axes(name, axis, axes, state)
        values, treedef = jax.tree.flatten(values)
        residuals = jax.tree.leaves(state.residual)
        run = on_devices(
            _on_one_device(exchange, axes, error_feedback),
            mesh,
            in_specs=(P(axes), P(axes), P()),
            out_specs=(P(), P(axes), P()),
            axes=axes,
        )
        means, residuals, memory = run(values, residuals, state.memory)
        means = [mean.astype(wide(value)) for mean, value in zip(means, values, strict=True)]
        # into the old nodes, whose mesh may be an abstract one: the structure must stay
        residual = jax.tree.unflatten(jax.tree.structure(state.residual), residuals)
        return treedef.unflatten(means), CompressedState(residual, memory)

    return optax.GradientTransformation(init, update)


def _on_one_device(
    exchange: Exchange, axes: tuple[str, ...], error_feedback: bool
) -> Callable[[Any, Any, Any], Any]:
    """What one device does with its rows."""

    def compute(values: list[jax.Array], olds: list[jax.Array], memory: Any) -> Any:
        values = [value.astype(jnp.float32) for value in values]
        if not error_feedback:
            means, _, new = exchange(values, memory, axes)
            return means, [], _finite_or(new, memory)
        values = [value + old for value, old in zip(values, olds, strict=True)]
        means, sent, new = exchange(values, memory, axes)
        kept = []
        for value, part, old in zip(values, sent, olds, strict=True):
            residual = value - part
            kept.append(jnp.where(jnp.isfinite(residual), residual, old))
        return means, kept, _finite_or(new, memory)

    def local(rows: Any, residuals: Any, memory: Any) -> Any:
        values, olds = [row[0] for row in rows], [residual[0] for residual in residuals]
        run = on_auto_axes(compute, (values, olds, memory))
        means, kept, memory = run(values, olds, memory)
        return means, [residual[None] for residual in kept], memory

    return local


def _finite_or(new: Any, old: Any) -> Any:
    """The new memory, but the old of each array of it that holds inf or NaN now."""

    def one(after: jax.Array, before: jax.Array) -> jax.Array:
        if not jnp.issubdtype(after.dtype, jnp.floating):
            return after
        return jnp.where(jnp.all(jnp.isfinite(after)), after, before)

    return jax.tree.map(one, new, old)


def check_axis(name: str, axis: AxisNames | None) -> None:
    """Refuses an empty list of axes."""
    if axis is not None and not axis:
        raise ValueError(
            f"{name}(axis={axis!r}) would average over nothing. Name the axes, or leave "
            "axis out to average over all."
        )
    if axis is not None and len(set(names_of(axis))) != len(names_of(axis)):
        raise ValueError(f"{name}(axis={axis!r}) names one axis twice; name each once.")


def _check_unreduced(name: str, updates: Any) -> None:
    """Refuses gradients that a ZeRO stage behind the compressor has had reduced already."""
    if any(map(is_reduced, jax.tree.leaves(updates, is_leaf=is_gradient))):
        raise ValueError(
            f"{name} received gradients that were reduced where they arose, in the backward pass, "
            "for a jdp.zero2 or jdp.zero3 behind it: there is nothing left to compress. Put "
            f"jdp.zero1 or jdp.zero2(..., reduce='step') behind {name}, or leave {name} out."
        )


def _check_axes(name: str, axis: AxisNames | None, axes: tuple[str, ...], state: Any) -> None:
    """Refuses gradients that differ along other axes than the residuals."""
    if not isinstance(state, CompressedState):
        raise ValueError(
            f"{name} was given a state that it did not make, a {type(state).__name__}. Make one "
            "with jdp.init_state(params, tx, mesh) for this tx."
        )
    named = axes if axis is None else names_of(axis)
    residuals = jax.tree.leaves(state.residual, is_leaf=is_per_replica)
    kept = residuals[0].axes if residuals else axes
    for leaf in residuals:
        check_rows(leaf, f"The residual of {name}")
    if wrong := next((other for other in (named, kept) if set(other) != set(axes)), None):
        raise ValueError(
            f"{name} works along the mesh axes {tuple(wrong)}, but the gradients differ along "
            f"{axes}: a compressor averages over all of theirs. Give it axis={axes}, or reduce "
            "over the others first: optax.chain(jdp.all_reduce('device'), "
            f"{name}(..., axis='node'))."
        )
