"""Files of examples as sources: each format is read by its own library, none is here.

    TokenFile      a flat file of token ids    windows of `length` + 1 ids, memory-mapped
    ArrayRecords   ArrayRecord files           through array_record, by Grain's source
    Parquet        Parquet files               through pyarrow, row groups kept for a while

In: paths and patterns. Out: a `Source`; it holds paths, and opens files where it reads them.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jdp.optional import library

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

_ROW_GROUPS_KEPT = 8  # decoded row groups of each process; a group is usually 10-100 MB


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
        found = existing(path, "jdp.TokenFile")
        if len(found) > 1:
            raise ValueError(
                f"jdp.TokenFile got {path!r}, which names {len(found)} files, and a window must "
                f"not reach from one into another. Give one."
            )
        self._path = found[0]
        self._length, self._dtype = length, np.dtype(dtype)
        self._bytes = size = os.path.getsize(self._path)
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
        if ids.dtype.kind not in "iu":
            raise ValueError(
                f"jdp.TokenFile: {self._path} holds {ids.dtype}, and ids of tokens are integers. "
                f"Give a file of integers, or their dtype."
            )
        self._windows = (len(ids) - 1) // length

    @functools.cached_property
    def _ids(self) -> np.ndarray:
        try:
            if self._path.endswith(".npy"):
                mapped = np.load(self._path, mmap_mode="r")
            else:
                mapped = np.memmap(self._path, self._dtype, mode="r")
        except (ValueError, OSError) as error:
            raise damaged("jdp.TokenFile", self._path, error) from error
        return np.asarray(mapped)  # a plain view, which is quicker to cut windows from

    def __getstate__(self) -> dict[str, Any]:
        # a pickled memmap is a copy of the file
        return {name: value for name, value in self.__dict__.items() if name != "_ids"}

    def __len__(self) -> int:
        return self._windows

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, np.ndarray]]:
        # Reading a mapping beyond the end of its file ends the process, with no word (SIGBUS).
        with contextlib.suppress(FileNotFoundError):  # removed, but as long as ever
            if os.stat(self._path).st_size < self._bytes:
                raise IndexError(self._shorter(indices[0]))
        starts = [index * self._length for index in indices]
        windows = [np.array(self._ids[start : start + self._length + 1]) for start in starts]
        for index, window in zip(indices, windows, strict=True):
            if len(window) <= self._length:
                raise IndexError(self._shorter(index))
        return [{"tokens": window} for window in windows]

    def _shorter(self, index: int) -> str:
        return (
            f"jdp.TokenFile: {self._path} has no whole window {index} of {self._windows}: the "
            "file has become shorter. Start again with the file as it is."
        )


class ArrayRecords:
    """Records of ArrayRecord files, decoded one by one.

    Args:
        paths: A file, a glob pattern, or several of them; read in the order given, patterns sorted.
        decode: Makes an example of a record's bytes.

    Raises:
        FileNotFoundError: If a path or pattern matches nothing.
        ValueError: If a file is damaged; later, if a record is, which its checksum tells.
        ImportError: If Grain's ArrayRecord reader is not installed.

    Example:
        >>> ArrayRecords("no/such/file.array_record", decode=bytes)
        Traceback (most recent call last):
        FileNotFoundError: jdp.ArrayRecords found nothing at 'no/such/file.array_record'. ...
    """

    def __init__(
        self, paths: str | os.PathLike[str] | Sequence[str], *, decode: Callable[[bytes], Any]
    ) -> None:
        self._paths = existing(paths, "jdp.ArrayRecords")
        self._decode = decode
        grain = library("grain", "jdp.ArrayRecords reads through Grain", "data")
        try:
            self._records = grain.sources.ArrayRecordDataSource(self._paths)
            self._length = len(self._records)
        except Exception as error:
            raise damaged("jdp.ArrayRecords", ", ".join(self._paths), error) from error

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        try:
            record = self._records[index]
        except Exception as error:
            where = f"record {index} of {', '.join(self._paths):.300}"
            raise damaged("jdp.ArrayRecords", where, error) from error
        return self._decode(record)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Several at a time, which array_record reads in parallel."""
        return [self._decode(record) for record in self._records.__getitems__(indices)]


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
        ValueError: If a column is not in a file, naming both, or a file is damaged.
        ImportError: If pyarrow is not installed.

    Example:
        >>> Parquet("no/such/*.parquet")
        Traceback (most recent call last):
        FileNotFoundError: jdp.Parquet found nothing at 'no/such/*.parquet'. ...
    """

    def __init__(
        self, paths: str | os.PathLike[str] | Sequence[str], *, columns: Sequence[str] | None = None
    ) -> None:
        columns = (columns,) if isinstance(columns, str) else columns
        self._columns = None if columns is None else tuple(columns)
        self._groups: list[_Group] = []
        sizes = []
        for path in existing(paths, "jdp.Parquet"):
            changed = os.stat(path).st_mtime_ns
            for number, rows in enumerate(_group_sizes(path, self._columns or ())):
                self._groups.append(_Group(path, changed, number))
                sizes.append(rows)
        self._ends = np.cumsum(sizes, dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"jdp.Parquet has rows 0 to {len(self) - 1}, and no row {index}.")
        group = int(np.searchsorted(self._ends, index, side="right"))
        row = index - (int(self._ends[group - 1]) if group else 0)
        table = _read_group(self._groups[group], self._columns)
        return {name: table[name][row].as_py() for name in table.column_names}


class _Group(NamedTuple):
    path: str
    changed: int  # when, in ns: a file written anew is another one
    number: int


def _group_sizes(path: str, columns: Sequence[str]) -> list[int]:
    parquet = library("pyarrow.parquet", "jdp.Parquet reads through pyarrow", "data")
    try:
        metadata = parquet.read_metadata(path)
        names = metadata.schema.to_arrow_schema().names
    except Exception as error:
        raise damaged("jdp.Parquet", path, error) from error
    if missing := set(columns) - set(names):
        raise ValueError(
            f"jdp.Parquet: {path} has no column {sorted(missing)}, only {names}, so its rows would "
            f"lack it. Give columns that every file has."
        )
    return [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]


@functools.lru_cache(maxsize=_ROW_GROUPS_KEPT)
def _read_group(group: _Group, columns: tuple[str, ...] | None) -> Any:
    parquet = library("pyarrow.parquet", "jdp.Parquet reads through pyarrow", "data")
    try:
        if os.stat(group.path).st_mtime_ns != group.changed:
            raise OSError("it was written anew since this run opened it")
        with parquet.ParquetFile(group.path, page_checksum_verification=True) as file:
            return file.read_row_group(group.number, columns=columns and list(columns))
    except Exception as error:
        raise damaged("jdp.Parquet", f"row group {group.number} of {group.path}", error) from error


def existing(paths: Any, who: str) -> list[str]:
    """Paths of files, with patterns replaced by what they match, sorted."""
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
    for path in found:
        if os.path.isdir(path):
            raise IsADirectoryError(
                f"{who}: {path} is a folder, and which of its files are data is not for a guess. "
                f"Give a pattern, such as {os.path.join(path, '*')!r}."
            )
    return found


def damaged(who: str, what: str, error: Exception) -> ValueError:
    """The error for a file that its library cannot read."""
    return ValueError(
        f"{who} cannot read {what}: {type(error).__name__}: {error}. The file is cut short, "
        f"damaged or of another format, and leaving it out would lose its examples. Copy it again "
        f"or leave it out of the paths."
    )
