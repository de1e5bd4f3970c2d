"""The loop people write: batches in, steps, metrics out one step late, callbacks in between.

    step, state, batches  --run-->  the last state

Composition only: what it does with `every`, `log` and `stop` can as well stand around a step in a
loop of one's own. A step's metrics are read when the next step is under way, so that the devices
never wait for the host to look.
"""

import contextlib
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from jdp.agreement import check_processes
from jdp.bad_steps import BadSteps
from jdp.batches import Batches
from jdp.decisions import Decisions
from jdp.folder import CheckpointError
from jdp.logs import progress_bar
from jdp.mesh import is_whole
from jdp.stopping import Stop
from jdp.watchdog import note_alive, note_step

if TYPE_CHECKING:
    from jdp.checkpoint import Checkpoints

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
            collectives, and must not leave them to one process: print and write on process 0,
            evaluate everywhere. One that takes longer than `stuck_seconds` calls `jdp.note_alive`
            now and then, as `jdp.evaluate` does.
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
    checkpoints: "Checkpoints | None" = None,
    callbacks: Sequence[Every] = (),
    log: Sequence[Log] = (),
    log_every: int = 10,
    stop: Callable[[int], bool] | Stop | None = None,
    most_nonfinite: int | None = 100,
    batches_begin: int = 0,
    progress: bool | None = None,
) -> Any:
    """Trains until the batches end, a number of steps is reached, or `stop` says so.

    Guarantees:
        - A batch is drawn only when it will be trained with: an iterator that knows its position
          stands right behind the last step.
        - All processes begin alike (`jdp.check_processes`, where the step can be lowered), and end
          after the same step, whichever of them wanted to. No process begins a step before all
          have come out of the callbacks.
        - Metrics of a step are read after the next has been dispatched, or before it is saved.
        - Nothing is saved while the last steps were bad: the newest checkpoint is a good one.
        - However it ends, logs are closed; an error says in which step it was raised.

    Args:
        step: `jdp.train_step(...)`, or any `step(state, batch) -> (state, metrics)`.
        state: Where to begin; steps count on from `state.step` if it has one.
        batches: Global batches, as from `jdp.Batches` or `jdp.feed`; of one process, host batches
            will do.
        steps: The number of the last step, `state.step` included: a run that is taken up ends where
            it would have. `None`: when the batches end.
        checkpoints: Where to save: when it is time to (after each step, if it has no period) and
            after the last step, with the position of the batches. The best is chosen among metrics
            and what callbacks of that step returned. To go on from there, before:
            `state = checkpoints.resume(state, batches)`.
        callbacks: Of `every`; what they return is logged.
        log: Each is called as `log(step, values)` on process 0: `JsonLines`, `TensorBoard`, or a
            function such as `lambda step, values: wandb.log(values, step=step)`. No collectives.
        log_every: Steps between two logged ones; the last is logged always.
        stop: A `jdp.Stop`, or `stop(step)`: whether to end after that step. With several processes
            a function is asked at logged steps only, and one of them is enough.
        most_nonfinite: Steps in a row that may be bad: of a loss that is NaN or infinite, or left
            out by `jdp.skip_nonfinite`. `None` for no limit.
        batches_begin: Steps that the state had made when the batches began, where a trained state
            goes on with other data.
        progress: A progress bar on process 0; `None` shows one where a terminal and rich are.

    Returns:
        The last state.

    Raises:
        FloatingPointError: If too many steps in a row were bad, or a parameter is not finite when
            it is to be saved: with the first bad step, its examples (of `jdp.Batches`) and the last
            good checkpoint. All processes raise it.
        CheckpointError: If the checkpoints cannot be written.
        ValueError: If a number cannot be meant, the state is beyond `steps`, `batches` stand at
            another step than the state, the folder holds a later one, or processes differ.

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
    _validate(number, steps, log_every, most_nonfinite, batches_begin)
    if hasattr(state, "step"):
        _check_position(number, batches, batches_begin)
    bad = BadSteps(most_nonfinite, batches, batches_begin, checkpoints)
    saver = _Saver(checkpoints, batches, bad, number, steps)
    with contextlib.ExitStack() as stack:
        for one in log:
            stack.callback(getattr(one, "close", lambda: None))
        bar = stack.enter_context(progress_bar(progress, number, steps))
        reader, caller = _Reader(log, log_every, bad, bar, number), _Caller(callbacks)
        agree = _agreement(stop, log_every)
        drawn, first = iter(batches), True
        try:
            while (steps is None or number < steps) and not (number and agree(number)):
                try:
                    batch = next(drawn)
                except StopIteration:
                    break
                if first:
                    _check_alike(step, state, batch, steps)
                state, metrics = step(state, batch)
                first, number = False, number + 1
                note_step(number)  # by its number in the run, whatever the step tells
                reader.tell()
                reader.pending = _Pending(number, metrics, caller.after(number, state))
                saver.after(number, state, reader)
            if reader.pending is not None:
                reader.pending.found.update(caller.at_end(number, state))
                reader.tell(last=True)
                saver.at_end(number, state, reader)
        except Exception as error:
            error.add_note(f"jdp.run: after {number} steps, in the next or in what comes between.")
            raise
    return state


def _check_whole(who: str, name: str, value: Any, least: int = 1) -> None:
    if not is_whole(value) or value < least:
        raise ValueError(
            f"{who} got {name}={value!r}, but it counts steps: a whole number, at least {least}."
        )


def _validate(
    number: int, steps: Any, log_every: Any, most_nonfinite: Any, batches_begin: Any
) -> None:
    given = {"steps": steps, "log_every": log_every, "most_nonfinite": most_nonfinite}
    for name, value in given.items():
        if value is not None:
            _check_whole("run", name, value)
    _check_whole("run", "batches_begin", batches_begin, 0)
    if steps is not None and number > steps:
        raise ValueError(
            f"run got steps={steps}, but the state has made {number} steps already. `steps` is the "
            "number of the last step of the whole run, not of further ones."
        )


def _check_position(number: int, batches: Any, begin: int) -> None:
    """Batches that know where they stand go on where the state does."""
    if not isinstance(batches, Batches) or batches.step + begin == number:
        return
    what = "be trained with again" if batches.step + begin < number else "be left out"
    raise ValueError(
        f"run got a state that has made {number} steps, and batches that stand at step "
        f"{batches.step + begin}: examples would {what}. The position is saved with a state and "
        "goes with it: state = checkpoints.resume(state, batches), or batches.restore(position) of "
        "what checkpoints.restore returned; batches.at(step) looks at a batch without moving. "
        "Where a trained state is meant to go on with other data, say how many steps it had made "
        f"when they began: batches_begin={max(0, number - batches.step)}."
    )


def _check_alike(step: Any, state: Any, batch: Any, steps: int | None) -> None:
    """Several processes are about to run the same thing."""
    if jax.process_count() > 1 and hasattr(step, "lower"):
        check_processes(step, state, batch, num_steps=steps)


class _Caller:
    """Calls callbacks, and makes sure that all processes come out of them."""

    def __init__(self, callbacks: Sequence[Every]) -> None:
        self._callbacks = callbacks
        self._decisions = Decisions("the callbacks of jdp.run", CheckpointError)

    def after(self, number: int, state: Any) -> dict[str, float]:
        """Those whose turn it is after a step."""
        return self._call([x for x in self._callbacks if number % x.steps == 0], state)

    def at_end(self, number: int, state: Any) -> dict[str, float]:
        """Those that are called after the last step, too."""
        return self._call([x for x in self._callbacks if x.at_end and number % x.steps], state)

    def _call(self, callbacks: Sequence[Every], state: Any) -> dict[str, float]:
        if not callbacks:
            return {}
        # A collective that only one process calls would meet one of the next step, and give both
        # a wrong result: so all come out of the callbacks before any goes on.
        found = self._decisions.each(lambda: _called(callbacks, state))
        note_alive()
        return found[jax.process_index()]


def _called(callbacks: Sequence[Every], state: Any) -> dict[str, float]:
    """What they return, together."""
    found: dict[str, float] = {}
    for one in callbacks:
        note_alive()  # each may take as long as a run may stand still
        told = one.call(state)
        found |= _scalars(told) if isinstance(told, Mapping) else {}
    return found


def _scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """What is a number; arrays and texts are no log's business."""
    numbers = (bool, int, float, np.generic, np.ndarray, jax.Array)
    kept = {k: x for k, x in values.items() if isinstance(x, numbers) and np.ndim(x) == 0}
    return {name: float(x) for name, x in jax.device_get(kept).items()}


