"""What a run says at its start and at its end."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import torch

from fullshard.checkpoint import holds_model
from fullshard.data import TokenizedSet
from fullshard.engine import memory_summary, units
from fullshard.train.assemble import Assembly
from fullshard.train.record import Record
from fullshard.train.reports import RankMemory, RunStart, RunSummary
from fullshard.version import __version__


def describe_start(parts: Assembly, *, resumed_step: int, notes: Sequence[str]) -> RunStart:
    """What is about to be trained on what; any rank.

    Args:
        parts: The run's parts.
        resumed_step: Steps taken before; 0 when it starts anew.
        notes: What is to be said about that.
    """
    lengths = _length_notes("training", parts.train_set)
    if parts.evaluation is not None:
        lengths += _length_notes("held-out", parts.evaluation.tokenized)
    earlier: tuple[str, ...] = ()
    if holds_model(Path(parts.config.output_dir)):
        earlier = (f"{parts.config.output_dir} holds an earlier run's model, which this run's replaces at the end",)
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
        notes=(*parts.notes, *lengths, *notes, *earlier),
        resumed_step=resumed_step,
    )


def summarise(parts: Assembly, record: Record, train_seconds: float) -> RunSummary:
    """The outcome; every rank calls it, and gets every rank's memory.

    Args:
        parts: The run's parts.
        record: What was done.
        train_seconds: Wall time of the whole run.
    """
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
        train_seconds=train_seconds,
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


def _memory(parts: Assembly, record: Record) -> RankMemory:
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
