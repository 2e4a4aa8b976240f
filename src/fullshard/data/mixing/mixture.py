"""The rows that each set of a mixture gives to an epoch: exact shares, the same on every rank and in every run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True)
class Mixture:
    """Sets of rows with a weight each; the rows are numbered through all sets, one after another.

    An epoch has as many rows as all sets together, and a weight is a set's share of them. A set goes through all its
    rows in an order drawn from the seed, and then through all of them again in another order, across epochs: at any
    time each of its rows was taken equally often, or once more than others.
    """

    rows: tuple[int, ...]  # rows of each set
    weights: tuple[float, ...]  # weight of each set, positive; only their ratios matter
    seed: int = 0  # seed of the run

    @property
    def counts(self) -> tuple[int, ...]:
        """Rows of each set in an epoch: its share, rounded by largest remainder; at least one."""
        return shares(sum(self.rows), self.weights)

    def epoch_rows(self, epoch: int) -> NDArray[np.int64]:
        """Return the numbers of an epoch's rows, set by set, not shuffled; ``epoch`` counts from 0.

        Returns:
            ``sum(rows)`` numbers from 0 to ``sum(rows) - 1``.
        """
        starts = np.cumsum([0, *self.rows[:-1]])
        parts = [
            start + self._taken(number, rows, epoch * count, (epoch + 1) * count)
            for number, (start, rows, count) in enumerate(zip(starts, self.rows, self.counts, strict=True))
        ]
        return np.concatenate(parts)

    def _taken(self, number: int, rows: int, first: int, end: int) -> NDArray[np.int64]:
        """Return places ``first`` to ``end`` of one set's orders, one after another."""
        passes = range(first // rows, (end - 1) // rows + 1)
        orders = np.concatenate([self._order(number, rows, one) for one in passes])
        return orders[first - passes.start * rows : end - passes.start * rows]

    def _order(self, number: int, rows: int, which: int) -> NDArray[np.int64]:
        """Return one order of all rows of a set."""
        # A seed of its own for each set and pass, far from those of epochs, which are seed + epoch.
        mixed = np.random.SeedSequence([self.seed, number, which]).generate_state(1, np.uint64)[0]
        generator = torch.Generator().manual_seed(int(mixed) >> 1)
        return torch.randperm(rows, generator=generator).numpy()


def shares(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Divide ``total`` in proportion to weights, by largest remainder; each gets at least one.

    Args:
        total: At least as many as there are weights.
        weights: Positive numbers.

    Returns:
        Whole numbers that add up to ``total``.
    """
    exact = [Fraction(weight) * total / sum(map(Fraction, weights)) for weight in weights]
    found = [int(share) for share in exact]
    # Of equal remainders the first set's counts; fractions are exact, so that every machine decides alike.
    by_remainder = sorted(range(len(exact)), key=lambda number: (found[number] - exact[number], number))
    for number in by_remainder[: total - sum(found)]:
        found[number] += 1
    while 0 in found:
        found[found.index(max(found))] -= 1
        found[found.index(0)] += 1
    return tuple(found)
