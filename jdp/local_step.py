"""One call of local steps: whose gradient, each replica's own step, and the agreement if it is due.

    PerReplica  --own_gradients-->  rows  --inner_step-->  rows of parameters  --agree-->  the same,
                                                            or in one call of H equal rows

In: gradients and parameters as rows, [N, *shape], and the state. Out: the next. All that is sent
is in `lax.cond` and `lax.switch` of the whole program, whose predicates no replica can see
differently; what is computed by a replica alone is in a `shard_map` that sends nothing.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdp.fragments import choose, deal_out, merge, put_state
from jdp.local_state import LocalState, reduction_inside
from jdp.mesh import AnyMesh, AxisNames
from jdp.reduce import all_reduce
from jdp.replica import (
    PerReplica,
    find_nodes,
    give_per_replica,
    map_per_replica,
    take_per_replica,
    widen,
)
from jdp.rows import on_rows, rows_like, rows_of
from jdp.split import ZeroState


class Plan(NamedTuple):
    """What the user asked for; parameters themselves are averaged where there is no outer one."""

    name: str
    inner: Any
    outer: Any
    every: int
    start: int
    axis: AxisNames | None
    reduce: Any
    fragments: int
    plain: bool = False  # whether gradients and differences are reduced as they are


def own_gradients(plan: Plan, updates: Any, state: LocalState) -> tuple[Any, AnyMesh, LocalState]:
    """Rows of the gradients to step by: each replica's own, or before `start` their mean."""
    updates, mesh = _along(plan, updates, state.axes)

    def apart(updates: Any) -> tuple[Any, Any]:
        return widen(take_per_replica(updates, plan.name)[0]), state.gradient_state

    def together(updates: Any) -> tuple[Any, Any]:
        mean, gradient_state = _reduce(plan, updates, state.gradient_state)
        return rows_of(widen(mean), mesh, state.axes), gradient_state

    if not plan.start:
        return apart(updates)[0], mesh, state
    grads, gradient_state = jax.lax.cond(state.calls < plan.start, together, apart, updates)
    return grads, mesh, dataclasses.replace(state, gradient_state=gradient_state)


def _along(plan: Plan, updates: Any, axes: tuple[str, ...]) -> tuple[Any, AnyMesh]:
    """Gradients that differ along these axes alone, averaged over the others; and the mesh."""
    _, given, mesh = take_per_replica(updates, plan.name)
    if missing := [name for name in axes if name not in given]:
        raise ValueError(
            f"{plan.name} takes local steps along the mesh axes {axes}, but the gradients differ "
            f"along {given}, not along {missing[0]!r}. Give {plan.name} and jdp.train_step (or "
            "jdp.value_and_grad) axes that fit, and put no reduction before it."
        )
    return over_others(updates, given, axes), mesh


def over_others(updates: Any, given: tuple[str, ...], axes: tuple[str, ...]) -> Any:
    """Gradients that differ along `given`, averaged over all of it but `axes`."""
    rest = tuple(name for name in given if name not in axes)
    return all_reduce(rest).update(updates, optax.EmptyState())[0] if rest else updates


def inner_step(
    plan: Plan, grads: Any, state: LocalState, values: Any, mesh: AnyMesh, extra: dict[str, Any]
) -> tuple[Any, LocalState]:
    """One step of each replica, on its own row of everything."""
    arrays = {name: x for name, x in extra.items() if isinstance(x, jax.Array)}

    def step(rows: Any, arrays: Any) -> Any:
        grads, inner_state, params = rows
        new, inner_state = plan.inner.update(grads, inner_state, params, **extra | arrays)
        return optax.apply_updates(params, new), inner_state

    inner_state = map_per_replica(lambda leaf: leaf.value, state.inner_state)
    try:
        rows = (grads, inner_state, values)
        values, new_state = on_rows(step, mesh, state.axes)(rows, arrays)
    except ValueError as error:
        if "has no replica axis" not in str(error):
            raise
        raise ValueError(reduction_inside(plan.name, "inner")) from error
    except TypeError as error:
        if "manual axis types" not in str(error):
            raise
        raise TypeError(
            f"{plan.name}: a transformation in `inner` has a branch or a loop that gives a "
            "constant in one case and a value of the replica's own in another "
            "(optax.contrib.reduce_on_plateau does), which JAX refuses within one replica. Leave "
            f"it out, or write it with jnp.where. JAX says: {error}"
        ) from error
    if jax.tree.structure(new_state) == jax.tree.structure(inner_state):
        new_state = rows_like(state.inner_state, new_state)
    # else the training step refuses it, naming the leaf
    return values, dataclasses.replace(state, calls=state.calls + 1, inner_state=new_state)


