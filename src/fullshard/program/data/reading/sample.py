"""Rows chosen by a hash, drawn or held out: the same in whatever order they come, on every rank and in every run."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable, Mapping
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
    return _hash_of(key) < fraction * 2**64


def _hash_of(key: str) -> int:
    return int.from_bytes(blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


MOST_CLASSES = 200
"""Distinct targets up to which they are the classes of a table, if it has at least twice as many rows."""


@dataclass(frozen=True)
class HeldOut:
    """Chooses the held-out rows of a table by the hash of their sources; of conversations by that of their openings.

    All turns of a conversation are on one side, and rows with the same source, or conversations that begin with the
    same turns, share a side. It depends on the rows, not on their order.
    """

    fraction: float
    where: str  # names the data in messages
    by_class: bool = True  # whether each class of a table that has classes is held out in the same share

    def rows(self, examples: Iterable[Example]) -> tuple[NDArray[np.bool_], str]:
        """Return whether each row is held out, and a message about how many are. Any process can call it.

        The examples are not kept: a row takes 12 bytes of memory, and about 60 at the end.

        Raises:
            DataError: One of the splits is empty.
        """
        hashes, classes = array("Q"), array("i")
        names: dict[str | bool, int] = {}
        of_turns, has_classes = False, self.by_class
        for example in examples:
            of_turns = example.conversation is not None
            hashes.append(_hash_of(opening(example.conversation) if example.conversation else example.source))
            if has_classes:
                name = example.target if example.desirable is None else example.desirable
                classes.append(names.setdefault(name, len(names)))
                # Of a pair both completions are the targets.
                has_classes = len(names) <= MOST_CLASSES and example.rejected is None
        keys = np.frombuffer(hashes, np.uint64) if hashes else np.zeros(0, np.uint64)
        if has_classes and 1 < len(names) <= len(keys) / 2:
            held_out = self._of_classes(keys, np.frombuffer(classes, np.int32), names)
        else:
            names, held_out = {}, keys < np.uint64(math.ceil(self.fraction * 2**64))
        return held_out, self._note(held_out, len(names), of_turns=of_turns)

    def _of_classes(
        self, keys: NDArray[np.uint64], classes: NDArray[np.int32], names: Mapping[str | bool, int]
    ) -> NDArray[np.bool_]:
        """Hold out the rows of each class with the smallest hashes, so many that classes keep their shares.

        Rows of one source are of the class that most of them have, the smallest one by name of equal ones.
        """
        ranks = np.argsort(np.argsort([str(name) for name in names], kind="stable"), kind="stable")[classes]
        distinct, source, copies = np.unique(keys, return_inverse=True, return_counts=True)
        pairs, counts = np.unique(np.stack([source, ranks]), axis=1, return_counts=True)
        order = np.lexsort((pairs[1], -counts, pairs[0]))
        first = order[np.unique(pairs[0][order], return_index=True)[1]]
        of_source = pairs[1][first]
        sizes = np.bincount(of_source, copies, len(names)).astype(np.int64)
        taken = np.zeros(len(distinct), np.bool_)
        # Of labels that are compared, both sides need each.
        quotas, room = _quotas(sizes, self.fraction, least=int(True in names)), 0
        for one in np.argsort(-sizes, kind="stable"):
            room += int(quotas[one])  # what sources of several rows left over, or took too much
            for member in np.flatnonzero(of_source == one)[:-1]:  # by ascending hash; one stays for training
                if copies[member] <= 2 * room:
                    taken[member], room = True, room - int(copies[member])
        return taken[source]

    def _note(self, held_out: NDArray[np.bool_], classes: int, *, of_turns: bool) -> str:
        rows, num_held_out = len(held_out), int(held_out.sum())
        require_both_sides(rows - num_held_out, num_held_out, self.fraction, self.where)
        what = "the turns before the first answer" if of_turns else "a row's source"
        how = f"the hash of {what} decides"
        if classes:
            how += f", and each of {classes} targets or labels keeps its share (data.held_out_by)"
        return (
            f"{self.where}: {num_held_out} of {rows} rows are held out, {num_held_out / rows:.1%}, by "
            f"data.validation_fraction {self.fraction:g}: {how}."
        )


def _quotas(sizes: NDArray[np.int64], fraction: float, *, least: int) -> NDArray[np.int64]:
    """Return the rows to hold out of classes: the fraction of all rows, divided by largest remainders.

    Of equal remainders the larger class is served first. A class gives at least ``least`` rows, and keeps one.
    """
    exact = sizes * fraction
    quotas = np.clip(np.floor(exact).astype(np.int64), least, np.maximum(sizes - 1, 0))
    left = max(1, round(float(sizes.sum()) * fraction)) - int(quotas.sum())
    order = [one for one in np.lexsort((-sizes, quotas - exact)) if quotas[one] < sizes[one] - 1]
    quotas[order[: max(0, left)]] += 1
    return quotas


def require_both_sides(num_train: int, num_held_out: int, fraction: float, where: str) -> None:
    """Raise DataError if a fraction leaves no rows for training or none for evaluation."""
    if not num_train or not num_held_out:
        raise DataError(
            f"{where}: data.validation_fraction {fraction} leaves {num_train} rows for training and {num_held_out} "
            "held out; both need at least one. Choose another fraction, or give data.validation_file."
        )
