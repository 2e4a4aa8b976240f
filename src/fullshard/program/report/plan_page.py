"""The page of a plan: memory over the fullest step, the schedule of units, memory and time by number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullshard.planner import HOST_LABELS, LABELS, PHASE_LABELS, MemoryTimeline, Plan
from fullshard.program.report.figures import (
    Bar,
    Figure,
    Record,
    area,
    gantt,
    kept,
    line,
    memory_unit,
    schedule_height,
    stacked,
)
from fullshard.program.report.render import render
from fullshard.sizes import format_bytes, format_duration
from fullshard.state.storage import write_text

if TYPE_CHECKING:
    from fullshard.program.train.run_plan import RunPlan

MOST_MOMENTS = 600
"""Moments of a step that are drawn; longer steps show the fullest and the emptiest moment of each interval."""

COLOURS = {
    "shards": "var(--blue)",
    "optimizer_state": "var(--purple)",
    "gradient_shards": "var(--orange)",
    "gradient_buffers": "var(--signal)",
    "gathered_units": "var(--teal)",
    "buffers_and_batch": "var(--slate)",
    "activations_and_temporaries": "var(--gold)",
}
"""Colours of the parts of memory, from the bottom up."""

_AXIS = "operators since the start of the step"


def write_plan(
    target: Path, name: str, plan: RunPlan, timeline: MemoryTimeline, others: Sequence[Plan], limit_bytes: int | None
) -> None:
    """Write the page of a plan; one process.

    ``name`` is that of the planned run, ``timeline`` that of the plan's fullest step. ``others`` are plans of the same
    run for other numbers of ranks, ascending; ``limit_bytes`` is the memory of a rank's device, if it is known.

    Raises:
        CheckpointError: The page cannot be written.
        ConfigError: plotly is missing.
    """
    drawn = {
        "memory": [_memory(plan, timeline)],
        "schedule": [_schedule(timeline)],
        "ranks": [_memory_by_ranks(others, limit_bytes), *_time_by_ranks(others)],
    }
    page = render(
        "plan.html.j2",
        name,
        drawn,
        plan=plan,
        limit=limit_bytes,
        phases=[
            ({**PHASE_LABELS, **HOST_LABELS}[phase], format_bytes(size))
            for phase, size in {**plan.phase_peaks, **plan.host}.items()
        ],
        chosen={choice.setting: f"{choice.value} ({choice.why})" for choice in plan.chosen},
        parts=[(LABELS[part], format_bytes(plan.parts[part])) for part in reversed(COLOURS)],
        by_ranks=[_of_ranks(other, limit_bytes, timed=any(one.timing for one in others)) for other in others],
    )
    write_text(target, page)


def _of_ranks(plan: Plan, limit: int | None, *, timed: bool) -> dict[str, str]:
    """Return the row of a number of ranks."""
    row = {
        "ranks": f"{plan.world_size:,}",
        "peak of a step": format_bytes(plan.peak_bytes),
        "needed": format_bytes(plan.needed_bytes),
    }
    if limit is not None:
        row["fits"] = "yes" if plan.fits(limit) else "no"
    if timed:
        row["a step"] = "" if plan.timing is None else format_duration(plan.timing.step_s)
    return row


def _memory(plan: Plan, timeline: MemoryTimeline) -> Figure:
    totals = [sum(sizes) for sizes in zip(*timeline.parts.values(), strict=True)]
    drawn = kept(totals, MOST_MOMENTS)
    columns = {
        LABELS[part]: ([timeline.parts[part][place] for place in drawn], colour)
        for part, colour in COLOURS.items()
        if any(timeline.parts[part])
    }
    # A stacked chart has one value at each place, so two moments of one operator get two places.
    again = [one == before for before, one in zip((-1, *timeline.places), timeline.places, strict=False)]
    places = [timeline.places[place] + 0.5 * again[place] for place in drawn]
    chart = stacked(places, columns, plan.peak_bytes, (_AXIS, timeline.operators))
    peak = format_bytes(plan.peak_bytes)
    text = f"Stacked areas over the {timeline.operators:,} operators of the fullest step. Peak: {peak}."
    return Figure("memory", "Memory over the fullest step", text, {"": chart}, 360, wide=True)


def _schedule(timeline: MemoryTimeline) -> Figure:
    rows = [*timeline.units, "optimizer"]
    bars = [Bar(span.unit, span.kind, span.start, span.end) for span in timeline.spans]
    chart = gantt(bars, rows, (_AXIS, timeline.operators), "operators")
    text = "One row per unit: gathers and reduces in the upper half, forward and backward in the lower half."
    return Figure("schedule", "Schedule of units", text, {"": chart}, schedule_height(rows), wide=True)


def _memory_by_ranks(plans: Sequence[Plan], limit: int | None) -> Figure:
    ranks = [plan.world_size for plan in plans]
    unit, size = memory_unit([*(plan.needed_bytes for plan in plans), limit or 0])
    data: list[Record] = [
        area(LABELS[part], ranks, [plan.parts[part] / size for plan in plans], colour, f"%{{y:,.2f}} {unit}")
        for part, colour in COLOURS.items()
        if any(plan.parts[part] for plan in plans)
    ]
    needed = [plan.needed_bytes / size for plan in plans]
    data.append(_curve("needed", ranks, needed, "var(--text)", unit, "solid"))
    if limit is not None:
        data.append(_curve("memory of the device", ranks, [limit / size] * len(ranks), "var(--signal)", unit, "dash"))
    text = "Parts of the peak of a step, stacked, and the memory needed, by number of ranks on a logarithmic axis."
    chart = _by_ranks(data, ranks, unit)
    return Figure("memory-ranks", "Memory by number of ranks", text, {"": chart}, 400, wide=True)


def _time_by_ranks(plans: Sequence[Plan]) -> list[Figure]:
    timed = [plan for plan in plans if plan.timing is not None]
    if not timed:
        return []
    parts = {
        "a step": ("step_s", "var(--text)"),
        "forward and backward": ("compute_s", "var(--blue)"),
        "optimizer": ("optimizer_s", "var(--gold)"),
        "waiting for other ranks": ("exposed_s", "var(--signal)"),
        "waiting for the CPU": ("issue_s", "var(--slate)"),
    }
    ranks = [plan.world_size for plan in timed]
    data = [
        _curve(label, ranks, [1e3 * getattr(plan.timing, name) for plan in timed], colour, "ms", "solid")
        for label, (name, colour) in parts.items()
    ]
    text = "Milliseconds of a step and its parts, by number of ranks on a logarithmic axis."
    chart = _by_ranks(data, [plan.world_size for plan in plans], "ms")
    return [Figure("time-ranks", "Time of a step by number of ranks", text, {"": chart}, 320, wide=True)]


def _curve(name: str, ranks: list[int], values: list[float], colour: str, unit: str, dash: str) -> Record:
    mode = "lines+markers" if dash == "solid" else "lines"
    points = [float(number) for number in ranks], values
    return line(points, name, colour, dash=dash, mode=mode) | {"hovertemplate": f"%{{y:,.4~r}} {unit}"}


def _by_ranks(data: list[Record], ranks: Sequence[int], unit: str) -> dict[str, Any]:
    layout = {
        "hovermode": "x unified",
        "showlegend": True,
        "legend": {"traceorder": "normal"},
        "xaxis": {
            "title": {"text": "ranks"},
            "type": "log",
            "tickvals": list(ranks),
            "ticktext": [f"{n:,}" for n in ranks],
        },
        "yaxis": {"title": {"text": unit}, "rangemode": "tozero"},
    }
    return {"data": data, "layout": layout}
