"""A check of a traced step: does anything touch a gradient before the reduction that takes it?

In: the program of a step (a jaxpr). Out: nothing, or an error that names the operation. Clipping
or normalising one replica's gradient is not clipping the gradient; optax looks inside
`PerReplica` nodes like inside any pytree, so this mistake would otherwise stay silent.

`jdp.value_and_grad` marks the gradients it gives, each jdp transformation marks those it takes;
between the two marks there may be calls and branches but no arithmetic. This module reads
programs and changes none.
"""

from typing import Any

from jdp.dataflow import bodies, is_literal, named
from jdp.replica import TAKEN, UNREDUCED


def check_order(jaxpr: Any, *, strict: bool = False) -> None:
    """Refuses a program in which a per-replica gradient is computed with before it is reduced.

    Args:
        jaxpr: The program, as of `jax.jit(step).trace(...).jaxpr.jaxpr`.
        strict: Refuse any number computed from such gradients, also one that goes somewhere else
            than into the reduction: a norm taken before it may be used after it. Asking whether
            they are finite stays allowed.

    Raises:
        ValueError: If there is such a computation, naming it.
    """
    _walk(jaxpr, {}, strict)


def _walk(jaxpr: Any, seen: dict[Any, str], strict: bool) -> dict[Any, str]:
    """Follows unreduced values; maps a variable to "" (as given) or to what touched it."""
    for eqn in jaxpr.eqns:
        inputs = [None if is_literal(v) else seen.get(v) for v in eqn.invars]
        if named(eqn, UNREDUCED):
            seen[eqn.outvars[0]] = ""
        elif named(eqn, TAKEN):
            if inputs[0]:
                raise ValueError(_message(inputs[0]))
        elif called := _calls(eqn):
            for body in called:
                outs = _walk_inside(body, inputs, strict)
                touched = {v: s for v, s in zip(eqn.outvars, outs, strict=True) if s is not None}
                # of several branches, the one that touched it tells
                seen.update({v: s or seen.get(v, s) for v, s in touched.items()})
        elif any(s is not None for s in inputs):
            touched = next((s for s in inputs if s), None) or eqn.primitive.name
            if strict and any("float" in str(out.aval.dtype) for out in eqn.outvars):
                raise ValueError(_message(touched))
            seen.update(dict.fromkeys(eqn.outvars, touched))
    return seen


def _walk_inside(body: Any, inputs: list[str | None], strict: bool) -> list[str | None]:
    """The same inside a call or a branch; what is known of its results."""
    given = inputs[len(inputs) - len(body.invars) :]  # a branch's index comes first
    known = {v: s for v, s in zip(body.invars, given, strict=True) if s is not None}
    known = _walk(body, known, strict)
    return [None if is_literal(v) else known.get(v) for v in body.outvars]


def _calls(eqn: Any) -> list[Any]:
    """The programs inside a call or a branch, whose inputs are the equation's own."""
    passes_on = ("cond", "jit", "pjit", "closed_call", "custom_jvp_call", "checkpoint", "remat2")
    return bodies(eqn) if eqn.primitive.name in passes_on else []


def _message(primitive: str) -> str:
    return (
        f"A transformation computes with per-replica gradients ({primitive!r}) before they are "
        "reduced: it would act on each replica's own gradient, or on all of them at once, instead "
        "of on their mean. A clip would bound the wrong norm, silently. Put the reduction first: "
        "optax.chain(jdp.all_reduce(), optax.clip_by_global_norm(1.0), ...)."
    )
