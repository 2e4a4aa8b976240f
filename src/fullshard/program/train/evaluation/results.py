"""The results of an evaluation of a trained model: its files and the printed tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fullshard.errors import CheckpointError, ConfigError
from fullshard.program.metrics import Confusion, describe_words, format_metric
from fullshard.program.train.reporting.reports import EvaluationReport
from fullshard.program.train.reporting.sinks import PREDICTIONS_NAME, SUMMARY_NAME
from fullshard.state.storage import write_text

EVALUATION_NAME = "evaluation.json"

TABLE_LABELS = 12
"""Label sets up to this size are printed as a full confusion matrix."""

SHOWN_MISTAKES = 10


def evaluation_values(report: EvaluationReport, **more: Any) -> dict[str, Any]:
    """Return the content of ``evaluation.json``: the evaluation, and ``more`` values about the model and the rows."""
    values = report.as_dict()
    for name in ("kind", "step", "epoch"):
        del values[name]
    confusion = report.confusion
    cells = (
        None if confusion is None else {"labels": list(confusion.labels), "cells": [list(c) for c in confusion.cells]}
    )
    return {**more, **values, "confusion": cells}


def require_no_run(directory: Path) -> None:
    """Raise if writing predictions to a directory would replace those of a run.

    Raises:
        ConfigError: It is the output_dir of a run.
    """
    if (directory / SUMMARY_NAME).exists():
        raise ConfigError(
            f"{directory} is the output_dir of a run, and its {PREDICTIONS_NAME} would be replaced. Set --output to "
            f"another directory, such as {directory / 'evaluation'}."
        )


def write_evaluation(report: EvaluationReport, values: dict[str, Any], directory: Path) -> None:
    """Write ``predictions.jsonl`` and ``evaluation.json``, replacing earlier ones; one process.

    Raises:
        CheckpointError: They cannot be written.
    """
    lines = [json.dumps(one.as_dict(), ensure_ascii=False) + "\n" for one in report.predictions]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # Predictions of an earlier evaluation must not remain if this one has none.
        (directory / PREDICTIONS_NAME).unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"Could not write to {directory}: {error}.") from error
    if lines:
        write_text(directory / PREDICTIONS_NAME, "".join(lines))
    write_text(directory / EVALUATION_NAME, json.dumps(values, indent=2, ensure_ascii=False) + "\n")


def draw_evaluation(console: Console, report: EvaluationReport, values: dict[str, Any], directory: Path) -> None:
    """Print the metrics with their baselines, and the confusion matrix if there is one."""
    table = Table(box=box.SIMPLE_HEAD)
    for title, justify in (("metric", "left"), ("model", "right"), ("baseline", "right")):
        table.add_column(title, justify=justify)  # type: ignore[arg-type]
    for name, value in report.metrics.items():
        baseline = report.baselines.get(name)
        shown = "" if baseline is None else format_metric(name, baseline)
        table.add_row(name, format_metric(name, value), shown)
    console.print(f"{values['model']} on {values['rows']:,} rows of {values['data']}", markup=False, soft_wrap=True)
    console.print(table)
    for name, one in report.sets.items():
        found = ", ".join(f"{key} {format_metric(key, value)}" for key, value in one["metrics"].items())
        console.print(f"{name}: {one['rows']:,} rows, loss {one['loss']:.4f}, {found}", markup=False, soft_wrap=True)
    if report.confusion is not None:
        console.print(_confusion_table(report.confusion))
    if report.words:
        console.print(describe_words(report.words), markup=False, highlight=False, soft_wrap=True)
    basis = f"baseline: {report.baseline_name}; " if report.baseline_name else ""
    text = f"{basis}held-out loss {report.loss:.4f}; {report.seconds:.1f} s; written to {directory}"
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _confusion_table(confusion: Confusion) -> Table:
    """Return the full matrix of a small label set; of a large one, the most frequent mistakes."""
    if len(confusion.labels) > TABLE_LABELS:
        return _mistakes_table(confusion)
    table = Table(title="right label (row), written label (column)", title_justify="left", box=box.SIMPLE_HEAD)
    names = [confusion.name(index) for index in range(len(confusion.labels) + 1)]
    for title in ("", *names):
        table.add_column(escape(title), justify="right", overflow="fold")
    for name, counts in zip(names, confusion.matrix(), strict=False):
        table.add_row(escape(name), *(str(count) if count else "·" for count in counts))
    return table


def _mistakes_table(confusion: Confusion) -> Table:
    mistakes = confusion.mistakes()
    title = f"most frequent of {sum(rows for *_, rows in mistakes):,} mistakes"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("right", "written"):
        table.add_column(name, overflow="fold")
    table.add_column("rows", justify="right")
    for right, written, rows in mistakes[:SHOWN_MISTAKES]:
        table.add_row(escape(right), escape(written), str(rows))
    return table
