"""The values of the report page; its template says how they look, and names files that are missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fullshard.program.config import changed_settings, flat_settings
from fullshard.program.data import ONE_ROW
from fullshard.program.metrics import format_metric, metric_of
from fullshard.program.report import figures
from fullshard.program.report.figures import MEMORY_PARTS, MOST_POINTS, WAITS, Figure, number, series, share
from fullshard.program.report.files import Record, RunFiles, read_run
from fullshard.program.report.render import render
from fullshard.program.train.reporting.reports import RankTrace, spread
from fullshard.sizes import format_bytes, format_duration
from fullshard.state.storage import write_text

REPORT_NAME = "report.html"

MOST_RANKS = 8
"""Maximum ranks of the recorded step on the page: the first, the slowest, the fullest and some in between."""

SHOWN_PREDICTIONS = 20


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
        "peak_bytes": max((rank["peak"] for rank in _memory_ranks(files)), default=None),
        "padding_share": files.fact("padding_share"),
    }


def make_page(files: RunFiles) -> str:
    """Return the page as HTML.

    Raises:
        ConfigError: plotly is missing.
    """
    numbers = headline(files)
    config = files.fact("config") or {}
    ranks = () if files.trace is None else files.trace.ranks
    # Marking equal texts makes sense for labels; longer texts are hardly ever equal.
    compared = bool(files.predictions) and metric_of(numbers["metric"]).of_labels
    return render(
        "report.html.j2",
        files.directory.resolve().name,
        _charts(files),
        files=files,
        numbers=numbers,
        base=files.fact("base") or {},
        objective=(config.get("training") or {}).get("objective", "sft"),
        sharers=(config.get("sharding") or {}).get("sequence_parallel", 1),
        other_metrics=_other_metrics(files, numbers["metric"]),
        rank_memory=_rank_memory(files),
        sets=_sets(files),
        changed=changed_settings(config) if config else {},
        every=dict(flat_settings(config)),
        peak_memory=[_peak_memory(rank) for rank in ranks],
        step_times=[_step_times(rank, files.trace.units[0]) for rank in ranks if files.trace],
        **_rows_and_notes(files),
        **_samples(files.predictions, compared=compared),
        most_points=MOST_POINTS,
        most_ranks=MOST_RANKS,
    )


def _charts(files: RunFiles) -> dict[str, list[Figure]]:
    """Return the charts of each section."""
    ranks, trace = _memory_ranks(files), files.trace
    chosen = [] if trace is None else _chosen_ranks(trace.ranks)
    return {
        "curves": figures.curves(files),
        "memory": ([figures.rest_memory(ranks)] if ranks else [])
        + ([] if trace is None else [figures.memory_timeline(trace, chosen)]),
        "schedule": [] if trace is None else [figures.schedule(trace, chosen)],
        "samples": [] if files.confusion is None else [figures.confusion_matrix(files.confusion)],
    }


def _chosen_ranks(ranks: Sequence[RankTrace]) -> list[RankTrace]:
    """Return rank 0, the slowest, the fullest and evenly spaced others, at most ``MOST_RANKS``."""
    slowest = max(ranks, key=lambda rank: rank.seconds)
    fullest = max(ranks, key=lambda rank: rank.peak_bytes)
    kept = {rank.rank: rank for rank in (ranks[0], slowest, fullest, *spread(ranks, MOST_RANKS))}
    return sorted(list(kept.values())[:MOST_RANKS], key=lambda rank: rank.rank)


# Rows of the tables: values by the title of their column


def _other_metrics(files: RunFiles, metric: str | None) -> list[tuple[str, ...]]:
    """Return the best model's other metrics beside their baselines."""
    best = files.best or {}
    values, baselines = best.get("metrics", {}), best.get("baselines", {})
    return [
        (name, format_metric(name, value), format_metric(name, baselines[name]) if name in baselines else "none")
        for name, value in values.items()
        if name != metric
    ]


def _memory_ranks(files: RunFiles) -> list[dict[str, int]]:
    """Return the bytes of each rank, from the summary or else from the end of the recorded step."""
    if files.summary.get("memory"):
        return list(files.summary["memory"])
    parts = ("parameters", "gradients", "optimizer")
    return [
        {"rank": rank.rank, **{part: getattr(rank.memory, part)[-1] for part in parts}, "peak": rank.peak_bytes}
        for rank in (() if files.trace is None else files.trace.ranks)
    ]


