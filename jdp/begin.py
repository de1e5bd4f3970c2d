"""One reduction for the first calls and another from then on: exact at first, then compressed.

    PerReplica g_i --> calls < n ? first : then --> mean [*shape], on every device
                         |            |
    residual_i ----------+------------+    one for both: what one has not sent, the other sends

In: per-replica gradients. Out: their mean, by one of two transformations that each make one. How
they do it is theirs; this module only says whose turn it is and hands the residuals on.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jdp.accumulate import MultiStepsState
from jdp.feedback import CompressedState
from jdp.local_state import check_transformation
from jdp.mesh import is_whole
from jdp.replica import (
    PerReplica,
    find_nodes,
    give_per_replica,
    map_per_replica,
    take_per_replica,
)
from jdp.split import ZeroState


class SharedResidual(NamedTuple):
    """Stands where a reduction would keep its residual, which is in `BeginState.residual`."""


class BeginState(NamedTuple):
    """State of `begin_with`.

    Attributes:
        calls: Calls so far, int32.
        residual: What each replica has not sent yet, see `jdp.CompressedState`; `()` if neither
            reduction keeps any.
        states: Those of the first reduction and of the other, without residuals.
    """

    calls: jax.Array
    residual: Any
    states: tuple[Any, Any]


_KEEPING = (CompressedState, BeginState)


def begin_with(
    first: optax.GradientTransformation, calls: int, then: optax.GradientTransformation
) -> optax.GradientTransformation:
    """Averages per-replica gradients by `first` in the first calls, and by `then` afterwards.

    What compresses much acts late, and that costs most where gradients change most: at the start
    of a run. (PyTorch's hook for PowerSGD has `start_powerSGD_iter` for this, 1000 by default.)
    Nested, it goes on after more calls: `begin_with(a, 100, begin_with(b, 800, c))` takes c from
    call 900 on.

    Guarantees:
        - Only the one whose turn it is sends: the other stands in a branch that is not taken, which
          all devices choose alike, by a count.
        - Its mean is what it would be alone, with the residual that there is.
        - Both share one residual: what the first has not sent yet, the other sends, at once if it
          keeps none itself. Over any number of calls, up to rounding, the sum of means and
          mean_i(residual_i) is the sum of the gradients.
        - Calls that only accumulate (`jdp.multi_steps` around it) and skipped ones
          (`jdp.skip_nonfinite`) do not count.

    It costs what the reductions keep, 4 bytes a parameter on each device for all residuals
    together. What stands in a branch is not sent under the backward pass: the compiler starts it
    when all gradients are there.

    Args:
        first: A transformation from `PerReplica` gradients to plain ones, such as
            `jdp.all_reduce(wire_dtype=jnp.int8, error_feedback=True)`.
        calls: How often it is used, at least 0.
        then: Another one, such as `jdp.power_sgd(4)`.

    Returns:
        A transformation from `PerReplica` gradients to plain ones, with state `BeginState`.

    Raises:
        ValueError: If `calls` cannot be meant, something else than a reduction stands inside, or
            the two do not give values of the same form.
        TypeError: If what should be a transformation is none.

    Example:
        >>> mesh, params = jdp.make_mesh(), {"w": jnp.zeros((64, 32))}
        >>> tx = optax.chain(jdp.begin_with(jdp.all_reduce(), 1, jdp.power_sgd(1)), optax.sgd(1.0))
        >>> step = jdp.train_step(lambda p, x: jnp.sum(p["w"] * jnp.mean(x)), tx, mesh)
        >>> state = jdp.init_state(params, tx, mesh)
        >>> for _ in range(3): state, _ = step(state, jnp.ones(8))
        >>> state.params["w"][0, :3], int(state.opt_state[0].calls)
        (Array([-3., -3., -3.], dtype=float32), 3)

    References:
        Vogels et al., PowerSGD, 2019. Li et al., PyTorch Distributed, 2020 (communication hooks).
    """
    check_transformation(first, "first", "jdp.begin_with")
    check_transformation(then, "then", "jdp.begin_with")
    if not is_whole(calls) or calls < 0:
        raise ValueError(
            f"jdp.begin_with got calls={calls!r}; it must be a whole number, at least 0: how often "
            "the first reduction is used before the other."
        )
    both = (first, then)

    def init(params: Any) -> BeginState:
        states = [tx.init(params) for tx in both]
        for state in states:
            _check_inside(state)
        (one, left), (other, right) = (_apart(state)[::-1] for state in states)
        residual = left if jax.tree.leaves(left) else right
        return BeginState(jnp.zeros((), jnp.int32), residual, (one, other))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, BeginState]:
        if not jax.tree.leaves(updates):
            return updates, state

        def use(turn: int, updates: Any, state: BeginState) -> tuple[Any, BeginState]:
            means, residual, own = _reduce(both[turn].update, updates, state, turn, params)
            states = (own, state.states[1]) if turn == 0 else (state.states[0], own)
            return means, state._replace(residual=residual, states=states)

        turns = [functools.partial(use, turn) for turn in range(2)]
        try:
            means, state = jax.lax.cond(state.calls < calls, *turns, updates, state)
        except TypeError as error:
            if "cond" not in str(error):
                raise
            raise ValueError(
                "jdp.begin_with was given two transformations that make different things of the "
                "same gradients. Both must end the replica axis, along the same axes: "
                f"jdp.begin_with(jdp.all_reduce(), 1000, jdp.power_sgd(4)). JAX says: {error}"
            ) from error
        return means, state._replace(calls=optax.safe_increment(state.calls))

    return optax.GradientTransformation(init, update)


def _reduce(
    update: Callable[..., tuple[Any, Any]], updates: Any, state: BeginState, turn: int, params: Any
) -> tuple[Any, Any, Any]:
    """Means by one of the two, the residual after that, and its own state."""
    own, residual = state.states[turn], state.residual
    if isinstance(own, _KEEPING) and isinstance(own.residual, SharedResidual):
        means, after = update(updates, own._replace(residual=residual), params)
        return means, after.residual, after._replace(residual=own.residual)
    if not jax.tree.leaves(residual):
        means, own = update(updates, own, params)
        return means, residual, own
    # it sends whatever it is given: what the other has left over goes along, at once
    values, axes, mesh = take_per_replica(updates, "jdp.begin_with")
    rests = map_per_replica(lambda leaf: leaf.value, residual)
    given = give_per_replica(jax.tree.map(jnp.add, values, rests), None, axes, mesh)
    means, own = update(given, own, params)
    return means, jax.tree.map(jnp.zeros_like, residual), own


def _apart(state: Any) -> tuple[Any, Any]:
    """The residual of a reduction's state, `()` if it keeps none, and the rest of the state."""
    if isinstance(state, _KEEPING) and jax.tree.leaves(state.residual):
        return state.residual, state._replace(residual=SharedResidual())
    return (), state


def _check_inside(state: Any) -> None:
    """Refuses what is no reduction, and residuals that could not be handed on."""
    for kind, name in ((ZeroState, "a ZeRO stage"), (MultiStepsState, "jdp.multi_steps")):
        if find_nodes(state, kind):
            raise ValueError(
                f"jdp.begin_with was given {name}; it says how gradients are averaged, and nothing "
                "else. Put the rest around it or behind it: jdp.multi_steps(optax.chain("
                "jdp.begin_with(...), jdp.zero1(adam)), every=k)."
            )
    if find_nodes(_apart(state)[1], PerReplica):
        raise ValueError(
            "jdp.begin_with was given a transformation that keeps values for each replica within "
            "others, a chain or local steps: what it has not sent could not be handed on. Give it "
            "the reduction alone: optax.chain(jdp.all_reduce('device'), jdp.begin_with("
            "jdp.all_reduce('node'), 1000, jdp.power_sgd(4, 'node'))). Local steps have `start=`."
        )
