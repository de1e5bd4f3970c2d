"""Which parameters a loss function puts together itself, layer by layer.

In: its program, in which the parameters and the places where `jdp.gather_params` stands carry
names. Out: the leaves that are used there and nowhere else. Programs are read, never changed.
"""

import collections
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jdp.dataflow import bodies, is_literal, named

GATHER = "jdp: gathered here"
CHECKPOINT = ("checkpoint", "remat2", "remat")


def uses(
    jaxpr: Any,
    leaves: dict[Any, int],
    front: dict[int, int],
    *,
    bare: bool,
    gathers: Callable[[Any], bool] = lambda eqn: named(eqn, GATHER),
) -> tuple[set[int], ...]:
    """Leaves that are gathered, used otherwise, gathered outside `jax.checkpoint`, or repeatedly.

    Repeatedly is in several places, or by a loop that does not scan over them. `front` counts the
    dims before the one that is split: so many scans may take one away.
    """
    found: tuple[set[int], ...] = set(), set(), set(), set()
    gathered, otherwise, outside, again = found
    for eqn in jaxpr.eqns:
        places = [
            (place, leaves[v])
            for place, v in enumerate(eqn.invars)
            if not is_literal(v) and v in leaves
        ]
        if not places:
            continue
        if gathers(eqn):
            again.update(gathered & {places[0][1]})
            gathered.add(places[0][1])
            if bare:
                outside.add(places[0][1])
            continue
        for place, leaf in places:
            body, left = _way_in(eqn, place, front[leaf])
            if body is None:
                otherwise.add(leaf)
                continue
            inner = {body.invars[place]: leaf}
            still = bare and eqn.primitive.name not in CHECKPOINT
            inside = uses(body, inner, front | {leaf: left}, bare=still, gathers=gathers)
            looped = eqn.primitive.name == "scan" and left == front[leaf]
            again.update(inside[0] if looped else inside[0] & gathered)
            for mine, theirs in zip(found, inside, strict=True):
                mine.update(theirs)
    otherwise.update(leaves[v] for v in jaxpr.outvars if not is_literal(v) and v in leaves)
    return found


def gathered_once(program: Any, front: dict[int, int]) -> set[int]:
    """Of the slots that a (closed) program takes, those that one gather takes, one time.

    Seen is the program with parts, since a gradient within the loss may gather them once more.
    """
    starts = {var: i for i, var in enumerate(program.jaxpr.invars) if i in front}
    gathers = lambda eqn: eqn.primitive.name.startswith("custom_vjp_call")  # noqa: E731
    gathered, otherwise, _, again = uses(program.jaxpr, starts, front, bare=True, gathers=gathers)
    return gathered - otherwise - again


def check_numbers(whole: Any, lazy: Any) -> None:
    """Refuses a loss function that counts the parts of parameters for the parameters."""
    wanted, found = _numbers(whole), _numbers(lazy)
    if wanted != found:
        have = ", ".join(found - wanted) or "none"
        raise ValueError(
            f"The loss function computes with numbers ({', '.join(wanted - found) or 'none'}) that "
            f"become others ({have}) when jdp.gather_params gathers its parameters a layer at a "
            "time: it counts the leaves of params, or their sizes, and until a parameter is "
            "gathered its leaves are the parts that a device holds. Count before the loss function "
            "is made: n = sum(x.size for x in jax.tree.leaves(params))."
        )


def _numbers(program: Any) -> collections.Counter[str]:
    """The numbers that stand in a (closed) program, but for those in custom gradients."""
    found = collections.Counter(str(x) for x in program.consts if jnp.ndim(x) == 0)
    todo = [program.jaxpr]
    while todo:
        for eqn in todo.pop().eqns:
            if not eqn.primitive.name.startswith("custom_vjp_call"):
                found.update(str(v.val) for v in eqn.invars if is_literal(v))
                todo += bodies(eqn)
    return found


def _way_in(eqn: Any, place: int, front: int) -> tuple[Any, int]:
    """The program in which an operand goes on, if it does so whole or layer by layer."""
    name, inner = eqn.primitive.name, bodies(eqn)
    if name == "scan":
        # by shape, since JAX 0.10 and 0.12 tell the kinds of operands in different ways
        scanned = eqn.invars[place].aval.ndim > inner[0].invars[place].aval.ndim
        if scanned and front == 0:
            return None, 0
        return inner[0], front - scanned
    passes_on = name in ("jit", "pjit", "closed_call", *CHECKPOINT)
    if passes_on and len(inner) == 1 and len(inner[0].invars) == len(eqn.invars):
        return inner[0], front
    return None, 0
