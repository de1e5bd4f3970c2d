"""Runs somebody's training script as far as its training step, and gets hold of that step.

    SCRIPT, arguments  --first_step-->  Job(step, state, batch)        nothing is trained
    SCRIPT, arguments  --follow-->      what a function of (step, state, batches) returns,
                                        the script's own loop going on as if it ran the steps

A script needs no change: any file that builds a step with `jdp.train_step` and calls it (or its
`lower`) will do. It is run as `python SCRIPT arguments` would, in this process, up to that call.
"""

import contextlib
import functools
import os
import queue
import runpy
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from unittest import mock

import jax
import optax

import jdp
from jdp.train import TrainStep


class Job(NamedTuple):
    """What a script was about to run.

    Attributes:
        step: Its training step.
        state: The state it gave.
        batch: The batch it gave.
        removed: What was taken out of its transformation, see `first_step`.
    """

    step: TrainStep
    state: Any
    batch: Any
    removed: tuple[str, ...] = ()


class ScriptError(Exception):
    """A script cannot be used, and why."""


class _Stop(BaseException):
    """Ends a script at its step; no `except Exception` of its own stops it."""


_EXPECTED = (
    "A script is expected to build a step with jdp.train_step and to call it: "
    "state, metrics = step(state, batch), when run as `python SCRIPT`."
)

# Links of a chain that communicate: alone they are left out, around another one that is kept.
_LINKS = (
    *("all_reduce", "all_reduce_in_backward", "all_reduce_in_order", "hierarchical"),
    *("power_sgd", "top_k", "random_k", "sign", "begin_with"),
)
_AROUND = ("zero1", "zero2", "zero3", "offload", "local_sgd", "diloco")


def first_step(
    path: str | os.PathLike[str],
    arguments: Sequence[str] = (),
    *,
    shapes: bool = False,
    plain: bool = False,
) -> Job:
    """Runs a script until it calls its training step, and stops it there.

    Args:
        path: The script.
        arguments: Its arguments.
        shapes: Let `jdp.init_state` make shapes instead of arrays, for models that are larger than
            this machine. (Parameters given as a function are then never made.)
        plain: Take what communicates or places out of its transformation, so that the plain
            optimizer is left.

    Returns:
        Step, state and batch.

    Raises:
        ScriptError: If there is no such script, it fails, or ends without a step.

    Example:
        >>> import tempfile, pathlib
        >>> script = pathlib.Path(tempfile.mkdtemp(), "train.py")
        >>> _ = script.write_text("print('no step here')")
        >>> first_step(script)
        Traceback (most recent call last):
        jdp.script.ScriptError: train.py ended without calling a training step. A script is ...
    """
    found: list[Job] = []

    def stop(step: TrainStep, state: Any, batch: Any, *, shares: Any = None) -> NoReturn:
        del shares
        found.append(Job(step, state, batch))
        raise _Stop

    removed: list[str] = []
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(TrainStep, "__call__", stop))
        patches.enter_context(mock.patch.object(TrainStep, "lower", stop))
        if shapes:
            made = functools.partial(_shapes_only, jdp.init_state)
            patches.enter_context(mock.patch.object(jdp, "init_state", made))
        for name, stand_in in _without_communication(removed).items() if plain else ():
            patches.enter_context(mock.patch.object(jdp, name, stand_in))
        _run(path, arguments)
    if not found:
        raise ScriptError(f"{Path(path).name} ended without calling a training step. {_EXPECTED}")
    return found[0]._replace(removed=tuple(removed))


def follow(
    path: str | os.PathLike[str],
    arguments: Sequence[str],
    function: Callable[[TrainStep, Any, Iterator[Any]], Any],
) -> Any:
    """Gives a function the step, the first state and all the batches of a running script.

    The script's loop waits while the function runs a step, and goes on with what that step
    returned, so what the function measures between two batches is the script's own doing. The
    script is stopped when the function returns.

    Args:
        path: The script.
        arguments: Its arguments.
        function: `function(step, state, batches)`; it runs in a thread of its own, as scripts may
            do what only a main thread can (signals).

    Returns:
        What the function returned.

    Raises:
        ScriptError: If there is no such script, it fails, or ends without a step.
    """
    meeting = _Meeting(function)
    with mock.patch.object(TrainStep, "__call__", meeting.hand_over(TrainStep.__call__)):
        try:
            _run(path, arguments)
        finally:
            meeting.end()
    return meeting.result(Path(path).name)