class _Saver:
    """Saves when it is time to, if the last steps were good."""

    def __init__(
        self,
        checkpoints: "Checkpoints | None",
        batches: Any,
        bad: BadSteps,
        begin: int,
        steps: int | None,
    ) -> None:
        self._checkpoints, self._bad, self._steps = checkpoints, bad, steps
        self._data = batches if callable(getattr(batches, "state", None)) else None
        self._owed, self._saved = False, begin
        if checkpoints is None:
            return
        if self._data is None:
            warnings.warn(
                f"jdp.run saves no position in the data: a {type(batches).__name__} has no "
                "state(). A run that resumes would begin its data anew, and repeat examples. Draw "
                "from jdp.Batches, or give it state() and restore(position).",
                stacklevel=3,
            )
        checkpoints.claim(begin)

    def after(self, number: int, state: Any, reader: "_Reader") -> None:
        """After a step."""
        if self._checkpoints is not None and (self._checkpoints.due(number) or self._owed):
            self._owed = True  # until a good step comes
            reader.settle()
            if number != self._steps:  # the last one waits for the callbacks of the end
                reader.tell()  # before: what is saved is not trained, and told of, again
                self._save(self._checkpoints, number, state, reader.values)

    def at_end(self, number: int, state: Any, reader: "_Reader") -> None:
        """After the last step, which has been read."""
        if self._checkpoints is None or self._saved == number:
            return
        self._save(self._checkpoints, number, state, reader.values)
        if self._bad.in_a_row:
            first = number - self._bad.in_a_row + 1
            warnings.warn(
                f"jdp.run ended after step {number} in the midst of bad steps, and has not saved "
                f"its last state. They began with step {first}. {self._bad.about(first)}",
                stacklevel=3,
            )

    def _save(
        self, checkpoints: "Checkpoints", number: int, state: Any, values: dict[str, float]
    ) -> None:
        if self._bad.in_a_row:
            return
        note_alive()
        given = values if checkpoints.best_by is None or checkpoints.best_by[0] in values else None
        try:
            checkpoints.save(state, step=number, data=self._data, metrics=given, force=True)
        except FloatingPointError as error:
            self._bad.fail(f"After step {number}: {error}", number)
        self._owed, self._saved = False, number
        note_alive()


