"""Charts as plain values for plotly. Colors are CSS variables of the page, which has a light and a dark mode."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fullshard.core.engine.step.recorder import Kind
from fullshard.program.metrics import Confusion, higher_is_better
from fullshard.program.report.files import Record, RunFiles
from fullshard.program.train.reporting.reports import RankTrace, StepTrace
from fullshard.sizes import format_bytes, format_duration

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


MEMORY_PARTS = {
    "parameters": ("parameters (shards)", "var(--blue)"),
    "optimizer": ("optimizer state", "var(--purple)"),
    "gradients": ("gradients", "var(--orange)"),
    "gathered": ("gathered parameters", "var(--teal)"),
    "other": ("other, before the step", "var(--slate)"),
    "activations": ("activations and temporaries", "var(--gold)"),
}
"""Labels and colors of the parts of memory, from the bottom up."""

WAITS = {
    "gather_wait": "waiting for a gather",
    "reduce_wait": "waiting for a reduce",
    "exchange_wait": "waiting for tokens",
}

KINDS = {
    "forward": ("forward", "var(--blue)"),
    "backward": ("backward", "var(--purple)"),
    "optimizer": ("optimizer step", "var(--gold)"),
    "gather": ("gather", "var(--teal)"),
    "reduce": ("reduce", "var(--orange)"),
    "gather_wait": ("waiting", "var(--signal)"),
    "reduce_wait": ("waiting", "var(--signal)"),
    "exchange_wait": ("waiting", "var(--signal)"),
}
"""Labels and colors of the kinds of events in a step."""

_COMPUTES = ("forward", "backward", "optimizer")

_LONG_STEP_S = 10.0
"""A step from this length on is drawn in seconds."""


@dataclass(frozen=True)
class Figure:
    """A chart, or several charts to choose from."""

    name: str  # HTML id
    title: str  # heading
    text: str  # description of its content, also for users who cannot see it
    choices: Mapping[str, Record]  # plotly's ``data`` and ``layout``, by label
    height: int = 260  # height in pixels
    wide: bool = False  # whether it has the full width of the page


def safe(text: object) -> str:
    """Escape text for plotly, which interprets some tags as markup."""
    return html.escape(str(text), quote=False)


# Curves


def curves(files: RunFiles) -> list[Figure]:
    """Return the charts of loss, metrics, learning rate, gradient norm and speed that have data."""
    found = [
        _loss(files),
        *_metric_curves(files),
        _curve(files, "learning_rate", "Learning rate", "learning rate", "var(--purple)"),
        _curve(files, "router_loss", "Routers' own loss", "part of the loss", "var(--slate)", smoothed=True),
        _curve(files, "rewards/margins", "Reward margin", "in training", "var(--teal)", smoothed=True),
        _curve(files, "grad_norm", "Gradient norm", "norm before clipping", "var(--orange)", smoothed=True),
        _curve(files, "tokens_per_second", "Speed", "tokens / s, all ranks", "var(--teal)", smoothed=True),
        _curve(files, "mfu", "Model FLOPs utilization", "share of the devices' peak", "var(--blue)", smoothed=True),
    ]
    return [figure for figure in found if figure is not None]


def _loss(files: RunFiles) -> Figure | None:
    points = series(files.steps, "loss")
    if not points[0]:
        return None
    average, drawn = _smoothed(points, "training, ", "var(--blue)")
    held_out = series(files.evaluations, "loss")
    data = [*drawn, line(held_out, "held-out rows", "var(--orange)", mode="lines+markers")]
    text = f"Training loss, smoothed: {_from_to(average)}. Held-out loss: {_from_to(held_out)}."
    return Figure(
        "loss", "Loss", text, {"": _chart(data if held_out[0] else drawn, "loss per target token")}, 320, wide=True
    )


def _metric_curves(files: RunFiles) -> list[Figure]:
    """Return one chart of all metrics where higher is better, with baselines, and one for each other metric."""
    names = list(dict.fromkeys(name for one in files.evaluations for name in one.get("metrics", {})))
    flat = [{"step": one["step"], **one.get("metrics", {})} for one in files.evaluations]
    baselines = files.evaluations[-1].get("baselines", {}) if files.evaluations else {}
    groups = [("metrics", "Metrics on held-out rows", "score", [n for n in names if higher_is_better(n)])]
    groups += [(name, name.capitalize(), name, [name]) for name in names if not higher_is_better(name)]
    colours = ("var(--blue)", "var(--orange)", "var(--teal)", "var(--purple)", "var(--gold)", "var(--slate)")
    figures = []
    for group, title, axis, members in groups:
        data, texts = [], []
        for place, name in enumerate(members):
            points, colour = series(flat, name), colours[place % len(colours)]
            data.append(line(points, name, colour, mode="lines+markers"))
            texts.append(f"{name}: {_from_to(points)}")
            if name in baselines and points[0]:
                ends = [0.0, points[0][-1]]
                data.append(line((ends, [baselines[name]] * 2), f"{name}, baseline", colour, dash="dot"))
        if data:
            chart = _chart(data, axis)
            if members and higher_is_better(members[0]):
                chart["layout"]["yaxis"] |= {"tickformat": PERCENT, "rangemode": "tozero"}
            figures.append(Figure(f"metric-{group}", title, ". ".join(texts) + ".", {"": chart}))
    return figures


def _curve(files: RunFiles, key: str, title: str, axis: str, colour: str, *, smoothed: bool = False) -> Figure | None:
    points = series(files.steps, key)
    if not points[0]:
        return None
    if not smoothed:
        return Figure(key, title, f"{title}: {_from_to(points)}.", {"": _chart([line(points, axis, colour)], axis)})
    average, data = _smoothed(points, "", colour)
    return Figure(key, title, f"{title}, smoothed: {_from_to(average)}.", {"": _chart(data, axis)})


def _smoothed(points: Points, prefix: str, colour: str) -> tuple[Points, list[Record]]:
    """Return the smoothed curve, and the lines to draw: it and each step; for a short run only each step."""
    average, over = smooth(points)
    if over == 1:
        return points, [line(points, f"{prefix}each step", colour)]
    faint = line(points, f"{prefix}each step", colour.replace(")", "-faint)"), width=1)
    return average, [faint, line(average, f"{prefix}smoothed over {over:,} steps", colour)]


def _from_to(points: Points) -> str:
    steps, values = points
    if not steps:
        return "no values yet"
    if len(steps) == 1:
        return f"{shown(values[0]):g} at step {steps[0]:,.0f}"
    return (
        f"{shown(values[0]):g} at step {steps[0]:,.0f}, {shown(values[-1]):g} at step {steps[-1]:,.0f} "
        f"(lowest {shown(min(values)):g}, highest {shown(max(values)):g})"
    )


def line(
    points: Points, name: str, colour: str, *, width: float = 2, dash: str = "solid", mode: str = "lines"
) -> Record:
    """Return a line through points, thinned if they are many."""
    steps, values = thin(points)
    if len(steps) == 1:
        mode = "markers"
    return {
        "type": "scatter",
        "mode": mode,
        "name": safe(name),
        "x": steps,
        "y": [shown(value) for value in values],
        "line": {"color": colour, "width": width, "dash": dash},
        "marker": {"color": colour, "size": 6},
    }


def _chart(data: list[Record], axis: str) -> Record:
    last = max((step for line in data for step in line["x"]), default=0)
    steps: Record = {"title": {"text": "step"}, "tickformat": WHOLE, "rangemode": "tozero"}
    if last <= FEW_STEPS:
        steps["dtick"] = 1
    layout = {"hovermode": "x unified", "showlegend": len(data) > 1, "xaxis": steps, "yaxis": {"title": {"text": axis}}}
    return {"data": data, "layout": layout}


# Memory


def rest_memory(ranks: Sequence[Mapping[str, int]]) -> Figure:
    """Return the chart of each rank's memory between steps; ``ranks`` have ``rank`` and the bytes by part."""
    names = [f"rank {one['rank']}" for one in ranks]
    unit, size = memory_unit(sum(one.get(part, 0) for part in MEMORY_PARTS) for one in ranks)
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": label,
            "y": names,
            "x": [shown(one[part] / size) for one in ranks],
            "marker": {"color": colour},
            "hovertemplate": f"%{{y}}: %{{x:,.1f}} {unit}",
        }
        for part, (label, colour) in MEMORY_PARTS.items()
        if any(one.get(part) for one in ranks)
    ]
    layout = {
        "barmode": "stack",
        "showlegend": True,
        "legend": {"traceorder": "normal"},
        "bargap": 0.35,
        "xaxis": {"title": {"text": unit}, "tickformat": WHOLE},
        "yaxis": {"autorange": "reversed", "showgrid": False},
    }
    text = "One stacked bar per rank; the table below the charts has the numbers."
    chart = {"": {"data": data, "layout": layout}}
    return Figure("memory-rest", "Between steps", text, chart, 130 + 30 * len(ranks), wide=True)


