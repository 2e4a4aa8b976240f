"""Rows of token ids of different lengths: in memory, mapped from a file, made on demand, and several joined."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

ID_DTYPE = np.dtype(np.int32)
OFFSET_DTYPE = np.dtype(np.int64)


class Ragged:
    """Rows of token ids, concatenated in one array.

    Attributes:
        ids: int32, all rows concatenated.
        offsets: int64, number of rows + 1; row i is ``ids[offsets[i] : offsets[i + 1]]``.
    """

    def __init__(self, ids: NDArray[np.int32], offsets: NDArray[np.int64]) -> None:
        """Wrap existing arrays without copying them."""
        self.ids, self.offsets = ids, offsets

    @classmethod
    def from_rows(cls, rows: Iterable[Sequence[int]]) -> Ragged:
        """Copy rows into one array."""
        rows = list(rows)
        offsets = offsets_of([len(row) for row in rows])
        return cls(np.fromiter(chain.from_iterable(rows), ID_DTYPE, count=int(offsets[-1])), offsets)

    @classmethod
    def joined(cls, parts: Sequence[Ragged]) -> Ragged:
        """Concatenate the rows of several, in order."""
        offsets = offsets_of(np.concatenate([part.lengths for part in parts]))
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
        """Return one row, as a view if the ids are held."""
        if not 0 <= row < len(self):
            raise IndexError(f"There is no row {row}: rows are 0 to {len(self) - 1}.")
        return self._row(row)

    def _row(self, row: int) -> NDArray[np.int32]:
        return self.ids[self.offsets[row] : self.offsets[row + 1]]

    def __iter__(self) -> Iterator[NDArray[np.int32]]:
        """Yield all rows as views."""
        return (self[row] for row in range(len(self)))

    def for_epoch(self, epoch: int) -> Ragged:
        """Return the rows of an epoch, counted from 0: the same in each, unless they are made anew; same lengths."""
        del epoch
        return self

    def checksum(self) -> int:
        """Return a CRC-32 of all lengths and ids."""
        lengths = zlib.crc32(np.ascontiguousarray(self.offsets).data)
        return zlib.crc32(np.ascontiguousarray(self.ids).data, lengths)

    def tolist(self) -> list[list[int]]:
        """Return all rows as lists; for few rows."""
        return [row.tolist() for row in self]


def offsets_of(lengths: Sequence[int] | NDArray[np.integer]) -> NDArray[np.int64]:
    """Return where each row starts, and the end of the last."""
    return np.concatenate([np.zeros(1, OFFSET_DTYPE), np.cumsum(lengths, dtype=OFFSET_DTYPE)])


@dataclass(frozen=True)
class Encoded:
    """One side of some rows: ids, and lengths before truncation."""

    ids: Ragged
    full_lengths: NDArray[np.int64]

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], full_lengths: Sequence[int]) -> Encoded:
        """Copy rows and their lengths before truncation."""
        return cls(Ragged.from_rows(rows), np.asarray(full_lengths, np.int64))


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


class RowSource(Protocol):
    """A source of token ids; threads may share it."""

    def encode(self, rows: Sequence[int]) -> EncodedRows:
        """Return the ids of rows, whose numbers must ascend."""
        ...


class OnDemand(Ragged):
    """One side of rows that are tokenized on demand; there is no array of ids."""

    def __init__(self, source: RowSource, side: str, lengths: NDArray[np.integer], content: str) -> None:
        """Set the rows' lengths, exact or estimated; ``side`` is source, target or spans.

        ``content`` is a digest of what the ids are made of.
        """
        self._source, self._side, self._content = source, side, content
        self.offsets = offsets_of(lengths)

    def _row(self, row: int) -> NDArray[np.int32]:
        side = getattr(self._source.encode([row]), self._side)
        return (side.ids if isinstance(side, Encoded) else side)[0]

    def checksum(self) -> int:
        """Return a CRC-32 of the lengths, and of what the ids are made of."""
        return zlib.crc32(np.ascontiguousarray(self.offsets).data, zlib.crc32(self._content.encode()))


class Picked(Ragged):
    """Some rows of a larger set, indexed by their numbers in it."""

    def __init__(self, picked: Ragged, rows: Sequence[int]) -> None:
        """Give the rows of ``picked`` the numbers ``rows``."""
        super().__init__(picked.ids, picked.offsets)
        self._places = {row: place for place, row in enumerate(rows)}

    def __getitem__(self, row: int) -> NDArray[np.int32]:
        """Return one row as a view, by its number in the larger set."""
        return self._row(self._places[row])


class Chained(Ragged):
    """The concatenated rows of several Ragged arrays; there is no single array of ids."""

    def __init__(self, parts: Sequence[Ragged]) -> None:
        """Keep the parts, at least one."""
        self._parts, self._starts = tuple(parts), np.cumsum([0, *map(len, parts)])
        self.offsets = offsets_of(np.concatenate([part.lengths for part in parts]))

    def _row(self, row: int) -> NDArray[np.int32]:
        part = int(np.searchsorted(self._starts, row, side="right")) - 1
        return self._parts[part][row - int(self._starts[part])]

    def for_epoch(self, epoch: int) -> Ragged:
        """See :meth:`Ragged.for_epoch`."""
        return Chained([part.for_epoch(epoch) for part in self._parts])

    def checksum(self) -> int:
        """Return a CRC-32 of the parts' checksums."""
        return zlib.crc32(b"".join(part.checksum().to_bytes(4, "big") for part in self._parts))


class ChainedSource:
    """The concatenated rows of several row sources."""

    def __init__(self, parts: Sequence[RowSource], rows: Sequence[int]) -> None:
        """Keep the parts and the number of rows of each."""
        self._parts, self._starts = tuple(parts), np.cumsum([0, *rows])

    def encode(self, rows: Sequence[int]) -> EncodedRows:
        """Return the ids of rows, whose numbers ascend."""
        numbers = np.asarray(rows)
        part_of = np.searchsorted(self._starts, numbers, side="right") - 1
        found = [
            self._parts[part].encode((numbers[part_of == part] - self._starts[part]).tolist())
            for part in np.unique(part_of).tolist()
        ]
        return joined_rows(found)
