"""A loop that is watched: it takes batches, runs steps, and keeps the state whatever happens.

    step, state, batches  --Run-->  one step after the other, each part marked for the trace
                          --warm_up, traced, timed-->  seconds, a trace, what was compiled

What the figures mean is said in `jdp.diagnose`.
"""

import contextlib
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax

from jdp import trace as tracing
from jdp.diagnosis import DiagnosisError
from jdp.hlo import COLLECTIVES, parse
from jdp.train import TrainStep

WARM_UP = 2  # steps: the first compiles, the second finds what that left undone
_COMPILES = "/jax/core/compile/backend_compile_duration"


class Run:
    """The loop: takes batches, runs steps, and keeps the state whatever happens."""

    def __init__(self, step: TrainStep, state: Any, batches: Iterable[Any]) -> None:
        self.step, self.state, self.batch = step, state, None
        self.notes: list[str] = []
        self._batches, self._taken, self._ended = iter(batches), 0, False
        self._metrics: Any = None

    def one(self) -> bool:
        """One turn of the loop; False if there are no more batches."""
        with tracing.marked("input"):
            batch = None if self._ended else self._next()
        if self._ended:
            return False
        with tracing.marked("step"):
            try:
                self.state, self._metrics = self.step(self.state, batch)
            except Exception as error:
                gone = any(map(_is_gone, jax.tree.leaves(self.state)))
                raise DiagnosisError(
                    f"Step {self._taken} failed ({type(error).__name__}: {error}). "
                    + (
                        "The state before it was consumed, by this step or before: go on from the "
                        "last one that was saved."
                        if gone
                        else "The state before it is this error's `state`."
                    ),
                    self.state,
                ) from error
        self.batch = batch
        return True

    def some(self, steps: int) -> int:
        """Steps, waited for, while there are batches; returns how many."""
        done = 0
        while done < steps and self.one():
            done += 1
        self.wait()
        return done

    def _next(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            self._ended = True
            self.notes.append(f"The batches ran out after {self._taken}; what was there is used.")
            return None
        except Exception as error:
            raise DiagnosisError(
                f"The loader failed after {self._taken} batches ({type(error).__name__}: {error}). "
                "The state after their steps is this error's `state`; nothing is lost.",
                self.state,
            ) from error
        self._taken += 1
        return batch

    @contextlib.contextmanager
    def kept(self, what: str) -> Iterator[None]:
        """Whatever fails inside, even by Ctrl-C, carries the state, once a step has been taken."""
        try:
            yield
        except DiagnosisError:
            raise
        except Exception as error:
            if not self._taken:
                raise
            raise DiagnosisError(
                f"{what} failed ({type(error).__name__}: {error}). The state after "
                f"{self._taken} batches is this error's `state`; nothing is lost.",
                self.state,
            ) from error
        except BaseException as error:
            error.state = self.state  # type: ignore[attr-defined]
            error.add_note(
                f"jdp.doctor was interrupted; the state after {self._taken} batches is this "
                "error's `state`."
            )
            raise

    def wait(self) -> None:
        """Until the devices have done what was asked."""
        jax.block_until_ready((self.state, self._metrics))

    def lacking(self, what: str) -> DiagnosisError:
        """The error for too few batches, before `what`."""
        return DiagnosisError(
            f"The batches ran out after {self._taken}, before {what}. Give at least "
            f"{WARM_UP + 1}, better {WARM_UP + 20}; the state after them is this error's `state`.",
            self.state,
        )


def _is_gone(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and leaf.is_deleted()


def warm_up(run: Run) -> float:
    """Seconds of the first step, which compiles."""
    start = time.perf_counter()
    if not run.one():
        raise ValueError(
            "jdp.doctor got no batches, so there is nothing to measure; the state is as it was. "
            "An iterator that another loop has used up is empty: make a new one."
        )
    run.wait()
    seconds = time.perf_counter() - start
    if not run.some(WARM_UP - 1):
        raise run.lacking("a step could be measured")
    return seconds


def traced(
    run: Run, steps: int, text: str, folder: Path | None
) -> tuple[tracing.Trace, tuple[float, float], int]:
    """The trace of some steps, the stretch of it that they take, and how many there were."""
    names = _names_of_collectives(text)
    with tracing.record(names, folder) as recording, tracing.marked("run"):
        done = run.some(steps)
    if not done:
        raise run.lacking("a step could be traced")
    mark = next(mark for mark in recording.trace.marks if mark.name == "run")
    return recording.trace, (mark.start, mark.end), done


def _names_of_collectives(text: str) -> set[str]:
    """Operations that send, under whatever name: collectives, and what wraps one."""
    found = set()
    for computation in parse(text).computations.values():
        for x in computation.instructions:
            wraps = x.opcode.startswith("async-") and any(
                kind in x.attributes for kind in COLLECTIVES
            )
            if x.collective or wraps:
                found.add(x.name)
    return found


def timed(run: Run, steps: int) -> tuple[float | None, int, tuple[int, float]]:
    """Seconds of a step without a trace, how many there were, and what was compiled meanwhile."""
    compiled: list[float] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        del kwargs
        if event == _COMPILES:
            compiled.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    start = time.perf_counter()
    try:
        done = run.some(steps)
        seconds = (time.perf_counter() - start) / done if done else None
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return seconds, done, (len(compiled), 1e3 * sum(compiled) / max(done, 1))