def memory_timeline(trace: StepTrace, ranks: Sequence[RankTrace]) -> Figure:
    """Return the chart of each rank's memory during the step, by part."""
    peaks = ", ".join(f"rank {one.rank} {format_bytes(one.peak_bytes)}" for one in ranks)
    return Figure(
        "memory-step",
        f"During step {trace.step:,}",
        f"Stacked areas over the {format_duration(ranks[0].seconds)} of the step. Peaks: {peaks}.",
        {f"rank {one.rank}": _stack(one) for one in ranks},
        360,
        wide=True,
    )


def _stack(rank: RankTrace) -> Record:
    columns = {
        label: (getattr(rank.memory, part), colour)
        for part, (label, colour) in MEMORY_PARTS.items()
        if any(getattr(rank.memory, part))
    }
    return stacked(rank.memory.seconds, columns, rank.peak_bytes, ("seconds from the start of the step", rank.seconds))


def area(
    name: str, x: Sequence[float], y: Sequence[float], colour: str, hover: str, *, shape: str = "linear"
) -> Record:
    """Return one of several stacked areas."""
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "stackgroup": "memory",
        "x": list(x),
        "y": [shown(value) for value in y],
        "line": {"width": 0, "shape": shape, "color": colour},
        "fillcolor": colour,
        "hovertemplate": hover,
    }


