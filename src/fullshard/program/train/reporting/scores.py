"""Scores of predictions: the value of each metric, its interval, and the confusion matrix of a label set."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

LOSS_METRICS = ("perplexity",)
"""Metrics of the loss; all others need generated text."""

OTHER = "(other)"
"""Name of text that is not a label in a confusion matrix."""

RESAMPLES = 2_000
"""Resamples of the bootstrap."""

LEAST_OTHERS = 10
"""Fewest rows that must differ from the most frequent score for the bootstrap to be used."""

_NORMAL = 1.959963984540054
"""97.5th percentile of the normal distribution."""


@dataclass(frozen=True)
class Confusion:
    """A confusion matrix: the counts of each pair of correct and predicted label."""

    labels: tuple[str, ...]  # the label set; the index ``len(labels)`` stands for text that is not a label
    # index of the correct label, index of the predicted one, and the number of rows, for cells that are not empty,
    # sorted by the indices
    cells: tuple[tuple[int, int, int], ...]

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Confusion:
        """Return the matrix that ``dataclasses.asdict`` was called on, also if JSON has turned tuples into lists."""
        return cls(tuple(values["labels"]), tuple((right, written, rows) for right, written, rows in values["cells"]))

    def name(self, index: int) -> str:
        """Return the label of an index."""
        return self.labels[index] if index < len(self.labels) else OTHER

    def matrix(self) -> list[list[int]]:
        """Return counts by correct label (row) and predicted label (column); the last column is any other text."""
        counts = [[0] * (len(self.labels) + 1) for _ in self.labels]
        for right, written, rows in self.cells:
            counts[right][written] = rows
        return counts

    def mistakes(self) -> list[tuple[str, str, int]]:
        """Return correct label, predicted label and number of rows of each mistake, the most frequent first."""
        wrong = [cell for cell in self.cells if cell[0] != cell[1]]
        return [
            (self.name(right), self.name(written), rows)
            for right, written, rows in sorted(wrong, key=lambda c: (-c[2], *c[:2]))
        ]


@dataclass(frozen=True)
class Scores:
    """Scores of predictions."""

    values: Mapping[str, float]  # value of each metric
    confusion: Confusion | None = None  # the confusion matrix if a metric is accuracy, else None


def mean_interval(scores: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean of row scores from 0 to 1, at least one; any rank, alone.

    Where each row is right (1) or wrong (0) it is Wilson's interval of a share, which is valid for few rows and near 0
    and 1. Otherwise it is the bootstrap's with a fixed seed: each of :data:`RESAMPLES` resamples draws as many rows as
    there are, with replacement, and the interval is from the 2.5th to the 97.5th percentile of their means. If fewer
    than :data:`LEAST_OTHERS` rows differ from the most frequent score, resamples hardly differ, and Wilson's is used:
    wider than needed, because scores between 0 and 1 vary no more than a share with their mean.
    """
    # Rows of equal score are drawn together, which is faster.
    values, counts = np.unique(np.asarray(scores, dtype=np.float64), return_counts=True)
    if set(values.tolist()) <= {0.0, 1.0} or len(scores) - counts.max() < LEAST_OTHERS:
        return _wilson(float(np.mean(scores)), len(scores))
    drawn = np.random.default_rng(0).multinomial(len(scores), counts / len(scores), size=RESAMPLES)
    low, high = np.percentile(drawn @ values / len(scores), (2.5, 97.5))
    return float(low), float(high)


def _wilson(share: float, rows: int) -> tuple[float, float]:
    square = _NORMAL**2 / rows
    middle = (share + square / 2) / (1 + square)
    half = _NORMAL / (1 + square) * math.sqrt(share * (1 - share) / rows + square / (4 * rows))
    # At 0 and 1 one bound equals the share, except for rounding.
    return max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))


def format_metric(metric: str, value: float) -> str:
    """Format a value for people: a share in percent, perplexity as a number."""
    return f"{value:,.3f}" if metric in LOSS_METRICS else f"{value:.2%}"
