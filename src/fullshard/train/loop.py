"""The run: steps, evaluations, the best model kept, checkpoints, a summary. Everything it says goes to sinks as values.

A run is exact: what a step does depends on the settings, the weights, the optimizer's state and the random state alone,
and all of these are in a checkpoint. So a run that goes on from one repeats what came after it, bit for bit.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch

from fullshard.checkpoint import publish_model, read_completion, step_directory
from fullshard.comm import Comm, MemoryMeter, together_in_background
from fullshard.config import RunConfig
from fullshard.data import Batch, EpochPlan, RowRef, TokenizedSet, batches
from fullshard.errors import ConfigError, RunStopped
from fullshard.saving import Checkpoints, SaveReport, save
from fullshard.saving.full import write_assets
from fullshard.train.assemble import Assembly, assemble
from fullshard.train.best import BestModel
from fullshard.train.describe import describe_start, summarise
from fullshard.train.evaluate import evaluate
from fullshard.train.record import Record
from fullshard.train.reports import CheckpointReport, EvaluationReport, RunSummary, StepReport
from fullshard.train.resume import CHECKPOINTS_NAME, Origin, choose_origin, mark_finished, prepare
from fullshard.train.sinks import Sink
from fullshard.train.step import StepSpec, train_step
from fullshard.train.stop import StopRequest


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

    @property
    def group_rows(self) -> int:
        """Rows that are grouped by length together: those of a micro-batch over all ranks, where the run began."""
        if self.origin.values is not None:
            return self.origin.values["group_rows"]
        return self.parts.comm.size * self.parts.config.training.per_device_train_batch_size

    @property
    def train_seconds(self) -> float:
        """Wall time of the run so far."""
        return self.record.train_seconds + time.perf_counter() - self.started


class _StopWishedError(Exception):
    """Ranks agreed in the middle of an evaluation to stop."""


def train(config: RunConfig, comm: Comm, sinks: Sequence[Sink] = (), stop: StopRequest | None = None) -> RunSummary:
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

    Returns:
        The summary, the same on every rank but for the times.

    Raises:
        RunStopped: A rank was asked to stop, and there is a checkpoint to go on from; on every rank.
        UserError: Data, model, settings or disk; on every rank, with the same text.
    """
    try:
        directory = Path(config.output_dir, CHECKPOINTS_NAME)
        # Takes the lock on the directory: nothing of another run is touched before.
        with Checkpoints(directory, ranks=comm, keep_last=config.training.save_total_limit) as checkpoints:
            origin = _on_first(comm, lambda: choose_origin(config, comm.size))
            parts = assemble(config, comm)
            best = BestModel(Path(config.output_dir), comm)
            return _fit(_Run(parts, origin, checkpoints, best, sinks, stop or StopRequest()))
    finally:
        for sink in sinks:
            sink.close()


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
            report = _take_step(run, due, metered=due.place.step == heaviest)
            if report.stop_requested:
                _leave(run, due.place.step)
            evaluation = _evaluate(run, due.place) if _evaluation_is_due(run, due.place) else None
            if _checkpoint_is_due(run, due.place):
                _save(run, due.place.step, None if evaluation is None else evaluation.value)
            _tell_of(run, run.checkpoints.committed())
    _tell_of(run, run.checkpoints.wait())
    return _finish(run)


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
    run.record = Record.from_values(origin.values["record"], rank=comm.rank, world_size=comm.size)
    run.resumed_step = restored.step
    if restored.path.parent.resolve() == run.checkpoints.directory.resolve():
        run.saved = (restored.step, restored.path)
    best = run.record.best
    if run.best.restore(restored.step, best):
        return ()
    # Where it is due, the evaluation after this step is made again.
    run.record.best, run.record.evaluated_step = None, 0
    assert best is not None, "no best model is always found"
    return (f"the best model so far, of step {best.step:,}, is no longer there: the best from here on is kept",)


def _seed_of(seed: int, rank: int, step: int) -> int:
    """A seed for a rank that has no random state to take up."""
    return int.from_bytes(hashlib.sha256(f"{seed} {rank} {step}".encode()).digest()[:8]) >> 1


def _catch_up(run: _Run) -> None:
    """Make the evaluation that was due after the step that the run goes on from, if it stopped before."""
    place = _place_after(run, run.resumed_step)
    if place.step and run.record.evaluated_step != place.step and _evaluation_is_due(run, place):
        _evaluate(run, place)


