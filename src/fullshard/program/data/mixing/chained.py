"""Concatenation of tokenized sets without copying their files into memory."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fullshard.program.data.tokenizing.on_demand import RowSource
from fullshard.program.data.tokenizing.ragged import EncodedRows, Ragged, joined_rows
from fullshard.program.data.tokenizing.tokenize import LengthStats, TokenizedSet


class Chained(Ragged):
    """The concatenated rows of several Ragged arrays; there is no single array of ids."""

    def __init__(self, parts: Sequence[Ragged]) -> None:
        """Keep the parts, at least one."""
        self._parts = tuple(parts)
        self._starts = np.cumsum([0, *map(len, parts)])
        lengths = np.concatenate([part.lengths for part in parts])
        self.offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])

    def __getitem__(self, row: int) -> NDArray[np.int32]:
        """Return one row as a view."""
        if not 0 <= row < len(self):
            raise IndexError(f"There is no row {row}: rows are 0 to {len(self) - 1}.")
        part = int(np.searchsorted(self._starts, row, side="right")) - 1
        return self._parts[part][row - int(self._starts[part])]

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


def chained(sets: Sequence[TokenizedSet]) -> TokenizedSet:
    """Return the concatenated rows of all sets; a single set is returned unchanged.

    The sets share one tokenizer and kind of model, so either all or none have spans. They belong to one run, so either
    all or none are tokenized on demand.
    """
    if len(sets) == 1:
        return sets[0]
    spans = [one.spans for one in sets if one.spans is not None]
    sources = [one.source for one in sets if one.source is not None] or None
    return TokenizedSet(
        source_ids=Chained([one.source_ids for one in sets]),
        target_ids=Chained([one.target_ids for one in sets]),
        source_stats=_joined([one.source_stats for one in sets], list(map(len, sets))),
        target_stats=_joined([one.target_stats for one in sets], list(map(len, sets))),
        spans=Chained(spans) if spans else None,
        weights=_joined_weights(sets),
        set_rows=tuple(map(len, sets)),
        source=None if sources is None else ChainedSource(sources, list(map(len, sets))),
        estimated=any(one.estimated for one in sets),
    )


def _joined_weights(sets: Sequence[TokenizedSet]) -> NDArray[np.float64] | None:
    """Return the weight of each row of all sets; None if all are 1."""
    if all(one.weights is None for one in sets):
        return None
    return np.concatenate([np.ones(len(one)) if one.weights is None else one.weights for one in sets])


def _joined(stats: Sequence[LengthStats], rows: Sequence[int]) -> LengthStats:
    tokens = sum(one.mean * count for one, count in zip(stats, rows, strict=True))
    return LengthStats(
        mean=tokens / sum(rows),
        longest=max(one.longest for one in stats),
        truncated=sum(one.truncated for one in stats),
        limit=stats[0].limit,
    )
