"""Which parameters a loss function puts together itself, layer by layer.

In: its program, in which the parameters and the places where `jdp.gather_params` stands carry
names. Out: the leaves that are used there and nowhere else. Programs are read, never changed.
"""

from typing import Any

from jdp.dataflow import bodies, is_literal, named

GATHER = "jdp: gathered here"
CHECKPOINT = ("checkpoint", "remat2", "remat")


def uses(
    jaxpr: Any, leaves: dict[Any, int], front: dict[int, int], *, bare: bool
) -> tuple[set[int], set[int], set[int]]:
    """Leaves that are gathered by the loss, used otherwise, gathered outside of `jax.checkpoint`.

    `front` counts the dims before the one that is split: so many scans may take one away.
    """
    found: tuple[set[int], set[int], set[int]] = set(), set(), set()
    gathered, otherwise, outside = found
    for eqn in jaxpr.eqns:
        places = [
            (place, leaves[v])
            for place, v in enumerate(eqn.invars)
            if not is_literal(v) and v in leaves
        ]
        if not places:
            continue
        if named(eqn, GATHER):
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
            inside = uses(body, inner, front | {leaf: left}, bare=still)
            for mine, theirs in zip(found, inside, strict=True):
                mine.update(theirs)
    otherwise.update(leaves[v] for v in jaxpr.outvars if not is_literal(v) and v in leaves)
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