def agree(
    plan: Plan, values: Any, state: LocalState, mesh: AnyMesh, extra: dict[str, Any]
) -> tuple[Any, LocalState]:
    """The parameters after this call's agreement, if one is due, on a fragment of them or all.

    Which branch is taken depends on a counter that all replicas share: all meet in the collective.
    """
    count = state.calls - plan.start
    offsets = jnp.arange(plan.fragments) * plan.every // plan.fragments
    due = ((count + offsets) % plan.every == 0) & (count > 0)
    branch = jnp.sum(jnp.where(due, jnp.arange(plan.fragments) + 1, 0))

    def keep(values: Any, state: LocalState) -> tuple[Any, LocalState]:
        return values, state

    fragment = functools.partial(_agree_on, plan, mesh, extra)
    branches = [keep, *(functools.partial(fragment, p) for p in range(plan.fragments))]
    if plan.start and plan.outer:
        branch = jnp.where(count == 0, plan.fragments + 1, branch)
        branches.append(functools.partial(_begin, mesh))
    return jax.lax.switch(branch, branches, values, state)


def _begin(mesh: AnyMesh, values: Any, state: LocalState) -> tuple[Any, LocalState]:
    """Takes what replicas have after the synchronous calls, which is equal, for the anchor."""
    rows = give_per_replica(values, None, state.axes, mesh)
    whole, _ = all_reduce().update(rows, optax.EmptyState())
    whole = jax.tree.map(lambda x, row: x.astype(row.dtype), whole, values)
    values = rows_of(whole, mesh, state.axes)
    return values, dataclasses.replace(state, anchor=widen(whole))


def _agree_on(
    plan: Plan, mesh: AnyMesh, extra: dict[str, Any], p: int, values: Any, state: LocalState
) -> tuple[Any, LocalState]:
    """Rows and state after all replicas have taken the same parameters in fragment p."""
    owners = deal_out(values, plan.fragments, plan.name)
    rows = choose(values, owners, p)
    if plan.outer:
        whole, state = _outer_step(plan, mesh, extra, p, rows, state)
    else:
        sent = give_per_replica(rows, None, state.axes, mesh)
        whole, reduce_state = _reduce(plan, sent, state.reduce_states[p])
        states = put_state(state.reduce_states, p, reduce_state)
        state = dataclasses.replace(state, reduce_states=states)
    whole = jax.tree.map(lambda x, row: x.astype(row.dtype), whole, rows)
    return merge(values, rows_of(whole, mesh, state.axes), owners, p), state


def _outer_step(
    plan: Plan, mesh: AnyMesh, extra: dict[str, Any], p: int, rows: Any, state: LocalState
) -> tuple[Any, LocalState]:
    """The next anchor of fragment p, and the state that holds it."""
    owners = deal_out(state.anchor, plan.fragments, plan.name)
    anchor = choose(state.anchor, owners, p)
    delta = on_rows(_differences, mesh, state.axes)(rows, anchor)
    delta = give_per_replica(delta, None, state.axes, mesh)
    reduce_state, outer_state = state.reduce_states[p], state.outer_states[p]
    if not (plan.plain and isinstance(outer_state, ZeroState)):  # which reduces as it splits
        delta, reduce_state = _reduce(plan, delta, reduce_state)
    new, outer_state = plan.outer.update(delta, outer_state, anchor, **extra)
    anchor = optax.apply_updates(anchor, new)
    return anchor, dataclasses.replace(
        state,
        anchor=merge(state.anchor, anchor, owners, p),
        outer_states=put_state(state.outer_states, p, outer_state),
        reduce_states=put_state(state.reduce_states, p, reduce_state),
    )


def _differences(params: Any, anchor: Any) -> Any:
    """What a replica has moved by since it took the anchor, negated: the outer gradient."""

    def one(param: jax.Array, anchor: jax.Array) -> jax.Array:
        narrow = jnp.finfo(param.dtype)
        if param.dtype != anchor.dtype:  # as it was taken; a pair of casts may be optimized away
            anchor = jax.lax.reduce_precision(anchor, narrow.nexp, narrow.nmant)
        return anchor - param.astype(anchor.dtype)

    return jax.tree.map(one, params, anchor)


def _reduce(plan: Plan, updates: Any, state: Any) -> tuple[Any, Any]:
    mean, state = plan.reduce.update(updates, state, None)
    if find_nodes(mean, PerReplica):
        raise ValueError(
            f"{plan.name} was given a `reduce` that leaves one value for each replica (it reduces "
            "over some of the axes only, or not at all). Replicas could not agree. Give one that "
            "ends the replica axis, such as jdp.all_reduce()."
        )
    return mean, state
