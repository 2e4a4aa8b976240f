"""The report page: each section is made from the files that exist, and a missing file is named instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from fullshard.program.config import changed_settings, flat_settings
from fullshard.program.data import ONE_ROW
from fullshard.program.metrics import format_metric, metric_of
from fullshard.program.report import figures, markup
from fullshard.program.report.figures import MOST_POINTS, Figure, number, series, share
from fullshard.program.report.files import RunFiles, read_run
from fullshard.program.report.markup import PageSection, frame, placeholders
from fullshard.program.train.reporting.reports import TRACE_NAME, RankTrace, spread
from fullshard.program.train.reporting.sinks import PREDICTIONS_NAME, RUN_NAME, SUMMARY_NAME
from fullshard.sizes import format_bytes, format_duration
from fullshard.state.storage import write_text

REPORT_NAME = "report.html"

MOST_RANKS = 8
"""Maximum ranks of the recorded step on the page: the first, the slowest, the fullest and some in between."""


def write_report(directory: Path, target: Path | None = None) -> dict[str, Any]:
    """Write the report of a run, which may still be running; one process.

    ``directory`` is the run's ``output_dir``, in which ``report.html`` is written unless there is a ``target``. Returns
    JSON values: path and size of the page, and the run's headline.

    Raises:
        CheckpointError: There is no run in ``directory``, or the page cannot be written.
        ConfigError: plotly is missing.
    """
    files = read_run(directory)
    target = target or directory / REPORT_NAME
    page = make_page(files)
    write_text(target, page)
    return {"report": str(target), "bytes": len(page.encode()), **headline(files)}


def headline(files: RunFiles) -> dict[str, Any]:
    """Return the run's key numbers; None for those that are unknown."""
    best = files.best or {}
    last = files.steps[-1] if files.steps else {}
    seconds, tokens = (sum(series(files.steps, key)[1]) for key in ("seconds", "tokens"))
    memory = _memory_ranks(files)
    values = {key: files.summary.get(key, best.get(key)) for key in ("metric", "value", "baseline", "baseline_name")}
    return {
        "finished": files.finished,
        **values,
        "held_out_loss": files.summary.get("loss", best.get("loss")),
        "best_step": files.summary.get("best_step", best.get("step")),
        "steps": files.summary.get("steps", last.get("step", 0)),
        "total_steps": files.fact("total_steps"),
        "train_loss": files.summary.get("train_loss", last.get("loss")),
        "tokens_per_second": files.summary.get("tokens_per_second", tokens / seconds if seconds else None),
        "train_seconds": files.summary.get("train_seconds"),
        "peak_bytes": max((rank["peak"] for rank in memory), default=None),
        "padding_share": files.fact("padding_share"),
    }


def make_page(files: RunFiles) -> str:
    """Return the page as HTML.

    Raises:
        ConfigError: plotly is missing.
    """
    name = files.directory.resolve().name
    sections = [_result(files), _curves(files), _memory(files), _schedule(files), _data(files), _samples(files)]
    sections.append(_settings(files))
    return frame(f"{name} · fullshard report", name, _state(files), sections)


def _state(files: RunFiles) -> str:
    numbers = headline(files)
    steps, total = numbers["steps"], numbers["total_steps"]
    if files.finished:
        return f'<span class="state">finished</span> after {steps:,} steps'
    of = f" of {total:,}" if isinstance(total, int) else ""
    return (
        f'<span class="state open">not finished</span>: last recorded step {steps:,}{of}. '
        "The run is still running, or was stopped or killed."
    )


# Sections


def _result(files: RunFiles) -> PageSection:
    numbers = headline(files)
    metric, value = numbers["metric"], numbers["value"]
    if metric is None or value is None:
        score = markup.note("The model has not been evaluated on held-out rows yet.")
    else:
        score = _score(files, metric, value, numbers)
    return PageSection("result", "Result", score + markup.tiles(_facts(files, numbers)))


def _score(files: RunFiles, metric: str, value: float, numbers: dict[str, Any]) -> str:
    shown = (
        f'<p class="score"><b>{escape(format_metric(metric, value))}</b><span>{escape(metric)} on held-out rows, '
        f"after step {numbers['best_step']:,}</span></p>"
    )
    baseline = numbers["baseline"]
    if baseline is None:
        return shown
    longest = max(value, baseline, 1.0 if value <= 1 and baseline <= 1 else 0.0)
    lines = [("this model", value, ""), (f"baseline: {numbers['baseline_name']}", baseline, "plain")]
    bars = "".join(_bar_line(name, of / longest, format_metric(metric, of), kind) for name, of, kind in lines)
    further = {name: one for name, one in (files.best or {}).get("metrics", {}).items() if name != metric}
    baselines = (files.best or {}).get("baselines", {})
    others = [
        [name, format_metric(name, one), format_metric(name, baselines[name]) if name in baselines else "none"]
        for name, one in further.items()
    ]
    more = markup.table("Other metrics of the same model", ["", "value", "baseline"], others) if others else ""
    return f'{shown}<div class="beside">{bars}</div>{more}'


