"""One step of a run under observation: what every unit did when, and what each rank's memory was taken by."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from fullshard.comm import Comm, MemoryMeter
from fullshard.engine import Recorder, TraceEvent, record, units
from fullshard.train.reporting.reports import StepReport
from fullshard.train.setup.optimizers import held_state_bytes

TRACE_NAME = "trace.json"
"""The file of a run that holds its trace."""

TIMELINE_POINTS = 400
"""Most moments of a memory timeline; of those in between the one with the most bytes is kept."""


@dataclass(frozen=True)
class MemoryTimeline:
    """Bytes of one rank's compute device over the step, what they are for; equally long sequences.

    The parts add up to what the allocator counted.

    Attributes:
        seconds: From the start of the step.
        parameters: Shards of the parameters.
        gradients: Shards of the gradients, and unsharded gradients that wait to be reduced.
        optimizer: Its state.
        gathered: Gathered parameters.
        activations: All that came to be in the step and is none of these: activations and temporaries.
        other: What was there before the step and is none of these: data, buffers of the model.
    """

    seconds: tuple[float, ...]
    parameters: tuple[int, ...]
    gradients: tuple[int, ...]
    optimizer: tuple[int, ...]
    gathered: tuple[int, ...]
    activations: tuple[int, ...]
    other: tuple[int, ...]


@dataclass(frozen=True)
class RankTrace:
    """What one rank did in the step.

    Attributes:
        rank: The rank.
        seconds: Length of the step.
        peak_bytes: Most tensor bytes at once; CUDA: over the run so far.
        events: In the order of their starts.
        memory: What its memory was taken by.
    """

    rank: int
    seconds: float
    peak_bytes: int
    events: tuple[TraceEvent, ...]
    memory: MemoryTimeline


@dataclass(frozen=True)
class StepTrace:
    """A step as all ranks saw it; ranks start together, each on its own clock.

    Attributes:
        step: Its number.
        device: Kind of device: ``cpu`` or ``cuda``.
        units: Names, root first.
        ranks: In rank order.
    """

    step: int
    device: str
    units: tuple[str, ...]
    ranks: tuple[RankTrace, ...]

    def as_dict(self) -> dict[str, Any]:
        """JSON-able; times are rounded to the microsecond."""
        return {"step": self.step, "device": self.device, "units": list(self.units), "ranks": _rounded(self.ranks)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StepTrace:
        """What :meth:`as_dict` gave.

        Raises:
            KeyError, TypeError: It is something else.
        """
        ranks = [
            RankTrace(
                **{
                    **one,
                    "events": tuple(TraceEvent(**event) for event in one["events"]),
                    "memory": MemoryTimeline(**{name: tuple(column) for name, column in one["memory"].items()}),
                }
            )
            for one in values["ranks"]
        ]
        return cls(values["step"], values["device"], tuple(values["units"]), tuple(ranks))


def traced_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, comm: Comm, take: Callable[[], StepReport]
) -> tuple[StepReport, StepTrace]:
    """Take a step and record it; on every rank together, one of them a process.

    On the CPU listening to the allocator slows the step down. Gradients of earlier steps are dropped first: freed
    inside, they would count as held to the end.

    Args:
        model: The sharded model.
        optimizer: Over its shards.
        comm: The ranks.
        take: Takes the step, and reports it.

    Returns:
        The report, and the traces of all ranks, the same on every rank but for the report's times.
    """
    optimizer.zero_grad()
    comm.barrier()
    parameters = _on_device(comm.device, _shards(model))
    before = held_state_bytes(optimizer, comm.device)
    meter = MemoryMeter(comm.device) if comm.device.type == "cpu" else None
    with _metered(meter), record(model) as recorder, _optimizer_recorded(optimizer, recorder):
        report = take()
    totals = _totals(recorder, meter)
    held = _Held(parameters, before, held_state_bytes(optimizer, comm.device))
    peak = torch.cuda.max_memory_allocated(comm.device) if meter is None else meter.peak_bytes
    mine = RankTrace(comm.rank, recorder.seconds, peak, recorder.events, _timeline(recorder, totals, held))
    names = tuple(row.unit for row in units(model).rows)
    return report, StepTrace(report.step, comm.device.type, names, tuple(comm.all_gather_object(mine)))


@dataclass(frozen=True)
class _Held:
    """Bytes that the step finds: parameters, and the optimizer's state before and after it."""

    parameters: int
    optimizer_before: int
    optimizer_after: int


