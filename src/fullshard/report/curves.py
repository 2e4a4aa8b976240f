"""Thinning and smoothing of long series for the charts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

MOST_POINTS = 1_500
"""Maximum points of a drawn curve; each interval of a longer one shows its minimum and maximum."""

SMOOTHED_SHARE = 30
"""A curve is smoothed over this fraction (1 / n) of its steps."""

Points = tuple[list[float], list[float]]


def series(records: Sequence[dict[str, Any]], key: str) -> Points:
    """Return the steps with a finite value of ``key``, and the values."""
    pairs = [(r["step"], r[key]) for r in records if isinstance(r.get(key), (int, float)) and math.isfinite(r[key])]
    return [float(step) for step, _ in pairs], [float(value) for _, value in pairs]


def thin(points: Points, most: int = MOST_POINTS) -> Points:
    """Return at most ``most`` of the points in order, with the minimum and maximum of each interval."""
    xs, ys = points
    order = kept(ys, most)
    return [xs[i] for i in order], [ys[i] for i in order]


def kept(ys: Sequence[float], most: int) -> Sequence[int]:
    """Return at most ``most`` places of ``ys`` in order, with the minimum and maximum of each interval."""
    if len(ys) <= most:
        return range(len(ys))
    chosen: set[int] = {0, len(ys) - 1}
    intervals = (most - 2) // 2
    for interval in range(intervals):
        low, high = interval * len(ys) // intervals, (interval + 1) * len(ys) // intervals
        chosen |= {min(range(low, high), key=ys.__getitem__), max(range(low, high), key=ys.__getitem__)}
    return sorted(chosen)


def smooth(points: Points) -> tuple[Points, int]:
    """Return the bias-corrected exponential moving average, and the number of steps it averages."""
    xs, ys = points
    over = max(1, len(xs) // SMOOTHED_SHARE)
    keep = 1 - 2 / (over + 1)
    smoothed, total, weight = [], 0.0, 0.0
    for value in ys:
        total, weight = keep * total + value, keep * weight + 1
        smoothed.append(total / weight)
    return (xs, smoothed), over
