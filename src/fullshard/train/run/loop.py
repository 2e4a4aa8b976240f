"""The run: steps, evaluations, the best model kept, checkpoints, a summary. Everything it says goes to sinks as values.

A run is exact: what a step does depends on the settings, the weights, the optimizer's state and the random state alone,
and all of these are in a checkpoint. So a run that goes on from one repeats what came after it, bit for bit.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path
from typing import Any, NoReturn

import torch

from fullshard.comm import Comm, together_in_background
from fullshard.config import RunConfig
from fullshard.data import Batch, step_sizes, steps
from fullshard.errors import ConfigError, RunStopped
from fullshard.saving import Checkpoints, SaveReport, save
from fullshard.saving.full import write_assets
from fullshard.storage import publish_model, read_completion, step_directory
from fullshard.train.evaluation.evaluate import evaluate
from fullshard.train.evaluation.metrics import higher_is_better, is_better
from fullshard.train.reporting.reports import CheckpointReport, EndedBy, EvaluationReport, RunSummary, StepReport
from fullshard.train.reporting.sinks import Sink
from fullshard.train.run.assemble import Assembly, assemble
from fullshard.train.run.best import BestModel
from fullshard.train.run.early_stop import any_rank, count_stale, ends_early
from fullshard.train.run.record import Record
from fullshard.train.run.step import StepSpec, train_step
from fullshard.train.run.stop import StopRequest
from fullshard.train.run.summary import describe_start, summarise
from fullshard.train.run.traced_step import traced_step
from fullshard.train.setup.data_plan import group_size
from fullshard.train.setup.learning_rate import learning_rate
from fullshard.train.setup.model import make_objective
from fullshard.train.setup.prepare import Prepared
from fullshard.train.setup.resume import CHECKPOINTS_NAME, Origin, choose_origin, mark_finished, prepare


@dataclass(frozen=True)
class _Place:
    """How far a run is: steps and epochs trained, and whether the step was an epoch's last."""

    step: int
    epoch: float
    ends_epoch: bool


@dataclass(frozen=True)
class _StepInput:
    """What one step is about to do: where it leads, and this rank's micro-batches."""

    place: _Place
    micro_batches: list[Batch]


@dataclass
class _Run:
    """A run under way on one rank.

    Attributes:
        parts: What it is made of.
        origin: Where it started.
        checkpoints: What it saves.
        best: The best model on disk.
        sinks: Told everything; on rank 0 only.
        stop: Whether this rank is asked to stop.
        started: Monotonic time of the beginning.
        record: What was done.
        resumed_step: Steps taken before the checkpoint that it goes on from; 0 when it started anew.
        saved: The step and the path of the newest checkpoint.
        ended_by: What ended it.
    """

    parts: Assembly
    origin: Origin
    checkpoints: Checkpoints
    best: BestModel
    sinks: Sequence[Sink]
    stop: StopRequest
    started: float = field(default_factory=time.perf_counter)
    record: Record = field(default_factory=Record)
    resumed_step: int = 0
    saved: tuple[int, Path | None] = (0, None)
    ended_by: EndedBy = "steps"

    @property
    def group_rows(self) -> int:
        """What a run that goes on with other ranks must know of this one's plan."""
        if self.origin.values is not None:
            return self.origin.values["group_rows"]
        return group_size(self.parts.config, self.parts.comm.size)

    @property
    def train_seconds(self) -> float:
        """Wall time of the run so far."""
        return self.record.train_seconds + time.perf_counter() - self.started


class _StopWishedError(Exception):
    """Ranks agreed in the middle of an evaluation to stop."""


