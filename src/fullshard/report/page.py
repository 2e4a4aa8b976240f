"""The page: sections in the order of interest, each from what is there; what is not there is said in its place."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from fullshard.errors import ConfigError
from fullshard.report import figures, tables
from fullshard.report.curves import MOST_POINTS, series
from fullshard.report.figures import Figure
from fullshard.report.files import RunFiles, read_run
from fullshard.report.look import SCRIPT, STYLE
from fullshard.sizes import format_bytes
from fullshard.storage import write_text
from fullshard.train.reporting.scores import format_metric
from fullshard.train.reporting.sinks import PREDICTIONS_NAME, RUN_NAME, SUMMARY_NAME
from fullshard.train.reporting.trace import TRACE_NAME, RankTrace
from fullshard.version import __version__

REPORT_NAME = "report.html"

MOST_RANKS = 8
"""Ranks of the recorded step that the page has; of more, the first, the slowest, the fullest and some between."""

# The browser itself sees to it that the page asks the network for nothing.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


@dataclass(frozen=True)
class Section:
    """One section of the page.

    Attributes:
        name: Its id.
        title: Its heading.
        body: HTML.
        figures: The charts that ``body`` has places for.
    """

    name: str
    title: str
    body: str
    figures: tuple[Figure, ...] = ()


def write_report(directory: Path, target: Path | None = None) -> dict[str, Any]:
    """Write the report of a run; one process, also while the run goes on.

    Args:
        directory: The run's ``output_dir``.
        target: File to write; None: ``report.html`` in ``directory``.

    Returns:
        JSON-able: where the page is, its size, and the run's headline.

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
    """The run in a few numbers; of those that are not known None."""
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
        "total_steps": files.said("total_steps"),
        "train_loss": files.summary.get("train_loss", last.get("loss")),
        "tokens_per_second": files.summary.get("tokens_per_second", tokens / seconds if seconds else None),
        "train_seconds": files.summary.get("train_seconds"),
        "peak_bytes": max((rank["peak"] for rank in memory), default=None),
        "padding_share": files.said("padding_share"),
    }


def make_page(files: RunFiles) -> str:
    """The whole page.

    Raises:
        ConfigError: plotly is missing.
    """
    name = files.directory.resolve().name
    sections = [_result(files), _curves(files), _memory(files), _schedule(files), _data(files), _samples(files)]
    sections.append(_settings(files))
    drawn = {figure.name: list(figure.choices.values()) for section in sections for figure in section.figures}
    # Inside a script element only "<" could end it.
    values = json.dumps(drawn, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    links = "".join(f'<li><a href="#{section.name}">{escape(section.title)}</a></li>' for section in sections)
    body = "".join(
        f'<section id="{section.name}"><h2>{escape(section.title)}</h2>{section.body}</section>' for section in sections
    )
    library = _plotly()
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{escape(name)} · fullshard report</title>'
        f"<style>{STYLE}</style></head><body>"
        f'<header><h1>{escape(name)}</h1><p class="lead">{_state(files)}</p>'
        f'<nav aria-label="Sections"><ul>{links}</ul></nav></header>'
        "<main><noscript><p>The charts need JavaScript; the tables do not.</p></noscript>"
        f"{body}</main>{_footer(len(library) + len(values) + len(body))}"
        f'<script type="application/json" id="figures">{values}</script>'
        f"<script>{library}</script><script>{SCRIPT}</script></body></html>\n"
    )


def _plotly() -> str:
    """The source of plotly.js, which the package ships."""
    try:
        offline = importlib.import_module("plotly.offline")
    except ImportError as error:
        raise ConfigError("The report draws its charts with plotly: pip install plotly.") from error
    return offline.get_plotlyjs().replace("</script", "<\\/script")


def _state(files: RunFiles) -> str:
    numbers = headline(files)
    steps, total = numbers["steps"], numbers["total_steps"]
    if files.finished:
        return f'<span class="state">finished</span> after {steps:,} steps'
    of = f" of {total:,}" if isinstance(total, int) else ""
    return (
        f'<span class="state open">not finished</span>: last recorded step {steps:,}{of}. '
        "The run goes on, or was stopped or killed."
    )


def _footer(size: int) -> str:
    return (
        f"<footer>Written by fullshard {escape(__version__)}. This file is whole in itself and asks the network for "
        f"nothing; about {format_bytes(size)}, most of it plotly.js.</footer>"
    )