def _bar_line(name: str, part: float, value: str, kind: str) -> str:
    """Return a line with a name, a bar over ``part`` of the width, and a number."""
    bar = f'<span class="bar"><i class="{kind}" style="width:{100 * part:.1f}%"></i></span>'
    return f"<div><span>{escape(name)}</span>{bar}<span>{escape(value)}</span></div>"


def _facts(files: RunFiles, numbers: dict[str, Any]) -> list[tuple[str, str, str]]:
    total = numbers["total_steps"]
    # The score belongs to the best step, which need not be the last one.
    last, best = f" ({numbers['steps']:,})", ""
    if numbers["best_step"] is not None:
        best = f", step {numbers['best_step']:,}"
    base = files.fact("base") or {}
    objective = ((files.fact("config") or {}).get("training") or {}).get("objective", "sft")
    each = {"sft": "per target token", "kto": "per row"}.get(objective, "per pair")
    what = "desirable and undesirable texts" if objective == "kto" else "preferences of a chosen over a rejected text"
    known: list[tuple[str, Any, Callable[[Any], str], str]] = [
        ("base model", base.get("name"), str, f"quantised: {base.get('quantisation')}; {base.get('content')}"),
        ("objective", None if objective == "sft" else objective, str, what),
        ("optimizer", files.fact("optimizer"), str, ""),
        ("training loss", numbers["train_loss"], partial(number, decimals=4), f"{each}, last step{last}"),
        ("held-out loss", numbers["held_out_loss"], partial(number, decimals=4), f"{each}{best}"),
        ("steps", numbers["steps"], "{:,}".format, "" if total is None else f"of {total:,}"),
        ("time", numbers["train_seconds"], format_duration, "including evaluations and saving"),
        ("tokens per second", numbers["tokens_per_second"], partial(number, decimals=0), "all ranks, without padding"),
        ("padding", numbers["padding_share"], share, "of the positions in training batches"),
        ("peak memory", numbers["peak_bytes"], format_bytes, "tensors of the rank with the most"),
        ("ranks", files.fact("world_size"), "{:,}".format, _about_ranks(files)),
        ("parameters", files.fact("parameters"), "{:,}".format, "sharded over the ranks"),
    ]
    return [(name, form(value), remark) for name, value, form, remark in known if value is not None]


def _about_ranks(files: RunFiles) -> str:
    sharers = ((files.fact("config") or {}).get("sharding") or {}).get("sequence_parallel", 1)
    shared = f", {sharers} share each row" if sharers > 1 else ""
    return f"{files.fact('device') or ''}{shared}"


def _curves(files: RunFiles) -> PageSection:
    drawn = figures.curves(files)
    if not drawn:
        return PageSection("curves", "Curves", markup.note("No step has been recorded yet."))
    body = placeholders(drawn) + markup.note("Drag over a chart to zoom in; double-click to reset.")
    if len(files.steps) > MOST_POINTS:
        body += markup.note(
            f"{len(files.steps):,} recorded steps are drawn with {MOST_POINTS:,} points: the minimum and maximum of "
            "each interval, after smoothing."
        )
    return PageSection("curves", "Curves", body, tuple(drawn))


def _memory_ranks(files: RunFiles) -> list[dict[str, int]]:
    """Return the bytes of each rank, from the summary or else from the recorded step."""
    if files.summary.get("memory"):
        return list(files.summary["memory"])
    return [] if files.trace is None else [markup.resting(rank) for rank in files.trace.ranks]


def _memory(files: RunFiles) -> PageSection:
    ranks, drawn, body = _memory_ranks(files), [], ""
    if ranks:
        drawn.append(figures.rest_memory(ranks))
    if files.trace is not None:
        chosen = _chosen_ranks(files.trace.ranks)
        drawn.append(figures.memory_timeline(files.trace, chosen))
    if drawn:
        plan = files.run.get("plan") or {}
        planned = {rank["rank"]: rank for rank in plan.get("memory", ())}
        body = placeholders(drawn) + markup.memory_table(ranks, planned)
    if files.trace is not None:
        body += markup.timeline_table(files.trace.ranks)
        body += markup.note(
            "The parts sum to the allocator's count. “Other” is memory from before the step that does not belong to "
            "parameters, gradients or optimizer: data, the model's buffers, and copies for snapshots." + _on_cpu(files)
        )
    else:
        body += markup.note(f"{files.missing.get(TRACE_NAME, '')} The timeline of a step needs it.")
    return PageSection("memory", "Memory", body, tuple(drawn))


