"""Rows of different lengths in one array, in memory or mapped from a file."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

ID_DTYPE = np.dtype(np.int32)
OFFSET_DTYPE = np.dtype(np.int64)

_MOST_SUMMED = 1 << 24
"""Of more ids than that a checksum has every second, third, …: it is for rows of other files, not for damage."""


class Ragged:
    """Rows of token ids, end to end in one array.

    Attributes:
        ids: int32, all rows one after another.
        offsets: int64, one more than there are rows: row i is ``ids[offsets[i] : offsets[i + 1]]``.
    """

    def __init__(self, ids: NDArray[np.int32], offsets: NDArray[np.int64]) -> None:
        """Rows of arrays that are there already; nothing is copied."""
        self.ids = ids
        self.offsets = offsets

    @classmethod
    def from_rows(cls, rows: Iterable[Sequence[int]]) -> Ragged:
        """Copy rows into one array."""
        rows = list(rows)
        offsets = np.zeros(len(rows) + 1, OFFSET_DTYPE)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        return cls(np.fromiter(chain.from_iterable(rows), ID_DTYPE, count=int(offsets[-1])), offsets)

    @classmethod
    def joined(cls, parts: Sequence[Ragged]) -> Ragged:
        """The rows of several, in their order."""
        lengths = np.concatenate([part.lengths for part in parts])
        offsets = np.concatenate([np.zeros(1, OFFSET_DTYPE), np.cumsum(lengths, dtype=OFFSET_DTYPE)])
        return cls(np.concatenate([part.ids for part in parts]), offsets)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each row."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> NDArray[np.int32]:
        """One row, as a view."""
        if not 0 <= row < len(self):
            raise IndexError(f"There is no row {row}: rows go from 0 to {len(self) - 1}.")
        return self.ids[self.offsets[row] : self.offsets[row + 1]]

    def __iter__(self) -> Iterator[NDArray[np.int32]]:
        """All rows, as views."""
        return (self[row] for row in range(len(self)))

    def checksum(self) -> int:
        """A CRC-32 of all lengths, and of all or evenly many ids."""
        step = max(1, -(-self.ids.size // _MOST_SUMMED))
        lengths = zlib.crc32(np.ascontiguousarray(self.offsets).data)
        return zlib.crc32(np.ascontiguousarray(self.ids[::step]).data, lengths)

    def tolist(self) -> list[list[int]]:
        """All rows as lists; for few rows."""
        return [row.tolist() for row in self]
