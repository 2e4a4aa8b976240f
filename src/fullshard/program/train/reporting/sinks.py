"""Sinks of a run's reports: files and the terminal. Sinks receive values and do not depend on the loop."""

from __future__ import annotations

import contextlib
import json
import math
import shlex
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table

from fullshard.errors import CheckpointError
from fullshard.program.config import RUN_NAME as RUN_NAME, SUMMARY_NAME
from fullshard.program.metrics import format_metric
from fullshard.program.train.reporting.flops import Flops
from fullshard.program.train.reporting.reports import (
    TRACE_NAME,
    CheckpointReport,
    EvaluationReport,
    RunStart,
    RunSummary,
    StepReport,
    StepTrace,
    spread,
)
from fullshard.sizes import format_bytes
from fullshard.state.storage import write_text

METRICS_NAME = "metrics.jsonl"
PREDICTIONS_NAME = "predictions.jsonl"

CELL_CHARACTERS = 200
"""Maximum length of a text in the table of samples."""

PLAIN_LINES = 20
"""Approximate number of step lines that a run prints if there is no terminal for a progress bar."""

PLAIN_SILENCE_S = 30.0
"""Longest time without a step line, except for the time of a step."""

COMPILING_SILENCE_S = 5.0
"""Shortest time between two lines about the compiler, which gives a sign of life every 4 s: none is silent for 10 s."""


class Sink:
    """Receiver of a run's reports, in order; on rank 0 only. Sinks override the methods that they need."""

    def referring(self, done: int, total: int) -> None:
        """Receive the progress of computing the reference of preferences, in batches, before the start."""

    def start(self, run: RunStart) -> None:
        """Receive the report of the start; called once, before the first step."""

    def step(self, report: StepReport) -> None:
        """Receive the report of an optimizer step."""

    def estimate(self, steps: int) -> None:
        """Receive how many steps of the run fit its time limit at the pace of the first ones."""

    def compiling(self, graphs: int, seconds: float, *, late_after: int | None = None) -> None:
        """Receive how many graphs of blocks are compiled so far, and in how many seconds; also while the compiler runs.

        It is then called from another thread. ``late_after`` is the last step if this was after the first epoch, in
        which all should have been compiled.
        """

    def evaluating(self, done: int, total: int) -> None:
        """Receive the progress of an evaluation, in batches."""

    def evaluation(self, report: EvaluationReport, *, is_best: bool) -> None:
        """Receive an evaluation; if it is the best so far, the model was saved."""

    def checkpoint(self, report: CheckpointReport) -> None:
        """Receive the report of a checkpoint on disk; later steps may have been taken meanwhile."""

    def profiled(self, directory: Path, problem: str) -> None:
        """Receive where the traces of the profiled steps are, or why one of them is missing."""

    def trace(self, trace: StepTrace) -> None:
        """Receive the trace of the recorded step."""

    def finish(self, summary: RunSummary) -> None:
        """Receive the summary; called once, after the model was saved."""

    def close(self) -> None:
        """Release files and the terminal; always called, also after a failure and without ``start``."""


