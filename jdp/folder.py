"""The folder of a run's checkpoints: which there are, whether they are whole, and who may write.

    folder/step_0000000400/arrays/...      written first, by Orbax
           step_0000000400/manifest.json   written last, at once: with it, it is a checkpoint
           writer.json                     who writes here, locked while it does

In: paths. Out: steps, manifests, sentences about what is wrong. Arrays are read and written by
`jdp.archive`; which checkpoints are made and kept is decided in `jdp.checkpoint`.
"""

import errno
import json
import os
import re
import socket
import uuid
import weakref
from typing import Any

from jdp.archive import at, check_off, list_files
from jdp.manifest import Manifest

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_STEP = re.compile(r"step_(\d+)")
_held: set[str] = set()  # a process can lock a file as often as it likes


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; those that were there still are."""


class Folder:
    """The folder of a run's checkpoints.

    Args:
        path: Local, or of a store that Orbax takes ("gs://...").
    """

    def __init__(self, path: Any) -> None:
        text = os.fspath(path)
        self.local = "://" not in text
        self.path = at(os.path.abspath(os.path.expanduser(text)) if self.local else text)
        self._lock: Any = None
        self._id = ""
        self._seen = False

    def of(self, step: int) -> Any:
        """The folder of a step's checkpoint."""
        return self.path / f"step_{step:010d}"

    def steps(self) -> list[int]:
        """Steps of which there is a finished checkpoint, ascending."""
        return [step for step, done in self._all() if done]

    def unfinished(self) -> list[int]:
        """Steps of which there is a beginning, left by a process that was ended."""
        return [step for step, done in self._all() if not done]

    def _all(self) -> list[tuple[int, bool]]:
        if not self.path.exists():
            return []
        names = sorted((m, entry) for entry in self.path.iterdir() if (m := self._step(entry.name)))
        return [(int(match), (entry / "manifest.json").exists()) for match, entry in names]

    @staticmethod
    def _step(name: str) -> str | None:
        match = _STEP.fullmatch(name)
        return match.group(1) if match else None

    def manifest(self, step: int) -> Manifest:
        """What the checkpoint of a step says about itself.

        Raises:
            ValueError: If it cannot be trusted, saying why.
        """
        try:
            text = (self.of(step) / "manifest.json").read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"its manifest cannot be read ({error})") from None
        found = Manifest.from_text(text)
        if found.step != step:
            raise ValueError(f"its manifest is of step {found.step}")
        return found

    def check(self, step: int, files: dict[str, tuple[int, int]]) -> None:
        """Reads files of a checkpoint.

        Raises:
            ValueError: If one is not as it was written, saying which.
        """
        for name, (size, crc) in files.items():
            path = self.of(step) / "arrays" / name
            try:
                found, sum_ = check_off(path)
            except OSError as error:
                raise ValueError(f"its file arrays/{name} cannot be read ({error})") from None
            if found != size:
                raise ValueError(f"its file arrays/{name} has {found} of {size} bytes")
            if sum_ != crc:
                raise ValueError(f"its file arrays/{name} was changed: the checksum disagrees")

    def list_files(self, step: int) -> list[str]:
        """The files of a step's arrays."""
        return list_files(self.of(step) / "arrays")

    def begin(self, step: int) -> Any:
        """An empty folder for a step, and where in it the arrays go."""
        if self._seen and not self.path.exists():
            raise FileNotFoundError(errno.ENOENT, "the folder is gone")
        self.remove(step)
        self.of(step).mkdir(parents=True, exist_ok=True)
        self._seen = True
        return self.of(step) / "arrays"

    def commit(self, manifest: Manifest) -> None:
        """Makes the arrays of a step a checkpoint, at once."""
        self._check_owner()
        folder = self.of(manifest.step)
        part = folder / "manifest.part"
        part.write_text(manifest.to_text())
        _flush(part, self.local)
        part.rename(folder / "manifest.json")
        for path in (folder, self.path):
            _flush(path, self.local)

    def check_off(self, step: int, names: list[str]) -> list[tuple[str, int, int]]:
        """Files of a checkpoint by name, with their sizes and checksums."""
        return [(name, *check_off(self.of(step) / "arrays" / name)) for name in names]

    def remove(self, step: int) -> None:
        """Removes a checkpoint, or the beginning of one; never leaves half of one."""
        folder = self.of(step)
        if folder.exists():
            (folder / "manifest.json").unlink(missing_ok=True)
            folder.rmtree()

    def lock(self) -> None:
        """Claims the folder for this run, until `unlock` or the end of the process.

        Raises:
            CheckpointError: If another run has it, naming it.
        """
        if self._lock is not None:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        self._seen, self._id = True, uuid.uuid4().hex
        path, me = self.path / "writer.json", os.fspath(self.path)
        said = {"id": self._id, "host": socket.gethostname(), "pid": os.getpid()}
        if not self.local or fcntl is None:  # others notice when they save
            path.write_text(json.dumps(said))
            self._lock = True
            return
        if me in _held:
            raise self._taken("this process, by another jdp.Checkpoints")
        file = os.open(me + "/writer.json", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = _who(os.read(file, 1000).decode(errors="replace"))
            os.close(file)
            raise self._taken(who) from None
        os.truncate(file, 0)
        os.write(file, json.dumps(said).encode())
        _held.add(me)
        self._lock = weakref.finalize(self, _release, file, me)  # also where nobody unlocks

    def unlock(self) -> None:
        """Gives the folder up."""
        if isinstance(self._lock, weakref.finalize):
            self._lock()
        self._lock = None

    def _check_owner(self) -> None:
        """Where files cannot be locked: the last run to begin has the folder."""
        if self._lock is True:
            said = (self.path / "writer.json").read_text()
            if self._id not in said:
                raise self._taken(_who(said))

    def _taken(self, who: str) -> CheckpointError:
        return CheckpointError(
            f"jdp.Checkpoints: {self.path} is being written to by {who}. Two runs in one folder "
            "would delete each other's checkpoints, and resume from each other's. Give this run a "
            "folder of its own, or end the other."
        )

    def explain(self, error: BaseException, step: int) -> CheckpointError:
        """An error of a file system, as a sentence."""
        text = f"{error}".strip()
        numbers = {getattr(error, "errno", None)}
        if errno.ENOSPC in numbers or "No space left" in text or "ENOSPC" in text:
            why, advice = "the disk is full", "Free some space, or keep fewer (keep=)"
        elif errno.EROFS in numbers or "ead-only file system" in text:
            why, advice = "the file system is read-only", "Mount it for writing, or use another"
        elif {errno.EACCES, errno.EPERM} & numbers or "ermission denied" in text:
            why, advice = "this user may not write there", "Change its permissions, or use another"
        elif self._seen and not self.path.exists():
            why, advice = (
                "the folder is gone, and the checkpoints in it",
                "Was it removed or unmounted? Bring it back, or begin a new one",
            )
        else:
            line = text.splitlines()[0] if text else ""
            short = line if len(line) <= 400 else f"{line[:100]} ... {line[-300:]}"
            why, advice = f"{type(error).__name__}: {short}", "See the error above"
        if where := re.search(r" \(on process \d+\)$", text):
            why = why.removesuffix(where[0]) + where[0]
        left = f"; the last checkpoint is of step {kept[-1]}" if (kept := self._quietly()) else ""
        return CheckpointError(
            f"jdp.Checkpoints could not save step {step} in {self.path}: {why}{left}. {advice}, "
            "and save again: a later call tries anew."
        )

    def _quietly(self) -> list[int]:
        try:
            return self.steps()
        except OSError:
            return []


def _release(file: int, path: str) -> None:
    _held.discard(path)
    os.close(file)


def _who(text: str) -> str:
    try:
        said = json.loads(text)
        return f"process {said['pid']} on {said['host']}"
    except (ValueError, KeyError, TypeError):
        return "another process"


def _flush(path: Any, local: bool) -> None:
    """To the disk itself: after a power cut there is a checkpoint, or none."""
    if local:
        handle = os.open(os.fspath(path), os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
