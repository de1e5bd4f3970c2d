"""Documents of unequal length put into rows of equal length, none cut without need, none lost.

In: a source of documents. Out: a source of rows, planned once from the lengths alone. It is not
`jdp.packing`, which gives the batches of a loader one form.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jdp.sources import Source

_OPEN_ROWS = 64  # that may still take a document, which bounds the cost of planning


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
