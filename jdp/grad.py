"""From a loss function to per-replica gradients and the global loss.

In: a user's function of (params, batch), and a mesh. Out: a function of global arrays that runs
it on every replica over that replica's microbatches, inside one `shard_map`:

    params (same on all) --+
    batch (split by rows) -+-> loss and its gradient, each microbatch --sum--> g_i  [N, *shape]
                                                       scalars of loss and aux --psum--> global

(Parameters that are `PerReplica` themselves, those of local steps, are each replica's own row.)

Gradients come back as `PerReplica` values, scaled so that their plain mean is the gradient of
the global loss. They are not sent here, least of all inside the loop over microbatches: what
ends the replica axis is a transformation such as `jdp.all_reduce`. (The exception is asked for by
a `Placement`, ZeRO-2's or 3's: gradients are then reduced where they arise, and come back split.)
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jdp.dataflow import exchanges_behind
from jdp.given import Ordered, Split, Whole
from jdp.loss import Form, Mean, check_params, count_rows, is_mean, take_apart
from jdp.mesh import AxisNames, data_axes
from jdp.microbatch import (
    Layout,
    Work,
    lay_out,
    on_replicas,
    over_microbatches,
    sum_over,
    varying_axes,
)
from jdp.padded import map_logical, view
from jdp.remat import checkpoint_policy
from jdp.replica import give_per_replica, give_reduced, wide
from jdp.rows import own_rows, row_specs
from jdp.split import Placement, as_stored, check_axes, mark
from jdp.unshard import PARAMS

_TOTAL, _WEIGHT = "jdp: total of a loss", "jdp: weight of a loss"


def value_and_grad(
    loss_fn: Callable[..., Any],
    mesh: Mesh,
    *,
    axis: AxisNames | None = None,
    microbatch: int | None = None,
    remat: bool | str | Callable[..., bool] = False,
) -> Callable[..., Any]:
    """Takes a loss function to a function of its global value and its per-replica gradients.

    A drop-in for `jax.value_and_grad`. With M microbatches of weight w_j on N replicas,

        loss = sum_j total_j / W,    W = sum_j w_j
        g_i  = (N / W) * sum over the microbatches j of replica i of grad(total_j)

    so the mean of g_1 ... g_N is the gradient of the loss over the whole batch. A scalar loss
    counts as the mean over its microbatch: total = m * loss, w = m.

    Guarantees:
        - Gradients are accumulated in float32 and returned in the dtype of their parameter.
        - No gradient is sent; the scalars of loss and aux are, once, after the last microbatch.
        - Microbatch j has the same rows, key and shapes on any number of replicas.
        - A parameter used several times (a tied embedding) has its gradient summed locally.

    Args:
        loss_fn: `loss_fn(params, batch[, key][, model_state=...])` returning `loss`,
            `(loss, aux)` or `(loss, aux, model_state)`; the loss is the mean over the examples
            it is given, or `jdp.Mean(total, weight)`; leaves of aux are scalars or `Mean`s.
            Inside, the data axes have their names: `jdp.all_gather` and BatchNorm's `axis_name`
            work.
        mesh: The mesh.
        axis: Data axes; `None` finds them, see `jdp.data_axes`.
        microbatch: Examples per microbatch; `None` takes a replica's whole share as one.
        remat: Recompute the forward pass in the backward pass: True, or what to keep of it, a
            policy of `jax.checkpoint_policies` or its name, such as "dots_saveable".

    Returns:
        `f(params, batch, key=None, *, model_state=None, shares=None, loss_scale=None,
        placement=None)`, jitted, which returns what `jax.value_and_grad` would: `(loss, grads)`,
        or `((loss, aux), grads)`, or `((loss, aux, model_state), grads)`. Loss and aux are the
        same on all devices; leaves of grads are `PerReplica`, shape [N, *param.shape]. Parameters
        may be `PerReplica` too (see `jdp.local_sgd`): g_i is then taken at replica i's own.

        `shares`, int32 of shape [N], gives replica i only its first shares[i] microbatches, for
        devices of unequal speed; a number it does not have makes the loss and every gradient NaN.
        `loss_scale`, a scalar, multiplies the gradients (not the loss that is returned), see
        `jdp.dynamic_loss_scale`. `placement`, that of `jdp.zero2` or `jdp.zero3` (the attribute of
        their state), makes grads plain arrays, reduced and split; without it, split parameters
        are gathered once, before the loss.

    Raises:
        ValueError: If the batch does not divide, the loss is not a scalar or is averaged over
            the data axis, its weight depends on the parameters, or model state differs by replica.
        TypeError: If a parameter or the loss is not real floating point.

    Example:
        >>> loss_fn = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
        >>> params, batch = {"w": jnp.ones(3)}, jnp.ones((16, 3))
        >>> loss, grads = jdp.value_and_grad(loss_fn, jdp.make_mesh(), microbatch=1)(params, batch)
        >>> float(loss), grads["w"].shape
        (9.0, (8, 3))

    References:
        Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, 2020.
    """
    axes = data_axes(mesh, axis)
    policy = checkpoint_policy(remat)

    @functools.partial(jax.jit, static_argnames="placement")
    def call(
        params: Any,
        batch: Any,
        key: Any = None,
        *,
        model_state: Any = None,
        shares: Any = None,
        loss_scale: Any = None,
        placement: Placement | None = None,
    ) -> Any:
        check_params(params)
        layout = lay_out(batch, mesh, axes, microbatch)
        in_backward = placement if placement is not None and placement.in_backward else None
        _check_shares(shares, model_state, in_backward, axes)
        seen: list[Form] = []  # what tracing finds out about the loss function
        if in_backward is None:
            params, treedef = map_logical(view, params), None
            make, specs, grad_specs = Whole, row_specs(params, axes, mesh), P(axes)
        else:
            check_axes(in_backward, axes)
            params, treedef = as_stored(params, in_backward)
            grad_specs = in_backward.specs
            specs = (grad_specs if in_backward.stage == 3 else P()), P()
            compute_dtype = getattr(loss_fn, "compute_dtype", None)
            gathering = functools.partial(Split, compute_dtype=compute_dtype)
            make = functools.partial(
                Ordered if in_backward.ordered else gathering,
                treedef=treedef,
                placement=in_backward,
            )
        run = on_replicas(
            functools.partial(_local, loss_fn, layout, policy, make, seen),
            layout,
            (grad_specs, P(), P(), P()),
            check=lambda program: _check_exchanges(program, seen[0], axes),
            params_specs=specs,
        )
        given = (params, loss_scale), batch, key, model_state, shares
        grads, loss, aux, new_state = run(*given)
        aux = jax.tree.map(lambda mean: mean.value, aux, is_leaf=is_mean)
        values: list[Any] = [loss.value, aux, new_state][: seen[0].values]
        # for other calls to be weighed against: a plain mean stands for its examples
        weight = loss.weight * (1 if seen[0].weighted else count_rows(batch) // layout.microbatches)
        if in_backward is None:
            grads = give_per_replica(grads, weight, axes, mesh)
        else:
            stored = [mark(g, p) for g, p in zip(grads, in_backward.parts, strict=True)]
            grads = give_reduced(stored, weight, treedef)
        return (tuple(values) if len(values) > 1 else values[0]), grads

    return call


def _check_shares(
    shares: Any, model_state: Any, in_backward: Placement | None, axes: tuple[str, ...]
) -> None:
    if shares is None:
        return
    if model_state is not None:
        raise ValueError(
            "shares and model_state exclude each other: model state is synchronised at every "
            "microbatch, and replicas with fewer of them would leave the others waiting."
        )
    if in_backward is not None:
        raise ValueError(
            f"shares and {in_backward.name} exclude each other: it reduces gradients over {axes} "
            "at every microbatch, and replicas with fewer of them would leave the others waiting. "
            'Use jdp.zero1, or jdp.zero2(..., reduce="step").'
        )


def _local(
    loss_fn: Callable[..., Any],
    layout: Layout,
    policy: Any,
    make: Callable[..., Whole | Split],
    seen: list[Form],
    given: Any,
    batch: Any,
    key: Any,
    model_state: Any,
    shares: Any,
) -> Any:
    """What one replica does: its gradient, as `given` has it, and the global loss, aux, state."""
    axes = layout.axes
    params, loss_scale = given
    own = make(own_rows(params), layout=layout)

    def call(params: Any) -> Any:
        first = jax.tree.map(lambda x: x[: x.shape[0] // layout.each], batch)
        return _call(loss_fn, params, first, key, model_state)

    own.look_at(call)
    worker = functools.partial(_worker, loss_fn, layout, policy, seen, loss_scale)
    first, last, ordered = own, None, isinstance(own, Ordered)
    if isinstance(own, Split) and own.once:
        first = Whole(jax.tree.unflatten(own.treedef, params), layout)
        last = functools.partial(_last, own, worker, seen)
    grads, scalars, state = over_microbatches(
        worker(first), batch, key, model_state, shares, layout, first.zeros, last, ordered
    )
    loss, aux = sum_over(scalars, axes, ordered=ordered)
    if shares is not None:  # more than there are, or fewer than none, must not pass for a mean
        valid = jax.lax.pmin(jnp.int32((shares[0] >= 0) & (shares[0] <= layout.each)), axes)
        loss = Mean(loss.total, jnp.where(valid == 1, loss.weight, jnp.nan))
    if seen[0].weighted or shares is not None:
        # no weight at all means no data: no gradient. NaN and infinite weights stay visible.
        scale = jnp.where(jnp.isfinite(loss.weight), layout.replicas / loss.weight, jnp.nan)
        scale = jnp.where(loss.weight == 0, 0.0, scale)
    else:
        scale = 1 / layout.each  # known beforehand, so that nothing waits for the sum
    return own.close(grads, scale), loss, aux, state


def _worker(
    loss_fn: Callable[..., Any],
    layout: Layout,
    policy: Any,
    seen: list[Form],
    loss_scale: Any,
    own: Whole | Split,
) -> Work:
    """The function of one microbatch: the gradient of its total, its scalars, the next state."""
    objective = functools.partial(_objective, loss_fn, layout, seen, own, loss_scale)
    if policy is not None or own.policy is not None:
        objective = jax.checkpoint(objective, policy=own.policy(policy) if own.policy else policy)
    run = jax.value_and_grad(objective, has_aux=True)

    def work(rows: Any, key: Any, state: Any) -> tuple[Any, Any, Any]:
        (_, (scalars, unit, state)), grads = run(own.slots, rows, key, state)
        if unit is not None:
            grads = jax.tree.map(lambda g: g.astype(wide(g)) * unit, grads)
        return grads, scalars, state

    return work


def _last(
    own: Split, worker: Callable[..., Work], seen: list[Form], sums: Any, scalars: Any
) -> Work:
    """The function of the last microbatch, which reduces what those before it have summed up."""
    own.add(sums, scalars[0].weight if seen[0].weighted else None)
    return worker(own)


def _objective(
    loss_fn: Callable[..., Any],
    layout: Layout,
    seen: list[Form],
    own: Whole | Split,
    loss_scale: Any,
    slots: Any,
    rows: Any,
    key: Any,
    model_state: Any,
) -> tuple[Any, Any]:
    """What to differentiate, beside the scalars to add up, their unit and the next model state."""
    axes = layout.axes
    output = _call(loss_fn, own.give(slots, rows), rows, key, model_state)
    parts = take_apart(output, has_model_state=model_state is not None, batch=rows)
    seen[:] = [parts.form]
    if not set(axes) <= varying_axes(parts.loss.total):
        raise ValueError(
            "The loss is the same on every replica: the loss function itself averages or sums it "
            f"over the mesh axis {axes} (psum, pmean), or it does not depend on the parameters. "
            "jdp.value_and_grad takes the mean over replicas; done twice, every gradient would be "
            "off by a factor of the number of replicas. Return this replica's own loss."
        )
    if model_state is not None:
        _check_state(model_state, parts.model_state, axes)
    loss = Mean(checkpoint_name(parts.loss.total, _TOTAL), parts.loss.weight)
    if parts.form.weighted:
        loss = Mean(loss.total, checkpoint_name(_constant(loss.weight), _WEIGHT))
    # as a mean, since a total may overflow a narrow dtype on its way back
    unit = own.weigh(loss.weight) if parts.form.weighted else None
    mean = loss.total if unit is None else loss.total / unit
    mean = mean if loss_scale is None else mean * loss_scale
    return mean, ((loss, parts.aux), unit, parts.model_state)


def _call(loss_fn: Callable[..., Any], params: Any, rows: Any, key: Any, model_state: Any) -> Any:
    # new nodes: flax.nnx lets only those Variables be updated that were made in this trace
    rows, model_state = jax.tree.map(lambda x: x, (rows, model_state))
    args = (params, rows) if key is None else (params, rows, key)
    keywords = {} if model_state is None else {"model_state": model_state}
    try:
        return loss_fn(*args, **keywords)
    except TypeError as error:
        if "argument" not in str(error):
            raise
        given = ", ".join(["params", "batch", "key"][: len(args)] + [f"{k}=" for k in keywords])
        raise TypeError(
            f"The loss function could not be called as loss_fn({given}): {error}. It is given a "
            "key if there is one (jdp.init_state(..., key=...)), and model_state= if there is one; "
            "its signature must take what it is given."
        ) from error


def _check_exchanges(program: Any, form: Form, axes: tuple[str, ...]) -> None:
    """Refuses divisors that were already summed over the replicas."""
    if form.weighted:
        if names := exchanges_behind(program, _WEIGHT, PARAMS, axes).names:
            raise ValueError(
                f"The weight of the loss was already combined over the mesh axis {axes} "
                f"({names[0]}). jdp sums totals and weights over the replicas; done twice, "
                "the gradient would be too small by their number. Return this replica's own weight."
            )
        return
    if exchanges_behind(program, _TOTAL, PARAMS, axes).scaled:
        raise ValueError(
            "The loss function returns a plain scalar, multiplied or divided by a number that was "
            f"combined over the mesh axis {axes}, such as a count. Divided by the global count, "
            "the mean over replicas would make loss and gradient too small by their number. "
            "Return jdp.Mean(total, weight) with this replica's own total and weight; if the loss "
            "is this replica's own mean all the same, return jdp.Mean(loss, 1)."
        )


def _check_state(old: Any, new: Any, axes: tuple[str, ...]) -> None:
    """Model state must come back as it went in, and the same on every replica."""
    if jax.tree.structure(old) != jax.tree.structure(new):
        raise ValueError(
            f"The loss function was given model_state {jax.tree.structure(old)} and returned "
            f"{jax.tree.structure(new)}; the next microbatch needs the same structure. Return the "
            "whole state, updated."
        )
    news = jax.tree.leaves(new)
    for (path, before), after in zip(
        jax.tree_util.tree_flatten_with_path(old)[0], news, strict=True
    ):
        where = f"model_state{jax.tree_util.keystr(path)}"
        kind = lambda x: (jnp.shape(x), jnp.result_type(x))  # noqa: E731
        if kind(before) != kind(after):
            raise ValueError(
                f"{where} went into the loss function as {kind(before)} and came out as "
                f"{kind(after)}; shape and dtype must stay, or every step would be compiled anew."
            )
        if differs := set(axes) & varying_axes(after):
            raise ValueError(
                f"{where} differs by replica: it was computed from one replica's part of the "
                "batch. Keeping one of the copies would be silently wrong. Synchronise it over the "
                f"axis, as BatchNorm(axis_name={differs.copy().pop()!r}) or jax.lax.pmean does."
            )


@jax.custom_jvp
def _constant(weight: jax.Array) -> jax.Array:
    """The weight as it is; an error if it depends on the parameters."""
    return weight


def _weight_depends(primals: Any, tangents: Any) -> Any:
    # JAX calls this only with a tangent that is not zero by construction
    raise ValueError(
        "The weight of the loss depends on the parameters (or on what an outer gradient is taken "
        "of), so the gradient of total / weight is not that of the total over the weight. Wrap it "
        "in jax.lax.stop_gradient if it is meant as a constant; otherwise put the quotient into "
        "the total."
    )


_constant.defjvp(_weight_depends, symbolic_zeros=True)
