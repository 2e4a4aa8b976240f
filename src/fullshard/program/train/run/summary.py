"""The reports of a run's start and end."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from fullshard.core.engine import memory_summary, units
from fullshard.program.config import option_of
from fullshard.program.data import row_parts
from fullshard.program.metrics import row_scores
from fullshard.program.models import base_of, stated_license
from fullshard.program.train.reporting.reports import EndedBy, EvaluationReport, RankMemory, RunStart, RunSummary
from fullshard.program.train.reporting.scores import mean_interval
from fullshard.program.train.run.assemble import Assembly
from fullshard.program.train.run.record import Record
from fullshard.program.train.run.step import reserved_memory_bytes
from fullshard.program.train.setup.optimizers import held_state_bytes, optimizer_title
from fullshard.state.storage import holds_model
from fullshard.version import __version__

_SHOWN_ROWS, _SHOWN_CHARACTERS = 5, 2_000
"""Number of evenly spaced training rows to record as the model sees them, and the characters of each."""


def describe_start(
    parts: Assembly, record: Record, settings: Mapping[str, Any], *, resumed_step: int, notes: Sequence[str]
) -> RunStart:
    """Return the report of the start, after ``resumed_step`` steps (0: a new run); any rank.

    ``settings`` are those of the run's :class:`~fullshard.program.train.setup.resume.StartingPoint`.
    """
    given = parts.config.as_flat()
    names = [key for key in settings if option_of(key).names is not None]
    limit = parts.config.training.max_train_minutes
    earlier: tuple[str, ...] = ()
    if holds_model(Path(parts.config.output_dir)):
        earlier = (f"{parts.config.output_dir} holds an earlier run's model; this run's model replaces it at the end",)
    return RunStart(
        output_dir=str(parts.config.output_dir),
        world_size=parts.comm.size,
        device=parts.comm.device.type,
        total_steps=parts.schedule.total_steps,
        steps_per_epoch=parts.schedule.steps_per_epoch,
        parameters=parts.parameters,
        optimizer=optimizer_title(parts.config.training.optimizer),
        train_rows=len(parts.train_set),
        validation_rows=0 if parts.evaluation is None else len(parts.evaluation.rows.tokenized),
        unit_table=str(units(parts.model)),
        config=parts.config.as_plain(),
        versions=_versions(),
        padding_share=parts.padding_share,
        architecture=type(base_of(parts.model)).__name__,
        causal=parts.collate.causal,
        hardware=_hardware(parts.comm.device),
        content={name: str(settings[name]) for name in names if settings[name] != given[name]},
        sets=parts.sets,
        base_license=None if parts.config.model.path is None else stated_license(parts.config.model.path),
        flops=parts.flops,
        notes=(*parts.notes, *notes, *earlier),
        conversations=bool(parts.system_turns),
        system_turns=parts.system_turns,
        shown_rows=_shown_rows(parts),
        resumed_step=resumed_step,
        evaluated_step=record.evaluated_step,
        time_limit_s=None if limit is None else max(0.0, 60.0 * limit - record.train_seconds),
        base=None if parts.base is None else parts.base.facts,
        chosen={one.setting: f"{one.value} ({one.why})" for one in parts.chosen},
    )


def summarise(parts: Assembly, record: Record, train_seconds: float, ended_by: EndedBy) -> RunSummary:
    """Return the summary of a finished run, with every rank's memory. Every rank calls it."""
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
        optimizer=optimizer_title(parts.config.training.optimizer),
        memory=tuple(parts.comm.all_gather_object(_memory(parts, record))),
        output_dir=str(parts.config.output_dir),
        config=parts.config.as_plain(),
        versions=_versions(),
        ended_by=ended_by,
        skipped_steps=record.skipped_steps,
        metrics={} if best is None else best.metrics,
        baselines={} if best is None else best.baselines,
        intervals={} if best is None else _intervals(best),
        confusion=None if best is None else best.confusion,
        predictions=() if best is None else best.predictions,
        sets={} if best is None else best.sets,
        words={} if best is None else best.words,
    )


def _intervals(best: EvaluationReport) -> dict[str, tuple[float, float]]:
    """Return the interval of each metric that is a mean over rows; the same on every rank."""
    if not best.predictions:
        return {}
    texts = [one.prediction for one in best.predictions]
    rows = row_scores(tuple(best.metrics), texts, [one.references for one in best.predictions])
    return {name: mean_interval(scores) for name, scores in rows.items()}


def _shown_rows(parts: Assembly) -> tuple[tuple[tuple[str, str], ...], ...]:
    rows = len(parts.train_set)
    count = min(_SHOWN_ROWS, rows)
    most, causal = _SHOWN_CHARACTERS, parts.collate.causal
    return tuple(
        tuple(row_parts(parts.train_set, place * rows // count, parts.tokenizer, causal=causal, most=most))
        for place in range(count)
    )


def _hardware(device: torch.device) -> str:
    """Return the name of a rank's GPU, or of the CPU as Linux reports it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine())


def _versions() -> dict[str, str]:
    """Return the versions of the packages that results depend on."""
    packages = {name: version(name) for name in ("torch", "transformers", "tokenizers")}
    return {"fullshard": __version__, "python": platform.python_version(), **packages}


def _memory(parts: Assembly, record: Record) -> RankMemory:
    held = memory_summary(parts.model)
    device = parts.comm.device
    return RankMemory(
        rank=parts.comm.rank,
        parameters=held["parameters"],
        gradients=held["gradients"],
        optimizer=held_state_bytes(parts.optimizer),
        gathered_peak=held["gathered_peak"],
        gradient_buffer_peak=held["gradient_buffer_peak"],
        peak=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else record.peak_bytes,
        reserved=reserved_memory_bytes(device),
    )
