"""Steps that taught nothing: counted, and after too many in a row the run ends, in words.

    step, loss, skipped  --note-->  how many in a row  --too many-->  FloatingPointError

A step is bad if its loss is NaN or infinite, or if `jdp.skip_nonfinite` (or a loss scale) left it
out. The error tells which step was the first, which examples it was of, and which checkpoint is
from before it. Nothing here skips a step or saves a state.
"""

import math
from typing import Any, NoReturn

from jdp.batches import Batches
from jdp.decisions import Decisions
from jdp.folder import CheckpointError
from jdp.watchdog import note_failing

_NAMED = 8  # examples of a batch that are named


class BadSteps:
    """Counts the bad steps of a run.

    Args:
        most: So many in a row end the run; `None` for no limit.
        batches: What the run draws from; of `jdp.Batches` the examples are named.
        begin: Steps before step 0 of `batches`.
        checkpoints: Of the run, or `None`.
    """

    def __init__(self, most: int | None, batches: Any, begin: int, checkpoints: Any) -> None:
        self._most, self._batches, self._begin = most, batches, begin
        self._checkpoints = checkpoints
        self._decisions = Decisions("jdp.run, ending")
        self._skipped: float | None = None
        self.in_a_row = 0

    def note(self, step: int, loss: float | None, skipped: float | None) -> None:
        """Counts a step, the next one; ends the run, on all processes, if that is one too many.

        Args:
            step: Its number.
            loss: Its loss, if there is one.
            skipped: How many have been left out so far, if that is known.
        """
        before, self._skipped = self._skipped, skipped
        left_out = before is not None and skipped is not None and skipped > before
        finite = loss is None or math.isfinite(loss)
        self.in_a_row = 0 if finite and not left_out else self.in_a_row + 1
        if self._most is not None and self.in_a_row >= self._most:
            first = step - self.in_a_row + 1
            what = "that or a gradient has not been" if finite else "has not been"
            self.fail(
                f"The loss is {loss}, and {what} finite in {self.in_a_row} steps in a row, from "
                f"step {first} on (most_nonfinite sets the limit).",
                first,
            )

    def fail(self, text: str, first: int) -> NoReturn:
        """Raises the same on all processes, so that none is ended by the end of another."""
        note_failing()
        text = f"{text} {self.about(first)}"
        self._decisions.each(lambda: None)
        raise FloatingPointError(text)

    def about(self, first: int) -> str:
        """Which batch the first bad step had, what is there from before it, and what to do."""
        return (
            f"{self._batch(first)}{self._saved(first)}Look at that step's batch, take a smaller "
            "learning rate, or leave such steps out with jdp.skip_nonfinite."
        )

    def _batch(self, first: int) -> str:
        if not isinstance(self._batches, Batches):
            return ""
        place = first - 1 - self._begin
        ids = [str(i) for i in self._batches.rows(place)]
        rest = f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else ""
        return (
            f"That step had the examples {', '.join(ids[:_NAMED])}{rest} of epoch "
            f"{place // self._batches.steps_per_epoch}; batches.at({place}) gives its batch again. "
        )

    def _saved(self, first: int) -> str:
        if self._checkpoints is None:
            return ""
        try:
            self._checkpoints.wait()
        except CheckpointError as error:
            return f"{error} "
        steps = [step for step in self._checkpoints.steps() if step < first]
        if not steps:
            return "There is no checkpoint of a step before it. "
        return (
            f"The last good checkpoint is of step {steps[-1]}; nothing has been saved since step "
            f"{first}, and a run that resumes meets that batch again. "
        )
