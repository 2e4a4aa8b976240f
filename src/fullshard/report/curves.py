"""Long series made short enough to draw, and smooth enough to read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

MOST_POINTS = 1_500
"""Points of a drawn curve; of a longer one each stretch shows its lowest and its highest value."""

SMOOTHED_SHARE = 30
"""A curve is smoothed over one part in so many of its steps."""

Points = tuple[list[float], list[float]]


def series(records: Sequence[dict[str, Any]], key: str) -> Points:
    """Steps and the finite values of ``key`` in them."""
    pairs = [(r["step"], r[key]) for r in records if isinstance(r.get(key), (int, float)) and math.isfinite(r[key])]
    return [float(step) for step, _ in pairs], [float(value) for _, value in pairs]


def thin(points: Points, most: int = MOST_POINTS) -> Points:
    """At most ``most`` of the points, the extremes of each stretch among them, in order."""
    xs, ys = points
    if len(xs) <= most:
        return points
    kept: set[int] = {0, len(xs) - 1}
    stretches = (most - 2) // 2
    for stretch in range(stretches):
        low, high = stretch * len(xs) // stretches, (stretch + 1) * len(xs) // stretches
        kept |= {min(range(low, high), key=ys.__getitem__), max(range(low, high), key=ys.__getitem__)}
    order = sorted(kept)
    return [xs[i] for i in order], [ys[i] for i in order]


def smooth(points: Points) -> tuple[Points, int]:
    """The exponential moving average, without the bias of its beginning, and the number of steps it is over."""
    xs, ys = points
    over = max(1, len(xs) // SMOOTHED_SHARE)
    keep = 1 - 2 / (over + 1)
    smoothed, total, weight = [], 0.0, 0.0
    for value in ys:
        total, weight = keep * total + value, keep * weight + 1
        smoothed.append(total / weight)
    return (xs, smoothed), over


def shown(value: float) -> float:
    """Five significant digits: more are not seen."""
    return float(f"{value:.5g}")