def train(
    config: RunConfig,
    comm: Comm,
    sinks: Sequence[Sink] = (),
    stop: StopRequest | None = None,
    prepared: Prepared | None = None,
) -> RunSummary:
    """Do a whole run: assemble it, train, evaluate, keep the best model, publish it; on every rank together.

    Afterwards ``output_dir`` holds the best model by the task's metric on the held-out rows (the last one when the run
    never evaluates), loadable by ``from_pretrained(output_dir)``. The same settings, world size, machine and library
    versions give the same losses and weights, bit for bit, also when the run was cut short and goes on from one of the
    checkpoints that it saves in ``output_dir/checkpoints``.

    Args:
        config: The run's settings.
        comm: The ranks.
        sinks: Told everything as it happens; given on rank 0 only.
        stop: Whether this rank is asked to stop; None: it never is.
        prepared: Tokenizer and token ids, from :func:`~fullshard.train.setup.prepare.prepare` on this rank, best
            before the ranks know each other: it may take long. None: made here.

    Returns:
        The summary, the same on every rank but for the times.

    Raises:
        RunStopped: A rank was asked to stop, and there is a checkpoint to go on from; on every rank.
        UserError: Data, model, settings or disk; on every rank, with the same text.
    """
    with ExitStack() as closing:
        for sink in reversed(sinks):
            closing.callback(sink.close)
        directory = Path(config.output_dir, CHECKPOINTS_NAME)
        # Takes the lock on the directory: nothing of another run is touched before.
        keep_last, greater = config.training.save_total_limit, higher_is_better(config.evaluation.metric)
        with Checkpoints(directory, ranks=comm, keep_last=keep_last, greater_is_better=greater) as checkpoints:
            origin = _on_first(comm, lambda: choose_origin(config, comm.size))
            group = None if origin.values is None else origin.values["group_rows"]
            parts = assemble(config, comm, prepared, group=group)
            best = BestModel(Path(config.output_dir), comm)
            return _fit(_Run(parts, origin, checkpoints, best, sinks, stop or StopRequest()))


def _fit(run: _Run) -> RunSummary:
    """Train an assembled run to its end; on every rank together.

    Raises:
        RunStopped, UserError: See :func:`train`.
    """
    config, comm = run.parts.config, run.parts.comm
    # Dropout differs between ranks, which see different rows. Weights were drawn from generators of their own.
    torch.manual_seed(config.seed + comm.rank)
    if comm.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(comm.device)
    notes = (*run.origin.notes, *_go_on(run))
    _on_first(comm, lambda: prepare(run.origin, config))
    if run.origin.path is None:
        _on_first(comm, run.best.discard)
    start = describe_start(run.parts, resumed_step=run.resumed_step, notes=notes)
    for sink in run.sinks:
        sink.start(start)
    heaviest = _heaviest_step(run)
    with run.stop:
        _catch_up(run)
        for due in _steps(run):
            early = _ends_early(run)
            if early is not None:
                run.ended_by = early
                break
            report = _take_step(run, due, metered=due.place.step == heaviest)
            if report.stop_requested:
                _leave(run, due.place.step)
            evaluation = _evaluate(run, due.place) if _evaluation_is_due(run, due.place) else None
            if _checkpoint_is_due(run, due.place):
                _save(run, due.place.step, None if evaluation is None else evaluation.value)
            _tell_of(run, run.checkpoints.committed())
        if run.ended_by != "steps":
            _round_off(run)
    _tell_of(run, run.checkpoints.wait())
    return _finish(run)


def _ends_early(run: _Run) -> EndedBy | None:
    """Whether the run ends before its next step; every rank gets the same. A run has at least one step."""
    if run.record.last is None:
        return None
    return ends_early(run.parts.config.training, run.record, run.train_seconds, run.parts.comm)