def _rank_memory(files: RunFiles) -> list[dict[str, str]]:
    """Return each rank's memory, next to its planned peak if there is a plan, each with the same contents.

    The plan has the bytes of ``peak``, and of ``copies`` of a save where the measured tensors
    include them.
    """
    ranks = _memory_ranks(files)
    planned = {rank["rank"]: rank for rank in (files.run.get("plan") or {}).get("memory", ())}
    columns = {
        "parameters": "parameters",
        "gradients": "gradients",
        "optimizer": "optimizer",
        "gathered_peak": "gathered, peak",
        "gradient_buffer_peak": "gradient buffers, peak",
        "peak": "all tensors, peak of a step",
        "reserved": "reserved by the allocator",
    }
    there = {key: title for key, title in columns.items() if any(key in rank for rank in ranks)}
    if not any(rank.get("reserved") for rank in ranks):
        there.pop("reserved", None)
    copies = any(of_rank.get("copies") for of_rank in planned.values())
    title = f"planned for the largest batch{', with the copies of a save' * copies}"
    rows = []
    for rank in ranks:
        row = {"": f"rank {rank['rank']}", **{there[key]: format_bytes(rank.get(key, 0)) for key in there}}
        if planned:
            of_rank = planned.get(rank["rank"])
            row[title] = "none" if of_rank is None else format_bytes(of_rank["peak"] + of_rank.get("copies", 0))
        rows.append(row)
    return rows


def _peak_memory(rank: RankTrace) -> dict[str, str]:
    """Return a rank's memory by part at its peak."""
    columns = {part: getattr(rank.memory, part) for part in MEMORY_PARTS}
    totals = [sum(values) for values in zip(*columns.values(), strict=True)]
    top = totals.index(max(totals))
    parts = {part: format_bytes(values[top]) for part, values in columns.items()}
    return {
        "": f"rank {rank.rank}",
        "at": format_duration(rank.memory.seconds[top]),
        **parts,
        "total": format_bytes(totals[top]),
    }


def _step_times(rank: RankTrace, root: str) -> dict[str, str]:
    """Return a rank's times in the recorded step."""

    def spent(kind: str, unit: str | None = None) -> float:
        return sum(e.end_s - e.start_s for e in rank.events if e.kind == kind and unit in (None, e.unit))

    seconds = {
        "step": rank.seconds,
        **{kind: spent(kind, root) for kind in ("forward", "backward")},
        **{label: spent(kind) for kind, label in WAITS.items()},
        "optimizer": spent("optimizer"),
    }
    shown = {f"{label}, ms": number(value * 1e3) for label, value in seconds.items()}
    waited = sum(spent(kind) for kind in WAITS)
    return {"": f"rank {rank.rank}", **shown, "waiting": share(waited / rank.seconds)}


def _sets(files: RunFiles) -> list[dict[str, str]]:
    """Return the sets of a mixture, with the metrics of the best model on each."""
    scores = (files.best or {}).get("sets", {})
    metrics = list(dict.fromkeys(name for found in scores.values() for name in found["metrics"]))
    rows = []
    for one in files.fact("sets") or ():
        found = scores.get(one["name"], {"metrics": {}})
        rows.append(
            {
                "": one["name"],
                "weight": "none" if one["weight"] is None else f"{one['weight']:g}",
                "training rows": f"{one['train_rows']:,}",
                "rows of an epoch": f"{one['epoch_rows']:,}",
                "held-out rows": f"{one['validation_rows']:,}",
                "hash": one["content"][:8],
                "held-out loss": f"{found['loss']:.4f}" if "loss" in found else "",
                **{
                    name: format_metric(name, found["metrics"][name]) if name in found["metrics"] else ""
                    for name in metrics
                },
            }
        )
    return rows


def _rows_and_notes(files: RunFiles) -> dict[str, Any]:
    """Return the shown training rows, and the run's notes; the note that is a row as text is left out beside them."""
    seen = files.fact("shown_rows") or []
    notes = [str(note) for note in files.fact("notes") or ()]
    return {
        "seen_rows": seen,
        "masked": any(name != "source" for row in seen for name, _ in row[:1]),
        "notes": [note for note in notes if not (seen and note.startswith(ONE_ROW))],
    }


def _samples(predictions: Sequence[Record], *, compared: bool) -> dict[str, Any]:
    """Return evenly spaced predictions; with ``compared``, those that equal no reference first."""
    rows = [
        {
            "input": str(row.get("input", "")),
            "prediction": str(row.get("prediction", "")),
            "references": [str(text) for text in row.get("references", ())],
        }
        for row in predictions
    ]
    differ = [compared and not _equals_a_reference(row) for row in rows]
    wrong, right = ([row for row, of in zip(rows, differ, strict=True) if of is kind] for kind in (True, False))
    first = spread(wrong, SHOWN_PREDICTIONS)
    shown = [row | {"differs": True} for row in first]
    shown += [row | {"differs": False} for row in spread(right, SHOWN_PREDICTIONS - len(first))]
    return {"samples": shown, "compared": compared, "wrong": len(wrong)}


def _equals_a_reference(row: Mapping[str, Any]) -> bool:
    return row["prediction"].split() in [text.split() for text in row["references"]]
