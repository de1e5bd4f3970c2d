"""One update: from gradients to the next parameters, and what is wrong with a chain, in words.

    gradients, state  --tx.update-->  updates, optimizer state  --added-->  parameters

Everything here runs while a step is traced. It calls the transformation, names the one in which
an error arose, and refuses what would silently change shapes, structures or meanings.
"""

import functools
import re
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jdp.accumulate import MultiStepsState
from jdp.finite import LossScaleState, SkipState
from jdp.local_state import LocalState
from jdp.replica import PerReplica, Reduced, find_nodes, is_per_replica
from jdp.split import ZeroState, find_placement
from jdp.state import TrainState, check_outermost
from jdp.zero import Applying


def update(
    tx: optax.GradientTransformationExtraArgs, grads: Any, state: TrainState, loss: Any
) -> tuple[Any, Any]:
    """New parameters and state, with a sentence for the commonest mistake."""
    check_outermost(state.opt_state)
    _check_private(state.opt_state)
    local = isinstance(state.opt_state, LocalState)
    if local and not isinstance(tx, Applying):
        raise ValueError(_made_for_another(state.opt_state))
    forgotten = (
        "The optimizer received one gradient for each replica: nothing in the chain reduces them, "
        "or something that needs the mean stands before or around the reduction. Put "
        "jdp.all_reduce() first, or a ZeRO stage outermost, outside of wrappers such as "
        "optax.apply_if_finite and optax.partition: optax.chain(jdp.all_reduce(), ...), "
        "jdp.zero1(...)."
    )
    try:
        run = tx.apply if isinstance(tx, Applying) else tx.update
        updates, opt_state = _call(run, grads, state, loss)
    except (TypeError, ValueError) as error:
        if ZeroState.__name__ in str(error):
            raise ValueError(_made_for_another(state.opt_state)) from error
        if _speaks_of_gradients(error):
            raise ValueError(forgotten) from error
        raise
    if _holds_gradients(updates) and not local:
        raise ValueError(forgotten)
    _check_updates(updates, state.params)
    _check_structure(state.opt_state, opt_state)
    if isinstance(tx, Applying):
        return updates, opt_state
    return optax.apply_updates(state.params, updates), opt_state


def _check_updates(updates: Any, params: Any) -> None:
    """Updates must have the parameters' shapes: adding others would silently change those."""
    olds = jax.tree_util.tree_flatten_with_path(params)[0]
    for (path, old), new in zip(olds, jax.tree.leaves(updates), strict=False):
        if jnp.shape(new) != jnp.shape(old):
            raise ValueError(
                f"The update of params{jax.tree_util.keystr(path)} has the shape {jnp.shape(new)}, "
                f"but the parameter has {jnp.shape(old)}: a transformation changes shapes (as "
                "optax.scale_by_distance_over_gradients does to scalars), and the "
                "parameter would silently take on the new one."
            )


def _made_for_another(opt_state: Any) -> str:
    """The sentence for a state that belongs to another transformation than the step's."""
    if isinstance(opt_state, LocalState):
        return (
            "The state was made for local steps (jdp.local_sgd, jdp.diloco), each replica with "
            "parameters of its own, and the step has another transformation. Go on from their "
            "mean: jdp.init_state(jdp.agreed(state.params), tx, mesh) for this tx."
        )
    placement = find_placement(opt_state)
    name = placement.name if placement else "another transformation"
    return (
        f"The state was made for {name} and the step has another transformation. Convert the "
        "state with jdp.restage(state, like), where like is jdp.init_state(params, tx, mesh) for "
        "this tx."
    )


def _check_private(opt_state: Any) -> None:
    """Refuses what would silently take rows of the mean gradient for examples."""
    private = "DifferentiallyPrivateAggregateState"
    is_private = lambda x: type(x).__name__ == private  # noqa: E731
    if any(map(is_private, jax.tree.leaves(opt_state, is_leaf=is_private))):
        raise ValueError(
            "optax.contrib.differentially_private_aggregate (in dpsgd) clips the gradient of every "
            "example, and a training step gives it the mean gradient: what it makes of that is not "
            "private. Compute gradients example by example in a step of your own."
        )


