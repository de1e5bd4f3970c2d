"""Reads the rows that one process has in each global batch, as host arrays.

    step -> (epoch, k)            divmod by the steps of an epoch
         -> positions             k * B + slots, those below n
         -> example ids           `shuffled`, or the positions themselves
         -> examples              source[id], transformed
         -> [slots, ...]          stacked; rows beyond the end of the epoch 0, with weight 0

In: a source and integers. Out: dicts of NumPy arrays, read by this process, by its threads or by
worker processes, which share out whole batches. Devices and other processes of the run are not
known here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import jax
import numpy as np

from jdp.loss import WEIGHT
from jdp.shuffle import shuffled
from jdp.workers import in_processes, in_threads

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

    def _held(self, indices: list[int]) -> Any:
        """Something to take these examples from: read together where the source can, or itself."""
        try:
            return dict(zip(indices, self.source.__getitems__(indices), strict=True))
        except Exception:  # none, or one of them is broken: reading one by one tells which
            return self.source

    def example(self, index: int, epoch: int, held: Any) -> dict[str, Any]:
        """One example as it goes into a batch, or an error that names it."""
        try:
            example = held[index]
            if self.transform is not None:
                example = self.transform(example)
            if self.random_transform is not None:
                generator = np.random.default_rng((self.seed, epoch, index))
                example = self.random_transform(example, generator)
        except (Exception, SystemExit) as error:
            raise _unreadable(error, f"example {index} in epoch {epoch}") from error
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
        indices = ids.tolist() if len(ids) else [0]
        held = self._held(indices)
        examples = [self.example(index, epoch, held) for index in indices]
        host = _stacked("", examples, ids, len(self.slots))
        ones = (np.arange(len(self.slots)) < len(ids)).astype(np.float32)
        return {WEIGHT: ones} | host  # a weight of the example's own is already 0 in padding


def _stacked(name: str, entries: list[Any], ids: np.ndarray, size: int) -> Any:
    """Leaves `[size, ...]`: one row for each of the ids, then zeros; without ids just shapes."""
    first = entries[0]
    if not isinstance(first, dict):
        return _column(name, entries, ids, size)
    for entry, index in zip(entries, ids, strict=False):
        if not isinstance(entry, dict) or entry.keys() != first.keys():
            raise ValueError(
                f"jdp.Batches: example {index} has {_said(entry)}{name and f' in {name}'}, example "
                f"{ids[0]} {_said(first)}; rows of a batch are alike. Give every example the same "
                f"names in transform=."
            )
    return {
        key: _stacked(f"{name}[{key!r}]", [entry[key] for entry in entries], ids, size)
        for key in first
    }


def _said(entry: Any) -> str:
    return f"the names {list(entry)}" if isinstance(entry, dict) else f"a {type(entry).__name__}"


def _column(name: str, entries: list[Any], ids: np.ndarray, size: int) -> np.ndarray:
    """One leaf; what it is called is worked out only for an error, being slower than the copy."""
    indices = ids if len(ids) else [0]
    arrays = [_array(entry, name, i) for entry, i in zip(entries, indices, strict=True)]
    like = arrays[0]
    for array, index in zip(arrays, indices, strict=True):
        if array.shape != like.shape or array.dtype != like.dtype:
            raise ValueError(
                f"jdp.Batches: leaf {name} of example {index} is {array.dtype}{list(array.shape)}, "
                f"of example {ids[0]} {like.dtype}{list(like.shape)}; rows of a batch have one "
                f"shape. Cut or pad them in transform=, or put sequences together with jdp.Packed."
            )
    if len(ids) == size:
        return np.stack(arrays)
    out = np.zeros((size, *like.shape), like.dtype)
    if len(ids):
        np.stack(arrays, out=out[: len(ids)])
    return out


def _array(entry: Any, name: str, index: int) -> np.ndarray:
    try:
        array = np.asarray(entry)
    except (TypeError, ValueError) as error:  # a typed PRNG key, a ragged list
        raise _no_numbers(entry, name, index, str(error)) from error
    if array.dtype.kind in "OSU":
        raise _no_numbers(entry, name, index, f"its dtype is {array.dtype}")
    return array


def _no_numbers(entry: Any, name: str, index: int, why: str) -> TypeError:
    return TypeError(
        f"jdp.Batches: leaf {name} of example {index} is a {type(entry).__name__} that JAX cannot "
        f"hold as an array of numbers ({why}). Encode it as numbers, or take it out of the "
        f"example, in transform=."
    )


def _unreadable(error: BaseException, what: str) -> RuntimeError:
    return RuntimeError(
        f"jdp.Batches could not read {what}: {type(error).__name__}: {error}. Without it the epoch "
        f"would not be the dataset: mend it, or leave it out of the source."
    )


def load(
    reads: Reads,
    steps: range,
    *,
    workers: int = 0,
    threads: int = 0,
    cancelled: Callable[[], bool] = lambda: False,
) -> Generator[Any, None, None]:
    """The host batches of the steps in order; workers and threads share out whole batches."""
    if workers:
        return in_processes(reads.read, steps, workers, threads, cancelled)
    return in_threads(reads.read, steps, threads, cancelled)


def fingerprint(source: Any, length: int) -> str:
    """A hash of the length and of up to 8 examples, the first and the last among them.

    Raises:
        RuntimeError: If one of them cannot be read, naming it.
    """
    digest = hashlib.sha256(str(length).encode())
    for index in sorted({(length - 1) * i // (_PROBED - 1) for i in range(_PROBED)}):
        try:
            example = source[index]
        except Exception as error:
            raise _unreadable(error, f"example {index}") from error
        for path, leaf in jax.tree.leaves_with_path(example, lambda x: not isinstance(x, dict)):
            digest.update(f"{index}{jax.tree_util.keystr(path)}".encode())
            digest.update(_as_bytes(leaf))
    return digest.hexdigest()[:16]


def _as_bytes(leaf: Any) -> bytes:
    if isinstance(leaf, bytes):
        return leaf
    try:
        array = np.asarray(leaf)
    except (TypeError, ValueError):  # a ragged list
        return repr(leaf).encode()
    if array.dtype == object:  # its bytes are addresses
        return type(leaf).__name__.encode()
    return f"{array.dtype}{array.shape}".encode() + array.tobytes()