class _Pending(NamedTuple):
    """A step that was dispatched: its number, its metrics, and what its callbacks returned."""

    number: int
    metrics: Mapping[str, Any]
    found: dict[str, float]


class _Reader:
    """Reads the metrics of a step, late, and tells the logs."""

    def __init__(
        self, log: Sequence[Log], log_every: int, bad: BadSteps, bar: Any, begin: int
    ) -> None:
        self._log = log if jax.process_index() == 0 else ()
        self._log_every, self._bad, self._bar = log_every, bad, bar
        self.pending: _Pending | None = None
        self.values: dict[str, float] = {}
        self._settled, self._logged, self._since = begin, begin, time.perf_counter()

    def settle(self, *, whole: bool = True) -> None:
        """Waits for the step that is pending, and counts it if it was bad."""
        if self.pending is None or self._settled == self.pending.number:
            return
        number, metrics, found = self.pending
        few = {name: x for name, x in metrics.items() if name in ("loss", "skipped")}
        values = _scalars(metrics if whole else few)
        self.values, self._settled = values | found, number
        self._bar(number, values.get("loss"))
        self._bad.note(number, values.get("loss"), values.get("skipped"))

    def tell(self, *, last: bool = False) -> None:
        """Settles the step that is pending, and tells the logs, once, if it is one to be logged."""
        if self.pending is None:
            return
        number, _, found = self.pending
        due = last or bool(found) or number % self._log_every == 0
        self.settle(whole=due)
        self.values |= found
        if due and number != self._logged:
            now = time.perf_counter()
            speed = (number - self._logged) / max(now - self._since, 1e-9)
            self._logged, self._since = number, now
            self._say(number, self.values | {"steps_per_s": speed})
        elif last and found:  # of the end
            self._say(number, found)

    def _say(self, number: int, values: dict[str, float]) -> None:
        for one in self._log:
            one(number, values)


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
