"""What a traced program computes from what: the questions the checks ask of a loss and a step.

In: jaxprs, in which interesting values carry a name (`jax.ad_checkpoint.checkpoint_name`). Out:
which collectives lie behind a named value, and whether they depend on the parameters. Programs
are read, never changed or run.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

PASSIVE = ("axis_index", "pvary", "pcast")  # they name an axis and send nothing


class Exchange(NamedTuple):
    """A collective: its primitive's name, and what it is given."""

    name: str
    on_params: bool  # something that depends on the parameters
    of_scalar: bool  # a single number, as a count is


def exchanges_behind(jaxpr: Any, value: str, params: str, axes: tuple[str, ...]) -> list[Exchange]:
    """Collectives over any of the axes that the value named `value` is computed from.

    Values named `params` count as parameters. A loop is looked at as a whole: if it is given
    parameters, all in it depends on them.
    """
    found = []
    for body in _all(jaxpr):
        marked = {eqn.outvars[0] for eqn in body.eqns if named(eqn, value)}
        if marked:
            found += _trace(body, set(), marked, params, axes)[1]
    return found


def uneven_exchange(jaxpr: Any, axes: tuple[str, ...]) -> tuple[str, str] | None:
    """A collective that devices may reach unequally often: ("cond" or "while", its name)."""
    for body in _all(jaxpr):
        for eqn in body.eqns:
            if eqn.primitive.name == "cond":
                decides = eqn.invars[0]
            elif eqn.primitive.name == "while":
                decides = eqn.params["cond_jaxpr"].jaxpr.outvars[0]
            else:
                continue
            varying = decides.aval.manual_axis_type.varying
            names = [e.primitive.name for b in bodies(eqn) for e in _sending(b, varying)]
            if names and varying & set(axes):
                return eqn.primitive.name, names[0]
    return None


def _sending(jaxpr: Any, axes: Any) -> list[Any]:
    return [eqn for body in _all(jaxpr) for eqn in body.eqns if _sends(eqn, tuple(axes))]


def named(eqn: Any, name: str) -> bool:
    """Whether an equation gives its operand this name."""
    return eqn.primitive.name == "name" and eqn.params["name"] == name


def is_literal(atom: Any) -> bool:
    """Whether an operand is a number in the program text instead of a variable."""
    return hasattr(atom, "val")


def bodies(eqn: Any) -> list[Any]:
    """The programs inside an equation: a called function, a loop's body, branches."""
    found = []
    for value in eqn.params.values():
        for inner in value if isinstance(value, (tuple, list)) else (value,):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                found.append(inner)
    return found


def _all(jaxpr: Any) -> Iterator[Any]:
    """A program and all programs inside it."""
    yield jaxpr
    for eqn in jaxpr.eqns:
        for body in bodies(eqn):
            yield from _all(body)


def _sends(eqn: Any, axes: tuple[str, ...]) -> bool:
    used = eqn.params.get("axes") or eqn.params.get("axis_name") or ()
    used = {used} if isinstance(used, str) else {name for name in used if isinstance(name, str)}
    return bool(used & set(axes)) and eqn.primitive.name not in PASSIVE


def _trace(
    jaxpr: Any, on_params: set[Any], wanted: set[Any], params: str, axes: tuple[str, ...]
) -> tuple[set[Any], list[Exchange]]:
    """Follows what `wanted` is computed from; returns what depends on the parameters, and sends."""
    needed, used = set(wanted), []
    for eqn in reversed(jaxpr.eqns):
        if any(out in needed for out in eqn.outvars):
            used.append(eqn)
            needed.update(v for v in eqn.invars if not is_literal(v))
    found = []
    for eqn in reversed(used):
        inputs = [not is_literal(v) and v in on_params for v in eqn.invars]
        if _sends(eqn, axes):
            of_scalar = any(v.aval.ndim == 0 for v in eqn.invars)
            found.append(Exchange(eqn.primitive.name, any(inputs), of_scalar))
        outputs = [any(inputs) or named(eqn, params)] * len(eqn.outvars)
        for body in bodies(eqn):
            # a call hands its inputs and outputs through one by one; a loop or branch may not
            through = len(body.invars) == len(inputs) and "scan" not in eqn.primitive.name
            ins = inputs if through else [any(inputs)] * len(body.invars)
            one_by_one = len(body.outvars) == len(eqn.outvars)
            ends = {
                end
                for i, end in enumerate(body.outvars)
                if not is_literal(end) and (not one_by_one or eqn.outvars[i] in needed)
            }
            known = {v for v, flag in zip(body.invars, ins, strict=True) if flag}
            known, inside = _trace(body, known, ends, params, axes)
            found += inside
            if one_by_one and through:
                outputs = [not is_literal(end) and end in known for end in body.outvars]
        on_params |= {out for out, flag in zip(eqn.outvars, outputs, strict=True) if flag}
    return on_params, found
