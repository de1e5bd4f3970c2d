"""The loop people write: batches in, steps, metrics out one step late, callbacks in between.

    step, state, batches  --run-->  the last state

Composition only: what it does with `every`, `log` and `stop` can as well stand around a step in a
loop of one's own. A step's metrics are read when the next step is under way, so that the devices
never wait for the host to look.
"""

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jdp.decisions import Decisions
from jdp.stopping import Stop

Log = Callable[[int, Mapping[str, float]], None]


class Every(NamedTuple):
    """A callback with its period, see `every`."""

    steps: int
    call: Callable[[Any], Any]
    at_end: bool


def every(steps: int, call: Callable[[Any], Any], *, at_end: bool = True) -> Every:
    """A callback for `run`: evaluates, saves, samples, or checks replicas.

    Args:
        steps: It is called after each step whose number this divides.
        call: `call(state)`; a dict of numbers that it returns is logged. The next step reuses the
            state's memory, so it must not keep the state. All processes call it, so that it may use
            collectives.
        at_end: Whether it is called after the last step, too.

    Raises:
        ValueError: If `steps` is no positive whole number.

    Example:
        >>> every(100, lambda state: {"norm": 1.0}).steps
        100
    """
    _check_whole("every", "steps", steps)
    if not callable(call):
        raise ValueError(
            f"every got a {type(call).__name__} to call. Give a function of the state: "
            "jdp.every(100, lambda state: {'held_out': evaluate(state)})."
        )
    return Every(steps, call, at_end)


def run(
    step: Callable[[Any, Any], tuple[Any, dict[str, Any]]],
    state: Any,
    batches: Iterable[Any],
    *,
    steps: int | None = None,
    callbacks: Sequence[Every] = (),
    log: Sequence[Log] = (),
    log_every: int = 10,
    stop: Callable[[int], bool] | Stop | None = None,
    most_nonfinite: int | None = 100,
    progress: bool | None = None,
) -> Any:
    """Trains until the batches end, a number of steps is reached, or `stop` says so.

    Guarantees:
        - A batch is drawn only when it will be trained with: an iterator that knows its position
          stands right behind the last step.
        - All processes end after the same step, whichever of them wanted to.
        - Metrics of a step are read after the next has been dispatched.
        - However it ends, logs are closed; an error says in which step it was raised.

    Args:
        step: `jdp.train_step(...)`, or any `step(state, batch) -> (state, metrics)`.
        state: Where to begin; steps count on from `state.step` if it has one.
        batches: Global batches, as from `jdp.feed`; of one process, host batches will do.
        steps: The number of the last step, `state.step` included: a run that is taken up ends where
            it would have. `None`: when the batches end.
        callbacks: Of `every`; what they return is logged.
        log: Each is called as `log(step, values)` on process 0: `JsonLines`, `TensorBoard`, or a
            function such as `lambda step, values: wandb.log(values, step=step)`.
        log_every: Steps between two logged ones; the last is logged always.
        stop: A `jdp.Stop`, or `stop(step)`: whether to end after that step. With several processes
            a function is asked at logged steps only, and one of them is enough.
        most_nonfinite: Steps in a row whose loss may be NaN or infinite; `None` for no limit.
        progress: A progress bar on process 0; `None` shows one where a terminal and rich are.

    Returns:
        The last state.

    Raises:
        FloatingPointError: If the loss was not finite too often in a row.
        ValueError: If `steps` or `log_every` is no positive whole number, or the state is beyond.

    Example:
        >>> tx, mesh = optax.chain(jdp.all_reduce(), optax.sgd(0.5)), jdp.make_mesh()
        >>> step = jdp.train_step(lambda p, x: jnp.mean((p["w"] - x) ** 2), tx, mesh)
        >>> state = jdp.init_state({"w": jnp.zeros(())}, tx, mesh)
        >>> seen = []
        >>> state = run(
        ...     step, state, [jnp.full(16, 3.0)] * 4,
        ...     log=[lambda step, values: seen.append((step, round(values["loss"], 2)))],
        ...     log_every=2,
        ... )
        >>> seen, int(state.step)
        ([(2, 0.0), (4, 0.0)], 4)
    """
    number = int(getattr(state, "step", 0))
    _validate(number, steps, log_every, most_nonfinite)
    with contextlib.ExitStack() as stack:
        for one in log:
            stack.callback(getattr(one, "close", lambda: None))
        bar = stack.enter_context(_bar(progress, number, steps))
        reader = _Reader(log, log_every, most_nonfinite, bar, number)
        agree = _agreement(stop, log_every)
        drawn = iter(batches)
        try:
            while (steps is None or number < steps) and not (number and agree(number)):
                try:
                    batch = next(drawn)
                except StopIteration:
                    break
                state, metrics = step(state, batch)
                reader.read()
                number += 1
                due = [x for x in callbacks if number % x.steps == 0]
                reader.pending = (number, metrics, _called(due, state))
            if reader.pending is not None:
                missed = [x for x in callbacks if x.at_end and number % x.steps]
                reader.pending[2].update(_called(missed, state))
            reader.read(last=True)
        except Exception as error:
            error.add_note(f"jdp.run: after {number} steps, in the next or in what comes between.")
            raise
    return state


