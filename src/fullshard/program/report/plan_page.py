"""The page of a plan: memory over the fullest step, the schedule of units, memory and time by number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullshard.planner import HOST_LABELS, LABELS, PHASE_LABELS, MemoryTimeline, Plan
from fullshard.program.report import markup
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
from fullshard.program.report.markup import PageSection, frame, placeholders
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
    sections = [_result(plan, limit_bytes), _memory(plan, timeline), _schedule(timeline), _ranks(others, limit_bytes)]
    write_text(target, frame(f"{name} · fullshard plan", name, _lead(plan, limit_bytes), sections))


def _lead(plan: Plan, limit: int | None) -> str:
    where = "CPU ranks" if plan.device is None else escape(plan.device.name)
    what = f"rank {plan.rank} of {plan.world_size:,}, {where}"
    if limit is None:
        return f"Planned: {what}."
    fits = plan.fits(limit)
    return f'<span class="state{"" if fits else " open"}">{"fits" if fits else "does not fit"}</span>: {what}'


def _result(plan: RunPlan, limit: int | None) -> PageSection:
    facts = [
        ("peak of a step", format_bytes(plan.peak_bytes), "tensors of the fullest rank"),
        ("needed", format_bytes(plan.needed_bytes), "with some to spare"),
    ]
    facts += [] if limit is None else [("memory", format_bytes(limit), "of a rank's device")]
    facts += [] if plan.timing is None else [("a step", format_duration(plan.timing.step_s), "by the data sheet")]
    facts += [("sent a step", format_bytes(sum(plan.sent_bytes.values())), "by a rank, to others")]
    rows = [[PHASE_LABELS[phase], format_bytes(size)] for phase, size in plan.phase_peaks.items()]
    rows += [[HOST_LABELS[kind], format_bytes(size)] for kind, size in plan.host.items()]
    chosen = {one.setting: f"{one.value} ({one.why})" for one in plan.chosen}
    body = markup.tiles(facts) + markup.table("Phases", ["", "bytes"], rows)
    return PageSection("result", "Result", body + markup.settings_table("Chosen by the run itself", chosen))


def _memory(plan: Plan, timeline: MemoryTimeline) -> PageSection:
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
    figure = Figure("memory", "Memory over the fullest step", text, {"": chart}, 360, wide=True)
    rows = [[LABELS[part], format_bytes(plan.parts[part])] for part in reversed(COLOURS)]
    body = placeholders([figure]) + markup.table(f"At the peak: {peak}", ["", "bytes"], rows)
    return PageSection("memory-section", "Memory", body, (figure,))


def _schedule(timeline: MemoryTimeline) -> PageSection:
    rows = [*timeline.units, "optimizer"]
    bars = [Bar(span.unit, span.kind, span.start, span.end) for span in timeline.spans]
    chart = gantt(bars, rows, (_AXIS, timeline.operators), "operators")
    text = "One row per unit: gathers and reduces in the upper half, forward and backward in the lower half."
    figure = Figure("schedule", "Schedule of units", text, {"": chart}, schedule_height(rows), wide=True)
    note = markup.note(
        "Gathers and reduces are drawn from issue to the moment they are waited for. The root's bars include the units "
        "inside it. Lengths are operators, not seconds."
    )
    return PageSection("schedule-section", "Schedule", placeholders([figure]) + note, (figure,))


def _ranks(plans: Sequence[Plan], limit: int | None) -> PageSection:
    figures = [_memory_by_ranks(plans, limit)]
    timed = [plan for plan in plans if plan.timing is not None]
    if timed:
        figures.append(_time_by_ranks(timed, plans))
    rows = [
        [
            f"{plan.world_size:,}",
            format_bytes(plan.peak_bytes),
            format_bytes(plan.needed_bytes),
            *([] if limit is None else ["yes" if plan.fits(limit) else "no"]),
            *([] if not timed else ["" if plan.timing is None else format_duration(plan.timing.step_s)]),
        ]
        for plan in plans
    ]
    head = ["ranks", "peak of a step", "needed", *([] if limit is None else ["fits"]), *(["a step"] if timed else [])]
    notes = "Only rank 0 of each is planned. If the data has too few rows for all ranks, steps are shorter."
    notes += " Plans that do not fit are not timed." if timed else ""
    body = placeholders(figures) + markup.table("By number of ranks", head, rows) + markup.note(notes)
    return PageSection("ranks", "Number of ranks", body, tuple(figures))


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


def _time_by_ranks(timed: Sequence[Plan], plans: Sequence[Plan]) -> Figure:
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
    return Figure("time-ranks", "Time of a step by number of ranks", text, {"": chart}, 320, wide=True)


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