def _places(drawn: Sequence[Figure]) -> str:
    """The places that the script draws the charts in."""
    places = []
    for figure in drawn:
        chooser = ""
        if len(figure.choices) > 1:
            options = "".join(f"<option>{escape(label)}</option>" for label in figure.choices)
            label = f"{figure.title}: which rank"
            chooser = f'<select data-figure="{figure.name}" aria-label="{escape(label)}">{options}</select>'
        places.append(
            f'<figure{" class=wide" if figure.wide else ""}><div class="head"><h3>{escape(figure.title)}</h3>{chooser}'
            f'</div><div id="{figure.name}" role="img" aria-label="{escape(figure.title)}" '
            f'style="height:{figure.height}px"></div><figcaption>{escape(figure.text)}</figcaption></figure>'
        )
    return f'<div class="charts">{"".join(places)}</div>'


# Sections


def _result(files: RunFiles) -> Section:
    numbers = headline(files)
    metric, value = numbers["metric"], numbers["value"]
    if metric is None or value is None:
        score = tables.note("The model has not been evaluated on held-out rows, or not yet.")
    else:
        score = _score(files, metric, value, numbers)
    return Section("result", "Result", score + tables.tiles(_facts(files, numbers)))


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
    more = tables.table("Further metrics of the same model", ["", "value", "baseline"], others) if others else ""
    return f'{shown}<div class="beside">{bars}</div>{more}'


def _bar_line(name: str, part: float, value: str, kind: str) -> str:
    """A name, a bar of ``part`` of the width, and a number."""
    bar = f'<span class="bar"><i class="{kind}" style="width:{100 * part:.1f}%"></i></span>'
    return f"<div><span>{escape(name)}</span>{bar}<span>{escape(value)}</span></div>"