class StepLog:
    """Selects the steps to log: every n-th, and the last, which is known only afterwards if a run ends early."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._total_steps = 0
        self._unlogged: StepReport | None = None

    def start(self, run: RunStart) -> None:
        """Receive the report of the start."""
        self._total_steps = run.total_steps

    def due(self, report: StepReport) -> bool:
        """Return True if a step is to be logged now."""
        last = report.step == self._total_steps or report.stop_requested
        is_due = last or report.step % self._every == 0
        self._unlogged = None if is_due else report
        return is_due

    def rest(self) -> StepReport | None:
        """Return the last step once if it was not logged; called after the last step."""
        rest, self._unlogged = self._unlogged, None
        return rest


class FileSink(Sink):
    """Sink that writes ``run.json``, ``metrics.jsonl``, ``trace.json``, and at the end predictions and summary.

    ``start`` and ``finish`` raise a CheckpointError if the directory or a file in it cannot be written. In between that
    does not end the run: the lines wait in memory for room on the disk.
    """

    def __init__(
        self, output_dir: Path, *, logging_steps: int = 1, say: Callable[[str], None] = lambda line: None
    ) -> None:
        """Write into ``output_dir``: one line for every ``logging_steps``-th step, each evaluation and checkpoint.

        ``say`` receives a line if a file cannot be written.
        """
        self.output_dir = output_dir
        self._log = StepLog(logging_steps)
        self._say = say
        self._metrics: FileIO | None = None
        self._unwritten = b""
        self._told = False
        self._flops: Flops | None = None

    def start(self, run: RunStart) -> None:
        """Start the metrics file, or truncate it after the step that the run resumes from; delete earlier results."""
        self._log.start(run)
        self._flops = run.flops
        try:
            self._metrics = self._open(run)
        except OSError as error:
            raise CheckpointError(f"Could not write to {self.output_dir}: {error}.") from error
        write_text(self.output_dir / RUN_NAME, json.dumps(run.as_dict(), indent=2, ensure_ascii=False) + "\n")

    def step(self, report: StepReport) -> None:
        """Append the step if it is due for logging."""
        if self._log.due(report):
            self._append_step(report)

    def evaluation(self, report: EvaluationReport, *, is_best: bool) -> None:
        """Append the evaluation."""
        self._append({**report.as_dict(), "is_best": is_best})

    def checkpoint(self, report: CheckpointReport) -> None:
        """Append the checkpoint."""
        self._append(report.as_dict())

    def trace(self, trace: StepTrace) -> None:
        """Write the trace."""
        try:
            write_text(self.output_dir / TRACE_NAME, json.dumps(trace.as_dict()) + "\n")
        except CheckpointError as error:
            self._say(f"warning: the recorded step will be missing from the report: {error} Training continues.")

    def finish(self, summary: RunSummary) -> None:
        """Write predictions and summary; the summary last, because it marks the run as complete."""
        self._append_rest()
        lines = [json.dumps(prediction.as_dict(), ensure_ascii=False) + "\n" for prediction in summary.predictions]
        if lines:
            write_text(self.output_dir / PREDICTIONS_NAME, "".join(lines))
        write_text(self.output_dir / SUMMARY_NAME, json.dumps(summary.as_dict(), indent=2, ensure_ascii=False) + "\n")

    def close(self) -> None:
        """Append the last step, if it was not logged, and close the metrics file."""
        if self._metrics is None:
            return
        self._append_rest()
        if self._unwritten:
            self._say(f"warning: {METRICS_NAME} lacks its last {len(self._unwritten.splitlines()):,} lines")
        self._metrics.close()
        self._metrics = None

    def _append_rest(self) -> None:
        if (rest := self._log.rest()) is not None:
            self._append_step(rest)

    def _append_step(self, report: StepReport) -> None:
        values = report.as_dict()
        if self._flops is not None:
            tokens, targets = report.tokens, report.target_tokens
            values["mfu"] = self._flops.utilisation(tokens=tokens, target_tokens=targets, seconds=report.seconds)
        self._append(values)

    def _open(self, run: RunStart) -> FileIO:
        self.output_dir.mkdir(parents=True, exist_ok=True)
        # A resumed run does not record a step again, so the earlier trace is kept.
        for name in (SUMMARY_NAME, PREDICTIONS_NAME, *(() if run.resumed_step else (TRACE_NAME,))):
            (self.output_dir / name).unlink(missing_ok=True)
        path = self.output_dir / METRICS_NAME
        write_text(path, _records_until(run, path))
        return FileIO(path, "a")

    def _append(self, values: dict[str, Any]) -> None:
        assert self._metrics is not None, "start() opens the file"
        self._unwritten += json.dumps(values).encode() + b"\n"
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._metrics.write(self._unwritten) :]
        except OSError as error:
            if not self._told:
                self._say(
                    f"warning: {METRICS_NAME} cannot be written: {error.strerror}. Training continues; the lines are "
                    f"written when there is room in {self.output_dir}, at the latest when the run ends."
                )
            self._told = True


class ConsoleSink(Sink):
    """Sink that prints a progress bar on a terminal, else a few plain lines; at the end samples, memory and result."""

    def __init__(self, console: Console, *, samples: int = 0) -> None:
        """Print to ``console``, with ``samples`` predictions at the end."""
        self.console = console
        self.samples = samples
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._total_steps = 0
        self._resumed_step = 0
        self._validation_rows = 0
        self._time_limit_s = math.inf
        self._started = 0.0
        self._last_line = 0.0
        self._compiles = False

    def start(self, run: RunStart) -> None:
        """Print the model, its units, the notes and the number of steps, and start the bar."""
        ranks = f"{run.world_size} rank{'s' if run.world_size > 1 else ''}"
        self._print(f"{run.parameters:,} parameters, sharded over {ranks} on {run.device}; {run.optimizer}")
        self._print(run.unit_table)
        for note in run.notes:
            self._print(note)
        self._print(f"{run.total_steps:,} steps, {run.steps_per_epoch:,} an epoch; writing to {run.output_dir}")
        self._total_steps = run.total_steps
        self._resumed_step = run.resumed_step
        self._validation_rows = run.validation_rows
        self._time_limit_s = math.inf if run.time_limit_s is None else run.time_limit_s
        self._started = self._last_line = time.monotonic()
        if self.console.is_terminal:
            columns = (BarColumn(bar_width=8), TextColumn("{task.description}", markup=False))
            self._progress = Progress(*columns, console=self.console)
            self._task = self._progress.add_task("first step", total=run.total_steps, completed=run.resumed_step)
            self._progress.start()

    def step(self, report: StepReport) -> None:
        """Update the bar, or print a line for about every twentieth of the run, and at least every 30 s."""
        if self._progress is not None:
            self._progress.update(self._task, completed=report.step, description=self._describe(report))
        elif (
            report.step in (self._resumed_step + 1, self._total_steps)
            or report.step % max(1, self._total_steps // PLAIN_LINES) == 0
            or time.monotonic() - self._last_line >= PLAIN_SILENCE_S
        ):
            self._last_line = time.monotonic()
            self._print(self._describe(report))

    def estimate(self, steps: int) -> None:
        """Print how many steps fit the time limit."""
        self._print(
            f"training.max_train_minutes: time for about {steps:,} of {self._total_steps:,} steps at this pace; a "
            "schedule that decays to the last step ends with the time or the steps, whichever comes first"
        )

    def compiling(self, graphs: int, seconds: float, *, late_after: int | None = None) -> None:
        """Show it next to the bar, or print the first line and later ones often enough; always print what is late."""
        line = f"compiling: {graphs} graph{'s' if graphs != 1 else ''} so far, {seconds:.0f} s"
        if late_after is not None:
            self._print(f"a block was compiled again after step {late_after:,}, for another shape; {line}")
        elif self._progress is not None:
            self._progress.update(self._task, description=line)
        elif not self._compiles or time.monotonic() - self._last_line >= COMPILING_SILENCE_S:
            self._last_line, self._compiles = time.monotonic(), True
            self._print(line)

    def referring(self, done: int, total: int) -> None:
        """Print that the reference is computed, at its begin and every tenth of it."""
        if done == 1 or done * 10 // total > (done - 1) * 10 // total:
            self._print(f"computing the reference's log-probabilities: batch {done:,}/{total:,}")

    def evaluating(self, done: int, total: int) -> None:
        """Show the progress of the evaluation next to the bar."""
        if self._progress is not None:
            self._progress.update(self._task, description=f"evaluating: batch {done}/{total}")

    def evaluation(self, report: EvaluationReport, *, is_best: bool) -> None:
        """Print every metric with its baseline."""
        metrics = ", ".join(
            _metric_text(name, value, report.baselines.get(name)) for name, value in report.metrics.items()
        )
        self._print(
            f"epoch {report.epoch:.2f}: held-out loss {report.loss:.4f}, {metrics} in {report.seconds:.1f} s"
            f"{', best so far: saved' if is_best else ''}"
        )
        for name, one in report.sets.items():
            found = [_metric_text(key, value, one["baselines"].get(key)) for key, value in one["metrics"].items()]
            self._print(f"  {name}, {one['rows']:,} rows: loss {one['loss']:.4f}, {', '.join(found)}")

    def checkpoint(self, report: CheckpointReport) -> None:
        """Print size and time of the checkpoint."""
        self._print(
            f"checkpoint of step {report.step:,} saved ({format_bytes(report.nbytes)} in {report.seconds:.1f} s)"
        )

    def profiled(self, directory: Path, problem: str) -> None:
        """Print where the traces are and what opens them, or why one is missing."""
        there = f"traces of the profiled steps are in {directory}, one a rank: open one at ui.perfetto.dev"
        self._print(f"warning: training.profile: {problem}" if problem else there)

    def finish(self, summary: RunSummary) -> None:
        """Print samples, memory and the result."""
        self.close()
        if summary.predictions and self.samples:
            self.console.print(_sample_table(summary, self.samples))
        self.console.print(_memory_table(summary))
        within = f"evaluation {_duration(summary.evaluation_seconds)}"
        if summary.compile_seconds:
            within = f"compiling {_duration(summary.compile_seconds)}, {within}"
        self._print(
            f"trained {summary.steps:,} steps with {summary.optimizer} in {_duration(summary.train_seconds)} "
            f"({within}), {summary.tokens_per_second:,.0f} tokens/s"
        )
        if summary.ended_by != "steps":
            reason = {
                "time": "its time limit was reached (training.max_train_minutes)",
                "early_stopping": "evaluations stopped improving (training.early_stopping_patience)",
            }[summary.ended_by]
            self._print(f"ended after step {summary.steps:,} of {self._total_steps:,}: {reason}")
        if summary.skipped_steps:
            self._print(f"{summary.skipped_steps:,} steps were skipped: loss or gradient was not finite")
        if summary.metric is not None and summary.value is not None:
            basis = ""
            if summary.baseline is not None:
                basis = f"; baseline ({summary.baseline_name}) {format_metric(summary.metric, summary.baseline)}"
            self._print(
                f"{summary.metric} {format_metric(summary.metric, summary.value)} on {self._validation_rows:,} "
                f"held-out rows, after step {summary.best_step:,}{basis}"
            )
        directory = shlex.quote(summary.output_dir)
        self._print(f"model saved in {summary.output_dir}")
        self._print("next:")
        self._print(f"  fullshard report {directory}          # one page: score, curves, memory, samples")
        self._print(f"  fullshard predict {directory} FILE    # texts for the rows of a table")
        self._print(f"  fullshard chat {directory}            # or line by line")

    def close(self) -> None:
        """Remove the bar from the terminal."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _describe(self, report: StepReport) -> str:
        """Return a line that fits next to a short bar in 80 columns; the metrics file has all values."""
        elapsed = time.monotonic() - self._started
        seconds_a_step = elapsed / (report.step - self._resumed_step)
        left = max(0.0, min(seconds_a_step * (self._total_steps - report.step), self._time_limit_s - elapsed))
        memory = format_bytes(max((report.memory_bytes, *report.memory_bytes_per_rank)))
        # On the CPU it is the whole process's, with its libraries; on CUDA tensors, of what the allocator has reserved.
        memory += f" of {format_bytes(report.reserved_bytes)} reserved" if report.reserved_bytes else " process"
        return (
            f"step {report.step}/{self._total_steps}  loss {report.loss:.4f}  "
            f"{report.tokens_per_second:,.0f} tokens/s  {memory}  {_duration(left)} left"
            f"{'  SKIPPED' if report.skipped else ''}"
        )

    def _print(self, text: str) -> None:
        """Print above the bar without markup, highlighting and wrapping."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def _metric_text(metric: str, value: float, baseline: float | None) -> str:
    basis = "" if baseline is None else f" (baseline {format_metric(metric, baseline)})"
    return f"{metric} {format_metric(metric, value)}{basis}"


def _records_until(run: RunStart, path: Path) -> str:
    """Return the records from before a run resumed; an incomplete last line of a killed run is dropped."""
    if run.resumed_step == 0 or not path.exists():
        return ""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            # An evaluation after the checkpoint's step that is not in the checkpoint is made again.
            again = record["kind"] == "evaluation" and record["step"] != run.evaluated_step
            if record["step"] < run.resumed_step + (not again):
                kept.append(line + "\n")
    return "".join(kept)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _sample_table(summary: RunSummary, samples: int) -> Table:
    table = Table(title="predictions on held-out rows", title_justify="left", show_lines=True)
    for name in ("source", "prediction", "reference"):
        table.add_column(name, overflow="fold")
    for shown in spread(summary.predictions, samples):
        cells = (shown.source, shown.prediction, "\n".join(shown.references))
        table.add_row(*(escape(_shortened(cell)) for cell in cells))
    return table


def _shortened(text: str) -> str:
    """Shorten a text so that a terminal shows several rows; the files have the full texts."""
    return text if len(text) <= CELL_CHARACTERS else f"{text[:CELL_CHARACTERS]}…"


def _memory_table(summary: RunSummary) -> Table:
    columns = ["parameters", "gradients", "optimizer", "gathered_peak", "gradient_buffer_peak", "peak"]
    titles = ["parameters", "gradients", "optimizer", "gathered\npeak", "gradient\nbuffer peak", "step peak"]
    if any(rank.reserved for rank in summary.memory):
        columns, titles = [*columns, "reserved"], [*titles, "reserved"]
    # Narrow gaps: with six sizes such as 1001.0 KiB it fills the 80 columns of a log, and rich would cut titles.
    table = Table(title="tensor memory of each rank", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for title in ("rank", *titles):
        table.add_column(title, justify="right", vertical="bottom")
    for rank in summary.memory:
        table.add_row(str(rank.rank), *(format_bytes(getattr(rank, name)) for name in columns))
    return table
