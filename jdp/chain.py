"""What a transformation is made of, as far as jdp's own parts of it can tell.

    tx  --parts-->  Parts: which of jdp's transformations are in it, and with which arguments

Nothing is run: transformations are functions, and what they were given is read from their closures.
What is made by others is looked through where it holds transformations, as `optax.chain` does, and
otherwise unknown. No measurement depends on it, only what is said of it.
"""

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

# By module and function of their `update`.
_NAMES = {
    ("jdp.reduce", "all_reduce"): "all_reduce",
    ("jdp.hierarchy", "hierarchical"): "hierarchical",
    ("jdp.begin", "begin_with"): "begin_with",
    ("jdp.accumulate", "multi_steps"): "multi_steps",
    ("jdp.zero", "_zero"): "zero",
    ("jdp.local", "_local_steps"): "local",
}
_DEEPEST = 12  # transformations in each other


class Parts(NamedTuple):
    """What was found.

    Attributes:
        reduces: The transformation that averages over the replicas; `None` if it is another.
        name: What it is called, such as "power_sgd"; "" if not known.
        wire_dtype: What gradients are sent in, as asked for; `None` if as they are, or not known.
        every: Batches for each update.
        local: Name of the transformation that takes local steps, "local_sgd" or "diloco"; else "".
        zero: What the ZeRO stage was asked for (number, wire_dtype, reduce); `None` if it is not
            known, or there is none.
    """

    reduces: Any = None
    name: str = ""
    wire_dtype: Any = None
    every: int = 1
    local: str = ""
    zero: Any = None

    @property
    def compresses(self) -> bool:
        """Whether it sends something else than the gradients."""
        known = ("", "all_reduce", "all_reduce_in_backward", "hierarchical", "all_reduce_in_order")
        return self.name not in known

    @property
    def reduction(self) -> str:
        """The code of what averages, as far as it is known; "" if not at all."""
        if not self.name:
            return ""
        if self.compresses or self.name.startswith("all_reduce_in"):
            return f"jdp.{self.name}(...)"
        across = "across_" if self.name == "hierarchical" and self.wire_dtype is not None else ""
        return f"jdp.{self.name}({across}{wire_code(self.wire_dtype)})"


def parts(tx: Any) -> Parts:
    """What a transformation is made of.

    Example:
        >>> found = parts(optax.chain(jdp.all_reduce(wire_dtype=jnp.bfloat16), optax.sgd(0.1)))
        >>> found.reduction
        'jdp.all_reduce(wire_dtype=jnp.bfloat16)'
    """
    found = Parts()
    for one in _all_of(tx, 0):
        held = _held(one)
        module, _, name = _made_by(one.update)
        says = name in ("compressed", "_asks_for")  # for these it is an argument
        name = str(held.get("name", "")) if says else _NAMES.get((module, name), "")
        if name == "multi_steps":
            found = found._replace(every=found.every * int(held["every"]))
        elif name == "zero":
            found = found._replace(zero=held["stage"], wire_dtype=_named(held["stage"].wire_dtype))
        elif name == "local":
            found = found._replace(local=held["plan"].name.removeprefix("jdp."))
            found = found._replace(every=found.every * int(held["plan"].every))
        elif name and not found.name:
            wire = getattr(held.get("send"), "wire_dtype", None)
            if "nodes" in held:
                wire = held["nodes"].outside.wire_dtype
            name = name.removeprefix("jdp.")
            reduces = None if name.startswith("all_reduce_in") else one
            wire = found.wire_dtype if wire is None else _named(wire)
            found = found._replace(name=name, reduces=reduces, wire_dtype=wire)
    return found


def wire_code(dtype: Any) -> str:
    """The argument for a wire dtype: "" for none."""
    return "" if dtype is None else f"wire_dtype=jnp.{jnp.dtype(dtype).name}"


def _named(dtype: Any) -> Any:
    return None if dtype is None else jnp.dtype(dtype)


def _made_by(function: Any) -> tuple[str, str, str]:
    """Module, qualified name, and the outermost name of a function."""
    name = getattr(function, "__qualname__", "")
    return getattr(function, "__module__", ""), name, name.split(".")[0]


def _held(tx: Any) -> dict[str, Any]:
    """What a transformation's update was given, and what functions in there were."""
    found: dict[str, Any] = {}
    waiting, seen = [tx.update], set()
    while waiting:
        function = waiting.pop()
        if id(function) in seen or not inspect.isfunction(function):
            continue
        seen.add(id(function))
        inner = inspect.getclosurevars(function).nonlocals
        found = {**inner, **found}
        # further functions of the same module are parts of it
        waiting += [x for x in inner.values() if _made_by(x)[0] == _made_by(function)[0]]
        if _made_by(function)[0] == "jdp.feedback":
            waiting.append(inner.get("exchange"))
    return found


def _all_of(tx: Any, depth: int) -> Iterator[Any]:
    """A transformation and those inside it, outer ones first."""
    if not isinstance(tx, optax.GradientTransformation) or depth > _DEEPEST:
        return
    yield tx
    held = _held(tx)
    if "update_fns" in held and inspect.isfunction(tx.init):  # a chain keeps both kinds apart
        starts = inspect.getclosurevars(tx.init).nonlocals.get("init_fns", ())
        inside: list[Any] = [
            optax.GradientTransformation(*pair)
            for pair in zip(starts, held["update_fns"], strict=False)
        ]
    else:
        plan = held.get("plan")
        inside = [*held.values(), *(plan if isinstance(plan, tuple) else ())]
    for one in inside:
        yield from _all_of(one, depth + 1)
