"""Sampling of rows by hash: the same rows in whatever order they come, on every rank and in every run."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from fullshard.program.data.examples import Example, Split


@dataclass(frozen=True)
class Sample:
    """A number of rows to draw from a table. A row is drawn or not by a hash of its texts and the seed."""

    rows: int  # rows to draw, positive; a table with fewer rows is used as a whole
    seed: int  # seed of the run

    def drawn(self, examples: Iterable[Example]) -> NDArray[np.bool_]:
        """Return whether each row is drawn: ``min(rows, number of examples)`` are. Any process can call it.

        The examples are not kept: a row takes 8 bytes of memory, and about 40 at the end.
        """
        keys = np.fromiter((self._key(one) for one in examples), np.uint64)
        order = np.argsort(keys, kind="stable")
        ascending = keys[order]
        # Equal rows have one key, so they are numbered: otherwise a frequent row would be drawn every time or never.
        firsts = np.flatnonzero(np.concatenate([np.ones(min(1, len(keys)), np.bool_), np.diff(ascending) != 0]))
        copies = np.arange(len(keys)) - np.repeat(firsts, np.diff(np.append(firsts, len(keys))))
        found = np.zeros(len(keys), np.bool_)
        found[order[np.argsort(_mixed(ascending, copies.astype(np.uint64)), kind="stable")[: self.rows]]] = True
        return found

    def _key(self, example: Example) -> int:
        # Not the hash that holds rows out: of held-out rows it has only small values.
        content = json.dumps([self.seed, example.source, example.references, example.weight])
        return int.from_bytes(blake2b(content.encode(), digest_size=8).digest(), "big")


def _mixed(keys: NDArray[np.uint64], copies: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the hash of each key and the number of its copy; the first copy's is the key itself."""
    mixed = copies * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return keys + (mixed ^ (mixed >> np.uint64(31)))


def sample_notes(drawn: NDArray[np.bool_], split: Split) -> tuple[str, ...]:
    """Return a line for the user about a split's drawn rows, or none if all of them are."""
    if drawn.all():
        return ()
    name, option = ("training", "train") if split == "train" else ("held-out", "eval")
    return (
        f"{name}: {drawn.sum():,} of {len(drawn):,} rows, drawn by a hash of each row and the seed "
        f"(data.max_{option}_samples)",
    )
