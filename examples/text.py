"""Text every reader has: the source of the Python standard library they run this with.

    *.py files --every 20th apart--> train bytes, held-out bytes --Reader--> batches

A batch is `{"tokens": uint8 [rows, context + 1]}`: the model reads all but the last byte of a row
and is asked for all but the first. Placing batches on devices is left to jdp.feed.
"""

import dataclasses
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

# Tests are most of the bytes in some installations and missing in others, like the tools here.
LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "ensurepip"}


def standard_library(held_out_every: int = 20) -> tuple[np.ndarray, np.ndarray]:
    """The bytes to train on, and the bytes of every 20th file to evaluate on."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(root.rglob("*.py"))
    files = [path for path in files if not LEFT_OUT & {*path.relative_to(root).parts}]
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for number, path in enumerate(files):
        parts[number % held_out_every == 0].append(path.read_bytes())
    train, held_out = (np.frombuffer(b"".join(part), np.uint8) for part in parts)
    return train, held_out


@dataclasses.dataclass(frozen=True)
class Reader:
    """Cuts windows out of a text; each process reads its own rows of the global batch.

    Attributes:
        context: Bytes the model looks at; a window has one more.
        batch: Windows in a global batch, over all processes.
        process: Number of this process.
        processes: How many there are.
    """

    context: int
    batch: int
    process: int = 0
    processes: int = 1

    def random(self, text: np.ndarray, seed: int) -> Iterator[dict[str, np.ndarray]]:
        """Endless batches from anywhere in the text, the same on any number of processes."""
        random = np.random.default_rng(seed)
        while True:
            starts = random.integers(0, len(text) - self.context, self.batch)
            yield self._windows(text, np.split(starts, self.processes)[self.process])

    def even(self, text: np.ndarray, count: int) -> Iterator[dict[str, np.ndarray]]:
        """The same `count` windows each time, spread over the text; the last batch may be short."""
        starts = np.linspace(0, len(text) - self.context - 1, count, dtype=np.int64)
        starts = np.array_split(starts, self.processes)[self.process]
        rows = self.batch // self.processes
        for first in range(0, len(starts), rows):
            yield self._windows(text, starts[first : first + rows])

    def _windows(self, text: np.ndarray, starts: np.ndarray) -> dict[str, np.ndarray]:
        return {"tokens": text[starts[:, None] + np.arange(self.context + 1)]}
