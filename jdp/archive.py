"""Arrays of a tree written to a folder and read back, through Orbax.

    leaves, values  --write-->  copies on the host  --done()-->  folder, its files checked off
    folder, saved leaves, wanted values  --read-->  values where the wanted ones lie

What is stored are arrays of logical shapes by their paths: no padding, nothing of a mesh or a
stage. Arrays go from files to their devices part by part; only what replicas kept, where their
number has changed, passes through the host. What makes such a folder a checkpoint is decided in
`jdp.checkpoint`.
"""

import concurrent.futures
import contextlib
import functools
import importlib
import logging
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jdp.decisions import Decisions
from jdp.manifest import Leaf
from jdp.optional import library
from jdp.padded import Padded, is_padded, stored_array, view
from jdp.replica import PerReplica, is_per_replica, is_stored
from jdp.restage import restage
from jdp.rows import agreed

_ROWS = ("rows",)  # where replicas lay is not known of a file; only their number matters
_CHUNK = 2**22  # bytes read at a time; the rest of the process wants memory too


def orbax() -> Any:
    """The library, which is only needed here.

    Raises:
        ImportError: If it is not installed, saying how to install it.
    """
    use = "jdp.Checkpoints stores arrays with Orbax"
    module = library("orbax.checkpoint", use, "checkpoints", "orbax-checkpoint")
    logging.getLogger("absl").addFilter(_is_news)  # once, however often
    return module


def _is_news(record: logging.LogRecord) -> bool:
    """Not an error that Orbax logs, with its trace, from a thread, and raises as well."""
    return not (record.exc_info and "orbax" in record.pathname)


def at(path: Any) -> Any:
    """A path, local or of a store that Orbax takes, as `etils.epath.Path`."""
    orbax()  # which brings epath along
    return importlib.import_module("etils.epath").Path(path)


def write(
    folder: Any, leaves: Sequence[Leaf], values: Sequence[Any], together: Decisions
) -> Callable[[], None]:
    """Copies values to the host, to be written to a folder that is not there yet.

    Returns when the values may be overwritten, as a donating step does.

    Args:
        folder: Where to.
        leaves: What the values are.
        values: Arrays, `Padded` and `PerReplica` nodes.
        together: Where processes meet while they write. A failure of one is told there: Orbax's own
            barriers know none, and would wait ten minutes for it.

    Returns:
        A function that writes, or waits until all processes have written, and raises what went
        wrong; for another thread.
    """
    ocp = orbax()
    plain = _on_host(leaves, values) if jax.process_count() == 1 else _in_place(leaves, values)
    arrays = {
        leaf.path: array
        for leaf, array in zip(leaves, plain, strict=True)
        if array.size  # Orbax stores nothing of size 0, and there is nothing to store
    }
    args = ocp.args.PyTreeSave(arrays or {"nothing": np.zeros(1)})
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=_processes(ocp))
    if jax.process_count() == 1:  # the caller pays nothing but the copy

        def save() -> None:
            with ocp.Checkpointer(handler) as checkpointer:
                checkpointer.save(folder, args=args)

        return save
    meetings = _Meetings(together)
    checkpointer = ocp.AsyncCheckpointer(
        handler,
        async_options=ocp.AsyncOptions(timeout_secs=600, barrier_sync_fn=meetings.meet),
        multiprocessing_options=_processes(ocp),
    )
    with meetings, contextlib.ExitStack() as unless_it_went_well:
        unless_it_went_well.callback(checkpointer.close)
        checkpointer.save(folder, args=args)
        unless_it_went_well.pop_all()

    def wait() -> None:
        with contextlib.closing(checkpointer), meetings:
            checkpointer.wait_until_finished()

    return wait


