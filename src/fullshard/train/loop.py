"""The run: steps, evaluations, the best model kept, and a summary. Everything it says goes to sinks as values."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from fullshard.checkpoint import WEIGHTS_NAME, publish
from fullshard.comm import Comm, MemoryMeter, together
from fullshard.config import RunConfig
from fullshard.data import Batch, EpochPlan, RowRef, TokenizedSet, batches
from fullshard.engine import memory_summary, units
from fullshard.saving import save
from fullshard.train.assemble import Assembly, assemble
from fullshard.train.evaluate import evaluate
from fullshard.train.reports import EvaluationReport, RankMemory, RunStart, RunSummary, StepReport
from fullshard.train.sinks import Sink
from fullshard.train.step import StepSpec, train_step
from fullshard.version import __version__


@dataclass(frozen=True)
class _StepInput:
    """What one step is about to do: its number, its place in the epoch, and this rank's micro-batches."""

    step: int
    epoch: float
    ends_epoch: bool
    micro_batches: list[Batch]


@dataclass
class _Record:
    """What a run has done so far on this rank."""

    last: StepReport | None = None
    best: EvaluationReport | None = None
    tokens: int = 0
    step_seconds: float = 0.0
    evaluation_seconds: float = 0.0
    peak_bytes: int = 0


def train(config: RunConfig, comm: Comm, sinks: Sequence[Sink] = ()) -> RunSummary:
    """Do a whole run: assemble it, train, evaluate, keep the best model, publish it; on every rank together.

    Afterwards ``output_dir`` holds the best model by the task's metric on the held-out rows (the last one when the run
    never evaluates), loadable by ``from_pretrained(output_dir)``. The same settings, world size, machine and library
    versions give the same losses and weights, bit for bit.

    Args:
        config: The run's settings.
        comm: The ranks.
        sinks: Told everything as it happens; given on rank 0 only.

    Returns:
        The summary, the same on every rank but for the times.

    Raises:
        UserError: Data, model, settings or disk; on every rank, with the same text.
    """
    try:
        return fit(assemble(config, comm), sinks)
    finally:
        for sink in sinks:
            sink.close()


def fit(parts: Assembly, sinks: Sequence[Sink]) -> RunSummary:
    """Train an assembled run to its end; on every rank together.

    Args:
        parts: This rank's parts.
        sinks: Told everything as it happens; given on rank 0 only.

    Returns:
        The summary.

    Raises:
        UserError: Training diverged, or the disk refused; on every rank, with the same text.
    """
    config, comm = parts.config, parts.comm
    # Dropout differs between ranks, which see different rows. Weights were drawn from generators of their own.
    torch.manual_seed(config.seed + comm.rank)
    if comm.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(comm.device)
    start = _describe_start(parts)
    for sink in sinks:
        sink.start(start)
    started = time.perf_counter()
    record = _Record()
    heaviest = _heaviest_step(parts)
    for due in _steps(parts):
        _take_step(parts, due, record, sinks, metered=due.step == heaviest)
        if _evaluation_is_due(parts, due):
            _evaluate_and_keep(parts, due, record, sinks)
    kept = Path(config.output_dir, "best")
    if record.best is None:
        kept = Path(config.output_dir, "last")
        save(parts.model, kept, tokenizer=parts.tokenizer)
    together(comm, lambda: publish(kept, Path(config.output_dir), last=WEIGHTS_NAME) if comm.rank == 0 else None)
    summary = _summarise(parts, record, time.perf_counter() - started)
    for sink in sinks:
        sink.finish(summary)
    return summary


