"""What a traced program computes from what: the questions the checks ask of a loss and a step.

In: jaxprs, in which interesting values carry a name (`jax.ad_checkpoint.checkpoint_name`). Out:
which collectives lie behind a named value, and whether they depend on the parameters. Programs
are read, never changed; `run_checked` runs one after it was read.
"""

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from jdp.mesh import as_one_program

PASSIVE = ("axis_index", "pvary", "pcast")  # they name an axis and send nothing


class Behind(NamedTuple):
    """What lies behind a value: the collectives, and whether an exchanged count scales it."""

    names: list[str]
    scaled: bool


def exchanges_behind(jaxpr: Any, value: str, params: str, axes: tuple[str, ...]) -> Behind:
    """Collectives over any of the axes that the value named `value` is computed from.

    Values named `params` are parameters; what their gradient cannot reach (a comparison, an
    index) does not count as depending on them. `scaled` is whether something that depends on them
    is multiplied or divided by a single number that was summed over the axis and does not, as a
    count is. Means over the axis, and statistics with a dim of features, are no counts. A loop is
    looked at as a whole: what it is given, all in it depends on.
    """
    names, scaled = [], False
    for body in _all(jaxpr):
        marked = {eqn.outvars[0] for eqn in body.eqns if named(eqn, value)}
        if marked:
            found = _trace(body, {}, marked, params, axes)
            names, scaled = names + found.names, scaled or found.scaled
    return Behind(names, scaled)


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


def run_checked(fn: Callable[..., Any], check: Callable[[Any], None], *args: Any) -> Any:
    """Calls `fn` as part of a larger trace, its program having been shown to `check` first.

    The function is traced once; what was looked at is what runs.
    """
    program, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    check(program.jaxpr)
    flat = as_one_program(jaxpr_as_fun(program))(*jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(shapes), flat)


def named(eqn: Any, name: str) -> bool:
    """Whether an equation gives its operand this name."""
    return eqn.primitive.name == "name" and eqn.params["name"] == name


def is_literal(atom: Any) -> bool:
    """Whether an operand is a number in the program text instead of a variable."""
    return hasattr(atom, "val")


def bodies(eqn: Any) -> list[Any]:
    """The programs inside an equation: a called function, a loop's body, branches."""
    return inner_programs(eqn.params)


def inner_programs(parameters: dict[str, Any]) -> list[Any]:
    """The programs among the parameters of an equation."""
    found = []
    for value in parameters.values():
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


_PARAM, _SENT, _COUNT = 1, 2, 4  # depends on parameters; was exchanged; so was, as one number


def _trace(
    jaxpr: Any, kinds: dict[Any, int], wanted: set[Any], params: str, axes: tuple[str, ...]
) -> Behind:
    """Follows what `wanted` is computed from, and notes in `kinds` what each variable is."""
    needed, used = set(wanted), []
    for eqn in reversed(jaxpr.eqns):
        if any(out in needed for out in eqn.outvars):
            used.append(eqn)
            needed.update(v for v in eqn.invars if not is_literal(v))
    names, scaled = [], False
    for eqn in reversed(used):
        inputs = [0 if is_literal(v) else kinds.get(v, 0) for v in eqn.invars]
        union = functools.reduce(operator.or_, inputs, 0)
        if _sends(eqn, axes):
            names.append(eqn.primitive.name)
            union |= 0 if eqn.primitive.name in ("pmax", "pmin") else _SENT
        if named(eqn, params):  # how a parameter came about, gathered perhaps, is no matter
            union = _PARAM
        scaled |= _scales(eqn, inputs)
        outputs = [union] * len(eqn.outvars)
        for body in bodies(eqn):
            inside, ends = _trace_inside(eqn, body, inputs, needed, params, axes)
            names, scaled = names + inside.names, scaled or inside.scaled
            whole = union | (_SENT if inside.names else 0)
            outputs = ends or [whole] * len(eqn.outvars)
        outputs = [_keep(eqn, inputs, kind) for kind in outputs]
        kinds.update(
            {out: _settle(out, kind) for out, kind in zip(eqn.outvars, outputs, strict=True)}
        )
    return Behind(names, scaled)


def _trace_inside(
    eqn: Any, body: Any, inputs: list[int], needed: set[Any], params: str, axes: tuple[str, ...]
) -> tuple[Behind, list[int]]:
    """The same inside an equation; the kinds of its outputs if they are handed out one by one."""
    # a call hands its inputs through one by one, as a branch does behind its index; a loop may not
    if eqn.primitive.name == "cond":
        inputs = inputs[len(inputs) - len(body.invars) :]
    through = len(body.invars) == len(inputs) and eqn.primitive.name != "scan"
    union = functools.reduce(operator.or_, inputs, 0)
    kinds = dict(zip(body.invars, inputs if through else [union] * len(body.invars), strict=True))
    one_by_one = len(body.outvars) == len(eqn.outvars)
    wanted = {
        end
        for i, end in enumerate(body.outvars)
        if not is_literal(end) and (not one_by_one or eqn.outvars[i] in needed)
    }
    found = _trace(body, kinds, wanted, params, axes)
    ends = [0 if is_literal(end) else kinds.get(end, 0) for end in body.outvars]
    return found, ends if one_by_one and through else []


def _scales(eqn: Any, inputs: list[int]) -> bool:
    """Whether something with a gradient is multiplied or divided by an exchanged count.

    What was itself summed over the axis may be divided by what was: nothing is off by N then.
    """
    if eqn.primitive.name not in ("mul", "div", "dot_general"):
        return False
    over, under = inputs
    own = lambda kind: kind & _PARAM and not kind & _SENT  # noqa: E731
    divided = bool(own(over) and under & _COUNT)
    return divided or (eqn.primitive.name != "div" and bool(own(under) and over & _COUNT))


def _keep(eqn: Any, inputs: list[int], kind: int) -> int:
    """Takes back that a result is a count, or a sum over the axis, where it is none any more."""
    name = eqn.primitive.name
    if name == "div" and not kind & _PARAM:
        over, under = inputs
        # one sum over the axis by another, or by the axis' size, as pmean does: a mean
        if over & _SENT and (under & _SENT or is_literal(eqn.invars[1])):
            return kind & ~(_SENT | _COUNT)
    if name in ("add", "sub"):
        others = [k for k, v in zip(inputs, eqn.invars, strict=True) if not is_literal(v)]
        if not all(k & _SENT for k in others):
            return kind & ~_COUNT
    return kind


def _settle(out: Any, kind: int) -> int:
    """What an output is, given what it was computed from."""
    if not jnp.issubdtype(getattr(out.aval, "dtype", jnp.float32), jnp.floating):
        kind &= ~_PARAM  # no gradient reaches through it
    if kind & _PARAM:
        return kind & ~_COUNT
    return kind | _COUNT if kind & _SENT and getattr(out.aval, "size", 0) == 1 else kind