class _Meeting:
    """Two threads taking turns: a script that calls a step, and a function that runs it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._batches: queue.Queue[Any] = queue.Queue()
        self._results: queue.Queue[Any] = queue.Queue()
        self._worker: threading.Thread | None = None
        self._step: TrainStep | None = None
        self._last: Any = None
        self._outcome: Any = None
        self._error: BaseException | None = None

    def hand_over(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """A `TrainStep.__call__` for both threads; `run` is the real one."""

        def call(step: TrainStep, state: Any, batch: Any, *, shares: Any = None) -> Any:
            if threading.current_thread() is self._worker:
                self._last = run(step, state, batch, shares=shares)
                return self._last
            if self._step is None:
                self._begin(step, state)
            if step is not self._step:  # a second step of the script is its own affair
                return run(step, state, batch, shares=shares)
            self._batches.put((batch,))
            result = self._results.get()
            if result is None:
                raise _Stop
            return result

        return call

    def _begin(self, step: TrainStep, state: Any) -> None:
        self._step = step
        self._worker = threading.Thread(target=self._work, args=(step, state), daemon=True)
        self._worker.start()

    def _work(self, step: TrainStep, state: Any) -> None:
        try:
            self._outcome = self._function(step, state, self._give())
        except BaseException as error:
            self._error = error
        self._results.put(None)

    def _give(self) -> Iterator[Any]:
        while (given := self._batches.get()) is not None:
            yield given[0]
            self._results.put(self._last)

    def end(self) -> None:
        """The script has ended: so do its batches."""
        self._batches.put(None)
        if self._worker is not None:
            self._worker.join()

    def result(self, name: str) -> Any:
        """What the function returned or raised."""
        if self._step is None:
            raise ScriptError(f"{name} ended without calling a training step. {_EXPECTED}")
        if self._error is not None:
            raise self._error
        return self._outcome


def _run(path: str | os.PathLike[str], arguments: Sequence[str]) -> None:
    """Runs a script as Python would, until it ends or is stopped."""
    path = Path(path)
    if not path.is_file():
        raise ScriptError(f"There is no script {path}. {_EXPECTED}")
    search = [str(path.resolve().parent), *sys.path]
    with (
        mock.patch.object(sys, "argv", [str(path), *arguments]),
        mock.patch.object(sys, "path", search),
    ):
        try:
            runpy.run_path(str(path), run_name="__main__")
        except _Stop:
            return
        except SystemExit as error:
            if error.code not in (None, 0):
                raise ScriptError(f"{path.name} exited with {error.code!r}.") from error
        except Exception as error:
            raise ScriptError(
                f"{path.name} failed before its step could be looked at: "
                f"{type(error).__name__}: {error}"
            ) from error


def _shapes_only(init_state: Callable[..., Any], params: Any, *args: Any, **kwargs: Any) -> Any:
    """`jdp.init_state` of the parameters' shapes."""
    make = callable(params) and jax.tree.leaves(params) == [params]
    shapes = jax.eval_shape(params if make else lambda: params)
    return init_state(shapes, *args, **kwargs)


def _without_communication(removed: list[str]) -> dict[str, Callable[..., Any]]:
    """Stand-ins for what communicates or places, by name; those called are noted in `removed`."""

    def left_out(name: str, *args: Any, **kwargs: Any) -> optax.GradientTransformation:
        del args, kwargs
        removed.append(name)
        return optax.identity()

    def unwrapped(name: str, inner: Any, *args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        removed.append(name)
        return inner

    links = {name: functools.partial(left_out, name) for name in _LINKS}
    return links | {name: functools.partial(unwrapped, name) for name in _AROUND}