def _take_step(parts: Assembly, due: _StepInput, record: _Record, sinks: Sequence[Sink], *, metered: bool) -> None:
    """One optimizer step, reported."""
    settings = parts.config.training
    spec = StepSpec(
        step=due.step,
        epoch=due.epoch,
        learning_rate=settings.learning_rate * parts.schedule.factor(due.step - 1),
        max_grad_norm=settings.max_grad_norm,
        causal=parts.collate.causal,
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
    for sink in sinks:
        sink.step(report)


def _evaluate_and_keep(parts: Assembly, due: _StepInput, record: _Record, sinks: Sequence[Sink]) -> None:
    """Evaluate, and write the model when it is the best so far; of equal metrics the lower loss is the better."""
    assert parts.evaluation is not None, "an evaluation is due only when there are rows for it"

    def progress(done: int, total: int) -> None:
        for sink in sinks:
            sink.evaluating(done, total)

    report = evaluate(
        parts.model, parts.tokenizer, parts.evaluation, parts.comm, step=due.step, epoch=due.epoch, progress=progress
    )
    record.evaluation_seconds += report.seconds
    best = record.best
    is_best = best is None or (report.value, -report.loss) > (best.value, -best.loss)
    if is_best:
        save(parts.model, Path(parts.config.output_dir, "best"), tokenizer=parts.tokenizer)
        record.best = report
    for sink in sinks:
        sink.evaluation(report, is_best=is_best)


def _steps(parts: Assembly) -> Iterator[_StepInput]:
    """The steps of the run with this rank's micro-batches, made as they are needed."""
    settings = parts.config.training
    per_epoch, total = parts.schedule.steps_per_epoch, parts.schedule.total_steps
    for epoch in range(settings.num_train_epochs):
        stream = batches(parts.train_set, _plan(parts, epoch), parts.comm.rank, parts.collate)
        for position, micro_batches in enumerate(_chunks(stream, settings.gradient_accumulation_steps), start=1):
            step = epoch * per_epoch + position
            if step > total:
                return
            yield _StepInput(step, epoch + position / per_epoch, position == per_epoch, micro_batches)


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


def _plan(parts: Assembly, epoch: int) -> EpochPlan:
    settings = parts.config.training
    grouped = settings.train_sampling_strategy == "group_by_length"
    return EpochPlan(
        num_rows=len(parts.train_set),
        world_size=parts.comm.size,
        batch_size=settings.per_device_train_batch_size,
        seed=parts.config.seed,
        epoch=epoch,
        lengths=parts.train_set.lengths if grouped else None,
    )


def _evaluation_is_due(parts: Assembly, due: _StepInput) -> bool:
    """By the strategy, and always after the last step: what the run ends with is measured."""
    settings = parts.config.training
    if parts.evaluation is None:
        return False
    if due.step == parts.schedule.total_steps:
        return True
    if settings.eval_strategy == "steps":
        assert settings.eval_steps is not None, "the schema asks for eval_steps with eval_strategy: steps"
        return due.step % settings.eval_steps == 0
    return due.ends_epoch


def _heaviest_step(parts: Assembly) -> int:
    """The step of the first epoch with rank 0's largest padded micro-batch, the same on every rank.

    Not the first one, which has no optimizer state yet, unless it is the only one.
    """
    micro_batches = _plan(parts, 0).micro_batches(0)
    accumulation = parts.config.training.gradient_accumulation_steps
    sizes = [0] * min(parts.schedule.steps_per_epoch, parts.schedule.total_steps)
    for number, rows in enumerate(micro_batches):
        step = number // accumulation
        if step < len(sizes):
            sizes[step] = max(sizes[step], _padded_tokens(rows, parts.train_set))
    later = range(1, len(sizes)) or range(1)
    return 1 + max(later, key=sizes.__getitem__)


def _padded_tokens(rows: Sequence[RowRef], tokenized: TokenizedSet) -> int:
    longest_source = max(len(tokenized.source_ids[row.index]) for row in rows)
    longest_target = max(len(tokenized.target_ids[row.index]) for row in rows)
    return len(rows) * (longest_source + longest_target)


def _describe_start(parts: Assembly) -> RunStart:
    notes = _length_notes("training", parts.train_set)
    if parts.evaluation is not None:
        notes += _length_notes("held-out", parts.evaluation.tokenized)
    if Path(parts.config.output_dir, WEIGHTS_NAME).exists():
        notes += (f"{parts.config.output_dir} holds an earlier run's model, which this run's replaces at the end",)
    return RunStart(
        output_dir=str(parts.config.output_dir),
        world_size=parts.comm.size,
        device=parts.comm.device.type,
        total_steps=parts.schedule.total_steps,
        steps_per_epoch=parts.schedule.steps_per_epoch,
        parameters=parts.parameters,
        train_rows=len(parts.train_set),
        validation_rows=0 if parts.evaluation is None else len(parts.evaluation.tokenized),
        unit_table=str(units(parts.model)),
        notes=notes,
    )


def _length_notes(name: str, tokenized: TokenizedSet) -> tuple[str, ...]:
    """One line on a set's lengths, and one for each side that truncation cut."""
    sides = (("source", tokenized.source_stats), ("target", tokenized.target_stats))
    means = ", ".join(f"{side} {stats.mean:.1f} tokens (longest {stats.longest})" for side, stats in sides)
    cut = [
        f"{stats.truncated:,} {name} {side}s were cut to {stats.limit} tokens (data.max_{side}_length)"
        for side, stats in sides
        if stats.truncated
    ]
    return (f"{name}: {len(tokenized):,} rows, mean {means}", *cut)


def _summarise(parts: Assembly, record: _Record, seconds: float) -> RunSummary:
    """The outcome; gathers every rank's memory."""
    assert record.last is not None, "a run has at least one step"
    best, last = record.best, record.last
    return RunSummary(
        metric=None if best is None else best.metric,
        value=None if best is None else best.value,
        baseline=None if best is None else best.baseline,
        baseline_name=None if best is None else best.baseline_name,
        loss=None if best is None else best.loss,
        best_step=last.step if best is None else best.step,
        steps=last.step,
        epochs=last.epoch,
        train_loss=last.loss,
        train_seconds=seconds,
        step_seconds=record.step_seconds,
        evaluation_seconds=record.evaluation_seconds,
        tokens=record.tokens,
        tokens_per_second=record.tokens / record.step_seconds,
        world_size=parts.comm.size,
        device=parts.comm.device.type,
        parameters=parts.parameters,
        memory=tuple(parts.comm.all_gather_object(_memory(parts, record))),
        output_dir=str(parts.config.output_dir),
        config=parts.config.as_plain(),
        versions={
            "fullshard": __version__,
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers")},
        },
        predictions=() if best is None else best.predictions,
    )


def _memory(parts: Assembly, record: _Record) -> RankMemory:
    held = memory_summary(parts.model)
    states = parts.optimizer.state.values()
    device = parts.comm.device
    return RankMemory(
        rank=parts.comm.rank,
        parameters=held["parameters"],
        gradients=held["gradients"],
        optimizer=sum(v.nbytes for state in states for v in state.values() if isinstance(v, torch.Tensor)),
        gathered_peak=held["gathered_peak"],
        gradient_buffer_peak=held["gradient_buffer_peak"],
        peak=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else record.peak_bytes,
    )
