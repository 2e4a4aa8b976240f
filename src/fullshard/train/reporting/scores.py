"""Scores of predictions: the value of each metric, and the confusion matrix of a label set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

LOSS_METRICS = ("perplexity",)
"""Metrics of the loss; every other one is of written text."""

OTHER = "(other)"
"""What a confusion matrix calls text that is no label."""


@dataclass(frozen=True)
class Confusion:
    """Which label was written for which.

    Attributes:
        labels: The label set; one further index, ``len(labels)``, stands for text that is no label.
        cells: Index of the right label, index of the written one, and the number of such rows; of cells that are not
            empty, in order of the indices.
    """

    labels: tuple[str, ...]
    cells: tuple[tuple[int, int, int], ...]

    def name(self, index: int) -> str:
        """The label of an index."""
        return self.labels[index] if index < len(self.labels) else OTHER

    def matrix(self) -> list[list[int]]:
        """Counts by right label (row) and written label (column); the last column is text that is no label."""
        counts = [[0] * (len(self.labels) + 1) for _ in self.labels]
        for right, written, rows in self.cells:
            counts[right][written] = rows
        return counts

    def mistakes(self) -> list[tuple[str, str, int]]:
        """Right label, written label, rows: the most frequent first, right answers left out."""
        wrong = [cell for cell in self.cells if cell[0] != cell[1]]
        return [(self.name(right), self.name(written), rows) for right, written, rows in sorted(wrong, key=_by_rows)]


@dataclass(frozen=True)
class Scores:
    """What predictions score.

    Attributes:
        values: For each metric its value.
        confusion: With accuracy, which label was written for which; else None.
    """

    values: Mapping[str, float]
    confusion: Confusion | None = None


def format_metric(metric: str, value: float) -> str:
    """A value as people read it: a share in percent, perplexity as a number."""
    return f"{value:,.3f}" if metric in LOSS_METRICS else f"{value:.2%}"


def _by_rows(cell: tuple[int, int, int]) -> tuple[int, int, int]:
    return (-cell[2], cell[0], cell[1])
