"""Rows chosen by a hash, drawn or held out: the same in whatever order they come, on every rank and in every run."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from fullshard.errors import DataError
from fullshard.program.data.examples import Example, Split
from fullshard.program.data.reading.conversations import opening


@dataclass(frozen=True)
class Sample:
    """A number of rows to draw. A row is drawn or not by a hash of its texts and the seed."""

    rows: int  # rows to draw, positive; of fewer rows all are used
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


def is_held_out(key: str, fraction: float) -> bool:
    """Return True for a ``fraction`` of keys; rows with the same key are on the same side."""
    digest = blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


class Sides:
    """Assigns rows to splits by their sources; conversations by their openings.

    All turns of a conversation are on one side, and conversations that begin with the same turns share a side.

    Attributes:
        counts: Rows of each split so far.
    """

    def __init__(self, fraction: float, where: str) -> None:
        """Start with no rows; ``where`` names the data in messages."""
        self.counts: dict[Split, int] = {"train": 0, "validation": 0}
        self._fraction, self._where, self._of_turns = fraction, where, False

    def side(self, example: Example) -> Split:
        """Return the split of a row, and count it."""
        talk = example.conversation
        self._of_turns = talk is not None
        key = example.source if talk is None else opening(talk)
        split: Split = "validation" if is_held_out(key, self._fraction) else "train"
        self.counts[split] += 1
        return split

    def note(self) -> str:
        """Return the message about how many rows are held out; called after all rows were seen.

        Raises:
            DataError: One of the splits is empty.
        """
        num_train, num_held_out = self.counts["train"], self.counts["validation"]
        require_both_sides(num_train, num_held_out, self._fraction, self._where)
        rows = num_train + num_held_out
        what = "the turns before the first answer" if self._of_turns else "a row's source"
        return (
            f"{self._where}: {num_held_out} of {rows} rows are held out, {num_held_out / rows:.1%}, by "
            f"data.validation_fraction {self._fraction:g}: the hash of {what} decides."
        )


def require_both_sides(num_train: int, num_held_out: int, fraction: float, where: str) -> None:
    """Raise DataError if a fraction leaves no rows for training or none for evaluation."""
    if not num_train or not num_held_out:
        raise DataError(
            f"{where}: data.validation_fraction {fraction} leaves {num_train} rows for training and {num_held_out} "
            "held out; both need at least one. Choose another fraction, or give data.validation_file."
        )
