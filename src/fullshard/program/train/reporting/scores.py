"""The interval of a metric that is a mean over rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

RESAMPLES = 2_000
"""Resamples of the bootstrap."""

LEAST_OTHERS = 10
"""Fewest rows that must differ from the most frequent score for the bootstrap to be used."""

_NORMAL = 1.959963984540054
"""97.5th percentile of the normal distribution."""


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
