"""Rows that each set of a mixture contributes to an epoch: exact shares, the same on every rank and in every run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True)
class Mixture:
    """Sets of rows with a weight each; rows are numbered consecutively through all sets.

    An epoch has as many rows as all sets together, and a set's share is in proportion to its weight. Each set is
    traversed in an order drawn from the seed, then in another order, and so on across epochs: at any time, the numbers
    of times that its rows were taken differ by at most one.
    """

    rows: tuple[int, ...]  # rows of each set
    weights: tuple[float, ...]  # weight of each set, positive; only their ratios matter
    seed: int = 0  # seed of the run

    @property
    def counts(self) -> tuple[int, ...]:
        """Rows of each set in an epoch: its share, rounded by largest remainder, at least one."""
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
        """Return positions ``first`` to ``end`` of one set's successive orders."""
        passes = range(first // rows, (end - 1) // rows + 1)
        orders = np.concatenate([self._order(number, rows, one) for one in passes])
        return orders[first - passes.start * rows : end - passes.start * rows]

    def _order(self, number: int, rows: int, which: int) -> NDArray[np.int64]:
        """Return one order of all rows of a set."""
        # Each set and pass has its own seed, far from the epochs' seeds, which are seed + epoch.
        mixed = np.random.SeedSequence([self.seed, number, which]).generate_state(1, np.uint64)[0]
        generator = torch.Generator().manual_seed(int(mixed) >> 1)
        return torch.randperm(rows, generator=generator).numpy()


def shares(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Divide ``total`` in proportion to weights by largest remainder; each share is at least one.

    Args:
        total: At least the number of weights.
        weights: Positive numbers.

    Returns:
        Whole numbers that add up to ``total``.
    """
    exact = [Fraction(weight) * total / sum(map(Fraction, weights)) for weight in weights]
    found = [int(share) for share in exact]
    # Of equal remainders, the first set's is rounded up; exact fractions make every machine decide alike.
    by_remainder = sorted(range(len(exact)), key=lambda number: (found[number] - exact[number], number))
    for number in by_remainder[: total - sum(found)]:
        found[number] += 1
    while 0 in found:
        found[found.index(max(found))] -= 1
        found[found.index(0)] += 1
    return tuple(found)
