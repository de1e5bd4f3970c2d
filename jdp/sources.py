"""Datasets as things with a length and an index: what `Batches` reads.

In: arrays. Out: a `Source`, `len(source)` examples of which `source[i]` is a dict of arrays. A
list, a Hugging Face `datasets.Dataset` and a `grain.MapDataset` are sources as they are; others:

    Columns                             {"x": [n, ...], "y": [n]}, an example a row, mapped or not
    TokenFile, ArrayRecords, Parquet    files (`jdp.files`)
    Packed                              documents of unequal length, several to a row (`jdp.packed`)

Each can be sent to a worker process: it holds paths, not open files. None shuffles, batches or
knows of devices.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np


class Source(Protocol):
    """A dataset with a length whose examples can be read in any order."""

    def __len__(self) -> int:
        """The number of examples."""
        ...

    def __getitem__(self, index: Any, /) -> Any:
        """Example `index`, 0 to `len - 1`."""
        ...


class Columns:
    """Example i is row i of every array.

    Args:
        columns: Arrays `[n, ...]` by name, in dicts within dicts if need be: NumPy, `np.memmap`,
            `np.load(path, mmap_mode="r")`, HDF5 and zarr arrays, or whatever has a length and an
            index. A memory-mapped file is opened again in worker processes; other arrays are
            copied to each.

    Raises:
        ValueError: If the arrays have different lengths, naming them.
        TypeError: If a column has no length.

    Example:
        >>> Columns({"x": np.arange(6).reshape(3, 2), "y": np.arange(3)})[1]["x"]
        array([2, 3])
    """

    def __init__(self, columns: Mapping[str, Any]) -> None:
        self._columns = _map_columns(_as_column, columns)
        lengths: dict[str, int] = {}
        _map_columns(lambda column, path: lengths.setdefault(path, len(column)), self._columns)
        if len(set(lengths.values())) != 1:
            raise ValueError(
                f"jdp.Columns needs arrays of one length, since row i of all is example i, and got "
                f"{', '.join(f'{n}: {k}' for n, k in lengths.items()) or 'none'}. Cut them to the "
                f"same examples."
            )
        self._length = next(iter(lengths.values()))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return _map_columns(lambda column, path: column[index], self._columns)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_columns": _map_columns(_Mapped.of, self._columns)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._columns = _map_columns(
            lambda column, path: column.open() if isinstance(column, _Mapped) else column,
            self._columns,
        )


def _map_columns(function: Callable[[Any, str], Any], columns: Any, path: str = "") -> Any:
    if not isinstance(columns, Mapping):
        return function(columns, path)
    return {n: _map_columns(function, column, f"{path}[{n!r}]") for n, column in columns.items()}


def _as_column(column: Any, path: str) -> Any:
    # a row of a jax.Array is a program; a row of a scalar or a text is not an example
    column = np.asarray(column) if isinstance(column, jax.Array) else column
    if (
        isinstance(column, str | bytes)
        or not hasattr(type(column), "__len__")
        or (isinstance(column, np.ndarray) and not column.ndim)
    ):
        raise TypeError(
            f"jdp.Columns: column {path} is a {type(column).__name__}, {column!r:.60}, which has "
            f"no rows. Columns are arrays [n, ...], a row for each example; put a constant into "
            f"the example in transform=."
        )
    return column


class _Mapped(NamedTuple):
    """A memory-mapped array by its file: pickled as it is, it would be a copy of the file."""

    path: str
    dtype: np.dtype[Any]
    offset: int
    shape: tuple[int, ...]
    order: Any

    @classmethod
    def of(cls, column: Any, path: str) -> Any:
        # a view (its base is an array) has the file name and offset of the whole
        if not isinstance(column, np.memmap) or not isinstance(column.base, mmap.mmap):
            return column
        order = "F" if column.flags.f_contiguous and not column.flags.c_contiguous else "C"
        return cls(str(column.filename), column.dtype, column.offset, column.shape, order)

    def open(self) -> np.ndarray:
        return np.memmap(self.path, self.dtype, "r", self.offset, self.shape, self.order)
