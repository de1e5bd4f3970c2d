"""Reads the rows that one process has in each global batch, as host arrays.

    step -> (epoch, k)            divmod by the steps of an epoch
         -> positions             k * B + slots, those below n
         -> example ids           `shuffled`, or the positions themselves
         -> examples              source[id], transformed
         -> [slots, ...]          stacked; rows beyond the end of the epoch 0, with weight 0

In: a source and integers. Out: dicts of NumPy arrays, by this process, by threads or by worker
processes of Grain, which share out whole batches. Devices and other processes are not known here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from jdp.loss import WEIGHT
from jdp.shuffle import shuffled
from jdp.sources import needed

_PROBED = 8  # examples that a fingerprint reads


class Reads(NamedTuple):
    """The rows of one process at every step, as host arrays; can be sent to a worker."""

    source: Any
    transform: Callable[[Any], Any] | None
    random_transform: Callable[[Any, np.random.Generator], Any] | None
    length: int
    batch: int
    seed: int
    shuffle: bool
    slots: np.ndarray  # this process's rows of a global batch, ascending

    def rows(self, step: int, slots: np.ndarray) -> tuple[int, np.ndarray]:
        """The epoch of a step, and the ids of the examples in the slots that are not padding."""
        epoch, k = divmod(step, -(-self.length // self.batch))
        positions = k * self.batch + slots
        positions = positions[positions < self.length]
        if not self.shuffle:
            return epoch, positions
        return epoch, shuffled(positions, self.length, seed=self.seed, epoch=epoch)

    def example(self, index: int, epoch: int) -> dict[str, Any]:
        """One example as it goes into a batch, or an error that names it."""
        try:
            example = self.source[index]
            if self.transform is not None:
                example = self.transform(example)
            if self.random_transform is not None:
                generator = np.random.default_rng((self.seed, epoch, index))
                example = self.random_transform(example, generator)
        except Exception as error:
            raise RuntimeError(
                f"jdp.Batches could not read example {index} in epoch {epoch}: "
                f"{type(error).__name__}: {error}. Without it the epoch would not be the dataset: "
                f"mend it, or leave it out of the source."
            ) from error
        if not isinstance(example, dict) or not example:
            raise TypeError(
                f"jdp.Batches: example {index} is a {type(example).__name__}, {example!r:.80}; it "
                f"must be a dict of arrays, so that the batch can carry which rows count. Wrap it: "
                f'transform=lambda x: {{"x": x}}; leave examples out in the source.'
            )
        return example

    def read(self, step: int) -> dict[str, Any]:
        """All slots of this process, those beyond the end of the epoch 0 with weight 0."""
        epoch, ids = self.rows(step, self.slots)
        # a process without a row in a ragged end still needs the shapes
        examples = [self.example(int(i), epoch) for i in (ids if len(ids) else [0])]
        host = _stack(examples, ids, len(self.slots))
        ones = (np.arange(len(self.slots)) < len(ids)).astype(np.float32)
        return {WEIGHT: ones} | host  # a weight of the example's own is already 0 in padding


def _stack(examples: list[Any], ids: np.ndarray, size: int) -> dict[str, Any]:
    """Leaves `[size, ...]`: one row for each of the ids, then zeros."""
    rows, structures = zip(*map(jax.tree.flatten, examples), strict=True)
    for index, structure in zip(ids, structures, strict=False):
        if structure != structures[0]:
            raise ValueError(
                f"jdp.Batches: example {index} has the leaves {structure}, example {ids[0]} "
                f"{structures[0]}; rows of a batch are alike. Give every example the same names "
                f"in transform=."
            )
    full = []
    for leaf, column in enumerate(zip(*rows, strict=True)):
        arrays = [np.asarray(entry) for entry in column]
        like = arrays[0]
        for index, array in zip(ids, arrays, strict=False):
            if array.shape != like.shape or array.dtype != like.dtype:
                path = jax.tree.leaves_with_path(examples[0])[leaf][0]
                raise ValueError(
                    f"jdp.Batches: leaf {jax.tree_util.keystr(path)} of example {index} is "
                    f"{array.dtype}{list(array.shape)}, of example {ids[0]} "
                    f"{like.dtype}{list(like.shape)}; rows of a batch have one shape. Cut or pad "
                    f"them in transform=, or put sequences together with jdp.Packed."
                )
        out = np.zeros((size, *like.shape), like.dtype)
        if len(ids):
            np.stack(arrays, out=out[: len(ids)])
        full.append(out)
    return jax.tree.unflatten(structures[0], full)


class Steps:
    """Steps `start` to `stop` as a thing that Grain can index: one element is one batch.

    Threads and workers thus share out whole batches, and their number changes nothing in them.
    """

    def __init__(self, reads: Reads, start: int, stop: int) -> None:
        self._reads, self.start, self.stop = reads, start, stop

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, k: Any) -> dict[str, Any]:
        return self._reads.read(self.start + int(k))


def load(steps: Steps, workers: int, threads: int) -> Generator[Any, None, None]:
    """The host batches of the steps in order."""
    if not workers and not threads:
        yield from map(steps.__getitem__, range(len(steps)))
        return
    grain = needed("grain", "jdp.Batches with workers or threads", "grain")
    from absl import flags

    if not flags.FLAGS.is_parsed():  # Grain's workers read flags that only absl's app.run parses
        flags.FLAGS.mark_as_parsed()
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=2 * threads)
    dataset = grain.MapDataset.source(steps).to_iter_dataset(options)
    if workers:
        several = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=2)
        dataset = dataset.mp_prefetch(several)
    iterator = iter(dataset)
    step = steps.start
    try:
        while (host := _next(iterator, step, (step - steps.start) % max(workers, 1))) is not None:
            yield host
            step += 1
    finally:
        if close := getattr(iterator, "close", None):
            close()


def _next(iterator: Iterator[Any], step: int, worker: int) -> Any:
    try:
        return next(iterator, None)
    except RuntimeError as error:
        if "terminated unexpectedly" not in str(error):
            raise
        raise RuntimeError(
            f"jdp.Batches: worker process {worker}, which was to read batch {step}, has died: "
            f"{error} The batch cannot be left out without losing its examples. Exit code -9 is "
            f"mostly the kernel short of memory: use fewer workers; then start again from the "
            f"last checkpoint."
        ) from error


def fingerprint(source: Any, length: int) -> str:
    """A hash of the length and of up to 8 examples, the first and the last among them."""
    digest = hashlib.sha256(str(length).encode())
    for index in sorted({(length - 1) * i // (_PROBED - 1) for i in range(_PROBED)}):
        for path, leaf in jax.tree.leaves_with_path(source[index]):
            digest.update(f"{index}{jax.tree_util.keystr(path)}".encode())
            digest.update(_as_bytes(leaf))
    return digest.hexdigest()[:16]


def _as_bytes(leaf: Any) -> bytes:
    if isinstance(leaf, bytes):
        return leaf
    array = np.asarray(leaf)
    plain = array.dtype != object
    return f"{array.dtype}{array.shape}".encode() + (array.tobytes() if plain else b"")