def stacked(
    places: Sequence[float], columns: Mapping[str, tuple[Sequence[int], str]], peak: int, axis: tuple[str, float]
) -> Record:
    """Return stacked areas of bytes that change at ``places``.

    Args:
        places: Along the horizontal axis.
        columns: Bytes at each of them and a colour, by label, from the bottom up.
        peak: Most bytes; decides the unit.
        axis: Title and end of the horizontal axis.
    """
    unit, size = memory_unit([peak])
    hover = f"%{{y:,.1f}} {unit}"
    data = [
        area(label, [shown(at) for at in places], [nbytes / size for nbytes in column], colour, hover, shape="hv")
        for label, (column, colour) in columns.items()
    ]
    layout = {
        "hovermode": "x unified",
        "showlegend": True,
        "legend": {"traceorder": "normal"},
        "xaxis": {"title": {"text": axis[0]}, "range": [0, axis[1]], "tickformat": WHOLE},
        "yaxis": {"title": {"text": unit}, "rangemode": "tozero", "tickformat": WHOLE},
    }
    return {"data": data, "layout": layout}


# The schedule


def schedule(trace: StepTrace, ranks: Sequence[RankTrace]) -> Figure:
    """Return the chart of the step's unit schedule: one row per unit, transfers above computation."""
    rows = ["waiting, all units", *trace.units, "optimizer"]
    text = (
        "One row per unit on a time axis: gathers and reduces in the upper half, forward and backward in the lower "
        "half. Waits of the compute thread are marked. The table below has the totals."
    )
    return Figure(
        "schedule",
        f"Unit schedule of step {trace.step:,}",
        text,
        {f"rank {one.rank}": _gantt(one, rows) for one in ranks},
        schedule_height(rows),
        wide=True,
    )


def schedule_height(rows: Sequence[str]) -> int:
    """Return the height of a schedule with these rows, in pixels."""
    return 130 + (30 if len(rows) <= 40 else 18) * len(rows)


def _gantt(rank: RankTrace, rows: Sequence[str]) -> Record:
    # Short, as a title of 35 letters is clipped on a window of 400 pixels.
    unit, measure, times = ("ms", "ms", 1e3) if rank.seconds < _LONG_STEP_S else ("seconds", "s", 1.0)
    events = [Bar(event.unit, event.kind, event.start_s * times, event.end_s * times) for event in rank.events]
    return gantt(events, rows, (f"{unit} from the start of the step", rank.seconds * times), measure)


@dataclass(frozen=True)
class Bar:
    """An interval of a schedule."""

    unit: str  # its row; empty: the optimizer's
    kind: Kind
    start: float
    end: float


