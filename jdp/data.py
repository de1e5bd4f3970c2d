"""Host batches in, global batches out: `feed` turns any iterator into split `jax.Array`s.

    loader -> packing.Packer      every batch in the form of the first; short ones padded, weight 0
           -> _agreed             processes compare the first batch and end on the same step
           -> BatchPlacement.put  rows to the devices that hold them
           -> prefetch.run_ahead  a thread stays some batches in front of the step

Row r of the global batch lies on replica r // (B / N), so microbatch j is always rows
[j * m, (j + 1) * m), on however many devices:

    one process       batch [B, ...]      replica 0 | replica 1 | ... | replica N - 1
    P processes       each [B / P, ...]   each gives the rows of its own replicas

Reading, shuffling and sharding a dataset is the loader's work (Grain, or any iterator); nothing
here reorders, repeats or drops a row.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jdp.mesh import AxisNames, data_axes
from jdp.packing import Packer, describe, first_difference, plan_rows
from jdp.parting import Parting, parting
from jdp.placement import BatchPlacement
from jdp.prefetch import Stop, run_ahead
from jdp.processes import Channel


def feed(
    batches: Iterable[Any],
    mesh: Mesh,
    *,
    axis: AxisNames | None = None,
    microbatch: int = 1,
    pad: bool = True,
    prefetch: int = 2,
    shares: Sequence[int] | None = None,
    room: int | None = None,
) -> Generator[Any, None, None]:
    """Places host batches on the mesh, split over its data axes, ahead of the step.

    With one process each batch is the whole global batch of B rows. With P processes each gives
    its own part, B / P rows of *different* data. One call is one pass through the loader; call
    `feed` again for the next epoch.

    **Guarantees**

    - Every batch has the structure, shapes and dtypes of the first: the step compiles once.
    - No row is dropped, repeated or reordered. With `pad`, a dict batch carries "weight", float32
      `[B]`: 1 for a row of data, 0 for padding. A "weight" of its own is kept, and padded with 0.
    - All processes end on the same step. One that runs out early feeds weight 0 until the others
      are done; where there is no weight (no dict, or `pad=False`), all raise on that step.
    - The loader may reuse its buffers: rows are copied before the next batch is asked for.
    - An exception of the loader arrives after the batches before it, with its own traceback.
    - Closing or dropping the iterator, or Ctrl-C, ends the thread.

    | a batch | dict, `pad=True` | other |
    | --- | --- | --- |
    | the first, B not a multiple of N * microbatch | padded if the only one, else ValueError \
| ValueError |
    | a later, shorter one | padded to B with weight 0 | ValueError |
    | a later, longer one; 0 rows; none at all on one of several processes | ValueError \
