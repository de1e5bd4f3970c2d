"""Rematerialisation: what the backward pass computes again instead of finding it kept.

    remat (True, a name, a policy) --checkpoint_policy--> policy of `jax.checkpoint`, or None
    policy                         --refuse_gathers-->    the same, but gathered parameters go

A policy is asked about each operation of the forward pass whether its result is kept for the
backward pass. Nothing here wraps a function: `jdp.value_and_grad` does, with what comes out.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.extend.core.primitives import tanh_p

from jdp.dataflow import inner_programs, named

READ = "jdp: read from the whole copy"
"""Name of a parameter that is not gathered but might be: it, too, is read again, not kept."""

Policy = Callable[..., Any]
"""(primitive, *operands, **parameters) -> whether the result is kept."""

# Operations that cost next to nothing and keep a parameter a parameter in another guise.
_LAYOUT = frozenset(
    {
        "bitcast_convert_type",
        "broadcast_in_dim",
        "convert_element_type",
        "copy",
        "name",
        "pvary",
        "reshape",
        "slice",
        "squeeze",
        "transpose",
    }
)


def policy_names() -> tuple[str, ...]:
    """Names the policies of the installed JAX that need no argument.

    Returns:
        Attributes of `jax.checkpoint_policies` that are policies, sorted. Others there make a
        policy from arguments; call them and pass the result.

    Example:
        >>> "dots_saveable" in policy_names(), "save_only_these_names" in policy_names()
        (True, False)
    """
    return tuple(sorted(name for name in _public() if _is_policy(name)))


def _public() -> list[str]:
    return [name for name in dir(jax.checkpoint_policies) if not name.startswith("_")]


def _is_policy(name: str) -> bool:
    """Whether it answers about an operation, rather than making a policy that does."""
    try:
        answer = getattr(jax.checkpoint_policies, name)(tanh_p)
    except TypeError:  # it needs more arguments
        return False
    return not callable(answer)


def checkpoint_policy(remat: bool | str | Policy | None) -> Policy | None:
    """Finds the policy that is meant by the argument `remat` of `jdp.value_and_grad`.

    | remat | the backward pass |
    | --- | --- |
    | False, None | finds everything kept; no `jax.checkpoint` at all |
    | True | computes everything again from parameters and batch |
    | a name | keeps what that policy of `jax.checkpoint_policies` keeps |
    | a function | keeps what it says True to |

    Args:
        remat: See above.

    Returns:
        A policy for `jax.checkpoint`, or `None` if nothing is to be computed again.

    Raises:
        ValueError: If there is no policy of that name, or it needs arguments.
        TypeError: If it is none of these.

    Example:
        >>> checkpoint_policy("dots_saveable") is jax.checkpoint_policies.dots_saveable
        True
    """
    if remat is None or isinstance(remat, bool):
        return jax.checkpoint_policies.nothing_saveable if remat else None
    if callable(remat):
        return remat
    if not isinstance(remat, str):
        raise TypeError(
            f"remat={remat!r} is a {type(remat).__name__}. It says what the backward pass computes "
            "again: True (everything), False (nothing), the name of a policy of "
            "jax.checkpoint_policies, or a policy."
        )
    if remat in policy_names():
        return getattr(jax.checkpoint_policies, remat)
    if remat in _public():
        raise ValueError(
            f"remat={remat!r} names a function that makes a policy from arguments, not a policy. "
            f"Call it: remat=jax.checkpoint_policies.{remat}(...)."
        )
    raise ValueError(
        f"remat={remat!r} is no rematerialisation policy of jax {jax.__version__}. It has "
        f"{', '.join(policy_names())}; True computes everything again."
    )


def refuse_gathers(policy: Policy | None = None, shapes: Iterable[tuple[int, ...]] = ()) -> Policy:
    """Makes a policy keep no gathered parameter, so that the backward pass gathers it again.

    Refused are the result of every all-gather (and of a custom gradient around one), and of every
    cheap operation (cast, transpose, reshape, slice, name) on something of the shape of a gathered
    parameter. All the rest is as `policy` says.

    Guarantees:
        - Between forward and backward pass a device holds its own part of a parameter only.
        - Whatever is refused is recomputed from that part by one all-gather and cheap operations.

    A collective gather in the loss function (`jdp.all_gather` of activations) is done again, too.

    Args:
        policy: What is kept otherwise; `None` keeps everything.
        shapes: Shapes of whole parameters. Shapes that an all-gather was seen to return, and those
            that cheap operations made of them, are added while the program is traced.

    Returns:
        A policy for `jax.checkpoint`.

    Example:
        >>> keeps = refuse_gathers(jax.checkpoint_policies.dots_saveable, {(4, 8)})
        >>> jax.jit(jax.grad(jax.checkpoint(lambda w: jnp.sum(w.T**2), policy=keeps)))(
        ...     jnp.ones((4, 8))
        ... ).shape
        (4, 8)
    """
    otherwise = jax.checkpoint_policies.everything_saveable if policy is None else policy
    gathered = {tuple(shape) for shape in shapes}

    def keeps(primitive: Any, *operands: Any, **parameters: Any) -> Any:
        name = primitive.name
        # a custom gradient is one operation here; nobody asks about what is inside
        inside = [program for program in inner_programs(parameters) if _gathers(program)]
        cheap = name in _LAYOUT and getattr(operands[0], "shape", None) in gathered
        if not (cheap or inside or name.startswith("all_gather")):
            return otherwise(primitive, *operands, **parameters)
        # in program order, so what is made of this result is asked about later
        for program in inside:
            gathered.update(tuple(out.aval.shape) for out in program.outvars)
        if not inside:
            gathered.update(_result_shapes(primitive, operands, parameters))
        return False

    return keeps


def _gathers(program: Any) -> bool:
    """Whether a program gathers something, or reads a parameter as if it did."""
    return any(
        eqn.primitive.name.startswith("all_gather") or named(eqn, READ) for eqn in program.eqns
    )


def _result_shapes(primitive: Any, operands: Any, parameters: Any) -> set[tuple[int, ...]]:
    """The shapes of what an operation returns."""
    results, _ = primitive.abstract_eval(*operands, **parameters)
    results = results if isinstance(results, (list, tuple)) else [results]
    return {tuple(result.shape) for result in results}
