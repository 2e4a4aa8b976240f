"""Numbers of the page: formatted readably at any magnitude, and long series thinned and smoothed for the charts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

WHOLE = ",~f"
"""Plotly's format for an axis of counts: no needless digits, but enough to distinguish two ticks."""

PERCENT = ",~%"
"""Plotly's format for an axis of shares."""

FEW_STEPS = 12
"""An axis of at most this many steps has a tick for each; otherwise plotly adds ticks between steps."""


def shown(value: float) -> float:
    """Round to seven significant digits; more are not visible, and a curve near 1 needs as many."""
    return float(f"{value:.7g}")


def number(value: float, decimals: int = 1) -> str:
    """Format a number with this many decimals, or with three significant digits if it is small."""
    small = abs(value) < 10 ** (2 - decimals) / 2
    return f"{value:.3g}" if small else f"{value:,.{decimals}f}"


def share(value: float) -> str:
    """Format a share as a percentage."""
    return "<0.1%" if 0 < value < 5e-4 else f"{value:.1%}"


def memory_unit(nbytes: Iterable[int]) -> tuple[str, int]:
    """Return name and bytes of the unit (KiB, MiB or GiB) that suits the largest of these sizes."""
    largest = max(nbytes, default=0)
    if largest < 1 << 20:
        return "KiB", 1 << 10
    return ("MiB", 1 << 20) if largest < 10 << 30 else ("GiB", 1 << 30)


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
