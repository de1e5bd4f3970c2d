"""Exactly-once data: an indexable dataset in, global batches out, at a position of one integer.

    step -> (epoch, k)            divmod by the steps of an epoch
         -> positions             k * B ... k * B + B - 1, those below n
         -> example ids           `shuffled`: a permutation of (seed, epoch) alone
         -> rows of this process  those of its replicas, row r on replica r // (B / N)
         -> read, stack           here, in threads, or in worker processes
         -> global arrays         a thread stays some batches in front of the step

The first three lines are pure functions of integers, in which no process, device or worker
appears: whoever asks for batch k of an epoch gets the same examples. Nothing is split before it is
ordered, so there is no shard to lose, no buffer to save and no state in a worker.

Formats are `jdp.sources`' and their libraries' work; streams without a length go to `jdp.feed`.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jdp.loading import Pace
from jdp.mesh import AxisNames, data_axes, is_whole
from jdp.packing import Packer, plan_rows
from jdp.placement import BatchPlacement
from jdp.prefetch import Stop, run_ahead
from jdp.processes import Channel
from jdp.reads import Reads, fingerprint, load
from jdp.sources import Source
from jdp.together import together

_WHO = "jdp.Batches"
_ENDLESS = 2**40  # epochs, or steps of a loop: at a thousand a second, 35 years


class Batches:
    """Global batches of a dataset, every example exactly once an epoch, at a known position.

    An epoch is the n examples in the order of (seed, epoch), cut into ceil(n / B) batches of B;
    the last is filled up with weight 0, and no batch has examples of two epochs.

    **Guarantees**

    - Batch `step` is a pure function of (source, B, seed, step): the same rows in the same places
      on any number of processes, devices, workers and threads. `random_transform` too: its
      generator is made of (seed, epoch, example).
    - `state()` is the position *after* the batch last taken, whatever has been read ahead, and may
      be restored on another number of processes and devices: nothing is repeated or lost.
    - Each process reads the examples of its own replicas only (and up to 9 more, at the start, for
      the fingerprint; a process with no row in a ragged end reads example 0 for its shapes).
    - Processes that disagree about the data, the position or the shapes are told so before the
      first batch; one that fails says why on all of them, at the same step.
    - An error while reading names the example, the death of a worker the worker and the batch.
    - When the loop has waited for data for more than 5 s and a tenth of its time, one
      `RuntimeWarning` says so, with the loader's speed; `pace` has the figures at any time.

    Iterating goes on from the position, and ends after `epochs`; iterating once more then gives
    nothing (`one_epoch` is for data that is gone through again and again, as in evaluation).

    Args:
        source: Anything with a length and an index whose examples are dicts, nested or not, of
            what `np.asarray` takes (a list is one array): a list of dicts, a Hugging Face dataset,
            a `grain.MapDataset`, `jdp.Columns`, `jdp.TokenFile`, ... Where it has `__getitems__`,
            the examples of a batch are read together.
        mesh: The mesh of the step.
        batch: Examples B of a global batch, a multiple of replicas * microbatch.
        seed: Of the order and of `random_transform`.
        epochs: How often the dataset is gone through; None: without end.
        shuffle: False: the order of the source in every epoch.
        axis: Data axes of the mesh; see `jdp.data_axes`.
        microbatch: Examples per microbatch, as given to the step.
        transform: Example to example, in the worker.
        random_transform: (example, `np.random.Generator`) to example, after `transform`.
        workers: Processes that read whole batches; 0: none. Source and transforms are pickled
            for them, by cloudpickle if it is installed, and a script needs
            `if __name__ == "__main__":`. Transforms there should be NumPy: a worker that computed
            with JAX would want the accelerator too.
        threads: Threads that read whole batches, in each worker if there are any.
        prefetch: Batches placed in advance; see `jdp.feed`.

    Raises:
        TypeError: If the source has no length or index; on the first batch, if an example is not a
            dict of numbers, or cannot be sent to the workers.
        ValueError: If the source is empty, or B does not fit the mesh; later, if examples differ
            in their names, shapes or dtypes.
        RuntimeError: If an example cannot be read, or a worker died.

    Example:
        >>> source = [{"x": np.float32(i)} for i in range(20)]
        >>> batches = Batches(source, jdp.make_mesh(), batch=16, seed=0, epochs=1)
        >>> [float(b["weight"].sum()) for b in batches]
        [16.0, 4.0]
        >>> batches.state()["step"]
        2
    """

    def __init__(
        self,
        source: Source,
        mesh: Mesh,
        *,
        batch: int,
        seed: int,
        epochs: int | None = None,
        shuffle: bool = True,
        axis: AxisNames | None = None,
        microbatch: int = 1,
        transform: Callable[[Any], Any] | None = None,
        random_transform: Callable[[Any, np.random.Generator], Any] | None = None,
        workers: int = 0,
        threads: int = 0,
        prefetch: int = 2,
    ) -> None:
        length = _valid_length(source)
        for name, value, least, most in (
            ("batch", batch, 1, 2**31 - 1),
            ("seed", seed, 0, 2**63 - 1),
            ("epochs", 1 if epochs is None else epochs, 1, _ENDLESS),
            ("workers", workers, 0, 1024),
            ("threads", threads, 0, 1024),
            ("prefetch", prefetch, 0, 1024),
        ):
            if not is_whole(value) or not least <= value <= most:
                raise ValueError(
                    f"jdp.Batches got {name}={value!r}; it is a whole number from {least} to "
                    f"{most}. Give one."
                )
        self._placement = BatchPlacement.of(mesh, data_axes(mesh, axis), _WHO)
        num, mine = self._placement.num_replicas, self._placement.mine
        axes = str(self._placement.axes)
        self._rows = plan_rows(num, mine, microbatch, None, axes, who=_WHO)
        share = _valid_share(int(batch), num, microbatch)
        slots = np.concatenate([np.arange(r * share, (r + 1) * share) for r in mine])
        self._reads = Reads(
            source,
            transform,
            random_transform,
            length,
            int(batch),
            int(seed),
            bool(shuffle),
            slots,
        )
        self._epochs, self._step = epochs, 0
        self._workers, self._threads, self._prefetch = workers, threads, prefetch
        self._fingerprint = fingerprint(source, length)
        self._loaded, self._load_seconds = 0, 0.0  # only the thread that loads writes these
        self._wait_seconds, self._total_seconds, self._said = 0.0, 0.0, False

    @property
    def step(self) -> int:
        """The position: the number of the batch that comes next."""
        return self._step

    @property
    def epoch(self) -> int:
        """The epoch of the batch that comes next."""
        return self._step // self.steps_per_epoch

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch, ceil(n / B)."""
        return -(-self._reads.length // self._reads.batch)

    @property
    def num_steps(self) -> int | None:
        """Batches of all epochs; None without end."""
        return None if self._epochs is None else self._epochs * self.steps_per_epoch

    @property
    def pace(self) -> Pace:
        """How fast loading has been since this was made."""
        return Pace(
            self._loaded,
            self._load_seconds,
            self._wait_seconds,
            self._total_seconds,
            self._reads.batch,
        )

    def rows(self, step: int) -> np.ndarray:
        """Ids of the examples in global batch `step`, in the order of its rows, padding left out.

        Example:
            >>> source = [{"x": np.float32(i)} for i in range(10)]
            >>> Batches(source, jdp.make_mesh(), batch=8, seed=0, shuffle=False).rows(1)
            array([8, 9])
        """
        return self._reads.rows(self._valid_step(step), np.arange(self._reads.batch))[1]

    def at(self, step: int) -> Any:
        """Global batch `step`, without moving the position; every process of the mesh calls it.

        Raises:
            ValueError: If there is no such step.
        """
        step = self._valid_step(step)
        host = self._packed(load(self._reads, range(step, step + 1)), step)
        return self._placement.put(next(host))

    def state(self) -> dict[str, int | bool | str]:
        """The position and what it is a position in, for the checkpoint; JSON can carry it."""
        r = self._reads
        known = {"seed": r.seed, "batch": r.batch, "shuffle": r.shuffle, "length": r.length}
        return known | {
            "step": self._step,
            "epoch": self.epoch,
            "fingerprint": self._fingerprint,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on where `state()` was taken, on whatever processes and devices.

        Raises:
            ValueError: If it is a position in other data, or in another order, naming what differs.
        """
        ours = self.state()
        given = state if isinstance(state, dict) else {}
        if missing := ours.keys() - given.keys():
            raise ValueError(
                f"jdp.Batches.restore got {state!r:.200}, which lacks "
                f"{sorted(missing)}: it does not say "
                f"where the data stood, and starting over would repeat examples. Give it what "
                f"state() returned."
            )
        for name, why, fix in _FIXED:
            if state[name] != ours[name]:
                raise ValueError(
                    f"jdp.Batches.restore: the state has {name} {state[name]!r}, this {name} "
                    f"{ours[name]!r}. {why}, so going on at step {state['step']} would repeat and "
                    f"lose examples. {fix}, or start a new run with the params only."
                )
        step = state["step"]
        if not is_whole(step) or not 0 <= step <= self._last_step:
            raise ValueError(
                f"jdp.Batches.restore: the state is at step {step!r}, but this has steps 0 to "
                f"{self._last_step}. Give as many epochs as the run had, or more."
            )
        self._step = int(step)

    def __iter__(self) -> Iterator[Any]:
        """Goes on from the position to the end of the last epoch."""
        stop = min(self._last_step, self._step + _ENDLESS)
        return self._advance(self._run(self._step, stop), self._step)

    def one_epoch(self, epoch: int = 0) -> Generator[Any, None, None]:
        """The batches of one epoch, without moving the position: for evaluation, or a look.

        Raises:
            ValueError: If there is no such epoch.
        """
        start = self._valid_step(epoch * self.steps_per_epoch)
        return self._run(start, start + self.steps_per_epoch)

    @property
    def _last_step(self) -> int:
        return 2**63 - 1 if self.num_steps is None else self.num_steps

    def _valid_step(self, step: int) -> int:
        if not is_whole(step) or not 0 <= step < self._last_step:
            raise ValueError(
                f"jdp.Batches has no step {step!r}; its steps are 0 to "
                f"{'without end' if self.num_steps is None else self.num_steps - 1}, "
                f"{self.steps_per_epoch} an epoch. Ask for one of these."
            )
        return int(step)

    def _run(self, start: int, stop: int) -> Generator[Any, None, None]:
        """Placed batches, ahead; the channel is made at once, in the order of the program."""
        halt = Stop()

        def stopped() -> bool:
            return halt.stopped

        read = load(
            self._reads,
            range(start, stop),
            workers=self._workers,
            threads=self._threads,
            cancelled=stopped,
        )
        host = self._packed(read, start)
        others = self._placement.processes
        if len(others) > 1:
            channel = Channel(_WHO, others, stopped)
            identity = self.state() | {"step": start, "epoch": start // self.steps_per_epoch}
            host = together(host, channel, identity, start)
        placed = self._timed(host)
        return run_ahead(placed, self._prefetch, halt) if self._prefetch else placed

    def _packed(self, host: Generator[Any, None, None], first: int) -> Generator[Any, None, None]:
        """In JAX's dtypes, and each like the first."""
        with contextlib.closing(host):
            yield from Packer(self._rows, True, _WHO, first).pack(host)

    def _timed(self, host: Generator[Any, None, None]) -> Generator[Any, None, None]:
        with contextlib.closing(host):
            began, first = time.perf_counter(), True
            for arrays in host:
                placed = self._placement.put(arrays)
                if not first:
                    self._load_seconds += time.perf_counter() - began
                    self._loaded += 1
                first = False
                yield placed
                began = time.perf_counter()

    def _advance(self, batches: Generator[Any, None, None], step: int) -> Iterator[Any]:
        """Moves the position with every batch taken, and measures the waiting."""
        with contextlib.closing(batches):
            last = None
            while True:
                if self._step != step:
                    raise RuntimeError(
                        f"jdp.Batches was moved to step {self._step} while a loop over it stood at "
                        f"step {step}, so that loop would give batches out of turn. Restore before "
                        f"the loop, and loop over it once at a time."
                    )
                asked = time.perf_counter()
                batch = next(batches, None)
                if batch is None:
                    return
                now = time.perf_counter()
                if last is not None:
                    self._note(now - asked, now - last)
                last = now
                self._step = step = step + 1
                yield batch
                del batch

    def _note(self, waited: float, passed: float) -> None:
        self._wait_seconds += waited
        self._total_seconds += passed
        if not self._said and (complaint := self.pace.complaint()):
            self._said = True
            warnings.warn(complaint, RuntimeWarning, stacklevel=3)


_FIXED = (
    ("length", "The dataset has grown or shrunk", "Give the source of the saved run"),
    ("fingerprint", "Some examples are others than they were", "Give the source of the saved run"),
    ("batch", "A step would be another part of the epoch", "Give the same batch: it is global"),
    ("seed", "The order would be another", "Give the same seed"),
    ("shuffle", "The order would be another", "Give the same shuffle"),
)


def _valid_share(batch: int, num: int, microbatch: int) -> int:
    """Examples of a replica."""
    if batch % (unit := num * microbatch):
        below, above = batch // unit * unit, -(-batch // unit) * unit
        raise ValueError(
            f"jdp.Batches got batch={batch}, which is not a multiple of {unit}, the {num} "
            f"replicas times microbatch {microbatch}. Replicas compute equally many whole "
            f"microbatches. Take {f'{below} or ' if below else ''}{above}, or another "
            f"microbatch or number of devices; of these only the batch changes the training."
        )
    return batch // num


def _valid_length(source: Any) -> int:
    try:
        length, _ = len(source), source.__getitem__
    except (TypeError, AttributeError, ValueError) as error:
        raise TypeError(
            f"jdp.Batches needs a source with a length and an index, and got a "
            f"{type(source).__name__} ({error}). A stream has no position to return to: give it to "
            f"jdp.feed, or read from a grain.MapDataset, a list, or files through jdp.sources."
        ) from error
    if isinstance(source, dict):
        raise TypeError(
            "jdp.Batches got a dict, whose length counts its names and not examples. For a dict of "
            "arrays write jdp.Columns(arrays)."
        )
    if length < 1:
        raise ValueError(
            "jdp.Batches got an empty source: there is nothing to train on. Look at the path or "
            "the filter it was made with."
        )
    return length
