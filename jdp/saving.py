"""What is given to `jdp.Checkpoints`, looked at before anything is written.

    arguments, state, position, step  -->  what will be stored of them, or a sentence

And a clock that strikes at the same step on all processes. Nothing here touches a file.
"""

import datetime
import functools
import importlib.metadata
import json
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jdp.decisions import Decisions
from jdp.drift import check_replicas
from jdp.manifest import Leaf, only
from jdp.mesh import is_whole
from jdp.replica import find_nodes
from jdp.split import ZeroState


class Clock:
    """Says when some time has passed, at the same step on all processes.

    They ask process 0 not at every step but at steps agreed before: half of those that are left at
    the pace so far.
    """

    def __init__(self, seconds: float, decisions: Decisions) -> None:
        self._seconds, self._decisions = seconds, decisions
        self._start, self._from, self._next = time.monotonic(), None, None

    def due(self, step: int) -> bool:
        """Whether the time has passed; starts it again if so."""
        if self._from is None:
            self._from = self._next = step
        if step < (self._next or 0):
            return False
        passed = self._decisions.first(lambda: time.monotonic() - self._start)
        if passed >= self._seconds:
            self._start, self._from, self._next = time.monotonic(), step, step + 1
            return True
        pace = (step - self._from) / max(passed, 1e-9)
        self._next = step + max(1, int(pace * (self._seconds - passed) / 2))
        return False


def step_of(state: Any, step: Any) -> int:
    """The number of a state's step: the one given, or what the state counts."""
    if step is None:
        step = getattr(state, "step", None)
        if step is None:
            raise ValueError(
                f"jdp.Checkpoints.save was given a {type(state).__name__}, which counts no steps. "
                "Say which one it is: save(state, step=...)."
            )
        step = int(step)
    if not is_whole(step) or step < 0:
        raise ValueError(
            f"jdp.Checkpoints.save got step={step!r}; steps are whole numbers from 0 on."
        )
    return int(step)


def position(data: Any) -> Any:
    """The position in the data, as it reads after JSON."""
    data = data.state() if callable(getattr(data, "state", None)) else data
    try:
        return json.loads(json.dumps(data))
    except TypeError as error:
        raise TypeError(
            f"jdp.Checkpoints.save got `data` that cannot be written as JSON ({error}). Give "
            "numbers, texts, lists and dicts, or an object whose state() returns those; arrays "
            "belong into the state."
        ) from None


def agreed_position(data: Any, decisions: Decisions) -> Any:
    """The position in the data, the same on all processes."""
    place = position(data)
    places = decisions.each(lambda: place)
    if any(other != places[0] for other in places):
        raise ValueError(
            "jdp.Checkpoints.save was given another `data` on one process than on another: a "
            "checkpoint holds one position, which any number of processes can go on from. Give "
            "that of the global batches, as jdp.Batches does."
        )
    return place


def put_back(place: Any, data: Any) -> None:
    """Moves what a run draws from to the position that was saved."""
    if place is not None and data is None:
        raise ValueError(
            f"jdp.Checkpoints.resume: the checkpoint was saved at a position in the data "
            f"({place!r:.100}), and there is nothing to move there: the run would repeat examples. "
            "Give it the data, resume(state, batches), or take the position in hand with restore."
        )
    if place is None and data is not None:
        raise ValueError(
            "jdp.Checkpoints.resume: the checkpoint was saved without a position in the data, so "
            "where to go on is not known, and starting over would repeat examples. Save with "
            "data=batches. Where it is meant, leave the data out: resume(state)."
        )
    if data is None:
        return
    if not callable(getattr(data, "restore", None)):
        raise TypeError(
            f"jdp.Checkpoints.resume got a {type(data).__name__} as data, which has no "
            "restore(position). Give a jdp.Batches, or take the position in hand: "
            "state, position = checkpoints.restore(state)."
        )
    data.restore(place)


def numbers(metrics: Mapping[str, Any] | None, best: tuple[str, str] | None) -> dict[str, float]:
    """Metrics as plain numbers, among them the one that the best checkpoint is chosen by."""
    named = {name: float(value) for name, value in (metrics or {}).items()}
    if best and metrics is not None and best[0] not in named:
        raise ValueError(
            f"jdp.Checkpoints keeps the best by {best[0]!r}, and save was given {sorted(named)}. "
            "Give it too, or leave metrics out where there is none."
        )
    return named