def _on_cpu(files: RunFiles) -> str:
    on_cpu = files.trace is not None and files.trace.device == "cpu"
    return " On the CPU, recording allocations slowed this step down." if on_cpu else ""


def _schedule(files: RunFiles) -> PageSection:
    title = "Schedule of a step"
    if files.trace is None:
        return PageSection("schedule-section", title, markup.note(files.missing.get(TRACE_NAME, "")))
    trace = files.trace
    drawn = figures.schedule(trace, _chosen_ranks(trace.ranks))
    body = placeholders([drawn]) + markup.schedule_table(trace.ranks, trace.units[0])
    notes = "Gathers and reduces are drawn from issue to completion. The root's bars include the units inside it."
    if trace.device == "cpu":
        notes += " On the CPU, a transfer's end is only known once it is waited for." + _on_cpu(files)
    if len(trace.ranks) > MOST_RANKS:
        notes += f" {MOST_RANKS} of {len(trace.ranks):,} ranks are shown, including the slowest and the fullest."
    return PageSection("schedule-section", title, body + markup.note(notes), (drawn,))


def _chosen_ranks(ranks: Sequence[RankTrace]) -> list[RankTrace]:
    """Return rank 0, the slowest, the fullest and evenly spaced others, at most ``MOST_RANKS``."""
    slowest = max(ranks, key=lambda rank: rank.seconds)
    fullest = max(ranks, key=lambda rank: rank.peak_bytes)
    kept = {rank.rank: rank for rank in (ranks[0], slowest, fullest, *spread(ranks, MOST_RANKS))}
    return sorted(list(kept.values())[:MOST_RANKS], key=lambda rank: rank.rank)


def _data(files: RunFiles) -> PageSection:
    padding, body = files.fact("padding_share"), ""
    if padding is not None:
        line = _bar_line("padding, share of all positions in training batches", padding, share(padding), "plain")
        body = f'<div class="beside">{line}</div>'
    rows = {"training rows": files.fact("train_rows"), "held-out rows": files.fact("validation_rows")}
    facts = [(name, f"{count:,}", "") for name, count in rows.items() if count is not None]
    body += markup.tiles(facts) if facts else ""
    body += markup.set_table(files.fact("sets"), files.best) if files.fact("sets") else ""
    shown = files.fact("shown_rows")
    # One of the notes is a row as text; the section shows it as a table.
    kept = (str(one) for one in files.fact("notes") or () if not (shown and str(one).startswith(ONE_ROW)))
    notes = "".join(f"<li>{escape(one)}</li>" for one in kept)
    body += f'<ul class="notes">{notes}</ul>' if notes else ""
    body += markup.row_table(shown) if shown else ""
    return PageSection(
        "data", "Data", body or markup.note(files.missing.get(RUN_NAME, "The run has recorded nothing about its data."))
    )


def _samples(files: RunFiles) -> PageSection:
    drawn: tuple[Figure, ...] = ()
    body, confusion = "", files.confusion
    if confusion is not None:
        drawn = (figures.confusion_matrix(confusion),)
        body = f"{placeholders(drawn)}{markup.mistake_table(confusion)}"
    if files.predictions:
        # Marking equal texts makes sense for labels; longer texts are hardly ever equal.
        compared = metric_of(headline(files)["metric"]).of_labels
        body += markup.prediction_table(files.predictions, compared=compared)
    else:
        body += markup.note(files.missing.get(PREDICTIONS_NAME, "The run has written no predictions."))
    return PageSection("samples", "Predictions", body, drawn)


def _settings(files: RunFiles) -> PageSection:
    config, versions, units = files.fact("config"), files.fact("versions"), files.fact("unit_table")
    body = ""
    if config:
        every = dict(flat_settings(config))
        chosen = files.fact("chosen")
        body = markup.settings_table("Chosen by the run itself", chosen) if chosen else ""
        body += markup.settings_table("Settings of the run that differ from the defaults", changed_settings(config))
        body += _folded(f"All {len(every)} settings", markup.settings_table("With defaults", every))
    body += markup.settings_table("Versions", versions) if versions else ""
    if isinstance(units, str):
        body += _folded("Sharded units", f"<pre>{escape(units)}</pre>")
    missing = " ".join(files.missing[name] for name in (RUN_NAME, SUMMARY_NAME) if name in files.missing)
    return PageSection("settings", "Configuration", body or markup.note(missing))


def _folded(title: str, body: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{body}</details>"