def gantt(events: Iterable[Bar], rows: Sequence[str], axis: tuple[str, float], measure: str) -> Record:
    """Return a schedule: one row per name, the first for waits; ``axis`` is title and end, in ``measure``."""
    place = {name: index for index, name in enumerate(rows)}
    bars: dict[str, Record] = {}
    for event in events:
        label, colour = KINDS[event.kind]
        row = place[event.unit] if event.unit in place else place["optimizer"]
        what = f"{safe(event.unit)}: {WAITS.get(event.kind, label)}" if event.unit else label
        computes = event.kind in _COMPUTES
        _add_bar(bars, label, colour, (row + 0.02, 0.36) if computes else (row - 0.38, 0.36), event, what)
        if event.kind in WAITS:
            _add_bar(bars, label, colour, (-0.38, 0.76), event, what)
    for bar in bars.values():
        bar["hovertemplate"] = f"%{{text}}<br>%{{x:,.4~r}} {measure} from %{{base:,.4~r}} {measure}<extra></extra>"
    order = list(dict.fromkeys(label for label, _ in KINDS.values()))
    data = sorted(bars.values(), key=lambda bar: order.index(bar["name"]))
    layout = {
        "barmode": "overlay",
        "showlegend": True,
        "hovermode": "closest",
        "xaxis": {"title": {"text": axis[0]}, "range": [0, axis[1]], "tickformat": WHOLE},
        "yaxis": {
            "range": [len(rows) - 0.5, -0.5],
            "tickvals": list(range(len(rows))),
            "ticktext": [safe(name) for name in rows],
            "showgrid": False,
            "zeroline": False,
        },
        "shapes": [
            {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y, "line": _RULE, "layer": "below"}
            for y in (index + 0.5 for index in range(len(rows) - 1))
        ],
    }
    return {"data": data, "layout": layout}


_RULE = {"color": "var(--grid)", "width": 1}


def _add_bar(
    bars: dict[str, Record], label: str, colour: str, span: tuple[float, float], event: Bar, what: str
) -> None:
    """Add the bar of ``event``; ``span`` is its offset from the row's number, and its width."""
    empty = {
        "type": "bar",
        "orientation": "h",
        "name": label,
        "marker": {"color": colour, "line": {"width": 0}},
        **{column: [] for column in ("x", "base", "y", "offset", "width", "text")},
        "textposition": "none",
    }
    bar = bars.setdefault(label, empty)
    cells = (shown(event.end - event.start), shown(event.start), 0, span[0], span[1], what)
    for column, cell in zip(("x", "base", "y", "offset", "width", "text"), cells, strict=True):
        bar[column].append(cell)


# The confusion matrix


def confusion_matrix(confusion: Confusion) -> Figure:
    """Return the confusion matrix: correct labels down, predicted ones across, as shares of each row."""
    counts = confusion.matrix()
    shares = [[shown(cell / (sum(row) or 1)) for cell in row] for row in counts]
    correct = [safe(label) for label in confusion.labels]
    predicted = [*correct, "(other)"]
    size = len(correct)
    data = [
        {
            "type": "heatmap",
            "x": predicted,
            "y": correct,
            "z": shares,
            "text": counts,
            "zmin": 0,
            "zmax": 1,
            "colorscale": [[0, "var(--raised)"], [1, "var(--blue)"]],
            "colorbar": {"tickformat": ".0%", "thickness": 12},
            "hovertemplate": "correct: %{y}<br>predicted: %{x}<br>%{text} rows (%{z:.1%})<extra></extra>",
            **({"texttemplate": "%{text}"} if size <= 12 else {}),
            "xgap": 1,
            "ygap": 1,
        }
    ]
    layout = {
        "showlegend": False,
        "hovermode": "closest",
        "xaxis": {"title": {"text": "predicted"}, "showticklabels": size <= 40, "type": "category"},
        "yaxis": {"autorange": "reversed", "showticklabels": size <= 90, "type": "category"},
    }
    if size > 40:
        layout["yaxis"]["tickfont"] = {"size": 9}
    text = f"{size:,} labels; the most frequent mistakes are in the table below."
    chart = {"": {"data": data, "layout": layout}}
    return Figure(
        "confusion",
        "Confusion matrix, coloured by the share of the row",
        text,
        chart,
        min(960, 220 + 26 * size),
        wide=True,
    )