def _facts(files: RunFiles, numbers: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Name, value and remark of what is known."""
    total = numbers["total_steps"]
    known: list[tuple[str, Any, Callable[[Any], str], str]] = [
        ("optimizer", files.said("optimizer"), str, ""),
        ("training loss", numbers["train_loss"], "{:.4f}".format, "per target token, last step"),
        ("held-out loss", numbers["held_out_loss"], "{:.4f}".format, "per target token"),
        ("steps", numbers["steps"], "{:,}".format, "" if total is None else f"of {total:,}"),
        ("time", numbers["train_seconds"], tables.duration, "steps, evaluations, saving"),
        ("tokens per second", numbers["tokens_per_second"], "{:,.0f}".format, "padding left out, all ranks"),
        ("padding", numbers["padding_share"], tables.share, "of the positions in training batches"),
        ("peak memory", numbers["peak_bytes"], format_bytes, "tensors of the fullest rank"),
        ("ranks", files.said("world_size"), "{:,}".format, str(files.said("device") or "")),
        ("parameters", files.said("parameters"), "{:,}".format, "sharded over the ranks"),
    ]
    return [(name, form(value), remark) for name, value, form, remark in known if value is not None]


def _curves(files: RunFiles) -> Section:
    drawn = figures.curves(files)
    if not drawn:
        return Section("curves", "Curves", tables.note("No step has been recorded yet."))
    body = _places(drawn) + tables.note("Drag over a chart to zoom in; a double click goes back.")
    if figures.is_thinned(files):
        body += tables.note(
            f"{len(files.steps):,} recorded steps are drawn with {MOST_POINTS:,} points: of each stretch the lowest "
            "and the highest value, after smoothing."
        )
    return Section("curves", "Curves", body, tuple(drawn))


def _memory_ranks(files: RunFiles) -> list[dict[str, int]]:
    """Bytes of each rank, from the summary, else from the recorded step."""
    if files.summary.get("memory"):
        return list(files.summary["memory"])
    return [] if files.trace is None else [tables.resting(rank) for rank in files.trace.ranks]


def _memory(files: RunFiles) -> Section:
    ranks, drawn, body = _memory_ranks(files), [], ""
    if ranks:
        drawn.append(figures.rest_memory(ranks))
    if files.trace is not None:
        chosen = _chosen_ranks(files.trace.ranks)
        drawn.append(figures.memory_timeline(files.trace, chosen))
    if drawn:
        body = _places(drawn) + tables.memory_table(ranks)
    if files.trace is not None:
        body += tables.timeline_table(files.trace.ranks)
        body += tables.note(
            "The parts add up to the allocator's own count. What the step found and what is none of the model's is "
            "“other”: data, and the model's buffers." + _on_cpu(files)
        )
    else:
        body += tables.note(f"{files.missing.get(TRACE_NAME, '')} So there is no timeline of a step.")
    return Section("memory", "Memory", body, tuple(drawn))


def _on_cpu(files: RunFiles) -> str:
    on_cpu = files.trace is not None and files.trace.device == "cpu"
    return " On the CPU the step was slowed down by listening to the allocator." if on_cpu else ""


def _schedule(files: RunFiles) -> Section:
    title = "Schedule of a step"
    if files.trace is None:
        return Section("schedule-section", title, tables.note(files.missing.get(TRACE_NAME, "")))
    trace = files.trace
    drawn = figures.schedule(trace, _chosen_ranks(trace.ranks))
    body = _places([drawn]) + tables.schedule_table(trace.ranks, trace.units[0])
    notes = "Gathers and reduces are drawn from their issue to their arrival; the root's bars span what is inside them."
    if trace.device == "cpu":
        notes += " On CPUs a transfer is known to be over only when it is waited for." + _on_cpu(files)
    if len(trace.ranks) > MOST_RANKS:
        notes += f" {MOST_RANKS} of {len(trace.ranks):,} ranks can be chosen: the slowest and the fullest among them."
    return Section("schedule-section", title, body + tables.note(notes), (drawn,))


def _chosen_ranks(ranks: Sequence[RankTrace]) -> list[RankTrace]:
    """Rank 0, the slowest, the fullest, and others evenly between, at most ``MOST_RANKS``."""
    slowest = max(ranks, key=lambda rank: rank.seconds)
    fullest = max(ranks, key=lambda rank: rank.peak_bytes)
    count = min(MOST_RANKS, len(ranks))
    spread = [ranks[place * len(ranks) // count] for place in range(count)]
    kept = {rank.rank: rank for rank in (ranks[0], slowest, fullest, *spread)}
    return sorted(list(kept.values())[:MOST_RANKS], key=lambda rank: rank.rank)


def _data(files: RunFiles) -> Section:
    padding, body = files.said("padding_share"), ""
    if padding is not None:
        line = _bar_line("padding, of all positions in training batches", padding, tables.share(padding), "plain")
        body = f'<div class="beside">{line}</div>'
    rows = {"training rows": files.said("train_rows"), "held-out rows": files.said("validation_rows")}
    facts = [(name, f"{count:,}", "") for name, count in rows.items() if count is not None]
    body += tables.tiles(facts) if facts else ""
    notes = "".join(f"<li>{escape(str(one))}</li>" for one in files.said("notes") or ())
    body += f'<ul class="notes">{notes}</ul>' if notes else ""
    return Section(
        "data", "Data", body or tables.note(files.missing.get(RUN_NAME, "The run said nothing of its data."))
    )


def _samples(files: RunFiles) -> Section:
    drawn: tuple[Figure, ...] = ()
    if files.predictions:
        # Texts are hardly ever equal, labels are.
        compared = headline(files)["metric"] in ("exact_match", "accuracy")
        body = tables.prediction_table(files.predictions, compared=compared)
    else:
        body = tables.note(files.missing.get(PREDICTIONS_NAME, "The run has written no predictions."))
    confusion = files.confusion
    if confusion is not None:
        drawn = (figures.confusion_matrix(confusion),)
        body += f'<div style="margin-top:16px">{_places(drawn)}</div>' + tables.mistake_table(confusion)
    return Section("samples", "Predictions", body, drawn)


def _settings(files: RunFiles) -> Section:
    config, versions, units = files.said("config"), files.said("versions"), files.said("unit_table")
    body = tables.settings_table("Settings of the run, defaults filled in", config) if config else ""
    body += tables.settings_table("Versions", versions) if versions else ""
    if isinstance(units, str):
        body += f"<details><summary>The sharded units</summary><pre>{escape(units)}</pre></details>"
    missing = " ".join(files.missing[name] for name in (RUN_NAME, SUMMARY_NAME) if name in files.missing)
    return Section("settings", "Configuration", body or tables.note(missing))
