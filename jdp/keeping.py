"""Which checkpoints may be made, and which stay: what process 0 decides for all.

    step, leaves  --begin-->  room for a checkpoint, or a sentence  ...  --tidy-->  the old are gone

Nothing that is there is overwritten by another model or by an earlier step, and nothing is removed
before what comes after it is whole.
"""

import contextlib
import math

from jdp.folder import Folder
from jdp.manifest import Leaf, Manifest, differences


class Keeper:
    """Decides about the checkpoints of a folder.

    Args:
        folder: The folder.
        keep: How many of the newest stay; `None` for all.
        best: A metric and "min" or "max", by which the best one stays too.
    """

    def __init__(self, folder: Folder, keep: int | None, best: tuple[str, str] | None) -> None:
        self._folder, self._keep, self._best = folder, keep, best
        self.bad: set[int] = set()  # steps whose checkpoints were found not to be whole
        self.own: set[int] = set()  # steps that this run has saved, or goes on from

    def begin(self, step: int, leaves: list[Leaf]) -> bool:
        """Makes room for the checkpoint of a step; `False` if this run has made it."""
        try:
            self._folder.lock()
            steps = self._good()
            if step in steps and step in self.own:
                return False
            self._check_folder(step, steps, leaves)
            self.bad.discard(step)
            self.own.add(step)
            self._folder.begin(step)
        except OSError as error:
            raise self._folder.explain(error, step) from error
        return True

    def claim(self, step: int) -> None:
        """Takes the folder for a run that goes on from a step."""
        try:
            self._folder.lock()
            steps = self._good()
        except OSError as error:
            raise self._folder.explain(error, step) from error
        if steps and steps[-1] > step:
            raise ValueError(self._later(f"was to go on from step {step}", step + 1, steps))

    def _good(self) -> list[int]:
        return [step for step in self._folder.steps() if step not in self.bad]

    def _later(self, what: str, step: int, steps: list[int]) -> str:
        return (
            f"jdp.Checkpoints {what} in {self._folder.path}, which holds step {steps[-1]} of "
            "another or a longer run: that would be resumed, and not this. Go on from it with "
            "resume, give this run a folder of its own, or remove the later checkpoints with "
            f"drop(after={max([s for s in steps if s < step], default=0)})."
        )

    def _check_folder(self, step: int, steps: list[int], leaves: list[Leaf]) -> None:
        if not steps:
            return
        if steps[-1] >= step:
            raise ValueError(self._later(f"was to save step {step}", step, steps))
        try:
            manifest = self._folder.manifest(steps[-1])
        except ValueError:
            return
        if lines := differences(manifest.leaves, leaves):
            raise ValueError(
                say_differences(self._folder, manifest, lines, "the state that is to be saved")
            )

    def tidy(self, step: int) -> None:
        """Removes what is older than what is kept, and beginnings without an end."""
        steps = self._folder.steps()
        stay = set(steps[-self._keep :] if self._keep else steps) | {step, self.best_step()}
        for old in [*self._folder.unfinished(), *steps]:
            if old not in stay:
                self._folder.remove(old)

    def best_step(self) -> int | None:
        """Step of the best checkpoint by the metric; `None` if none has it."""
        if self._best is None:
            return None
        name, direction = self._best
        sign = 1 if direction == "min" else -1
        found = []
        for step in self._folder.steps():
            with contextlib.suppress(ValueError):  # one that cannot be read is not the best
                value = self._folder.manifest(step).metrics.get(name, math.nan)
                if not math.isnan(value):
                    found.append((sign * value, step))
        return min(found)[1] if found else None

    def drop(self, after: int) -> None:
        """Removes the checkpoints after a step."""
        self._folder.lock()
        for step in self._folder.steps():
            if step > after:
                self._folder.remove(step)


def say_differences(
    folder: Folder, manifest: Manifest, lines: list[str], what: str = "`like`"
) -> str:
    """The sentence about a checkpoint of another model."""
    text = "\n".join(lines)
    return (
        f"jdp.Checkpoints: step {manifest.step} of {folder.path} is of another model or "
        f"optimizer than {what}:\n{text}\nUse the model and transformation that it was saved "
        'with, restore what is the same alone, restore(like, parts=("params",)), or give the '
        "run a folder of its own."
    )


def say_missing(folder: Folder, steps: list[int], step: int | None) -> str:
    """The sentence about a checkpoint that is not there."""
    if steps:
        there = ", ".join(map(str, steps))
        return f"jdp.Checkpoints: {folder.path} holds no step {step}, but {there}."
    what = "holds no finished checkpoint" if folder.path.exists() else "does not exist"
    return (
        f"jdp.Checkpoints has nothing to restore: {folder.path} {what}. Look whether the path is "
        "meant; a run that may be new takes resume, or asks latest() first."
    )