def _go_on(run: _Run) -> tuple[str, ...]:
    """Take up the state of the checkpoint that the run starts at, if it does.

    Returns:
        What is to be said about it.
    """
    origin, parts, comm = run.origin, run.parts, run.parts.comm
    if origin.path is None or origin.values is None:
        return ()
    options = [{k: v for k, v in group.items() if k != "params"} for group in parts.optimizer.param_groups]
    restored = run.checkpoints.load(parts.model, parts.optimizer, path=origin.path)
    assert restored is not None, "a path was given"
    # The optimizer's options are the settings', which may have been changed on purpose.
    for group, given in zip(parts.optimizer.param_groups, options, strict=True):
        group.update(given)
    if restored.step > parts.schedule.total_steps:
        raise ConfigError(
            f"{origin.path} was made after step {restored.step:,}, and with these settings the run has "
            f"{parts.schedule.total_steps:,} steps: raise training.num_train_epochs or training.max_steps."
        )
    if not restored.rng_restored:
        torch.manual_seed(_seed_of(parts.config.seed, comm.rank, restored.step))
    if parts.scaler is not None and origin.values["scaler"] is not None:
        parts.scaler.load_state_dict(origin.values["scaler"])
    run.record = Record.from_values(origin.values["record"], rank=comm.rank, world_size=comm.size)
    run.resumed_step = restored.step
    if restored.path.parent.resolve() == run.checkpoints.directory.resolve():
        run.saved = (restored.step, restored.path)
    return _take_up_best(run, restored.step)


def _take_up_best(run: _Run, step: int) -> tuple[str, ...]:
    """Go on with the best model so far, if it is there and can be compared with those to come."""
    best = run.record.best
    if best is None:
        return ()
    why = "was evaluated with other settings"
    if run.origin.comparable:
        if run.best.restore(step, best):
            return ()
        why = "is no longer there"
    # Where it is due, the evaluation after this step is made again.
    run.record.best, run.record.evaluated_step, run.record.stale_evaluations = None, 0, 0
    return (f"the best model so far, of step {best.step:,}, {why}: the best from here on is kept",)


def _seed_of(seed: int, rank: int, step: int) -> int:
    """A seed for a rank that has no random state to take up."""
    return int.from_bytes(hashlib.sha256(f"{seed} {rank} {step}".encode()).digest()[:8]) >> 1


def _catch_up(run: _Run) -> None:
    """Make the evaluation that was due after the step that the run goes on from, if it stopped before."""
    place = _place_after(run, run.resumed_step)
    if place.step and run.record.evaluated_step != place.step and _evaluation_is_due(run, place):
        _evaluate(run, place)


def _round_off(run: _Run) -> None:
    """Evaluate and save after the last step of a run that ends early, as after the last step of all."""
    settings, last = run.parts.config.training, run.record.last
    if last is None:
        return
    if run.parts.evaluation is not None and run.record.evaluated_step != last.step:
        _evaluate(run, _place_after(run, last.step))
    if settings.save_strategy != "no" and run.saved[0] != last.step:
        _save(run, last.step)


def _take_step(run: _Run, due: _StepInput, *, metered: bool) -> StepReport:
    """One optimizer step, reported."""
    parts, record = run.parts, run.record
    settings = parts.config.training
    spec = StepSpec(
        step=due.place.step,
        epoch=due.place.epoch,
        learning_rate=learning_rate(settings, parts.schedule, due.place.step, record.skipped_steps),
        max_grad_norm=settings.max_grad_norm,
        causal=parts.collate.causal,
        stop=run.stop.requested,
        objective=make_objective(parts.config),
        on_nonfinite=settings.on_nonfinite,
        precision=settings.precision,
    )

    def take() -> StepReport:
        return train_step(parts.model, parts.optimizer, due.micro_batches, parts.comm, spec, parts.scaler)

    if metered:
        report, trace = traced_step(parts.model, parts.optimizer, parts.comm, take)
        record.peak_bytes = trace.ranks[parts.comm.rank].peak_bytes
        for sink in run.sinks:
            sink.trace(trace)
    else:
        report = take()
    record.last = report
    record.tokens += report.tokens
    record.step_seconds += report.seconds
    record.skipped_steps += report.skipped
    for sink in run.sinks:
        sink.step(report)
    return report