def check_state(state: Any, number: int, check: bool) -> None:
    """Refuses a state of another step and, if it is to be checked, one that has gone wrong."""
    own = getattr(state, "step", None)
    if own is not None and jnp.ndim(own) == 0 and int(own) != number:
        raise ValueError(
            f"jdp.Checkpoints.save got step={number}, but the state counts {int(own)} steps. "
            "A run that resumes there would count, schedule and draw its data one way and its "
            "keys another. Leave `step` out, or number the steps as the state does: 1 after "
            "the first."
        )
    if check:
        check_replicas(state)
        check_finite(getattr(state, "params", None))


@jax.jit
def _all_finite(arrays: list[jax.Array]) -> list[jax.Array]:
    return [jnp.all(jnp.isfinite(x)) for x in arrays]


def check_finite(params: Any) -> None:
    """Refuses parameters of which one is not finite, naming it."""
    found = jax.tree_util.tree_flatten_with_path(params)[0]
    found = [(p, x) for p, x in found if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
    if not found:
        return
    for (path, _), finite in zip(found, _all_finite([x for _, x in found]), strict=True):
        if not finite:
            raise FloatingPointError(
                f"jdp.Checkpoints.save: the parameter {jax.tree_util.keystr(path)} holds NaN or "
                "infinity. Such a state cannot be trained further, and would in time displace the "
                "good ones. Resume from the last one; jdp.skip_nonfinite leaves such steps out. "
                "(check=False saves it all the same.)"
            )


def made_by(state: Any) -> dict[str, Any]:
    """What made a state: for people who look at it later."""
    meshes = [
        x.sharding.mesh
        for x in jax.tree.leaves(state)
        if isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding)
    ]
    stages = find_nodes(state, ZeroState)
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jdp": _version("jdp-train"),
        "orbax": _version("orbax-checkpoint"),
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "processes": jax.process_count(),
        "mesh": dict(meshes[0].shape) if meshes else None,
        "stage": stages[0].placement.name if stages else None,
    }


@functools.cache
def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def check_parts(parts: Sequence[str], wanted: list[Leaf], saved: list[Leaf]) -> None:
    """Refuses fields that are not in both trees."""
    fields = {leaf.name[0] for leaf in saved if leaf.name}
    if isinstance(parts, str) or not set(parts) <= fields or not only(wanted, parts):
        raise ValueError(
            f"jdp.Checkpoints.restore got parts={parts!r}; they are fields that both the "
            f"checkpoint and `like` have, as ('params',). The checkpoint has {sorted(fields)}."
        )


def check_arguments(every_steps: Any, every_minutes: Any, keep: Any, best: Any) -> None:
    """Refuses arguments of `jdp.Checkpoints` that cannot be meant."""
    for name, value in (("every_steps", every_steps), ("keep", keep)):
        if value is not None and (not is_whole(value) or value < 1):
            raise ValueError(
                f"jdp.Checkpoints got {name}={value!r}; it must be a whole number, at least 1."
            )
    if every_minutes is not None and not every_minutes > 0:
        raise ValueError(
            f"jdp.Checkpoints got every_minutes={every_minutes!r}; it must be more than 0."
        )
    if best is not None and not (
        isinstance(best, tuple) and len(best) == 2 and best[1] in ("min", "max")
    ):
        raise ValueError(
            f"jdp.Checkpoints got best={best!r}; it is a metric's name and 'min' or 'max', as "
            "('loss', 'min')."
        )


def others(steps: Sequence[int], step: int | None) -> str:
    """What else there is to restore, where that of a step, or all of them, are not whole."""
    left = [str(other) for other in steps if other != step] if step is not None else []
    if not left:
        return "No other one is left: restore the folder from a copy."
    return f"There are also {', '.join(left)}; restore() takes the newest whole one."


def tell(errors: list[BaseException]) -> None:
    """Prints errors that nobody asked for: they are not to be lost with the run."""
    for error in errors:
        print(error, file=sys.stderr)
