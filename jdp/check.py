"""Proof for the user's own loss: the mesh against one device, and the order of a chain.

In: a loss or a step, and example inputs. Out: a number, or an AssertionError that says which
gradient is off and by what factor. Gradients are compared, not parameters after an optimizer:
Adam, Lion and clipping hide a gradient that is 8 times too big.

These are for tests and notebooks; nothing here runs in a training loop.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jdp import order
from jdp.grad import value_and_grad
from jdp.mesh import AxisNames, make_mesh
from jdp.replica import map_per_replica
from jdp.rows import agreed


def check_against_one_device(
    loss_fn: Callable[..., Any],
    params: Any,
    batch: Any,
    mesh: Mesh,
    *,
    axis: AxisNames | None = None,
    microbatch: int | None = None,
    key: Any = None,
    model_state: Any = None,
    rtol: float = 1e-4,
) -> float:
    """Compares loss and gradient on the mesh with the whole batch on one device, in one call.

    It fails for a loss that is not a mean over examples: one that divides by its own count of
    tokens (a mean of means), couples the examples of a batch without `jdp.all_gather`, or adds a
    term that does not depend on the data to a `Mean`'s total.

    Args:
        loss_fn: See `jdp.value_and_grad`.
        params: Parameters.
        batch: A whole global batch, on the host or on this process's devices. The more unequal
            its parts, the sharper the check.
        mesh: The mesh.
        axis: Data axes, as for `jdp.value_and_grad`.
        microbatch: Examples per microbatch on the mesh.
        key: A random key, for losses that take one. One device then works in the same
            microbatches, so that it draws the same numbers; `microbatch` must be given.
        model_state: For losses that take it.
        rtol: Largest accepted difference, relative to each leaf's largest entry, or to a hundredth
            of the largest entry of all where that is more.

    Returns:
        The largest relative difference found.

    Raises:
        AssertionError: If loss or gradient differ by more, naming the leaf and the factor.
        ValueError: If a key is given without `microbatch`.

    Example:
        >>> loss_fn = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
        >>> params, batch = {"w": jnp.ones(3)}, jnp.arange(48.0).reshape(16, 3)
        >>> jdp.check_against_one_device(loss_fn, params, batch, jdp.make_mesh()) < 1e-5
        True
    """
    if key is not None and microbatch is None:
        raise ValueError(
            "check_against_one_device needs `microbatch` with a key: random numbers are drawn for "
            "each microbatch, and one device can draw the same only for microbatches of one size."
        )
    alone = make_mesh(
        mesh.axis_names,
        (1,) * len(mesh.axis_names),
        devices=[mesh.local_devices[0]],
        axis_types=mesh.axis_types,
    )
    params, batch, model_state = jax.device_get((agreed(params), batch, model_state))
    results = []
    for place, size in ((mesh, microbatch), (alone, microbatch if key is not None else None)):
        run = value_and_grad(loss_fn, place, axis=axis, microbatch=size)
        values, grads = run(params, batch, key, model_state=model_state)
        loss = values[0] if isinstance(values, tuple) else values
        means = map_per_replica(lambda g: np.asarray(g.value, np.float64).mean(0), grads)
        results.append({"loss": np.asarray(loss, np.float64), "gradient": means})
    return _compare(*results, rtol=rtol, count=mesh.size)


def _compare(many: Any, one: Any, *, rtol: float, count: int) -> float:
    """The largest relative difference between two trees, or an AssertionError."""
    worst, largest = 0.0, max(np.abs(x).max(initial=0.0) for x in jax.tree.leaves(one["gradient"]))
    paths = jax.tree_util.tree_flatten_with_path(one)[0]
    for (path, want), got in zip(paths, jax.tree.leaves(many), strict=True):
        # rounding alone is left of a gradient that is 0, such as that of an attention's key bias
        size = max(np.abs(want).max(initial=0.0), 1e-2 * largest)
        error = np.abs(got - want).max(initial=0.0) / max(size, 1e-30)
        if not error <= rtol:
            factor = np.vdot(want, got) / max(np.vdot(want, want), 1e-300)
            raise AssertionError(
                f"{jax.tree_util.keystr(path)} on {count} devices differs from one device by "
                f"{error:.2g} (accepted: {rtol:.2g}); it is about {factor:.3g} times as large. "
                "Either the loss is not a mean over the examples it is given (where counts differ, "
                "return jdp.Mean(total, weight)), or it sums over the data axis what jdp sums too."
            )
        worst = max(worst, float(error))
    return worst


def check_order(step: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Refuses a step in which a per-replica gradient is computed with before it is reduced.

    `jdp.train_step` does this by itself; a step of your own (a flax `TrainState`'s, say) can be
    checked with one call in a test. `optax.chain(clip_by_global_norm(1.0), jdp.all_reduce())`
    would otherwise clip the norm of all replicas' gradients together, silently.

    Args:
        step: A function that takes a gradient with `jdp.value_and_grad` and reduces it.
        *args: Its arguments, arrays or shapes.
        **kwargs: Its keyword arguments.

    Raises:
        ValueError: If there is such a computation, naming it.

    Example:
        >>> grad_fn = jdp.value_and_grad(lambda p, batch: jnp.mean(batch * p), jdp.make_mesh())
        >>> tx = optax.chain(jdp.all_reduce(), optax.clip(1.0))
        >>> step = lambda p, batch: tx.update(grad_fn(p, batch)[1], tx.init(p))[0]
        >>> jdp.check_order(step, jnp.ones(()), jnp.ones(8))
    """
    order.check_order(jax.jit(step).trace(*args, **kwargs).jaxpr.jaxpr)
