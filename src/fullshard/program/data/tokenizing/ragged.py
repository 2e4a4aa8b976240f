"""Rows of different lengths in one array, in memory or mapped from a file."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

ID_DTYPE = np.dtype(np.int32)
OFFSET_DTYPE = np.dtype(np.int64)

_MOST_SUMMED = 1 << 24
"""Maximum ids in a checksum, evenly spaced; it detects different data, not corruption."""


class Ragged:
    """Rows of token ids, concatenated in one array.

    Attributes:
        ids: int32, all rows concatenated.
        offsets: int64, number of rows + 1; row i is ``ids[offsets[i] : offsets[i + 1]]``.
    """

    def __init__(self, ids: NDArray[np.int32], offsets: NDArray[np.int64]) -> None:
        """Wrap existing arrays without copying them."""
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
        """Concatenate the rows of several, in order."""
        lengths = np.concatenate([part.lengths for part in parts])
        offsets = np.concatenate([np.zeros(1, OFFSET_DTYPE), np.cumsum(lengths, dtype=OFFSET_DTYPE)])
        return cls(np.concatenate([part.ids for part in parts]), offsets)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of tokens of each row."""
        return np.diff(self.offsets)

    @property
    def num_ids(self) -> int:
        """Number of tokens of all rows."""
        return int(self.offsets[-1])

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> NDArray[np.int32]:
        """Return one row as a view."""
        if not 0 <= row < len(self):
            raise IndexError(f"There is no row {row}: rows are 0 to {len(self) - 1}.")
        return self.ids[self.offsets[row] : self.offsets[row + 1]]

    def __iter__(self) -> Iterator[NDArray[np.int32]]:
        """Yield all rows as views."""
        return (self[row] for row in range(len(self)))

    def checksum(self) -> int:
        """Return a CRC-32 of all lengths, and of all or evenly spaced ids."""
        step = max(1, -(-self.ids.size // _MOST_SUMMED))
        lengths = zlib.crc32(np.ascontiguousarray(self.offsets).data)
        return zlib.crc32(np.ascontiguousarray(self.ids[::step]).data, lengths)

    def tolist(self) -> list[list[int]]:
        """Return all rows as lists; for few rows."""
        return [row.tolist() for row in self]


@dataclass(frozen=True)
class Encoded:
    """One side of some rows: ids, and lengths before truncation."""

    ids: Ragged
    full_lengths: NDArray[np.int64]


@dataclass(frozen=True)
class EncodedRows:
    """Both sides of some rows, and which of their tokens are learned."""

    source: Encoded
    target: Encoded
    spans: Ragged | None = None  # start and end of each run of learned tokens, in source and target joined


def joined_rows(parts: Sequence[EncodedRows]) -> EncodedRows:
    """Concatenate the rows of several, in order; all or none have spans."""
    sides = [
        Encoded(Ragged.joined([side.ids for side in one]), np.concatenate([side.full_lengths for side in one]))
        for one in ([part.source for part in parts], [part.target for part in parts])
    ]
    spans = [part.spans for part in parts if part.spans is not None]
    return EncodedRows(sides[0], sides[1], Ragged.joined(spans) if spans else None)