def _take_step(run: _Run, due: _StepInput, *, metered: bool) -> StepReport:
    """One optimizer step, reported."""
    parts, record = run.parts, run.record
    settings = parts.config.training
    spec = StepSpec(
        step=due.place.step,
        epoch=due.place.epoch,
        learning_rate=settings.learning_rate * parts.schedule.factor(due.place.step - 1),
        max_grad_norm=settings.max_grad_norm,
        causal=parts.collate.causal,
        stop=run.stop.requested,
    )
    # CUDA's allocator keeps its own peak over the whole run; on the CPU listening costs time, so one step is measured.
    meter = MemoryMeter(parts.comm.device) if metered and parts.comm.device.type == "cpu" else None
    if meter is not None:
        parts.optimizer.zero_grad()  # or the last step's gradients, freed inside, would count to the end
    with meter or nullcontext():
        report = train_step(parts.model, parts.optimizer, due.micro_batches, parts.comm, spec)
    if meter is not None:
        record.peak_bytes = meter.peak_bytes
    record.last = report
    record.tokens += report.tokens
    record.step_seconds += report.seconds
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
        if done < total and _agree_to_stop(run):
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
    best = record.best
    is_best = best is None or (report.value, -report.loss) > (best.value, -best.loss)
    if is_best:
        run.best.keep(parts.model, parts.tokenizer, report)
        record.best = report
    for sink in run.sinks:
        sink.evaluation(report, is_best=is_best)
    return report


def _agree_to_stop(run: _Run) -> bool:
    """Whether any rank is asked to stop; every rank calls it and gets the same answer."""
    wish = torch.tensor(int(run.stop.requested), device=run.parts.comm.device)
    run.parts.comm.all_reduce(wish, "max").wait()
    return bool(wish)


def _save(run: _Run, step: int, metric: float | None = None, *, background: bool = True) -> None:
    """Save a checkpoint; in the background, it is told of when it is on the disk."""
    parts, comm = run.parts, run.parts.comm
    _tell_of(run, run.checkpoints.wait())
    peaks = comm.all_gather_object(run.record.peak_bytes)
    values = {
        "settings": run.origin.settings,
        "group_rows": run.group_rows,
        "total_steps": parts.schedule.total_steps,
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
    summary = summarise(parts, run.record, run.train_seconds)
    for sink in run.sinks:
        sink.finish(summary)
    run.best.clear()
    _on_first(comm, lambda: mark_finished(config, summary.steps))
    return summary


def _on_first(comm: Comm, action: Callable[[], Any]) -> Any:
    """Do something on rank 0 that may take long or fail; every rank gets its result, or its error."""
    result = together_in_background(comm, lambda: action() if comm.rank == 0 else None)
    return comm.all_gather_object(result)[0]


def _steps(run: _Run) -> Iterator[_StepInput]:
    """The steps that are left with this rank's micro-batches, made as they are needed."""
    parts, settings = run.parts, run.parts.config.training
    per_epoch, total = parts.schedule.steps_per_epoch, parts.schedule.total_steps
    accumulation = settings.gradient_accumulation_steps
    first_epoch, taken = divmod(run.resumed_step, per_epoch)
    for epoch in range(first_epoch, settings.num_train_epochs):
        start = taken if epoch == first_epoch else 0
        plan = _plan(run, epoch)
        stream = batches(parts.train_set, plan, parts.comm.rank, parts.collate, start=start * accumulation)
        for step, micro_batches in enumerate(_chunks(stream, accumulation), start=epoch * per_epoch + start + 1):
            if step > total:
                return
            yield _StepInput(_place_after(run, step), micro_batches)


def _place_after(run: _Run, step: int) -> _Place:
    per_epoch = run.parts.schedule.steps_per_epoch
    return _Place(step, step / per_epoch, step % per_epoch == 0)


def _chunks(stream: Iterator[Batch], size: int) -> Iterator[list[Batch]]:
    """Neighbours together; the last chunk may be shorter."""
    chunk: list[Batch] = []
    for batch in stream:
        chunk.append(batch)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _plan(run: _Run, epoch: int) -> EpochPlan:
    parts, settings = run.parts, run.parts.config.training
    grouped = settings.train_sampling_strategy == "group_by_length"
    return EpochPlan(
        num_rows=len(parts.train_set),
        world_size=parts.comm.size,
        batch_size=settings.per_device_train_batch_size,
        seed=parts.config.seed,
        epoch=epoch,
        lengths=parts.train_set.lengths if grouped else None,
        group_rows=run.group_rows,
    )


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
    accumulation = parts.config.training.gradient_accumulation_steps
    sizes = [0] * min(parts.schedule.steps_per_epoch, parts.schedule.total_steps - before)
    for number, rows in enumerate(_plan(run, epoch).micro_batches(0)):
        step = number // accumulation
        if step < len(sizes):
            sizes[step] = max(sizes[step], _padded_tokens(rows, parts.train_set))
    later = range(taken or 1, len(sizes)) or range(taken, len(sizes))
    return before + 1 + max(later, key=sizes.__getitem__) if later else 0


def _padded_tokens(rows: Sequence[RowRef], tokenized: TokenizedSet) -> int:
    longest_source = max(len(tokenized.source_ids[row.index]) for row in rows)
    longest_target = max(len(tokenized.target_ids[row.index]) for row in rows)
    return len(rows) * (longest_source + longest_target)
