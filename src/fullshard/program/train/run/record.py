"""What a run records of itself: its progress, its start and end, and what it holds when memory runs out."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from fullshard.core.comm import Comm, free_memory
from fullshard.core.engine import memory_summary, units
from fullshard.program.config import option_of
from fullshard.program.data import row_parts
from fullshard.program.metrics import row_scores
from fullshard.program.models import base_of, stated_license
from fullshard.program.train.reporting.reports import (
    EndedBy,
    EvaluationReport,
    RankMemory,
    RunStart,
    RunSummary,
    StepReport,
    spread,
)
from fullshard.program.train.reporting.scores import mean_interval
from fullshard.program.train.run.assemble import Assembly
from fullshard.program.train.run.step import peak_memory_bytes, reserved_memory_bytes
from fullshard.program.train.setup.devices import Choice
from fullshard.program.train.setup.optimizers import held_state_bytes, optimizer_title
from fullshard.sizes import format_bytes
from fullshard.state.storage import holds_model
from fullshard.version import __version__


@dataclass
class Record:
    """The progress of a run on one rank."""

    last: StepReport | None = None  # the last step
    best: EvaluationReport | None = None  # the best evaluation
    evaluated_step: int = 0  # step after which the last evaluation was made; 0 before the first
    tokens: int = 0  # tokens trained on, of all ranks
    train_seconds: float = 0.0  # wall time of the run up to the checkpoint that it resumed from
    step_seconds: float = 0.0  # wall time of all steps
    evaluation_seconds: float = 0.0  # wall time of all evaluations
    compile_seconds: float = 0.0  # wall time of compiling blocks, on this rank; part of that of steps
    peak_bytes: int = 0  # peak memory of this rank in the traced step; 0 before it
    stale_evaluations: int = 0  # evaluations since the last one that was better, by early stopping's threshold
    pace_s: float = 0.0  # seconds of a step with its share of evaluations, for a time limit; 0: not measured
    skipped_steps: int = 0  # steps that were skipped because the loss or the gradient was not finite

    def add_step(self, report: StepReport) -> None:
        """Count one more step."""
        self.last = report
        self.tokens += report.tokens
        self.step_seconds += report.seconds
        self.skipped_steps += report.skipped

    def as_values(self, *, train_seconds: float, peaks: Sequence[int]) -> dict[str, Any]:
        """Return JSON-able values; ``peaks`` is ``peak_bytes`` of every rank."""
        return {**asdict(self), "train_seconds": train_seconds, "peak_bytes": list(peaks)}

    @classmethod
    def from_values(cls, values: Mapping[str, Any], *, rank: int, world_size: int) -> Record:
        """Restore the record from :meth:`as_values`.

        If the number of ranks has changed, they hold other shards and measure their peak again.
        """
        last, best, peaks = values["last"], values["best"], values["peak_bytes"]
        # Earlier versions took the mean of all steps, which goes on until this attempt has measured its own.
        earlier = 0.0 if last is None else values["train_seconds"] / last["step"]
        return cls(
            **{
                "pace_s": earlier,
                **values,
                "last": None if last is None else StepReport(**last),
                "best": None if best is None else EvaluationReport.from_values(best),
                "peak_bytes": peaks[rank] if len(peaks) == world_size else 0,
            }
        )


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
        **_facts(parts),
        total_steps=parts.schedule.total_steps,
        steps_per_epoch=parts.schedule.steps_per_epoch,
        train_rows=parts.train_set.examples,
        validation_rows=0 if parts.evaluation is None else parts.evaluation.rows.tokenized.examples,
        unit_table=str(units(parts.model)),
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
    of_best: dict[str, Any] = {name: getattr(best, name, None) for name in _OF_BEST}
    return RunSummary(
        **_facts(parts),
        **of_best,
        best_step=last.step if best is None else best.step,
        steps=last.step,
        epochs=last.epoch,
        train_loss=last.loss,
        train_seconds=train_seconds,
        step_seconds=record.step_seconds,
        evaluation_seconds=record.evaluation_seconds,
        compile_seconds=record.compile_seconds,
        tokens=record.tokens,
        tokens_per_second=record.tokens / record.step_seconds,
        memory=tuple(parts.comm.all_gather_object(_memory(parts, record))),
        ended_by=ended_by,
        skipped_steps=record.skipped_steps,
        metrics={} if best is None else best.metrics,
        baselines={} if best is None else best.baselines,
        intervals={} if best is None else _intervals(best),
        predictions=() if best is None else best.predictions,
        sets={} if best is None else best.sets,
        words={} if best is None else best.words,
    )


_OF_BEST = ("metric", "value", "baseline", "baseline_name", "loss", "confusion")
"""What a summary takes from the best evaluation, None without one."""


def _facts(parts: Assembly) -> dict[str, Any]:
    """Return what the reports of a run's start and end both state."""
    packages = {name: version(name) for name in ("torch", "transformers", "tokenizers")}  # results depend on them
    return {
        "output_dir": str(parts.config.output_dir),
        "world_size": parts.comm.size,
        "device": parts.comm.device.type,
        "parameters": parts.parameters,
        "optimizer": optimizer_title(parts.config.training.optimizer),
        "config": parts.config.as_plain(),
        "versions": {"fullshard": __version__, "python": platform.python_version(), **packages},
    }