def _evaluate(run: _Run, place: _Place) -> EvaluationReport:
    """Evaluate, and keep the model when it is the best so far; of equal metrics the lower loss is the better.

    Raises:
        RunStopped: A rank was asked to stop meanwhile. The evaluation is made when the run goes on.
    """
    parts, record = run.parts, run.record
    assert parts.evaluation is not None, "an evaluation is due only when there are rows for it"

    def progress(done: int, total: int) -> None:
        for sink in run.sinks:
            sink.evaluating(done, total)
        if done < total and any_rank(parts.comm, run.stop.requested):
            raise _StopWishedError

    try:
        report = evaluate(
            parts.model,
            parts.tokenizer,
            parts.evaluation,
            parts.comm,
            step=place.step,
            epoch=place.epoch,
            progress=progress,
        )
    except _StopWishedError:
        _leave(run, place.step)
    record.evaluation_seconds += report.seconds
    record.evaluated_step = place.step
    record.stale_evaluations = count_stale(record, report, parts.config.training.early_stopping_threshold)
    is_best = record.best is None or _beats(report, record.best)
    if is_best:
        run.best.keep(parts.model, parts.tokenizer, report)
        record.best = report
    for sink in run.sinks:
        sink.evaluation(report, is_best=is_best)
    return report


def _beats(report: EvaluationReport, best: EvaluationReport) -> bool:
    """Of equal metrics the lower loss is the better."""
    if report.value == best.value:
        return report.loss < best.loss
    return is_better(report.metric, report.value, best.value)


def _save(run: _Run, step: int, metric: float | None = None, *, background: bool = True) -> None:
    """Save a checkpoint; in the background, it is told of when it is on the disk."""
    parts, comm = run.parts, run.parts.comm
    _tell_of(run, run.checkpoints.wait())
    peaks = comm.all_gather_object(run.record.peak_bytes)
    values = {
        "settings": run.origin.settings,
        "group_rows": run.group_rows,
        "total_steps": parts.schedule.total_steps,
        "scaler": None if parts.scaler is None else parts.scaler.state_dict(),
        "record": run.record.as_values(train_seconds=run.train_seconds, peaks=peaks),
    }
    started = time.monotonic()
    run.checkpoints.save(
        parts.model,
        parts.optimizer,
        step=step,
        values=values,
        metric=metric,
        background=background,
        assets=lambda directory: write_assets(parts.model, directory, tokenizer=parts.tokenizer),
    )
    path = step_directory(run.checkpoints.directory, step)
    run.saved = (step, path)
    run.best.named(step, run.record.best)
    if not background:
        seconds = time.monotonic() - started
        _committed(run, step, path, seconds, stall_seconds=seconds)


def _tell_of(run: _Run, report: SaveReport | None) -> None:
    """Say that a checkpoint which was saved in the background is on the disk."""
    if report is not None:
        _committed(run, report.step, report.path, report.seconds, report.stall_seconds)


def _committed(run: _Run, step: int, path: Path, seconds: float, stall_seconds: float) -> None:
    run.best.committed(step)
    if run.sinks:
        nbytes = sum(read_completion(path).files.values())
        for sink in run.sinks:
            sink.checkpoint(CheckpointReport(step, str(path), nbytes, seconds, stall_seconds))


def _leave(run: _Run, step: int) -> NoReturn:
    """Save, unless this very step is saved already, and end the run here; on every rank together.

    Raises:
        RunStopped: Always.
    """
    _tell_of(run, run.checkpoints.wait())
    if run.saved[0] != step:
        _save(run, step, background=False)
    path = run.saved[1]
    resume = "" if run.parts.config.resume == "auto" else " with resume=auto"
    raise RunStopped(
        f"Stopped after step {step:,} of {run.parts.schedule.total_steps:,}, saved in {path}. "
        f"The same command{resume} goes on from there.",
        step=step,
        checkpoint=str(path),
    )


