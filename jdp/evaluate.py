"""Evaluation: a metric function over a global batch, as totals and weights that add up exactly.

    params, batch  --metric_fn on each microbatch-->  Mean leaves  --psum-->  global Mean leaves

What comes out is not divided yet, so that batches of unequal weight add up: `evaluate` does that
on the host, in double precision, and divides once. Nothing here changes parameters.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jdp.loss import Mean, count_rows, is_mean, require_weights, weigh
from jdp.mesh import AxisNames, data_axes
from jdp.microbatch import Layout, lay_out, on_replicas, over_microbatches, sum_over, vary
from jdp.pace import is_emulated, keep_pace
from jdp.padded import map_logical, view
from jdp.rows import agreed
from jdp.watchdog import note_alive


def eval_step(
    metric_fn: Callable[..., Any],
    mesh: Mesh,
    *,
    axis: AxisNames | None = None,
    microbatch: int | None = None,
) -> Callable[..., Any]:
    """Takes a metric function to one of a global batch, the same on every device.

    With microbatches j, each metric becomes `Mean(sum_j total_j, sum_j weight_j)`; a plain scalar
    counts as Mean(m * value, m). Metrics that are not means (perplexity, RMSE, F1) are computed
    from such means afterwards, once.

    Guarantees:
        - Totals and weights of several batches may be added before dividing.
        - One small exchange for each batch, after its last microbatch.

    Args:
        metric_fn: `metric_fn(params, batch[, model_state=...])` returning a pytree of scalars and
            `Mean`s.
        mesh: The mesh.
        axis: Data axes; `None` finds them, see `jdp.data_axes`.
        microbatch: Examples per microbatch; `None` takes a replica's whole share as one.

    Returns:
        `f(params, batch, *, model_state=None)`, jitted, which returns the pytree with `Mean`
        leaves of float32. Parameters that differ by replica are taken at their mean, see
        `jdp.agreed`, which costs an all-reduce of them for each batch.

    Raises:
        ValueError: If the batch does not divide, or a metric is neither a scalar nor a `Mean`; if
            the batch carries weights and a metric is a plain scalar, which would ignore them.

    Example:
        >>> metric_fn = lambda params, batch: {"squares": jdp.Mean((batch**2).sum(), batch.size)}
        >>> metrics = jdp.eval_step(metric_fn, jdp.make_mesh())({}, jnp.arange(8.0))
        >>> float(metrics["squares"].total), float(metrics["squares"].value)
        (140.0, 17.5)
    """
    axes = data_axes(mesh, axis)

    @jax.jit
    def call(params: Any, batch: Any, *, model_state: Any = None) -> Any:
        layout = lay_out(batch, mesh, axes, microbatch)
        local = functools.partial(_local, metric_fn, layout)
        params = map_logical(view, agreed(params))
        return on_replicas(local, layout, P())(params, batch, None, model_state, None)

    if not is_emulated(mesh):
        return call

    def paced(params: Any, batch: Any, *, model_state: Any = None) -> Any:
        result = call(params, batch, model_state=model_state)
        first = jax.tree.leaves(result)[:1]
        if first:
            keep_pace(first[0])
        return result

    return paced


def _local(
    metric_fn: Callable[..., Any],
    layout: Layout,
    params: Any,
    batch: Any,
    key: Any,
    model_state: Any,
    shares: Any,
) -> Any:
    """What one replica does: its microbatches' totals and weights, summed over all replicas."""
    keywords = {} if model_state is None else {"model_state": vary(model_state, layout.axes)}

    def work(rows: Any, key: Any, state: Any) -> tuple[Any, Any, Any]:
        # new nodes: flax.nnx lets only those Variables be updated that were made in this trace
        new = jax.tree.map(lambda x: x, keywords)
        metrics = metric_fn(vary(params, layout.axes), rows, **new)
        require_weights(metrics, rows)
        return (), weigh(metrics, float(count_rows(rows))), None

    _, sums, _ = over_microbatches(work, batch, key, None, shares, layout, ())
    return sum_over(sums, layout.axes)


def evaluate(
    step: Callable[..., Any], params: Any, batches: Iterable[Any], *, model_state: Any = None
) -> Any:
    """Runs an evaluation step over batches and divides once, at the end.

    Totals and weights are added on the host in float64, exact to 2^53 where float32 stops
    counting at 2^24. Each batch is dispatched before the one before it is read.

    Args:
        step: What `eval_step` returned.
        params: The parameters.
        batches: Global batches, such as `jdp.feed` gives.
        model_state: What the model keeps besides parameters, if the metric function takes it.

    Returns:
        The pytree of metrics as floats (arrays where the totals are arrays).

    Raises:
        ValueError: If there is no batch.

    Example:
        >>> metric_fn = lambda params, batch: jdp.Mean(batch.sum(), batch.size)
        >>> step = jdp.eval_step(metric_fn, jdp.make_mesh())
        >>> jdp.evaluate(step, {}, [jnp.ones(8), 4 * jnp.ones(16)])
        3.0
    """
    keywords = {} if model_state is None else {"model_state": model_state}
    params = agreed(params)  # once, and not for every batch
    total, pending = None, None
    for batch in batches:
        note_alive()  # an evaluation may take longer than a run may stand still
        new = step(params, batch, **keywords)
        total, pending = _add(total, pending), new
    total = _add(total, pending)
    if total is None:
        raise ValueError(
            "jdp.evaluate got no batch: a mean over nothing is not defined. An iterator that was "
            "already used up gives none; make a new one for each evaluation."
        )
    return jax.tree.map(_divide, total, is_leaf=is_mean)


def _add(total: Any, new: Any) -> Any:
    """Adds a batch's sums, read from the devices, in float64."""
    if new is None:
        return total
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), new)
    return wide if total is None else jax.tree.map(np.add, total, wide)


def _divide(mean: Mean) -> Any:
    with np.errstate(invalid="ignore", divide="ignore"):
        value = np.divide(mean.total, mean.weight)
    return float(value) if value.ndim == 0 else value