def _call(
    run: Callable[..., tuple[Any, Any]], grads: Any, state: TrainState, loss: Any
) -> tuple[Any, Any]:
    """tx.update; where it fails, the name of the transformation that does."""
    try:
        try:
            return run(grads, state.opt_state, state.params, value=loss)
        except TypeError as error:
            if "unexpected keyword argument 'value'" not in str(error):
                raise
        # tracing has no effect that would have to be undone (optax.contrib.sam takes no extras)
        return run(grads, state.opt_state, state.params)
    except Exception as error:
        raise _named(error) from error


def _named(error: Exception) -> Exception:
    """An error that begins with the transformation in whose update it arose, if that is known."""
    frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    called = re.match(r"(\w+)\.<locals>\.\w+\(\)", str(error))  # a call that did not get inside
    names = [
        code.co_qualname.split(".<locals>")[0]
        for code in frames
        if ".<locals>." in code.co_qualname and "optax" in code.co_filename
    ]
    names += [called.group(1)] if called else []
    inner = [
        name for name in names if name not in ("chain", "named_chain", "with_extra_args_support")
    ]
    if not inner or _speaks_of_gradients(error):
        return error
    kind = TypeError if isinstance(error, TypeError) else ValueError
    return kind(
        f"{inner[-1]}, a transformation of the chain, cannot be used in a training step as it is: "
        f"{error} A step gives a transformation the mean gradient, the parameters, and the loss as "
        "`value`; no function to evaluate elsewhere and no gradients of single examples. Call it "
        "in a step of your own, see jdp.value_and_grad."
    )


def keep_if_skipped(new: Any, old: Any, opt_state: Any) -> Any:
    """Model state of before a step that was skipped: it may hold what made the gradient NaN.

    Of several calls that `jdp.multi_steps` gathers, only the last one is known to be skipped. Of
    replicas that take local steps, one that skipped may have spoilt the state of all.
    """
    if new is None or isinstance(opt_state, MultiStepsState):
        return new
    if isinstance(opt_state, LocalState):
        opt_state = jax.tree.map(
            lambda x: jnp.any(x.value) if x.dtype == bool else x.value,
            opt_state.inner_state,
            is_leaf=is_per_replica,
        )
    for node in find_nodes(opt_state, (SkipState, LossScaleState)):
        new = jax.tree.map(functools.partial(jnp.where, node.last_skipped), old, new)
    return new


def skips(opt_state: Any) -> dict[str, jax.Array]:
    """How many steps have been left out so far, as a metric; nothing where nobody counts.

    Replicas that take local steps count each for itself: to add that up they would have to talk.
    """
    nodes = find_nodes(opt_state, (SkipState, LossScaleState))
    counts = [node.skipped for node in nodes if not is_per_replica(node.skipped)]
    return {"skipped": functools.reduce(jnp.add, counts)} if counts else {}


def _check_structure(old: Any, new: Any) -> None:
    """A step must be able to follow another."""
    if jax.tree.structure(old) == jax.tree.structure(new):
        return
    if _holds_gradients(new) and not _holds_gradients(old):
        return  # it computed with gradients that are not reduced, which `check_order` refuses
    before, after = (
        {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]}
        for tree in (old, new)
    )
    where = min(before ^ after, default="")
    raise ValueError(
        f"state.opt_state{where} is in the state before a step or after it, but not both: a "
        "transformation changes the structure of its state in the first update (as optax.monitor "
        "and optax.measure_with_ema do), and a step has to keep it. Leave that transformation out, "
        "and measure with aux of the loss."
    )


def _holds_gradients(tree: Any) -> bool:
    return bool(find_nodes(tree, (PerReplica, Reduced)))


def _speaks_of_gradients(error: Exception) -> bool:
    """Whether JAX or optax could not make sense of gradients that no reduction has taken."""
    return any(kind.__name__ in str(error) for kind in (PerReplica, Reduced))