def _finish(run: _Run) -> RunSummary:
    """Place the model in ``output_dir``, and say how it went; on every rank together."""
    parts, config, comm = run.parts, run.parts.config, run.parts.comm
    kept = run.best.directory
    if run.record.best is None:
        kept = Path(config.output_dir, "last")
        save(parts.model, kept, tokenizer=parts.tokenizer)
    # In the background: where there are no hard links it copies whole files.
    _on_first(comm, lambda: publish_model(kept, Path(config.output_dir)))
    summary = summarise(parts, run.record, run.train_seconds, run.ended_by)
    for sink in run.sinks:
        sink.finish(summary)
    run.best.clear()
    _on_first(comm, lambda: mark_finished(config, summary.steps, summary.ended_by))
    return summary


def _on_first(comm: Comm, action: Callable[[], Any]) -> Any:
    """Do something on rank 0 that may take long or fail; every rank gets its result, or its error."""
    result = together_in_background(comm, lambda: action() if comm.rank == 0 else None)
    return comm.all_gather_object(result)[0]


def _steps(run: _Run) -> Iterator[_StepInput]:
    """The steps that are left with this rank's micro-batches, made as they are needed."""
    parts = run.parts
    per_epoch, total = parts.schedule.steps_per_epoch, parts.schedule.total_steps
    collate = replace(parts.collate, packed=parts.config.training.packing)
    first_epoch, taken = divmod(run.resumed_step, per_epoch)
    for epoch in range(first_epoch, ceil(total / per_epoch)):
        start = taken if epoch == first_epoch else 0
        stream = steps(parts.train_set, parts.plan.for_epoch(epoch), parts.comm.rank, collate, start=start)
        for step, micro_batches in enumerate(stream, start=epoch * per_epoch + start + 1):
            if step > total:
                return
            yield _StepInput(_place_after(run, step), micro_batches)


def _place_after(run: _Run, step: int) -> _Place:
    per_epoch = run.parts.schedule.steps_per_epoch
    return _Place(step, step / per_epoch, step % per_epoch == 0)


def _evaluation_is_due(run: _Run, place: _Place) -> bool:
    """By the strategy, and always after the last step: what the run ends with is measured."""
    settings = run.parts.config.training
    if run.parts.evaluation is None:
        return False
    return _is_due(run, place, settings.eval_strategy, settings.eval_steps)


def _checkpoint_is_due(run: _Run, place: _Place) -> bool:
    """By the strategy; after the last step the model is saved anyway, but only here the optimizer's state."""
    settings = run.parts.config.training
    return _is_due(run, place, settings.save_strategy, settings.save_steps)


def _is_due(run: _Run, place: _Place, strategy: str, steps: int | None) -> bool:
    if strategy == "no":
        return False
    if place.step == run.parts.schedule.total_steps:
        return True
    return place.ends_epoch if steps is None else place.step % steps == 0


def _heaviest_step(run: _Run) -> int:
    """The step whose memory is measured: of the first epoch, that with rank 0's largest padded micro-batch.

    Not the first step, which has no optimizer state yet, unless it is the only one. A run that goes on measures only
    what the run before it did not come to, or came to on other ranks.

    Returns:
        The same on every rank; 0: none.
    """
    parts = run.parts
    if run.record.peak_bytes:
        return 0
    epoch, taken = divmod(run.resumed_step, parts.schedule.steps_per_epoch)
    before = epoch * parts.schedule.steps_per_epoch
    left = min(parts.schedule.steps_per_epoch, parts.schedule.total_steps - before)
    causal, packed = parts.collate.causal, parts.config.training.packing
    sizes = step_sizes(parts.plan.for_epoch(epoch), parts.train_set, 0, causal=causal, packed=packed)
    later = range(taken or 1, left) or range(taken, left)
    return before + 1 + max(later, key=sizes.__getitem__) if later else 0
