"""Checkpoints of a run: written while it goes on, whole or not there, restored anywhere.

    state, position  --save-->  folder/step_.../  --restore(like)-->  state as `like` lies, position

A checkpoint holds logical arrays and a manifest that is written last; nothing in it depends on the
number of devices or processes or on the ZeRO stage. Arrays are stored by Orbax (`jdp.archive`),
files are told good from bad in `jdp.folder`, trees are compared in `jdp.manifest`. Nothing here
trains, and nothing decides when a run ends.
"""

import contextlib
import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import jax

from jdp import archive
from jdp.decisions import Decisions
from jdp.folder import CheckpointError, Folder
from jdp.keeping import Keeper, say_differences, say_missing
from jdp.manifest import Leaf, Manifest, differences, fingerprint, flatten, only
from jdp.replica import is_stored
from jdp.saving import (
    Clock,
    agreed_position,
    check_arguments,
    check_parts,
    check_state,
    made_by,
    numbers,
    others,
    put_back,
    step_of,
    tell,
)

_FAILED = -1  # in place of the last step: the next call of save tries again


class Checkpoints:
    """A folder of checkpoints of one run: a context manager with `save` and `restore`.

    Guarantees:
        - A checkpoint is whole, or not there: its manifest comes last and at once, and older
          checkpoints are removed only after that. What was truncated or changed later is noticed
          by its checksums.
        - Resuming on the same devices gives the same bits as not stopping: parameters, optimizer
          state, residuals, model state, step and random key are all in the state, and the
          position in the data is saved beside them.
        - Restored on any mesh, number of devices and processes, and under any ZeRO stage, with
          what replicas keep for themselves treated as `jdp.restage` says.
        - An error of a write in the background is raised by the next save, by `wait` and by
          `close`; no checkpoint that was there is lost by it.
        - All processes save, restore and fail alike. They call it equally often.

    Args:
        path: The folder: local, or of a store that Orbax takes ("gs://bucket/run"). The first save
            makes it.
        every_steps: Save where a multiple of this is reached. With neither this nor
            `every_minutes`, every call of `save` saves; with both, either is enough.
        every_minutes: Save when so long has passed since the last save, by process 0's clock.
        keep: How many of the newest checkpoints stay; `None` for all of them.
        best: A metric and "min" or "max": the best checkpoint by it stays too.
        asynchronous: Write in the background. The caller then waits only for the copy to the host,
            and for the write before it, if that still goes on.
        check: Before saving, make sure that replicas agree (`jdp.check_replicas`) and that all
            parameters are finite.

    Raises:
        ValueError: If an argument cannot be meant.

    Example:
        >>> mesh, tx = jdp.make_mesh(), jdp.zero1(optax.adam(0.1))
        >>> state = jdp.init_state({"w": jnp.ones((64, 8))}, tx, mesh)
        >>> import tempfile
        >>> with jdp.Checkpoints(tempfile.mkdtemp(), every_steps=50) as checkpoints:
        ...     state = checkpoints.resume(state)  # there is none yet
        ...     saved = checkpoints.save(state, step=0, data={"epoch": 0, "step": 0})
        ...     state, position = checkpoints.restore(state)
        >>> saved, position
        (True, {'epoch': 0, 'step': 0})
    """

    def __init__(
        self,
        path: Any,
        *,
        every_steps: int | None = None,
        every_minutes: float | None = None,
        keep: int | None = 3,
        best: tuple[str, str] | None = None,
        asynchronous: bool = True,
        check: bool = True,
    ) -> None:
        check_arguments(every_steps, every_minutes, keep, best)
        self._folder = Folder(path)
        self._keeper, self.best_by = Keeper(self._folder, keep, best), best
        self._asynchronous, self._check = asynchronous, check
        self._decisions = Decisions("jdp.Checkpoints", CheckpointError)
        self._behind = Decisions("jdp.Checkpoints, writing", CheckpointError)
        self._files = Decisions("jdp.Checkpoints, files")
        self._every_steps = every_steps
        self._clock = Clock(60 * every_minutes, self._decisions) if every_minutes else None
        self._last: int | None = None
        self._thread: threading.Thread | None = None
        self._errors: list[BaseException] = []
        self._last_words = weakref.finalize(self, tell, self._errors)

    def save(
        self,
        state: Any,
        *,
        step: int | None = None,
        data: Any = None,
        metrics: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> bool:
        """Saves a state, if it is time to.

        All processes call it, with the same step and position. When it returns, the state may be
        given to a step that overwrites it.

        Args:
            state: A `TrainState`, or any pytree of arrays.
            step: Its step. `None` reads `state.step`, which waits until the step is done: give it
                where `save` is called after every step.
            data: Position in the data: what JSON takes, or an object with `state()`, as
                `jdp.Batches`.
            metrics: Numbers to choose the best checkpoint by, and to find again.
            force: Save, even if it is not time to: at the end of a run.

        Returns:
            Whether it was saved, or has begun to be: not if it is not time, or there is one.

        Raises:
            CheckpointError: If this write, or the last one in the background, failed.
            DriftError: If replicas differ, see `jdp.check_replicas`.
            FloatingPointError: If a parameter is not finite.
            ValueError: If the folder belongs to another model or to a later run, or `step` is not
                that of the state.
        """
        number = step_of(state, step)
        if not (force or self.due(number)):
            return False
        self._last = _FAILED  # unless it comes to its end
        self.wait()
        leaves, values = flatten(state)
        named = numbers(metrics, self.best_by)
        check_state(state, number, self._check)
        place = agreed_position(data, self._decisions)
        begun = self._decisions.first(lambda: self._keeper.begin(number, leaves))
        if begun:
            made = made_by(state)
            about = Manifest(number, tuple(leaves), fingerprint(leaves), place, named, made, {})
            self._write(about, leaves, values)
        self._last = number
        return begun

    def due(self, step: int) -> bool:
        """Whether it is time to save, after this step: then `save(..., force=True)` does.

        `save` asks by itself. Ask here, after every step, to evaluate before a save alone.
        """
        last, self._last = self._last, step
        if last == _FAILED:
            return True
        if (every := self._every_steps) is None:
            return self._clock is None or self._clock.due(step)
        # a multiple is also reached where a call takes several steps
        reached = step % every == 0 if last is None else step // every > last // every
        return reached or (self._clock is not None and self._clock.due(step))

    def resume(self, like: Any, data: Any = None) -> Any:
        """The state of the newest whole checkpoint, and `data` put where it stood then.

        Args:
            like: What `restore` takes, of arrays; given back if there is no checkpoint.
            data: What was given to `save`, with a `restore(position)`, as `jdp.Batches`.

        Raises:
            ValueError: As `restore`; or if a position was saved and there is no `data` to move,
                or the other way round: examples would be repeated.
        """
        if self.latest() is None:
            return like
        state, place = self.restore(like)
        put_back(place, data)
        return state

    def claim(self, step: int) -> None:
        """Takes the folder for a run that goes on from `step`; `save` does it otherwise.

        Raises:
            CheckpointError: If another run writes there, or nothing can be written.
            ValueError: If the folder holds a later step.
        """
        self.wait()
        self._decisions.first(lambda: self._keeper.claim(step))

    def restore(
        self, like: Any, *, step: int | None = None, parts: Sequence[str] | None = None
    ) -> tuple[Any, Any]:
        """Reads a checkpoint to where `like` lies: any mesh, number of devices, ZeRO stage.

        | kept for each replica when saved | becomes |
        | --- | --- |
        | and wanted so, for as many replicas | the same |
        | otherwise (residuals, parameters of `jdp.local_sgd`) | the mean, for each new one |

        Guarantees:
            - Values are the same bits, but for those means.
            - Nothing is cast, dropped or filled in: leaves are compared by path, shape and dtype.
            - Of a checkpoint that is not whole nothing is restored.

        Args:
            like: A state of arrays or, cheaper, of shapes, as `jdp.init_state` makes of
                `jax.ShapeDtypeStruct`s. Shapes without a sharding ask for NumPy arrays.
            step: Which one. `None` takes the newest that is whole, and warns if an older one had
                to do.
            parts: Fields to restore, such as ("params",); the others stay as in `like`.

        Returns:
            The state, and the position in the data (`None` if none was saved).

        Raises:
            FileNotFoundError: If there is none, or not of this step.
            CheckpointError: If none is whole, or not that of this step.
            ValueError: If it is of another model or optimizer, saying what differs.
        """
        self.wait()
        manifest = self._find(step)
        wanted, likes = flatten(like)
        saved = list(manifest.leaves)
        chosen = list(range(len(wanted)))
        if parts is not None:
            check_parts(parts, wanted, saved)
            chosen = only(wanted, parts)
            saved = [saved[i] for i in only(saved, parts)]
        if lines := differences(saved, [wanted[i] for i in chosen]):
            raise ValueError(say_differences(self._folder, manifest, lines))
        values, folder = list(likes), self._folder.of(manifest.step) / "arrays"
        asked, found = [likes[i] for i in chosen], []
        self._decisions.each(lambda: found.extend(archive.read(folder, saved, asked)))
        for i, value in zip(chosen, found, strict=True):
            values[i] = value
        self._last = manifest.step
        self._keeper.own.add(manifest.step)
        return jax.tree.structure(like, is_leaf=is_stored).unflatten(values), manifest.data

    def latest(self) -> int | None:
        """Step of the newest finished checkpoint, the same on all processes; `None` if none."""
        return max(self.steps(), default=None)

    def steps(self) -> list[int]:
        """Steps of the finished checkpoints, ascending; those of process 0, on all processes."""
        return self._decisions.first(self._folder.steps)

    def best(self) -> int | None:
        """Step of the best checkpoint by the metric chosen; `None` if none has it."""
        return self._decisions.first(self._keeper.best_step)

    def manifest(self, step: int | None = None) -> Manifest:
        """What a checkpoint says about itself: leaves, versions, mesh, stage, metrics, position.

        Args:
            step: Which one; `None` for the newest that is whole.
        """
        self.wait()
        return self._find(step)

    def drop(self, after: int) -> None:
        """Removes the checkpoints after a step, to go on from there instead."""
        self.wait()
        self._decisions.first(lambda: self._keeper.drop(after))

    def wait(self) -> None:
        """Waits until what was saved is there.

        Raises:
            CheckpointError: If it could not be written.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._errors:
            self._last = _FAILED
            raise self._errors.pop()

    def close(self) -> None:
        """Waits, and gives the folder up. Raises as `wait` does."""
        try:
            self.wait()
        finally:
            self._folder.unlock()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except CheckpointError as failed:
            if error is None:
                raise
            error.add_note(str(failed))  # what ended the run is worth more

    # Saving, on all processes

    def _write(self, about: Manifest, leaves: list[Leaf], values: list[Any]) -> None:
        """Copies to the host; then writes, in the background or here."""
        folder = self._folder.of(about.step) / "arrays"
        done: list[Callable[[], None]] = []
        try:
            write = functools.partial(archive.write, folder, leaves, values, self._files)
            self._decisions.each(lambda: done.append(write()))
        except Exception as error:
            raise self._failed(error, about.step) from error
        if not self._asynchronous:
            self._finish(done[0], about)
            self.wait()
            return
        self._thread = threading.Thread(
            target=self._finish, args=(done[0], about), name="jdp.Checkpoints"
        )
        self._thread.start()

    def _finish(self, done: Callable[[], None], about: Manifest) -> None:
        """Waits for the arrays, makes them a checkpoint, and removes old ones."""
        try:
            self._behind.each(done)
            names = self._behind.first(lambda: self._folder.list_files(about.step))
            parts = self._behind.each(lambda: self._folder.check_off(about.step, _mine(names)))
            files = {name: (size, crc) for part in parts for name, size, crc in part}
            self._behind.first(lambda: self._folder.commit(about._replace(files=files)))
        except Exception as error:
            said = self._failed(error, about.step)
            said.__cause__ = None if said is error else error
            self._errors.append(said)
            return
        try:
            self._behind.first(lambda: self._keeper.tidy(about.step))
        except Exception as error:
            text = f"saved step {about.step}, but cannot remove older ones: {error}"
            self._errors.append(CheckpointError(f"jdp.Checkpoints {text}"))

    def _failed(self, error: Exception, step: int) -> CheckpointError:
        """The sentence; what was begun is removed, to leave the space that there is."""
        if isinstance(error, CheckpointError):
            return error
        said = self._folder.explain(error, step)
        if jax.process_index() == 0:
            with contextlib.suppress(OSError):
                self._folder.remove(step)
        return said

    def _find(self, step: int | None) -> Manifest:
        """The manifest of a checkpoint that is whole: of this step, or the newest."""
        steps = self.steps()
        if not steps or (step is not None and step not in steps):
            say = functools.partial(say_missing, self._folder, steps, step)
            raise FileNotFoundError(self._decisions.first(say))
        bad: list[str] = []
        for number in [step] if step is not None else reversed(steps):
            try:
                text = self._decisions.first(lambda s=number: self._folder.manifest(s).to_text())
                manifest = Manifest.from_text(text)
                self._decisions.each(lambda m=manifest: self._check_share(m))
            except ValueError as error:
                bad.append(f"step {number} is not whole: {error}")
                self._keeper.bad.add(number)
                continue
            if bad:
                went = f"Went back to step {number}, the last good one."
                text = f"jdp.Checkpoints, {self._folder.path}: {'; '.join(bad)}. {went}"
                warnings.warn(f"{text} What came after it is trained again.", stacklevel=3)
            return manifest
        raise CheckpointError(
            f"jdp.Checkpoints, {self._folder.path}: {'; '.join(bad)}. Files were changed, cut or "
            f"removed after they were written. {others(steps, step)}"
        )

    def _check_share(self, manifest: Manifest) -> None:
        names = _mine(list(manifest.files))
        self._folder.check(manifest.step, {name: manifest.files[name] for name in names})


def _mine(names: list[str]) -> list[str]:
    """This process's share of the files."""
    return names[jax.process_index() :: jax.process_count()]