class _Meetings:
    """The two meetings of a write: all have written; process 0 has made the folder final.

    A process that fails within `with` comes to the next one all the same, and says so there. The
    others then end without an error of their own.
    """

    def __init__(self, together: Decisions) -> None:
        self._together, self._left = together, 2

    def meet(self, *, key: str, timeout_ms: int) -> None:
        """What Orbax calls."""
        del key, timeout_ms
        self._left -= 1
        try:
            self._together.each(lambda: None)
        except Exception:
            self._left = 0
            raise concurrent.futures.CancelledError from None  # Orbax then ends in silence

    def __enter__(self) -> None:
        """Nothing yet."""

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Tells the others of an error."""
        if isinstance(error, Exception) and self._left:
            self._left = 0
            with contextlib.suppress(Exception):  # it comes back as what it is
                self._together.each(functools.partial(_raise, error))


def _raise(error: Exception) -> None:
    raise error


def _processes(ocp: Any) -> Any:
    """Barriers of several processes through the coordination service.

    By default they are collectives on the devices, which would meet those of a step.
    """
    count = jax.process_count()
    return ocp.options.MultiprocessingOptions(
        primary_host=0, active_processes=set(range(count)) if count > 1 else None
    )


def _on_host(leaves: Sequence[Leaf], values: Sequence[Any]) -> list[np.ndarray]:
    """Copies of logical shapes, put together on the host: no device ever holds a whole one."""
    values = [value.value if is_per_replica(value) else value for value in values]
    for array in map(stored_array, values):
        if isinstance(array, jax.Array) and not jnp.issubdtype(array.dtype, jax.dtypes.extended):
            array.copy_to_host_async()  # all at once, not one after the other
    return [
        np.asarray(jax.random.key_data(value) if leaf.key else value).copy()
        for leaf, value in zip(leaves, values, strict=True)
    ]


def _in_place(leaves: Sequence[Leaf], values: Sequence[Any]) -> list[Any]:
    """Arrays of logical shapes on the devices, of which each process writes its parts.

    What is padded, process 0 writes.
    """
    values = [value.value if is_per_replica(value) else value for value in values]
    values = [
        jax.random.key_data(value) if leaf.key else _on_first(value) if is_padded(value) else value
        for leaf, value in zip(leaves, values, strict=True)
    ]
    # what the caller may change while it is being written is copied
    return [x if isinstance(x, jax.Array) else np.array(x) for x in values]


def _on_first(padded: Padded) -> np.ndarray:
    """The logical array, on the host of process 0; elsewhere one that nobody writes.

    Devices hold it whole meanwhile, so one goes after the other.
    """
    everywhere = NamedSharding(padded.value.sharding.mesh, P())
    whole = jax.block_until_ready(jax.jit(view, out_shardings=everywhere)(padded))
    if jax.process_index() == 0:
        return np.array(whole)
    return np.broadcast_to(np.zeros((), whole.dtype), whole.shape)


def read(folder: Any, leaves: Sequence[Leaf], likes: Sequence[Any]) -> list[Any]:
    """Reads leaves to where others lie.

    Args:
        folder: Where from.
        leaves: What is stored, in the order of `likes`.
        likes: Arrays, or shapes with shardings, of the same logical shapes and dtypes; those
            without a sharding ask for NumPy arrays.

    Returns:
        The values; those that have no place to go straight to are moved as `jdp.restage` does.
    """
    ocp = orbax()
    places = [_place(leaf, like) for leaf, like in zip(leaves, likes, strict=True)]
    wanted = {
        leaf.path: _restore_args(ocp, leaf, like, place)
        for leaf, like, place in zip(leaves, likes, places, strict=True)
        if _size(leaf)
    }
    found: dict[str, Any] = {}
    if wanted:
        me = jax.process_index()  # each reads for itself, and waits for nobody
        alone = ocp.options.MultiprocessingOptions(primary_host=me, active_processes={me})
        handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
        with ocp.Checkpointer(handler, multiprocessing_options=alone) as checkpointer:
            args = ocp.args.PyTreeRestore(
                item={path: jax.ShapeDtypeStruct((), np.float32) for path in wanted},
                restore_args=wanted,
                partial_restore=True,
            )
            found = checkpointer.restore(folder, args=args)
    nothing = {
        leaf.path: np.zeros(leaf.stored_shape, leaf.dtype) for leaf in leaves if not _size(leaf)
    }
    found |= nothing
    values = []
    for leaf, like, place in zip(leaves, likes, places, strict=True):
        there = place is not None and leaf.path not in nothing
        finish = _wrapped if there else _placed
        values.append(finish(found[leaf.path], leaf, like))
    return values


def _size(leaf: Leaf) -> int:
    return math.prod(leaf.stored_shape)


def _place(leaf: Leaf, like: Any) -> Any:
    """The sharding with which the stored array becomes the wanted one; `None` if none does."""
    rows = like.shape[0] if is_per_replica(like) else None
    value = like.value if is_per_replica(like) else like
    if leaf.key or leaf.replicas != rows or (is_per_replica(like) and is_padded(value)):
        return None
    return getattr(stored_array(value), "sharding", None)


def _restore_args(ocp: Any, leaf: Leaf, like: Any, place: Any) -> Any:
    if place is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    value = like.value if is_per_replica(like) else like
    return ocp.ArrayRestoreArgs(
        sharding=place,
        global_shape=tuple(stored_array(value).shape),
        dtype=np.dtype(leaf.dtype),
        strict=not is_padded(value),  # Orbax then fills up with zeros
    )


def _wrapped(array: Any, leaf: Leaf, like: Any) -> Any:
    """An array that lies where it is wanted, as the node that is wanted."""
    del leaf
    if is_per_replica(like):
        return PerReplica(array, axes=like.axes, mesh=like.mesh)
    return Padded(array, dim=like.dim, length=like.length) if is_padded(like) else array


def _placed(array: Any, leaf: Leaf, like: Any) -> Any:
    """A host array, moved to where it is wanted by the rules of `jdp.restage`."""
    if leaf.key:
        return _key(array, leaf, like)
    old = array if leaf.replicas is None else PerReplica(array, axes=_ROWS, mesh=None)  # type: ignore[arg-type]
    if getattr(like.value if is_stored(like) else like, "sharding", None) is not None:
        return restage([old], [like])[0]
    if leaf.replicas is None or is_per_replica(like):
        return _wrapped(array, leaf, like)
    return np.asarray(agreed(old))


def _key(data: Any, leaf: Leaf, like: Any) -> Any:
    """Random keys of their data; of rows for another number of replicas, the first one's."""
    value = like.value if is_per_replica(like) else like
    shape = tuple(value.shape)
    if leaf.replicas is not None and leaf.stored_shape != shape:
        data = data[0]
    data = np.broadcast_to(data, (*shape, data.shape[-1]))
    wrap = functools.partial(jax.random.wrap_key_data, impl=leaf.key)
    place = getattr(value, "sharding", None)
    if not isinstance(place, NamedSharding):
        keys = wrap(jnp.asarray(data))
        return _wrapped(keys if place is None else jax.device_put(keys, place), leaf, like)
    # as numbers first: processes can put their parts of those together
    flat = NamedSharding(place.mesh, P(*place.spec))
    whole = jax.make_array_from_callback(data.shape, flat, lambda index: data[index])
    return _wrapped(jax.jit(wrap, out_shardings=place)(whole), leaf, like)


def list_files(folder: Any) -> list[str]:
    """The files below a folder, by their paths from there, in order."""
    found: list[str] = []
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            found += [f"{entry.name}/{name}" for name in list_files(entry)]
        else:
            found.append(entry.name)
    return found


def check_off(path: Any) -> tuple[int, int]:
    """Size in bytes and CRC-32 of a file."""
    size = crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return size, crc
