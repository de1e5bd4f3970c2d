"""Where metrics go: a file of JSON lines, TensorBoard's event files, or any function; and a bar.

    log(step, {"loss": 1.5, ...})    for each step that is logged, on one process
    log.close()                      at the end, if it has one

A run that is taken up at step s writes s, s + 1, ... once more; what an earlier run left of these
steps is dropped first, so that each step is in the log once.
"""

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import jax

from jdp.optional import library


class JsonLines:
    """A file with a JSON object in each line: the step, and each metric.

    Guarantees:
        - Each step is in the file once, also after the run was taken up again; a line that a crash
          tore is dropped.
        - A line is with the operating system once its step is logged: a killed process loses none.
        - What is not finite is null, as JSON has no NaN.

    Args:
        path: The file; its folder is made.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "log.jsonl"
        >>> log = JsonLines(path)
        >>> log(10, {"loss": 0.5})
        >>> log.close()
        >>> print(path.read_text(encoding="utf-8").strip())
        {"step": 10, "loss": 0.5}
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file: TextIO | None = None
        self._last: dict[str, float | None] = {}
        self._begin = 0  # of the last line

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        """Writes a line, or more into the last one if it is of this step."""
        if self._file is None:
            self._file = self._opened(step)
        finite = {name: x if math.isfinite(x) else None for name, x in values.items()}
        if self._last.get("step") == step:
            self._file.truncate(self._begin)
        else:
            self._last, self._begin = {}, os.fstat(self._file.fileno()).st_size
        self._last |= {"step": step, **finite}
        self._file.write(json.dumps(self._last) + "\n")
        self._file.flush()

    def _opened(self, step: int) -> TextIO:
        """The file, without what it has of this step and later ones."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines()
            kept = [line for line in lines if _step_of(line) < step]
            if kept != lines:
                part = self.path.with_name(f"{self.path.name}.part")
                part.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
                part.replace(self.path)
        return self.path.open("a", encoding="utf-8")

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file, self._last = None, {}


def _step_of(line: str) -> float:
    """The step of a line; infinite if it is torn."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf


class TensorBoard:
    """TensorBoard's event files, through tensorboardX.

    Guarantees:
        - TensorBoard shows each step once, also after the run was taken up again.

    Args:
        folder: Where the event files go; it is made.

    Raises:
        ImportError: When the first step is logged, if tensorboardX is not installed.

    Example:
        >>> import tempfile
        >>> log = TensorBoard(tempfile.mkdtemp())
        >>> log(10, {"loss": 0.5})
        >>> log.close()
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._writer: Any = None

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        """Writes a scalar for each value."""
        if self._writer is None:
            self._writer = _writer(self.folder, step)
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Closes the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _writer(folder: Path, step: int) -> Any:
    use = "jdp.TensorBoard writes through tensorboardX"
    written = library("tensorboardX", use, "run", "tensorboardX")
    return written.SummaryWriter(str(folder), purge_step=step)


def progress_bar(
    progress: bool | None, number: int, steps: int | None
) -> contextlib.AbstractContextManager[Callable[[int, float | None], None]]:
    """A bar on process 0: a context that gives `show(step, loss)`.

    Args:
        progress: Whether to draw one; `None`: where a terminal and rich are.
        number: Where it begins.
        steps: Where it ends, if that is known.
    """
    nothing = contextlib.nullcontext(lambda number, loss: None)
    if progress is False or jax.process_index() or (progress is None and not sys.stderr.isatty()):
        return nothing
    try:
        bars = library("rich.progress", "A progress bar is drawn by rich", "run", "rich")
        console = library("rich.console", "A progress bar is drawn by rich", "run", "rich")
    except ImportError:
        if progress:
            raise
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
        with bars.Progress(*columns, console=console.Console(stderr=True)) as bar:
            task = bar.add_task("", total=steps, completed=number, loss="")

            def show(number: int, loss: float | None) -> None:
                bar.update(task, completed=number, loss="" if loss is None else f"loss {loss:.4g}")

            yield show

    return shown()
