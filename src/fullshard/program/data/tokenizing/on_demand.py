"""Rows whose token ids are made on demand."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fullshard.program.data.tokenizing.ragged import OFFSET_DTYPE, EncodedRows, Ragged


class RowSource(Protocol):
    """A source of token ids; threads may share it."""

    def encode(self, rows: Sequence[int]) -> EncodedRows:
        """Return the ids of rows, whose numbers must ascend."""
        ...


class OnDemand(Ragged):
    """One side of rows that are tokenized on demand; there is no array of ids."""

    def __init__(self, source: RowSource, side: str, lengths: NDArray[np.integer]) -> None:
        """Set the rows' lengths, exact or estimated; ``side`` is source, target or spans."""
        self._source, self._side = source, side
        self.offsets = np.concatenate([np.zeros(1, OFFSET_DTYPE), np.cumsum(lengths, dtype=OFFSET_DTYPE)])

    def __getitem__(self, row: int) -> NDArray[np.int32]:
        """Return one row."""
        if not 0 <= row < len(self):
            raise IndexError(f"There is no row {row}: rows are 0 to {len(self) - 1}.")
        encoded = self._source.encode([row])
        if self._side == "spans":
            assert encoded.spans is not None, "a set with spans has them in all rows"
            return encoded.spans[0]
        return (encoded.source if self._side == "source" else encoded.target).ids[0]

    def checksum(self) -> int:
        """Return a CRC-32 of the lengths."""
        return zlib.crc32(np.ascontiguousarray(self.offsets).data)


class Picked(Ragged):
    """Some rows of a larger set, indexed by their numbers in it."""

    def __init__(self, picked: Ragged, rows: Sequence[int]) -> None:
        """Give the rows of ``picked`` the numbers ``rows``."""
        super().__init__(picked.ids, picked.offsets)
        self._places = {row: place for place, row in enumerate(rows)}

    def __getitem__(self, row: int) -> NDArray[np.int32]:
        """Return one row as a view, by its number in the larger set."""
        return super().__getitem__(self._places[row])
