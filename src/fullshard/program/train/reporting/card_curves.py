"""The curves of a run as an SVG picture next to its card, drawn without a plotting package."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

CURVES_NAME = "training_curves.svg"
"""File of the picture."""

CURVES_SIGNATURE = "<!-- written by fullshard train -->"
"""A picture without this line is the user's, and is kept."""

MOST_POINTS = 120
"""Most points of the training loss; each is the mean over an equal number of steps."""

WIDTH, HEIGHT = 420, 260
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 34, 42
BLUE, ORANGE, GREY = "#2f6fb7", "#c87a2a", "#98a1ab"

Points = Sequence[tuple[float, float]]
Curve = tuple[str, str, Points, bool]
"""Name, colour, points, and whether each point has a dot."""


def draw_curves(records: Iterable[Mapping[str, Any]]) -> str | None:
    """Return the picture of a run's records of steps and evaluations; None if there is nothing to draw."""
    kept = list(records)
    steps = _points(kept, "step", "loss")
    if not steps:
        return None
    evaluations = [one for one in kept if one["kind"] == "evaluation"]
    each = -(-len(steps) // MOST_POINTS)
    name = "training" if each == 1 else f"training, means of {each:,} steps"
    losses: list[Curve] = [(name, BLUE, _means(steps, each), False)]
    panels = [("Loss for each target token", losses)]
    if evaluations:
        losses.append(("held-out rows", ORANGE, _points(kept, "evaluation", "loss"), True))
        metric = evaluations[-1]["metric"]
        curves: list[Curve] = [(metric, ORANGE, _points(kept, "evaluation", "value"), True)]
        baseline = evaluations[-1].get("baseline")
        if baseline is not None:
            last = max(step for step, _ in steps)
            curves.append(("baseline", GREY, [(0.0, baseline), (last, baseline)], False))
        panels.append((f"{metric} on held-out rows", curves))
    width = WIDTH * len(panels)
    drawn = "\n".join(_panel(title, curves, WIDTH * place) for place, (title, curves) in enumerate(panels))
    return (
        f'{CURVES_SIGNATURE}\n<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" width="{width}" '
        f'height="{HEIGHT}" font-family="sans-serif" font-size="11" fill="#333">\n'
        f'<rect width="{width}" height="{HEIGHT}" fill="#fff"/>\n{drawn}\n</svg>\n'
    )


def _points(records: Iterable[Mapping[str, Any]], kind: str, key: str) -> list[tuple[float, float]]:
    found = ((one["step"], one.get(key)) for one in records if one["kind"] == kind)
    return [(float(step), value) for step, value in found if value is not None and math.isfinite(value)]


def _means(points: Points, each: int) -> Points:
    groups = (points[start : start + each] for start in range(0, len(points), each))
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]


def _panel(title: str, curves: Sequence[Curve], left: int) -> str:
    """Return one chart, ``left`` pixels from the left."""
    every = [point for _, _, points, _ in curves for point in points]
    last = max((step for step, _ in every), default=1.0)
    low, high = _bounds([value for _, value in every])
    wide, tall = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(step: float, value: float) -> str:
        return f"{LEFT + wide * step / last:.1f},{TOP + tall * (high - value) / (high - low):.1f}"

    lines = [f'<g transform="translate({left} 0)">', f'<text x="{LEFT}" y="16" font-size="12">{escape(title)}</text>']
    for part in range(5):
        value = low + (high - low) * part / 4
        y = TOP + tall * (4 - part) / 4
        lines.append(f'<path d="M{LEFT} {y:.1f}h{wide}" stroke="#e3e6ea"/>')
        lines.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    for part, anchor in ((0, "start"), (1, "end")):
        text = f"{last * part:,.0f}" if part else "step 0"
        lines.append(f'<text x="{LEFT + wide * part}" y="{TOP + tall + 16}" text-anchor="{anchor}">{text}</text>')
    at = LEFT
    for name, colour, points, dots in curves:
        path = " ".join(place(*point) for point in points)
        lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        circles = (place(*point).split(",") for point in points if dots)
        lines += [f'<circle cx="{x}" cy="{y}" r="2.6" fill="{colour}"/>' for x, y in circles]
        lines.append(f'<text x="{at}" y="{HEIGHT - 8}" fill="{colour}">{escape(name)}</text>')
        at += 26 + 6 * len(name)
    return "\n".join([*lines, "</g>"])


def _bounds(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of the axis: the range of the values with a small margin."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    margin = (high - low) * 0.05 or abs(high) * 0.05 or 0.5
    return (max(0.0, low - margin) if low >= 0 else low - margin), high + margin
