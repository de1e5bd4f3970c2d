"""Gives every batch of one process the structure, shapes and dtypes of the first.

In: what a loader yields. Out: pytrees of NumPy arrays that nobody else holds, `[rows, ...]`, with
the rows in the order of this process's replicas. Devices and other processes are not known here.

    rows      1 2 3 4 5 6 | - -     a short batch: zero rows, weight 0
    shares    1 2 3 4 | 5 6 - -     replica 0 takes 2 microbatches of 2, replica 1 takes 1
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdp.loss import WEIGHT
from jdp.mesh import is_whole

_END = object()
_STRUCTURE = "(structure)"
_LAST = (f"[{WEIGHT!r}]", _STRUCTURE)


class Rows(NamedTuple):
    """How many rows a batch of this process has, and where they go in its part of the array."""

    unit: int  # a batch is a multiple of this ...
    exact: bool  # ... or, with shares, just this
    spread: Callable[[np.ndarray, float], np.ndarray]  # (array, what fills the holes)
    reason: str


def plan_rows(
    num_replicas: int,
    mine: Sequence[int],
    microbatch: int,
    shares: Sequence[int] | None,
    where: str,
    room: int | None = None,
    who: str = "jdp.feed",
) -> Rows:
    """Plans the rows of the replicas `mine`, out of `num_replicas` along the axes `where`."""
    if not is_whole(microbatch) or microbatch < 1:
        raise ValueError(
            f"{who} needs a whole number of examples per microbatch, 1 or more, and got "
            f"microbatch={microbatch!r}. Give the microbatch of the step."
        )
    part = f"{len(mine)} of the " if len(mine) < num_replicas else ""
    whole = f"{part}{num_replicas} replicas along {where}"
    if room is not None and (shares is None or not is_whole(room) or room < max(shares, default=0)):
        raise ValueError(
            f"jdp.feed got room={room!r} for shares={shares}; it is the number of microbatches "
            f"that the part of each replica has room for, at least the largest share, and has no "
            f"meaning without shares."
        )
    if shares is None:
        reason = f"{whole} times microbatch {microbatch}"
        return Rows(len(mine) * microbatch, False, lambda array, hole: array, reason)
    if len(shares) != num_replicas or any(k != int(k) or k < 0 for k in shares) or not sum(shares):
        raise ValueError(
            f"jdp.feed got shares={tuple(shares)} for {num_replicas} replicas along {where}; it "
            f"needs a whole number of microbatches for each replica, 0 or more, and not all 0."
        )
    size = (max(shares) if room is None else room) * microbatch
    slots = [i * size + row for i, r in enumerate(mine) for row in range(shares[r] * microbatch)]

    def spread(array: np.ndarray, hole: float) -> np.ndarray:
        out = np.full((len(mine) * size, *array.shape[1:]), hole, array.dtype)
        out[slots] = array
        return out

    reason = f"shares {tuple(shares)} on {whole}, times microbatch {microbatch}"
    return Rows(len(slots), True, spread, reason)


class Packer:
    """Packs one pass through a loader; the first batch decides the form of all.

    Args:
        rows: How many a batch has, and where they go.
        pad: Whether short batches are filled up.
        who: Packs, for the errors.
        first: Number of the first batch, for the errors.

    Attributes:
        blank: The first batch with every entry 0, "weight" included; `None` before the first.
        padded: Whether short batches are filled up with weight 0, so that `blank` may be fed.
    """

    def __init__(self, rows: Rows, pad: bool, who: str = "jdp.feed", first: int = 0) -> None:
        self._rows, self._pad, self._who, self._first = rows, pad, who, first
        self._size = 0
        self.blank: Any = None
        self.padded = False

    def pack(self, batches: Iterable[Any]) -> Generator[Any, None, None]:
        """Yields a host pytree for each batch."""
        iterator = iter(batches)
        index = self._first
        while (batch := next(iterator, _END)) is not _END:
            arrays, count = _read(batch, index, self._who)
            if self.blank is None:
                # Copied, since looking whether it is the only batch may overwrite it.
                arrays = jax.tree.map(np.copy, arrays)
                self.padded = self._pad and isinstance(batch, dict)
                self._size = self._first_size(count, iterator)
            host = self._fill(arrays, count, index)
            if self.blank is None:
                self.blank = jax.tree.map(np.zeros_like, host)
            _match(self.blank, host, index, self._who)
            yield host
            index += 1

    def _first_size(self, count: int, iterator: Any) -> int:
        """B: the first batch's rows, or the next size that fits if it is the whole dataset."""
        unit, exact = self._rows.unit, self._rows.exact
        below, above = (0 if exact else count // unit * unit), -(-count // unit) * unit
        above = unit if exact else above
        if count == above:
            return count
        if count < above and self.padded and next(iterator, _END) is _END:
            return above
        nearest = f"{below} or {above}" if below else f"{above}"
        raise ValueError(
            f"jdp.feed: the first batch has B = {count} rows, and {count} is not "
            f"{'' if exact else 'a multiple of '}{unit}, the {self._rows.reason}. Replicas compute "
            f"equally many whole microbatches of equal size. Make batches of {nearest} rows, or "
            f"change the microbatch or the number of devices; only a last batch may be smaller, "
            f"if it is a dict and pad=True."
        )

    def _fill(self, arrays: Any, count: int, index: int) -> Any:
        """Copies, padding to B, adding the weight, and spreading the rows over the shares."""
        size = self._size
        if count > size or (count < size and not self.padded):
            raise ValueError(_other_size(count, size, index))
        if isinstance(arrays, dict) and (self.padded or WEIGHT in arrays):
            weight = arrays.get(WEIGHT, np.ones(count, np.float32))
            arrays = {**arrays, WEIGHT: _valid_weight(weight, index, self._who)}

        weighted = isinstance(arrays, dict) and WEIGHT in arrays

        def fill(array: np.ndarray) -> np.ndarray:
            out = np.zeros((size, *array.shape[1:]), array.dtype)
            out[:count] = array
            # rows beyond a share are never reached; a step that forgets the shares must not
            # take them for data, and without a weight only a NaN can say so
            floating = np.issubdtype(array.dtype, np.floating) or array.dtype.kind == "V"
            return self._rows.spread(out, np.nan if floating and not weighted else 0)

        return jax.tree.map(fill, arrays)


def describe(host: Any) -> dict[str, str]:
    """Dtype and shape of each leaf by its path, and the structure."""
    leaves = {_named(p): f"{a.dtype}{list(a.shape)}" for p, a in jax.tree.leaves_with_path(host)}
    return leaves | {_STRUCTURE: str(jax.tree.structure(host))}


def first_difference(one: dict[str, str], other: dict[str, str]) -> tuple[str, str, str] | None:
    """The first leaf that two descriptions disagree about, and what each says of it."""
    for name in sorted([*one, *other], key=_LAST.__contains__):  # the user's leaves first
        if one.get(name) != other.get(name):
            return name, one.get(name, "missing"), other.get(name, "missing")
    return None


def _named(path: Any) -> str:
    return jax.tree_util.keystr(path) or "(the batch itself)"


def _match(blank: Any, host: Any, index: int, who: str) -> None:
    if differs := first_difference(describe(blank), describe(host)):
        name, before, now = differs
        raise ValueError(
            f"{who}: leaf {name} of batch {index} is {now}, but in the first batch it is "
            f"{before}. Another structure, shape or dtype would compile the step again. Have the "
            f"loader give every batch the same."
        )


def _other_size(count: int, size: int, index: int) -> str:
    if count > size:
        why, fix = "another shape would compile the step again", "Put no batch before a larger one"
    else:
        why = "without a weight, rows filled in would count as data"
        fix = "Yield dict batches and leave pad=True"
    return (
        f"jdp.feed: batch {index} has {count} rows where the first had {size}; {why}. {fix}, or "
        f"have the loader drop the remainder."
    )


def _read(batch: Any, index: int, who: str) -> tuple[Any, int]:
    """The batch as arrays of the dtypes JAX gives them, not yet copied, and its rows."""
    paths, treedef = jax.tree.flatten_with_path(batch)
    where = [f"{who}: leaf {_named(path)} of batch {index}" for path, _ in paths]
    arrays = [_as_array(leaf, name) for (_, leaf), name in zip(paths, where, strict=True)]
    if not arrays:
        raise ValueError(
            f"{who}: batch {index} is {batch!r} and has no arrays, so there is nothing to "
            f"split. Yield pytrees of arrays [rows, ...]."
        )
    counts = [len(array) for array in arrays]
    for (path, _), count in zip(paths, counts, strict=True):
        if count != counts[0]:
            raise ValueError(
                f"{where[0]} has {counts[0]} rows but leaf {_named(path)} of batch {index} has "
                f"{count}; the leading dim of every leaf counts the same examples. Keep what is "
                f"not per example out of the batch."
            )
    if counts[0] == 0:
        raise ValueError(
            f"{where[0]} has 0 rows, and a mean over no examples is not a number. Have "
            f"the loader skip empty batches."
        )
    cast = [_cast(array, name) for array, name in zip(arrays, where, strict=True)]
    return jax.tree.unflatten(treedef, cast), counts[0]


def _as_array(leaf: Any, where: str) -> np.ndarray:
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        raise ValueError(
            f"{where} is a jax.Array spread over processes, so it is placed already. "
            f"Give it to the step, or feed host arrays, each process its own rows."
        )
    try:
        array = np.asarray(leaf)
    except (TypeError, ValueError) as error:  # a typed PRNG key, a ragged list
        raise TypeError(_no_numbers(leaf, where, str(error))) from error
    if not (array.dtype == bool or jnp.issubdtype(array.dtype, np.number)):
        raise TypeError(_no_numbers(leaf, where, f"its dtype is {array.dtype}"))
    if array.ndim == 0:
        raise ValueError(
            f"{where} is a scalar, {leaf!r}, with no rows to split over the replicas. "
            f"Leaves are [rows, ...]: wrap a list of numbers in np.asarray, and give constants to "
            f"the loss another way."
        )
    return array


def _no_numbers(leaf: Any, where: str, why: str) -> str:
    return (
        f"{where} is a {type(leaf).__name__} that JAX cannot hold as an array of numbers "
        f"({why}). Encode it as numbers, or take it out of the batch."
    )


def _cast(array: np.ndarray, where: str) -> np.ndarray:
    """To the dtype JAX gives it (32 bits without x64), refusing integers that would wrap round."""
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    if dtype == array.dtype:
        return array
    if array.dtype.kind in "iu" and array.size:
        limit = np.iinfo(dtype)
        outside = [int(v) for v in (array.min(), array.max()) if not limit.min <= v <= limit.max]
        if outside:
            raise ValueError(
                f"{where} holds {outside[0]}, which does not fit {dtype}, what JAX makes "
                f"of {array.dtype} unless jax_enable_x64 is set: it would wrap round to another "
                f"number. Use smaller ids, or enable x64."
            )
    with np.errstate(over="ignore"):  # float64 beyond float32 becomes inf, as in JAX
        return array.astype(dtype)


def _valid_weight(weight: Any, index: int, who: str) -> np.ndarray:
    weight = np.asarray(weight, np.float32)
    bad = ~(np.isfinite(weight) & (weight >= 0))
    if bad.any():
        at = tuple(int(i) for i in np.argwhere(bad)[0])
        raise ValueError(
            f"{who}: the weight of batch {index} is {weight[at]} in row {at[0]}. It says how "
            f"much an example counts, so it is finite and at least 0; give 0 to one that shall "
            f"not count."
        )
    return weight