def _check_whole(who: str, name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(
            f"{who} got {name}={value!r}, but it counts steps: a whole number, at least 1."
        )


def _validate(number: int, steps: int | None, log_every: int, most_nonfinite: int | None) -> None:
    given = {"steps": steps, "log_every": log_every, "most_nonfinite": most_nonfinite}
    for name, value in given.items():
        if value is not None:
            _check_whole("run", name, value)
    if steps is not None and number > steps:
        raise ValueError(
            f"run got steps={steps}, but the state has made {number} steps already. `steps` is the "
            "number of the last step of the whole run, not of further ones."
        )


def _called(callbacks: Sequence[Every], state: Any) -> dict[str, float]:
    """What they return, together."""
    found: dict[str, float] = {}
    for one in callbacks:
        told = one.call(state)
        found |= _scalars(told) if isinstance(told, Mapping) else {}
    return found


def _scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """What is a number; arrays and texts are no log's business."""
    numbers = (bool, int, float, np.generic, np.ndarray, jax.Array)
    kept = {k: x for k, x in values.items() if isinstance(x, numbers) and np.ndim(x) == 0}
    return {name: float(x) for name, x in jax.device_get(kept).items()}


class _Reader:
    """Reads the metrics of the step before."""

    def __init__(
        self, log: Sequence[Log], log_every: int, most_nonfinite: int | None, bar: Any, begin: int
    ) -> None:
        self._log = log if jax.process_index() == 0 else ()
        self._log_every, self._most, self._bar = log_every, most_nonfinite, bar
        self.pending: tuple[int, Mapping[str, Any], dict[str, float]] | None = None
        self._bad, self._logged, self._since = 0, begin, time.perf_counter()

    def read(self, *, last: bool = False) -> None:
        """Waits for the step that is pending, and tells the logs if it is one to be logged."""
        if self.pending is None:
            return
        number, metrics, found = self.pending
        self.pending = None
        due = last or bool(found) or number % self._log_every == 0
        values = _scalars(metrics if due else {k: x for k, x in metrics.items() if k == "loss"})
        loss = values.get("loss")
        self._bar(number, loss)
        self._count(number, loss)
        if due:
            now = time.perf_counter()
            values["steps_per_s"] = (number - self._logged) / max(now - self._since, 1e-9)
            self._logged, self._since = number, now
            for one in self._log:
                one(number, values | found)

    def _count(self, number: int, loss: float | None) -> None:
        self._bad = 0 if loss is None or math.isfinite(loss) else self._bad + 1
        if self._most is not None and self._bad >= self._most:
            raise FloatingPointError(
                f"The loss is {loss}, and has not been finite in {self._bad} steps in a row, from "
                f"step {number - self._bad + 1} on. Look at that step's batch, take a smaller "
                "learning rate, or skip such steps with jdp.skip_nonfinite; most_nonfinite sets "
                "the limit."
            )


def _agreement(stop: Callable[[int], bool] | Stop | None, log_every: int) -> Callable[[int], bool]:
    """Whether to end after a step; over several processes one that wants to is enough."""
    if stop is None:
        return lambda number: False
    if isinstance(stop, Stop):
        return stop.after
    if jax.process_count() == 1:
        return stop
    decisions = Decisions("jdp.run")

    def agreed(number: int) -> bool:
        return number % log_every == 0 and any(decisions.each(lambda: bool(stop(number))))

    return agreed


def _bar(
    progress: bool | None, number: int, steps: int | None
) -> contextlib.AbstractContextManager[Callable[[int, float | None], None]]:
    """A context that gives `show(step, loss)`."""
    nothing = contextlib.nullcontext(lambda number, loss: None)
    if progress is False or jax.process_index() or (progress is None and not sys.stderr.isatty()):
        return nothing
    try:
        import rich.progress as bars
        from rich.console import Console
    except ImportError as error:
        if progress:
            raise ImportError(
                "A progress bar is drawn by rich, which is not installed (pip install rich)."
            ) from error
        return nothing

    @contextlib.contextmanager
    def shown() -> Any:
        columns = (
            bars.BarColumn(),
            bars.TextColumn("step {task.completed:,.0f}"),
            bars.TextColumn("{task.fields[loss]}"),
            bars.TimeElapsedColumn(),
            bars.TimeRemainingColumn(),
        )
        with bars.Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task("", total=steps, completed=number, loss="")

            def show(number: int, loss: float | None) -> None:
                bar.update(task, completed=number, loss="" if loss is None else f"loss {loss:.4g}")

            yield show

    return shown()