| ValueError |
    | float64, int64 without x64 | float32, int32; ValueError if an integer does not fit | same |

    Args:
        batches: Any iterable of pytrees of arrays `[rows, ...]`, NumPy or what `np.asarray` takes.
        mesh: The mesh of the step.
        axis: Its data axes; see `jdp.data_axes`.
        microbatch: Examples per microbatch m, as given to the step.
        pad: Whether a short batch is filled up, and dict batches get a "weight".
        prefetch: Batches placed in advance; the thread holds one more. 0: no thread.
        shares: Microbatches of each replica, k_0 ... k_{N-1}, for replicas of unequal speed. A
            global batch then has sum(k) * m rows; the part of replica i is its k_i * m rows, then
            rows of weight 0 up to max(k) * m (NaN where there is no weight, so that a step without
            the shares shows it). Give the step the same shares.
        room: Microbatches that the part of each replica has room for, in place of max(k): with the
            same room, batches of other shares (another call of `feed`, see `jdp.rebalance`) have
            the same shape, and the step is not compiled again.

    Returns:
        A generator of pytrees of global `jax.Array`s, `[B, ...]`, or `[N * max(k) * m, ...]`.

    Raises:
        ValueError: If a batch cannot be split or padded, or processes disagree.
        TypeError: If a leaf is not an array of numbers, or `batches` is itself one batch.
        TimeoutError: If another process does not answer, naming it.

    Example:
        >>> rows = [{"x": np.ones((16, 3))}, {"x": np.ones((9, 3))}]
        >>> for batch in jdp.feed(rows, jdp.make_mesh()):
        ...     print(batch["x"].shape, batch["weight"].sum())
        (16, 3) 16.0
        (16, 3) 9.0
    """
    if isinstance(batches, dict | np.ndarray | jax.Array | str):
        raise TypeError(
            f"jdp.feed takes an iterable of batches, but got one {type(batches).__name__}, which "
            f"it would take apart. For a single batch write feed([batch], mesh)."
        )
    if prefetch != int(prefetch) or prefetch < 0:
        raise ValueError(
            f"jdp.feed got prefetch={prefetch!r}; it is the number of batches to place in advance, "
            f"0 or more."
        )
    placement = BatchPlacement.of(mesh, data_axes(mesh, axis))
    rows = plan_rows(
        placement.num_replicas, placement.mine, microbatch, shares, str(placement.axes), room
    )
    stop, packer = Stop(), Packer(rows, pad)
    local = packer.pack(batches)
    if len(placement.processes) > 1:
        # Made here, since processes match channels by the order of calls: threads have none.
        channel = Channel("jdp.feed", placement.processes, lambda: stop.stopped)
        local = _agreed(local, packer, channel)
    placed = _placed(local, placement)
    return run_ahead(placed, prefetch, stop) if prefetch else placed


def _placed(
    local: Generator[Any, None, None], placement: BatchPlacement
) -> Generator[Any, None, None]:
    with contextlib.closing(local):
        for host in local:
            yield placement.put(host)


def _agreed(
    local: Generator[Any, None, None], packer: Packer, channel: Channel
) -> Generator[Any, None, None]:
    """`local`, but ending on the same step on every process.

    Before each step every process says whether it has a batch, in words only, so a thread may ask
    while the devices work. Each raises what the words of all imply, hence all the same.
    """
    step, ended = 0, False
    with parting(channel, {"ended": True}) as leaving, contextlib.closing(local):
        while True:
            host = None if ended else next(local, None)
            ended = host is None
            note = {"ended": ended} | ({} if step else _introduce(host))
            texts = channel.exchange(json.dumps(note))
            notes = {process: json.loads(text) for process, text in texts.items()}
            leaving.why = ""  # whatever follows from these, all processes do
            _check(notes, step, packer.padded)
            if all(note["ended"] for note in notes.values()):
                return
            leaving.why = Parting.why
            yield packer.blank if host is None else host
            step += 1


def _introduce(host: Any) -> dict[str, Any]:
    """What the others want to know about a first batch."""
    if host is None:
        return {"form": None, "content": None}
    content = hashlib.sha256()
    for leaf in jax.tree.leaves(host):
        content.update(leaf.tobytes())
    return {"form": describe(host), "content": content.hexdigest()}


def _check(notes: dict[int, dict[str, Any]], step: int, padded: bool) -> None:
    """Raises the same on every process, if the step cannot be taken by all."""
    if left := [f"process {p} {note['left']}" for p, note in notes.items() if "left" in note]:
        raise ValueError(
            f"jdp.feed has no batch {step}: {'; '.join(left)}. The step needs a part from every "
            f"process, and going on would hang. End all processes on the same step."
        )
    if step == 0:
        _check_first(notes)
    ended = [process for process, note in notes.items() if note["ended"]]
    if ended and len(ended) < len(notes) and not padded:
        had = [f"process {p} {step if p in ended else f'more than {step}'}" for p in notes]
        raise ValueError(
            f"jdp.feed: the processes have different numbers of batches: {', '.join(had)}. Those "
            f"with more would hang in the next step. Yield dict batches and leave pad=True, which "
            f"fills up with weight 0, or give every process equally many."
        )


def _check_first(notes: dict[int, dict[str, Any]]) -> None:
    forms = {process: note["form"] for process, note in notes.items()}
    empty = [process for process, form in forms.items() if form is None]
    if len(empty) == len(forms):
        return
    if empty:
        raise ValueError(
            f"jdp.feed: process {', '.join(map(str, empty))} has no batch at all, so it does not "
            f"know the shapes to fill up with. Give every process at least one batch."
        )
    (one, first), *others = forms.items()
    for process, form in others:
        if differs := first_difference(first, form):
            name, here, there = differs
            raise ValueError(
                f"jdp.feed: leaf {name} of the first batch is {here} on process {one} but {there} "
                f"on process {process}. They would run different programs, and hang or compute "
                f"garbage. Give every process a part of the same structure, shapes and dtypes."
            )
    givers: dict[str, list[int]] = {}
    for process, note in notes.items():
        givers.setdefault(note["content"], []).append(process)
    for processes in givers.values():
        if len(processes) > 1:
            raise ValueError(
                f"jdp.feed: processes {', '.join(map(str, processes))} gave the very same first "
                f"batch. Each is to give its own part of the global batch; these examples would "
                f"count {len(processes)} times and others never. Split the dataset by "
                f"jax.process_index(), for example with grain.sharding.ShardByJaxProcess."
            )
