"""The state of local steps, and what cannot be meant with them, in sentences.

In: optimizer states, parameters and arguments of `jdp.local_sgd` and `jdp.diloco`. Out: nothing,
or an error. Nothing here takes a step or sends anything.
"""

import dataclasses
import functools
from typing import Any

import jax

from jdp.accumulate import MultiStepsState
from jdp.finite import LossScaleState
from jdp.mesh import AnyMesh, found_mesh, is_whole
from jdp.precision import MasterWeightsState
from jdp.replica import PerReplica, find_nodes, is_per_replica
from jdp.rows import spread
from jdp.split import ZeroState


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "calls",
        "inner_state",
        "anchor",
        "outer_states",
        "reduce_states",
        "gradient_state",
    ],
    meta_fields=["axes"],
)
@dataclasses.dataclass(frozen=True)
class LocalState:
    """State of `local_sgd` and `diloco`.

    Attributes:
        calls: Calls so far, int32, the same on every replica.
        inner_state: State of the inner optimizer, one for each replica: `PerReplica` leaves.
        anchor: The parameters last agreed on, at least float32; `()` where none are kept.
        outer_states: State of the outer optimizer for each fragment.
        reduce_states: State of the reduction for each fragment.
        gradient_state: State of the reduction of gradients, in the synchronous calls before
            `start`.
        axes: The mesh axes along which replicas differ; part of the tree's structure.
    """

    calls: jax.Array
    inner_state: Any
    anchor: Any
    outer_states: tuple[Any, ...]
    reduce_states: tuple[Any, ...]
    gradient_state: Any
    axes: tuple[str, ...]


def spread_params(params: Any, opt_state: Any) -> Any:
    """Whole parameters as the optimizer state wants them: a row for each replica, or as they are.

    Within a mesh, as of `jax.set_mesh`.
    """
    if not isinstance(opt_state, LocalState):
        return params
    return spread(params, mesh_of(params, "jdp.local_sgd"), opt_state.axes)


def mesh_of(params: Any, name: str) -> AnyMesh:
    """The mesh that parameters lie on, or the one set."""
    does = f"{name} keeps parameters for each replica, so its init must know the mesh"
    return found_mesh(params, does)


def check_numbers(name: str, every: Any, start: Any, fragments: Any) -> None:
    """Refuses numbers of calls and fragments that cannot be meant."""
    for what, number, least in (
        ("every", every, 1),
        ("start", start, 0),
        ("fragments", fragments, 1),
    ):
        if not is_whole(number) or number < least:
            raise ValueError(
                f"{name} got {what}={number!r}; it must be a whole number, at least {least}."
            )
    if fragments > every:
        raise ValueError(
            f"{name} got fragments={fragments} and every={every}: each fragment has "
            "a call of its own, and there are not so many from one agreement to the next. Use "
            "fewer fragments."
        )


def check_transformation(tx: Any, what: str, name: str) -> None:
    """Refuses what is no optax transformation."""
    if not hasattr(tx, "init") or not hasattr(tx, "update"):
        raise TypeError(
            f"{name} was given a {type(tx).__name__} as `{what}`, where an optax transformation "
            "belongs, such as optax.adamw(3e-4) or jdp.all_reduce()."
        )


def reduction_inside(name: str, what: str) -> str:
    """What is wrong with a reduction among what runs on one replica."""
    return (
        f"{name}: a reduction stands in `{what}`, which is given plain values: {name} hands each "
        "replica its own gradient and averages by itself. Take it out; how to send is said by "
        "`reduce`, as in reduce=jdp.all_reduce(wire_dtype=jnp.bfloat16)."
    )


_OWN_STATES = (
    PerReplica,
    ZeroState,
    MultiStepsState,
    LossScaleState,
    MasterWeightsState,
    LocalState,
)


def check_inside(name: str, what: str, opt_state: Any, fragments: int = 1) -> None:
    """Refuses transformations that would be wrong, or meaningless, on one replica alone."""
    for node in find_nodes(opt_state, _OWN_STATES):
        if isinstance(node, PerReplica):
            raise ValueError(reduction_inside(name, what))
        if isinstance(node, ZeroState):
            if what == "outer" and node.placement.stage == 1:
                if fragments > 1:
                    raise ValueError(
                        f"{name} got fragments={fragments} with jdp.zero1 in `outer`: a stage "
                        "places the state of all parameters, and a fragment's outer optimizer sees "
                        "but its own. Use fragments=1, or leave jdp.zero1 out."
                    )
                continue
            raise ValueError(
                f"{name}: {node.placement.name} stands in `{what}`. Replicas that step apart share "
                "no gradients and no parameters that could be split among them. Only the outer "
                "optimizer's state can be: jdp.diloco(inner, jdp.zero1(outer), every)."
            )
        if isinstance(node, MultiStepsState):
            raise ValueError(
                f"{name}: jdp.multi_steps stands in `{what}`, but there is nothing to reduce once "
                "in a window. Use optax.MultiSteps inside, or microbatch= of jdp.train_step."
            )
        if isinstance(node, LossScaleState):
            raise ValueError(
                f"{name}: jdp.dynamic_loss_scale stands in `{what}`; the loss is scaled once for "
                "all replicas, and each would want a scale of its own. Compute in bfloat16, which "
                "needs none (jdp.compute_in), or train synchronously."
            )
        if isinstance(node, LocalState):
            raise ValueError(f"{name}: local steps stand in `{what}`, inside local steps. Use one.")
        if what == "inner" and jax.tree.leaves(node.master):
            raise ValueError(
                f"{name}: jdp.master_weights stands in `inner`. Its float32 copies are each "
                "replica's own: they would undo every agreement. Keep the parameters in float32, "
                "and compute in another dtype with jdp.compute_in."
            )


def check_outermost(opt_state: Any) -> None:
    """Refuses transformations around or beside local steps."""
    if not isinstance(opt_state, LocalState) and find_nodes(opt_state, LocalState):
        raise ValueError(
            "jdp.local_sgd or jdp.diloco stands inside another transformation (optax.chain, "
            "jdp.skip_nonfinite, jdp.multi_steps, ...), but what it gives are the parameters that "
            "replicas have agreed on, not gradients to be worked on. Make it the outermost, and "
            "put the others inside: jdp.local_sgd(optax.chain(...), every=H); jdp.skip_nonfinite "
            "inside skips one replica's step."
        )


def check_state(name: str, state: Any, params: Any) -> None:
    """Refuses a state or parameters that are not of local steps, or lie along other axes."""
    if not isinstance(state, LocalState):
        raise ValueError(
            f"{name} was given a state that it did not make, a {type(state).__name__}. Make "
            "one with jdp.init_state(jdp.agreed(state.params), tx, mesh) for this tx."
        )
    if params is None:
        raise ValueError(
            f"{name} needs the parameters, on which replicas are to agree: "
            "tx.update(grads, opt_state, params)."
        )
    leaves = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_per_replica)[0]
    for path, leaf in leaves:
        if not is_per_replica(leaf) or leaf.axes != state.axes:
            how = f"differs along {leaf.axes}" if is_per_replica(leaf) else "has no replica axis"
            raise ValueError(
                f"{name} was given the parameter {jax.tree_util.keystr(path)}, which {how}; "
                f"its state is for parameters of which each replica along {state.axes} has its "
                "own. Use the params of the state that jdp.init_state(params, tx, mesh) made."
            )