@contextmanager
def _metered(meter: MemoryMeter | None) -> Iterator[None]:
    if meter is None:
        yield
        return
    with meter:
        yield


@contextmanager
def _optimizer_recorded(optimizer: torch.optim.Optimizer, recorder: Recorder) -> Iterator[None]:
    """Record the optimizer's step as one span of the whole model."""
    handles = [
        optimizer.register_step_pre_hook(lambda *_: recorder.begin("", "optimizer")),
        optimizer.register_step_post_hook(lambda *_: recorder.end("", "optimizer")),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _shards(model: torch.nn.Module) -> list[torch.Tensor]:
    return [param.data for param in model.parameters()]


def _on_device(device: torch.device, tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of the storages under ``tensors`` that are on ``device``, each counted once: shards have padding."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.device == device}
    return sum(storages.values())


def _totals(recorder: Recorder, meter: MemoryMeter | None) -> list[tuple[float, int]]:
    """When the allocator's count changed, in seconds of the record, and to what."""
    if meter is None:
        return [(sample.at_s, sample.allocated or 0) for sample in recorder.samples]
    counts = [(at - recorder.started, count) for at, count in meter.timeline]
    at_start = [meter.start_bytes, *(count for at, count in counts if at <= 0)][-1]
    return [(0.0, at_start), *((at, count) for at, count in counts if at > 0)]


def _timeline(recorder: Recorder, totals: Sequence[tuple[float, int]], held: _Held) -> MemoryTimeline:
    """Each moment's total, less what is known of it; between two moments of one kind the earlier one's bytes hold."""
    sample_times = [sample.at_s for sample in recorder.samples]
    total_times = [at for at, _ in totals]
    span = next(((e.start_s, e.end_s) for e in recorder.events if e.kind == "optimizer"), None)
    before_step = totals[max(0, bisect.bisect_right(total_times, span[0]) - 1)][1] if span else 0

    def optimizer_at(at: float, total: int) -> int:
        if span is None or at >= span[1]:
            return held.optimizer_after
        if at < span[0]:
            return held.optimizer_before
        return min(held.optimizer_after, held.optimizer_before + max(0, total - before_step))

    first = recorder.samples[0]
    known = held.parameters + held.optimizer_before + first.gradients + first.gradient_buffers + first.gathered
    other = max(0, totals[0][1] - known)
    rows: list[tuple[float, int, int, int, int, int, int]] = []
    for at, total in _kept(sorted({*sample_times, *total_times}), totals, total_times, recorder.seconds):
        sample = recorder.samples[max(0, bisect.bisect_right(sample_times, at) - 1)]
        gradients, optimizer = sample.gradients + sample.gradient_buffers, optimizer_at(at, total)
        rest = total - held.parameters - gradients - optimizer - sample.gathered - other
        rows.append((at, held.parameters, gradients, optimizer, sample.gathered, max(0, rest), other))
    return MemoryTimeline(*(tuple(column) for column in zip(*rows, strict=True)))


def _kept(
    times: Sequence[float], totals: Sequence[tuple[float, int]], total_times: Sequence[float], seconds: float
) -> list[tuple[float, int]]:
    """Of each short stretch of the step the moment with the most bytes, and of the last the end."""
    best: dict[int, tuple[float, int]] = {}
    for at in times:
        if not 0 <= at <= seconds:
            continue
        total = totals[max(0, bisect.bisect_right(total_times, at) - 1)][1]
        stretch = int(at / seconds * (TIMELINE_POINTS - 1)) if seconds else 0
        if stretch not in best or total > best[stretch][1]:
            best[stretch] = (at, total)
    return [best[stretch] for stretch in sorted(best)]


def _rounded(ranks: Sequence[RankTrace]) -> list[dict[str, Any]]:
    def times(values: Mapping[str, Any]) -> dict[str, Any]:
        return {key: round(value, 6) if isinstance(value, float) else value for key, value in values.items()}

    return [
        {
            **times({"rank": one.rank, "seconds": one.seconds, "peak_bytes": one.peak_bytes}),
            "events": [times(asdict(event)) for event in one.events],
            "memory": {
                field.name: [round(value, 6) for value in getattr(one.memory, field.name)]
                for field in fields(MemoryTimeline)
            },
        }
        for one in ranks
    ]
