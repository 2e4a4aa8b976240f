"""The training loop: steps, evaluations, the best model, checkpoints and the summary, all reported to sinks.

A run is exact: a step depends only on the settings, the weights, the optimizer's state and the random state, all of
which are in a checkpoint. A run that resumes from a checkpoint therefore repeats what followed it bit for bit, except
with ``max_train_minutes``: the learning rate follows the time that is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from math import ceil
from pathlib import Path
from typing import Any, NoReturn, Self

import torch

from fullshard.core.comm import Comm, device_of, together, together_in_background
from fullshard.errors import CheckpointError, ConfigError, MemoryLimitError, RunStopped
from fullshard.program.config import RunConfig, TrainingConfig
from fullshard.program.data import Batch, feed, step_sizes, steps
from fullshard.program.metrics import higher_is_better, is_better
from fullshard.program.models import Objective
from fullshard.program.speed import Compiled, watch_compiling
from fullshard.program.train.evaluation.evaluate import evaluate
from fullshard.program.train.evaluation.generation import fits_at_once
from fullshard.program.train.reporting.reports import EndedBy, EvaluationReport, RunSummary, StepReport
from fullshard.program.train.reporting.sinks import Sink
from fullshard.program.train.run.assemble import Assembly, assemble
from fullshard.program.train.run.checkpoints import BestModel, PromptedTokenizer, RunCheckpoints
from fullshard.program.train.run.disk import Target, demand, free_bytes, require_room
from fullshard.program.train.run.profile import StepProfiler
from fullshard.program.train.run.record import Planned, Record, describe_start, explain, is_out_of_memory, summarise
from fullshard.program.train.run.step import IssuedStep, StepSpec, issue_step, traced_step
from fullshard.program.train.setup.devices import Choice, Devices, kept_choices, precision_choice, with_precision
from fullshard.program.train.setup.model import preference_of
from fullshard.program.train.setup.prepare import Prepared, prepare
from fullshard.program.train.setup.resume import (
    StartingPoint,
    checkpoints_directory,
    choose_starting_point,
    delete_superseded,
    mark_finished,
    or_snapshot,
)
from fullshard.program.train.setup.sequence import Readers
from fullshard.program.train.setup.steps import learning_rate
from fullshard.program.train.setup.ways import ways_choice
from fullshard.state.saving import Checkpoints, save
from fullshard.state.storage import publish_model

_SLOW_STEPS = 2
"""First steps of an attempt, which are left out of the pace."""

_PACE_STEPS = 5
"""Steps of an attempt after which it is told how many fit the time limit: the first ones take longer."""


def train(
    config: RunConfig,
    comm: Comm,
    sinks: Sequence[Sink] = (),
    stop: StopRequest | None = None,
    prepared: Prepared | None = None,
    planned: Planned | None = None,
    chosen: Sequence[Choice] = (),
) -> RunSummary:
    """Assemble a run, train, evaluate, keep the best model and publish it; every rank calls it.

    Afterwards ``output_dir`` holds the best model by the task's metric on the held-out rows (the last one if the run
    never evaluates), loadable by ``from_pretrained(output_dir)``. The same settings, world size, machine and library
    versions give the same losses and weights, bit for bit, also when the run was interrupted and resumed from one of
    the checkpoints that it saves in ``output_dir/checkpoints``, or where ``training.checkpoints_to`` says.

    Sinks are passed on rank 0 only; ``stop`` is this rank's request to stop. ``prepared`` are tokenizer and token ids
    from ``prepare`` on this rank, which may take long and is better done before there is a process group; None:
    prepared here. ``planned`` is for the run's files and for the message when memory runs out. ``chosen`` is what was
    chosen before instead of by ``auto`` in ``config``, to be recorded. The summary is the same on every rank except for
    the times.

    Raises:
        RunStopped: A stop was requested on some rank, and a checkpoint to resume from is on disk; on every rank.
        UserError: Data, model, settings or disk cannot be used; on every rank, with the same text.
        MemoryLimitError: This rank is out of memory; the others lose it.
    """
    if config.sharding.auto is True:
        raise ConfigError("sharding: auto must be resolved first: add what chosen_settings() returns to the settings.")
    devices = Devices.of_ranks(comm)
    chosen = chosen or [precision_choice(config, devices)]
    config = with_precision(config, devices)
    if config.speed.ways == "auto":
        ready = prepared = prepared or together(comm, lambda: prepare(config))
        config, ways = together(comm, lambda: ways_choice(config, ready, comm.size, devices, comm.device))
        chosen = (*chosen, *ways)
    if comm.device.type == "cuda":
        torch.set_float32_matmul_precision("high" if config.training.tf32 else "highest")
    parts: Assembly | None = None

    def referring(done: int, total: int) -> None:
        for sink in sinks:
            sink.referring(done, total)

    with ExitStack() as closing:
        for sink in reversed(sinks):
            closing.callback(sink.close)
        directory = checkpoints_directory(config)
        # The lock on the directory is taken before another run's files are touched.
        keep_last, greater = config.training.save_total_limit, higher_is_better(config.evaluation.metric)
        own = {"ranks": comm, "keep_last": keep_last, "greater_is_better": greater, "in_memory": "auto"}
        with Checkpoints(directory, **own) as checkpoints:
            start = _starting_point(config, comm, checkpoints)
            try:
                settings, kept = kept_choices(start.partition.settings(config), start.chosen)
                parts = assemble(
                    settings,
                    comm,
                    prepared,
                    group=start.group,
                    rules=start.rules,
                    filled=start.in_memory,
                    chosen=(*chosen, *kept),
                    progress=referring,
                )
                return TrainingRun(parts, start, checkpoints, sinks, stop or StopRequest(), planned).train()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                raise MemoryLimitError(explain(error, comm, parts, planned)) from error


def _starting_point(config: RunConfig, comm: Comm, checkpoints: Checkpoints) -> StartingPoint:
    """Return the starting point: the newest snapshot, the newest checkpoint, or scratch. Every rank calls it."""
    kept = checkpoints.in_memory
    begun = 0 if kept is None else kept.begun()
    path = None if kept is None else kept.newest()
    found = path is not None
    start = _on_rank_0(comm, lambda: choose_starting_point(config, comm.size, begun=begun, in_memory=found))
    return together(comm, lambda: or_snapshot(start, path))


class _StopDuringEvaluationError(Exception):
    """Raised on all ranks when they agree during an evaluation to stop."""


class TrainingRun:
    """An assembled run on one rank; every rank calls :meth:`train` once.

    Attributes:
        record: The run so far; goes into every checkpoint.
        resumed_step: Step of the checkpoint that the run resumed from; 0 for a new run.
        ended_by: What ended the run.
    """

    def __init__(
        self,
        parts: Assembly,
        start: StartingPoint,
        checkpoints: Checkpoints,
        sinks: Sequence[Sink],
        stop: StopRequest,
        planned: Planned | None = None,
    ) -> None:
        """Store the parts. This run holds the lock on ``checkpoints``; ``sinks`` is empty on all ranks but 0."""
        self.record = Record()
        self.resumed_step = 0
        self.ended_by: EndedBy = "steps"
        self._parts = parts
        self._config = parts.config
        self._comm = parts.comm
        self._start = start
        self._sinks = sinks
        self._stop = stop
        self._planned = planned
        self._started = time.perf_counter()
        self._best = BestModel(Path(parts.config.output_dir), parts.comm)
        self._checkpoints = RunCheckpoints(parts, start, checkpoints, self._best, sinks)
        self._timetable = Timetable(parts)
        decided = parts.scaler is None and parts.config.training.on_nonfinite == "stop"
        self._schedule = parts.schedule
        self._paced_from_s = 0.0
        self._late = decided and device_of(parts.comm.device).queues
        self._unread: IssuedStep | None = None
        self._compiled = Compiled()
        self._profiler = StepProfiler(
            parts.config.training.profile, Path(parts.config.output_dir), parts.comm, self._profiled
        )
        self._read_s = 0.0

    @property
    def train_seconds(self) -> float:
        """Wall time of the run so far, including the time before it was interrupted."""
        return self.record.train_seconds + time.perf_counter() - self._started

    def train(self) -> RunSummary:
        """Train to the end.

        Raises:
            RunStopped, UserError: See :func:`train`.
        """
        self._begin()
        try:
            self._take_steps()
            return self._finish()
        except CheckpointError as error:
            raise type(error)(f"{error} {self._way_on()}") from error

    def _take_steps(self) -> None:
        """Take all steps, with the checkpoints and evaluations that are due."""
        # A resumed run traces a step only if its checkpoint has no trace, or has one of another number of ranks.
        traced = 0 if self.record.peak_bytes else self._timetable.heaviest_step(self.resumed_step, self._profiler.steps)
        with ExitStack() as ending:
            ending.enter_context(self._stop)
            ending.enter_context(self._profiler)
            steps_due = ending.enter_context(closing(self._timetable.steps_after(self.resumed_step)))
            if "compile" in self._config.ways:
                ending.enter_context(watch_compiling(self._compiled_more, self._compiling))
            self._make_up_evaluation()
            for due in steps_due:
                reason = self._early_end(due.position.step - 1)
                if reason is not None:
                    self.ended_by = reason
                    self._save_and_evaluate_early_end()
                    break
                position = due.position
                evaluates = self._timetable.evaluation_is_due(position)
                saves = self._timetable.checkpoint_is_due(position)
                copies = self._checkpoints.snapshot_is_due(position.step)
                self._profiler.begin(position.step)
                stops = self._take_step(due, traced=position.step == traced, late=not (evaluates or saves or copies))
                self._profiler.end(position.step)
                self._checkpoints.step_over()
                if stops:
                    self._leave(position.step)
                if saves:
                    self._save(position.step, background=not evaluates)
                if evaluates:
                    if not saves:  # with checkpoints, a rank that dies in the evaluation costs no step
                        self._checkpoints.snapshot(position.step, self.record, self.train_seconds)
                    self._evaluate(position)
                if copies or evaluates:
                    self._checkpoints.snapshot(position.step, self.record, self.train_seconds)
                self._checkpoints.report()
            self._read_step()
            self._checkpoints.report(wait=True)  # a stop must not abandon the checkpoint that is being written

    def _begin(self) -> None:
        """Set the random state, restore the checkpoint, delete what the run replaces, and notify the sinks."""
        # Dropout must differ between ranks, which see different rows. Weights were drawn from separate generators.
        torch.manual_seed(self._config.seed + self._comm.rank)
        if self._comm.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._comm.device)
        self.resumed_step, self.record, notes = self._checkpoints.restore()
        # Only after these: if the checkpoint cannot be loaded or the disk is too small, nothing has been deleted.
        notes = (*notes, *self._require_room())
        _on_rank_0(self._comm, lambda: delete_superseded(self._start, self._config))
        if self._start.path is None:
            _on_rank_0(self._comm, self._best.discard)
        self._checkpoints.begun()
        notes = (*self._start.notes, *notes)
        start = describe_start(
            self._parts, self.record, self._start.settings, resumed_step=self.resumed_step, notes=notes
        )
        start = start if self._planned is None else replace(start, plan=self._planned.values)
        for sink in self._sinks:
            sink.start(start)

    def _require_room(self) -> tuple[str, ...]:
        """Compare what the run writes with what is free on its disks, and return notes for the user.

        Raises:
            CheckpointError: Not even the first checkpoint and model fit; on every rank.
        """
        saves, evaluations = self._timetable.due_after(self.resumed_step)
        has_best, output_dir = self.record.best is not None, Path(self._config.output_dir)
        needed = demand(self._parts, saves=saves, evaluations=evaluations, has_best=has_best)
        directory = checkpoints_directory(self._config)

        def compare() -> tuple[tuple[int, ...], tuple[str, ...]]:
            kept = self._checkpoints.kept()
            replaced = tuple(path for path in self._start.superseded if isinstance(path, Path))
            checkpoints = Target(directory, replaced) if isinstance(directory, Path) else None
            models = Target(output_dir, (self._best.directory,) if self._start.path is None else ())
            return kept, require_room(replace(needed, kept=len(kept)), checkpoints, models, free_bytes)

        kept, notes = _on_rank_0(self._comm, compare)
        self._checkpoints.complete = kept[-1] if kept else 0
        return notes

    def _way_on(self) -> str:
        """Return how the run goes on after a save has failed; no communication."""
        step = self._checkpoints.complete
        if not step:
            return "No checkpoint is complete yet: once that is mended, the same command starts over."
        return f"Once that is mended, the same command{self._resume} resumes from step {step:,}."

    @property
    def _resume(self) -> str:
        """What the same command needs in addition to resume from the newest checkpoint."""
        return "" if self._config.resume in ("auto", "previous") else " with resume=auto"

    def _compiling(self, so_far: Compiled) -> None:
        for sink in self._sinks:
            sink.compiling(so_far.graphs, so_far.seconds)

    def _compiled_more(self, found: Compiled) -> None:
        """Tell that blocks were compiled; a block that is compiled after the first epoch costs time unexpectedly."""
        step = self.record.last.step if self.record.last is not None else 0
        epoch_over = step >= self.resumed_step + self._parts.schedule.steps_per_epoch
        again = found.graphs > self._compiled.graphs and epoch_over
        self.record.compile_seconds += found.seconds - self._compiled.seconds
        self._compiled = replace(found)
        for sink in self._sinks:
            sink.compiling(found.graphs, found.seconds, late_after=step if again else None)

    def _profiled(self, directory: Path, problem: str) -> None:
        for sink in self._sinks:
            sink.profiled(directory, problem)

    def _early_end(self, steps: int) -> EndedBy | None:
        """Return why the run ends before its next step, after ``steps``, or None. A run has at least one step.

        With a time limit, the schedule is from now on that of the steps that fit.
        """
        if steps == 0:
            return None
        limit, seconds = self._config.training.max_train_minutes, 0.0
        if limit is not None:
            seconds = most_of(self._comm, self.train_seconds)  # the ranks' clocks differ
            self._follow_pace(60.0 * limit, steps, seconds)
        reason = ends_early(self._config.training, self.record, seconds)
        if reason is not None:
            self._read_step()
        return reason

    def _follow_pace(self, limit_s: float, steps: int, seconds: float) -> None:
        """Set the schedule to that of the steps that fit, once the pace is known, from this attempt or an earlier one.

        The first steps of an attempt are slow (compiling, caches, the traced step) and say nothing about later ones.
        """
        measured = steps - self.resumed_step - _SLOW_STEPS
        if measured == 0:
            self._paced_from_s = seconds
        if measured >= _PACE_STEPS:
            self.record.pace_s = (seconds - self._paced_from_s) / measured
        pace_s = self.record.pace_s
        self._schedule = self._parts.schedule.within(limit_s, steps=steps, seconds=seconds, pace_s=pace_s)
        if measured == _PACE_STEPS:
            for sink in self._sinks:
                sink.estimate(self._schedule.total_steps)

    def _make_up_evaluation(self) -> None:
        """Make the evaluation that was due at the step that the run resumes from, if it was not made."""
        position = self._timetable.position(self.resumed_step)
        made = self.record.evaluated_step == position.step
        if position.step and not made and self._timetable.evaluation_is_due(position):
            self._evaluate(position)

    def _save_and_evaluate_early_end(self) -> None:
        """Save and evaluate after the last step of a run that ends early, as after the last planned step."""
        last = self.record.last
        assert last is not None, "a run has at least one step"
        evaluates = self._parts.evaluation is not None and self.record.evaluated_step != last.step
        if self._config.training.save_strategy != "no" and self._checkpoints.newest[0] != last.step:
            self._save(last.step, background=not evaluates)
        if evaluates:
            self._evaluate(self._timetable.position(last.step))

    def _take_step(self, due: StepInput, *, traced: bool, late: bool) -> bool:
        """Take one optimizer step, report it, and return True if some rank was asked to stop.

        On a device with a queue, ``late`` delays the report until the next call has issued its work to the device.
        """
        parts, record, settings = self._parts, self.record, self._config.training
        spec = StepSpec(
            step=due.position.step,
            epoch=due.position.epoch,
            learning_rate=learning_rate(settings, self._schedule, due.position.step, record.skipped_steps),
            max_grad_norm=settings.max_grad_norm,
            causal=parts.collate.causal,
            stop=self._stop.requested,
            objective=Objective(settings.label_smoothing_factor, settings.z_loss),
            preference=preference_of(parts.config),
            router_loss=parts.router_loss,
            on_nonfinite=settings.on_nonfinite,
            precision=settings.precision,
            unsharded=settings.accumulate == "unsharded",
        )

        late = late and self._late and not traced

        def take() -> IssuedStep:
            inputs = parts.model, parts.optimizer, due.micro_batches, parts.comm, spec, parts.scaler
            issued = issue_step(*inputs, late=late)
            if parts.average is not None:
                parts.average.update()
            return issued

        if traced:
            stops = self._read_step()
            beside = self._checkpoints.snapshot_bytes
            report, trace = traced_step(parts.model, parts.optimizer, parts.comm, lambda: take().report(), beside)
            record.peak_bytes = trace.ranks[parts.comm.rank].peak_bytes
            for sink in self._sinks:
                sink.trace(trace)
            return self._note(report) or stops
        issued = take()
        stops, self._unread = self._read_step(), issued
        if stops or not late:  # the checkpoint after a stop includes this step
            stops |= self._read_step()
        return stops

    def _read_step(self) -> bool:
        """Report the last issued step if it was not yet; return True if some rank was asked to stop.

        Raises:
            TrainingError: Its loss or its gradient is not finite; on every rank.
        """
        issued, self._unread = self._unread, None
        return False if issued is None else self._note(issued.report(since=self._read_s))

    def _note(self, report: StepReport) -> bool:
        self._read_s = time.perf_counter()
        self.record.add_step(report)
        for sink in self._sinks:
            sink.step(report)
        return report.stop_requested

    def _evaluate(self, position: Position) -> None:
        """Evaluate, and keep the model if it is the best so far.

        A checkpoint of this step is saved first, so that an error in generation costs no training; the evaluation is
        added to it afterwards.

        Raises:
            RunStopped: A stop was requested on some rank meanwhile. A resumed run makes the evaluation again.
        """
        parts, record = self._parts, self.record
        assert parts.evaluation is not None, "an evaluation is due only when there are rows for it"

        def progress(done: int, total: int) -> None:
            for sink in self._sinks:
                sink.evaluating(done, total)
            if done < total and most_of(self._comm, float(self._stop.requested)):
                raise _StopDuringEvaluationError

        step, epoch = position.step, position.epoch
        # A save under way would be abandoned if the evaluation failed.
        self._checkpoints.report(wait=True)
        try:
            of_run = parts.model, parts.tokenizer, parts.evaluation, self._comm
            at_once = (
                self._planned.values.get("gathers_once", False)
                if self._planned
                else fits_at_once(parts.model, self._comm)
            )
            with self._averaged():
                report = evaluate(*of_run, step=step, epoch=epoch, progress=progress, at_once=at_once)
        except _StopDuringEvaluationError:
            self._leave(step)
        record.evaluation_seconds += report.seconds
        record.evaluated_step = step
        record.stale_evaluations = count_stale(record, report, self._config.training.early_stopping_threshold)
        best = record.best
        is_best = best is None or is_better(report.metric, report.value, best.value)
        if best is not None and report.value == best.value:
            is_best = report.loss < best.loss
        if is_best:
            with self._averaged():
                self._best.keep(parts.model, PromptedTokenizer(parts), report)
            record.best = report
        for sink in self._sinks:
            sink.evaluation(report, is_best=is_best)
        self._checkpoints.add_evaluation(report, record, self.train_seconds)

    def _averaged(self) -> AbstractContextManager[None]:
        """Give the model the weights that are evaluated and published; checkpoints hold those that are trained."""
        average = self._parts.average
        return nullcontext() if average is None else average.applied()

    def _save(self, step: int, *, background: bool = True) -> None:
        # The time of saving is part of the run's time, which is saved.
        self._checkpoints.report(wait=True)
        self._checkpoints.save(step, self.record, self.train_seconds, background=background)

    def _leave(self, step: int) -> NoReturn:
        """Save a checkpoint unless this step is already saved, and end the run.

        Raises:
            RunStopped: Always.
        """
        self._checkpoints.report(wait=True)
        if self._checkpoints.newest[0] != step:
            self._save(step, background=False)
        path = self._checkpoints.newest[1]
        raise RunStopped(
            f"Stopped after step {step:,} of {self._parts.schedule.total_steps:,}, saved in {path}. "
            f"The same command{self._resume} resumes from there.",
            step=step,
            checkpoint=str(path),
        )

    def _finish(self) -> RunSummary:
        parts, config, comm = self._parts, self._config, self._comm
        kept = self._best.directory
        if self.record.best is None:
            kept = Path(config.output_dir, "last")
            with self._averaged():
                save(parts.model, kept, tokenizer=PromptedTokenizer(parts))
        # In the background: without hard links it copies all files.
        _on_rank_0(comm, lambda: publish_model(kept, Path(config.output_dir)))
        summary = summarise(parts, self.record, self.train_seconds, self.ended_by)
        for sink in self._sinks:
            sink.finish(summary)
        self._best.clear()
        _on_rank_0(comm, lambda: mark_finished(config, summary.steps, summary.ended_by))
        return summary


def _on_rank_0(comm: Comm, action: Callable[[], Any]) -> Any:
    """Run a function on rank 0 that may take long or fail; every rank gets its result or raises its error."""
    result = together_in_background(comm, lambda: action() if comm.rank == 0 else None)
    return comm.all_gather_object(result)[0]


class StopRequest:
    """A request to stop on this rank; used as a context while training can obey it.

    Attributes:
        requested: True to stop; may be set at any time, from any thread.
    """

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> Self:
        """Enter when training begins."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Leave when training is over."""