def _intervals(best: EvaluationReport) -> dict[str, tuple[float, float]]:
    """Return the interval of each metric that is a mean over rows; the same on every rank."""
    if not best.predictions:
        return {}
    texts = [one.prediction for one in best.predictions]
    rows = row_scores(tuple(best.metrics), texts, [one.references for one in best.predictions])
    return {name: mean_interval(scores) for name, scores in rows.items()}


def _shown_rows(parts: Assembly) -> tuple[tuple[tuple[str, str], ...], ...]:
    rows, most, causal = parts.train_set, _SHOWN_CHARACTERS, parts.collate.causal
    chosen = spread(range(len(rows)), _SHOWN_ROWS)
    return tuple(tuple(row_parts(rows, row, parts.tokenizer, causal=causal, most=most)) for row in chosen)


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


_CPU_ALLOCATOR = "DefaultCPUAllocator"
"""Name in torch's RuntimeError when the system refuses memory, which has no error class of its own."""

_IN_GENERAL = (
    "Less is needed with training.gradient_checkpointing=true, training.fused_cross_entropy=true, a smaller "
    "training.per_device_train_batch_size with more training.gradient_accumulation_steps, or more ranks."
)


@dataclass(frozen=True)
class Planned:
    """The plan that a run was started with."""

    values: Mapping[str, Any]  # JSON-able values, for the files of the run
    table: str  # the plan of this rank, for people
    remedies: Callable[[], str]  # plans settings that need less and returns lines about them; this rank only
    chosen: tuple[Choice, ...] = ()  # what the plans of all ranks decided


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation was refused, by the GPU or by the system."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and _CPU_ALLOCATOR in str(error)


def explain(error: BaseException, comm: Comm, parts: Assembly | None, planned: Planned | None) -> str:
    """Return the message of a rank that is out of memory; that rank only. ``parts`` is None before it is assembled."""
    first = (str(error).splitlines() or [""])[0]
    lines = [f"Rank {comm.rank} of {comm.size} is out of memory: {first}", "", "measured on this rank:"]
    lines += [f"{label:<28}{format_bytes(size):>12}" for label, size in _measured(comm, parts).items()]
    if planned is None:
        return "\n".join([*lines, "", _IN_GENERAL])
    return "\n".join([*lines, "", f"planned: {planned.table}", "", planned.remedies() or _IN_GENERAL])


def _measured(comm: Comm, parts: Assembly | None) -> dict[str, int]:
    """Return what the engine counts of this rank's memory, the peak of its allocator or process, and what is free."""
    sizes: dict[str, int] = {}
    if parts is not None:
        held = memory_summary(parts.model)
        sizes = {
            "shards": held["parameters"],
            "optimizer state": held_state_bytes(parts.optimizer),
            "gathered units, peak": held["gathered_peak"],
            "unsharded gradients, peak": held["gradient_buffer_peak"],
            "gradients of the shards": held["gradients"],
        }
    on_gpu = comm.device.type == "cuda"
    sizes["tensors, peak" if on_gpu else "process, peak"] = peak_memory_bytes(comm.device)
    if on_gpu:  # not run on a GPU yet
        sizes["reserved by the allocator"] = torch.cuda.memory_reserved(comm.device)
    pools = free_memory(comm.device)
    return {**sizes, "free now": min(pools.values())} if pools else sizes
