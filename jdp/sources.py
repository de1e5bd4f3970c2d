"""Datasets as things with a length and an index: what `Batches` reads.

In: files, arrays, or another dataset. Out: a `Source`, `len(source)` examples of which
`source[i]` is a dict of arrays. A list, a Hugging Face `datasets.Dataset` and a
`grain.MapDataset` are sources as they are; here are those that need a line or two:

    Columns        {"x": [n, ...], "y": [n]}      one example a row, memory-mapped or not
    TokenFile      a flat file of token ids       windows of `length` + 1 ids
    ArrayRecords   ArrayRecord files              through array_record
    Parquet        Parquet files                  through pyarrow, row groups kept for a while
    Packed         documents of unequal length    several to a row, none cut without need or lost

Each can be sent to a worker process: it holds paths, not open files. Nothing here shuffles,
batches or knows of devices.
"""

from __future__ import annotations

import functools
import glob
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike

_ROW_GROUPS_KEPT = 8  # decoded row groups of a Parquet source; a group is usually 10-100 MB
_OPEN_ROWS = 64  # of `Packed`: rows that may still take a document, which bounds its cost


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
        columns: Arrays `[n, ...]` by name: NumPy, `np.memmap`, `np.load(path, mmap_mode="r")`,
            HDF5 and zarr arrays, or whatever has a length and an index. A memory-mapped array is
            sent to worker processes whole; use threads with those, or a source that holds a path.

    Raises:
        ValueError: If the arrays have different lengths, naming two.

    Example:
        >>> Columns({"x": np.arange(6).reshape(3, 2), "y": np.arange(3)})[1]["x"]
        array([2, 3])
    """

    def __init__(self, columns: Mapping[str, Any]) -> None:
        lengths = {name: len(column) for name, column in columns.items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(
                f"jdp.Columns needs arrays of one length, since row i of all is example i, and got "
                f"{lengths or 'none'}. Cut them to the same examples."
            )
        self._columns = dict(columns)
        self._length = next(iter(lengths.values()))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: column[index] for name, column in self._columns.items()}


class TokenFile:
    """Windows of a flat file of token ids, memory-mapped.

    Example i is `{"tokens": ids[i * length : (i + 1) * length + 1]}`: inputs are its first `length`
    ids and targets its last `length`, so every id but the first is a target exactly once.

    Args:
        path: A raw file of ids, or a one-dimensional `.npy`.
        length: Tokens a window predicts. At most `length` ids at the end fill no window.
        dtype: Of a raw file, such as `np.uint16`; a `.npy` knows its own.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file holds no window, or is not whole ids.

    Example:
        >>> import tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "ids.npy")
        >>> np.save(path, np.arange(10))
        >>> source = TokenFile(path, 4)
        >>> len(source), source[1]["tokens"]
        (2, array([4, 5, 6, 7, 8]))
    """

    def __init__(
        self, path: str | os.PathLike[str], length: int, *, dtype: DTypeLike = np.uint16
    ) -> None:
        (self._path,) = _existing(path, "jdp.TokenFile")
        self._length, self._dtype = length, np.dtype(dtype)
        size = os.path.getsize(self._path)
        if not self._path.endswith(".npy") and size % self._dtype.itemsize:
            raise ValueError(
                f"jdp.TokenFile: {self._path} has {size} bytes, which is no whole number of "
                f"{self._dtype} ids: it was cut short, or has another dtype. Give the dtype it was "
                f"written with."
            )
        ids = self._ids
        if ids.ndim != 1 or length < 1 or len(ids) <= length:
            raise ValueError(
                f"jdp.TokenFile: {self._path} holds ids of shape {ids.shape}, which give no "
                f"window of length {length} and the id after it. Give a flat file of more ids, or "
                f"a shorter length of at least 1."
            )
        self._windows = (len(ids) - 1) // length

    @functools.cached_property
    def _ids(self) -> np.ndarray:
        if self._path.endswith(".npy"):
            return np.load(self._path, mmap_mode="r")
        return np.memmap(self._path, self._dtype, mode="r")

    def __getstate__(self) -> dict[str, Any]:
        # a pickled memmap is a copy of the file
        return {name: value for name, value in self.__dict__.items() if name != "_ids"}

    def __len__(self) -> int:
        return self._windows

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        start = index * self._length
        return {"tokens": np.array(self._ids[start : start + self._length + 1])}


class ArrayRecords:
    """Records of ArrayRecord files, decoded one by one.

    Args:
        paths: A file, a glob pattern, or several of them; read in the order given, patterns sorted.
        decode: Makes an example of a record's bytes.

    Raises:
        FileNotFoundError: If a path or pattern matches nothing.
        ImportError: If Grain's ArrayRecord reader is not installed.

    Example:
        >>> ArrayRecords("no/such/file.array_record", decode=bytes)
        Traceback (most recent call last):
        FileNotFoundError: jdp.ArrayRecords found nothing at 'no/such/file.array_record'. ...
    """

    def __init__(
        self, paths: str | os.PathLike[str] | Sequence[str], *, decode: Callable[[bytes], Any]
    ) -> None:
        self._paths = _existing(paths, "jdp.ArrayRecords")
        self._decode = decode
        grain = needed("grain", "jdp.ArrayRecords", "grain array_record")
        self._records = grain.sources.ArrayRecordDataSource(self._paths)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Any:
        return self._decode(self._records[index])


class Parquet:
    """Rows of Parquet files as dicts.

    Reading a row decodes its row group; the last 8 groups of each process are kept. A shuffled run
    over a file of many large groups decodes them again and again: write small groups (1,000 to
    10,000 rows), or let Hugging Face `datasets` turn the files into memory-mapped Arrow once.

    Args:
        paths: A file, a glob pattern, or several of them; read in the order given, patterns sorted.
        columns: Names of the columns to read; all by default.

    Raises:
        FileNotFoundError: If a path or pattern matches nothing.
        ValueError: If a column is not in a file, naming both.
        ImportError: If pyarrow is not installed.
    """

    def __init__(
        self, paths: str | os.PathLike[str] | Sequence[str], *, columns: Sequence[str] | None = None
    ) -> None:
        self._paths = _existing(paths, "jdp.Parquet")
        self._columns = None if columns is None else list(columns)
        parquet = needed("pyarrow.parquet", "jdp.Parquet", "pyarrow")
        self._groups: list[tuple[str, int]] = []
        sizes = []
        for path in self._paths:
            with parquet.ParquetFile(path) as file:
                missing = set(self._columns or ()) - set(file.schema_arrow.names)
                if missing:
                    raise ValueError(
                        f"jdp.Parquet: {path} has no column {sorted(missing)}, only "
                        f"{file.schema_arrow.names}, so its rows would lack it. Give columns that "
                        f"every file has."
                    )
                for group in range(file.num_row_groups):
                    self._groups.append((path, group))
                    sizes.append(file.metadata.row_group(group).num_rows)
        self._ends = np.cumsum(sizes, dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        group = int(np.searchsorted(self._ends, index, side="right"))
        row = index - (int(self._ends[group - 1]) if group else 0)
        path, number = self._groups[group]
        table = _row_group(path, number, None if self._columns is None else tuple(self._columns))
        return {name: table[name][row].as_py() for name in table.column_names}


@functools.lru_cache(maxsize=_ROW_GROUPS_KEPT)
def _row_group(path: str, number: int, columns: tuple[str, ...] | None) -> Any:
    parquet = needed("pyarrow.parquet", "jdp.Parquet", "pyarrow")
    with parquet.ParquetFile(path) as file:
        return file.read_row_group(number, columns=None if columns is None else list(columns))


class Packed:
    """Documents of unequal length, several to a row of `length` tokens.

    A row is `{"tokens", "segment_ids", "positions"}`, each int32 `[length]`: segment 1, 2, ... for
    its documents, 0 for padding, and each token's position in its document. A document that is
    longer than a row is cut into pieces of `length`, each a segment, positions going on.

    **Guarantees**

    - Every token of every document is in exactly one row; which one depends on the lengths alone
      (first fit among the last 64 rows not yet full, in the order of the source). So an epoch over
      the rows sees every document once, whatever the number of processes or workers.
    - Rows and their order do not change from epoch to epoch; `Batches` shuffles whole rows.

    Args:
        documents: A source of flat arrays of token ids, or of dicts that have them under `key`.
        length: Tokens a row.
        lengths: Of the documents, `[n]`, where known; otherwise each is read once to find out.
        key: Where an example holds its ids.

    Raises:
        ValueError: If `length` is below 1, or a given length is not that of its document.

    Example:
        >>> rows = Packed([np.arange(3), np.arange(4), np.arange(2)], 5)
        >>> len(rows), rows[0]["tokens"], rows[0]["segment_ids"]
        (2, array([0, 1, 2, 0, 1], dtype=int32), array([1, 1, 1, 2, 2], dtype=int32))

    References:
        Krell et al., Efficient Sequence Packing without Cross-contamination, 2021.
    """

    def __init__(
        self, documents: Source, length: int, *, lengths: Any = None, key: str = "tokens"
    ) -> None:
        if length < 1:
            raise ValueError(
                f"jdp.Packed got length={length}; a row holds at least one token. Give the context "
                f"length of the model."
            )
        self._documents, self._length, self._key = documents, length, key
        if lengths is None:
            lengths = [len(self._tokens(i)) for i in range(len(documents))]
        self._lengths = np.asarray(lengths, np.int64)
        if len(self._lengths) != len(documents):
            raise ValueError(
                f"jdp.Packed got {len(self._lengths)} lengths for {len(documents)} documents; "
                f"without the length of each it cannot tell which fit in a row together. Leave "
                f"lengths out to have them counted."
            )
        self._rows = first_fit(self._lengths, length)

    def _tokens(self, index: int) -> np.ndarray:
        document = self._documents[index]
        return np.asarray(document[self._key] if isinstance(document, Mapping) else document)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        tokens, segments, positions = np.zeros((3, self._length), np.int32)
        end = 0
        for segment, (document, start, size) in enumerate(self._rows[index], 1):
            ids = self._tokens(document)
            if len(ids) != self._lengths[document]:
                raise ValueError(
                    f"jdp.Packed: document {document} has {len(ids)} tokens, not the "
                    f"{self._lengths[document]} that the rows were planned with, so tokens would "
                    f"be lost. Give the lengths of these documents."
                )
            here = slice(end, end + size)
            tokens[here] = ids[start : start + size]
            segments[here], positions[here] = segment, np.arange(start, start + size)
            end += size
        return {"tokens": tokens, "segment_ids": segments, "positions": positions}


def first_fit(lengths: Any, length: int) -> list[list[tuple[int, int, int]]]:
    """Plans rows of at most `length`: of each, its pieces (document, start, size).

    Example:
        >>> first_fit([3, 4, 2], 5)
        [[(0, 0, 3), (2, 0, 2)], [(1, 0, 4)]]
    """
    rows: list[list[tuple[int, int, int]]] = []
    room: dict[int, int] = {}  # of the rows still open, oldest first
    for document, total in enumerate(map(int, lengths)):
        for start in range(0, total, length):
            size = min(length, total - start)
            row = next((row for row, left in room.items() if left >= size), None)
            if row is None:
                row = len(rows)
                rows.append([])
                room[row] = length
            rows[row].append((document, start, size))
            room[row] -= size
            if not room[row]:
                del room[row]
            elif len(room) > _OPEN_ROWS:
                del room[next(iter(room))]
    return rows


def needed(module: str, who: str, packages: str) -> Any:
    """Imports an optional library, or says how to get it."""
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{who} reads through {module}, which is not installed ({error}). Install it with: "
            f"pip install {packages}"
        ) from error


def _existing(paths: Any, who: str) -> list[str]:
    """Paths with patterns replaced by what they match, sorted."""
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    found = []
    for path in map(os.fspath, given):
        matches = [path] if os.path.exists(path) else sorted(glob.glob(path))
        if not matches:
            raise FileNotFoundError(
                f"{who} found nothing at {path!r}. Training would go without it: check the path, "
                f"relative to {os.getcwd()}, and that the file system is mounted on this host."
            )
        found += matches
    return found