@dataclass(frozen=True)
class Position:
    """The progress of a run."""

    step: int  # steps trained
    epoch: float  # epochs trained, a fraction within an epoch
    ends_epoch: bool  # whether the step is the last one of an epoch


@dataclass(frozen=True)
class StepInput:
    """Input of one step."""

    position: Position  # position after the step
    micro_batches: list[Batch]  # this rank's micro-batches, on its device


def saves_between_steps(settings: TrainingConfig, *, evaluates: bool) -> bool:
    """Return True if some checkpoint is written while steps continue; those before an evaluation are not."""
    if settings.save_strategy == "no":
        return False
    if not evaluates or settings.eval_strategy != settings.save_strategy:
        return True
    return settings.save_steps is not None and settings.save_steps % (settings.eval_steps or 1) != 0


class Timetable:
    """The steps of a run, and after which of them it evaluates and saves; the same on every rank."""

    def __init__(self, parts: Assembly) -> None:
        self._parts = parts
        self._settings = parts.config.training
        self._per_epoch = parts.schedule.steps_per_epoch
        self._total = parts.schedule.total_steps

    def position(self, step: int) -> Position:
        """Return the position after ``step`` steps."""
        return Position(step, step / self._per_epoch, step % self._per_epoch == 0)

    def steps_after(self, resumed_step: int) -> Generator[StepInput]:
        """Yield the steps after ``resumed_step``; see :func:`~fullshard.program.data.feed`."""
        with closing(feed(self._micro_batches(resumed_step), self._parts.comm.device)) as fed:
            for step, micro_batches in enumerate(fed, start=resumed_step + 1):
                yield StepInput(self.position(step), micro_batches)

    def _micro_batches(self, resumed_step: int) -> Generator[list[Batch]]:
        """Yield this rank's micro-batches of each step after ``resumed_step``, on the CPU."""
        parts = self._parts
        reader = Readers.of(parts.model, parts.comm).index
        first_epoch, taken = divmod(resumed_step, self._per_epoch)
        for epoch in range(first_epoch, ceil(self._total / self._per_epoch)):
            start = taken if epoch == first_epoch else 0
            left = self._total - epoch * self._per_epoch - start
            with closing(
                steps(parts.train_set, parts.plan.for_epoch(epoch), reader, parts.collate, start=start)
            ) as stream:
                yield from islice(stream, left)

    def evaluation_is_due(self, position: Position) -> bool:
        """Return True if the run evaluates here: by ``eval_strategy``, and always after the last step."""
        if self._parts.evaluation is None:
            return False
        return self._is_due(position, self._settings.eval_strategy, self._settings.eval_steps)

    def checkpoint_is_due(self, position: Position) -> bool:
        """Return True if the run saves a checkpoint here: by ``save_strategy``, and always after the last step.

        The finished run saves its model anyway, but only a checkpoint has the optimizer's state.
        """
        return self._is_due(position, self._settings.save_strategy, self._settings.save_steps)

    def _is_due(self, position: Position, strategy: str, steps: int | None) -> bool:
        if strategy == "no":
            return False
        if position.step == self._total:
            return True
        return position.ends_epoch if steps is None else position.step % steps == 0

    def due_after(self, step: int) -> tuple[int, int]:
        """Return how many checkpoints and how many evaluations are due after ``step``, if the run takes all steps."""

        def count(strategy: str, steps: int | None) -> int:
            every = steps or self._per_epoch
            return 0 if strategy == "no" else ceil(self._total / every) - step // every

        settings = self._settings
        saves = 0 if step >= self._total else count(settings.save_strategy, settings.save_steps)
        evaluated = step < self._total and self._parts.evaluation is not None
        return saves, count(settings.eval_strategy, settings.eval_steps) if evaluated else 0

    def heaviest_step(self, resumed_step: int, profiled: Sequence[int] = ()) -> int:
        """Return the step to trace: the one of the current epoch with rank 0's largest padded micro-batch.

        It is not the first step, which has no optimizer state yet, unless that is the only one, and none of those that
        are profiled: no two profilers run at once. The same on every rank; 0 if no step is left after ``resumed_step``.
        """
        parts = self._parts
        epoch, taken = divmod(resumed_step, self._per_epoch)
        before = epoch * self._per_epoch
        left = min(self._per_epoch, self._total - before)
        sizes = step_sizes(parts.plan.for_epoch(epoch), parts.train_set, 0, parts.collate)
        later = range(taken or 1, left) or range(taken, left)
        later = [index for index in later if before + 1 + index not in profiled]
        return before + 1 + max(later, key=sizes.__getitem__) if later else 0


def ends_early(settings: TrainingConfig, record: Record, train_seconds: float) -> EndedBy | None:
    """Return why the run ends here, or None; the same on every rank if ``train_seconds`` are."""
    patience = settings.early_stopping_patience
    if patience is not None and record.stale_evaluations >= patience:
        return "early_stopping"
    limit = settings.max_train_minutes
    return "time" if limit is not None and train_seconds >= 60.0 * limit else None


def count_stale(record: Record, report: EvaluationReport, threshold: float) -> int:
    """Count the evaluations in a row, including this one, that did not improve by more than ``threshold``.

    ``record`` is the run before this evaluation.
    """
    best = record.best
    if best is None:
        return 0
    gain = report.value - best.value if higher_is_better(report.metric) else best.value - report.value
    return 0 if gain > threshold else record.stale_evaluations + 1


def most_of(comm: Comm, value: float) -> float:
    """Return the greatest of the ranks' values. Every rank calls it and gets the same answer."""
    most = torch.tensor(value, dtype=torch.float64, device=comm.device)
    comm.all_reduce(most, "max").wait()
    return float(most)
