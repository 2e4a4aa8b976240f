"""Recording of one step of a run: when each unit did what, and how each rank's memory was used."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

from fullshard.core.comm import Comm, MemoryMeter
from fullshard.core.engine import Recorder, record, units
from fullshard.program.train.reporting.reports import StepReport
from fullshard.program.train.reporting.trace import MemoryTimeline, RankTrace, StepTrace
from fullshard.program.train.setup.optimizers import held_state_bytes

TIMELINE_POINTS = 400
"""Maximum number of moments in a memory timeline."""


def traced_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, comm: Comm, take: Callable[[], StepReport]
) -> tuple[StepReport, StepTrace]:
    """Take a step and record it. Every rank calls it, and each rank must be a process.

    On the CPU the allocator's events are recorded, which slows the step down.

    Args:
        model: The sharded model.
        optimizer: Over its shards.
        comm: The ranks.
        take: Takes the step and reports it.

    Returns:
        The report, and the trace of all ranks, the same on every rank.
    """
    # Gradients of earlier steps that are freed while the meter runs would count as held until the end.
    optimizer.zero_grad()
    comm.barrier()
    parameters = _on_device(comm.device, [param.data for param in model.parameters()])
    before = held_state_bytes(optimizer, comm.device)
    meter = MemoryMeter(comm.device) if comm.device.type == "cpu" else None
    with meter or nullcontext(), record(model) as recorder, _optimizer_recorded(optimizer, recorder):
        report = take()
    totals = _totals(recorder, meter)
    held = _Held(parameters, before, held_state_bytes(optimizer, comm.device))
    peak = torch.cuda.max_memory_allocated(comm.device) if meter is None else meter.peak_bytes
    mine = RankTrace(comm.rank, recorder.seconds, peak, recorder.events, _timeline(recorder, totals, held))
    names = tuple(row.unit for row in units(model).rows)
    return report, StepTrace(report.step, comm.device.type, names, tuple(comm.all_gather_object(mine)))


@dataclass(frozen=True)
class _Held:
    """Bytes of the parameters, and of the optimizer's state before and after the step."""

    parameters: int
    optimizer_before: int
    optimizer_after: int


@contextmanager
def _optimizer_recorded(optimizer: torch.optim.Optimizer, recorder: Recorder) -> Iterator[None]:
    """Record the optimizer's step as one event inside the context."""
    handles = [
        optimizer.register_step_pre_hook(lambda *_: recorder.begin("", "optimizer")),
        optimizer.register_step_post_hook(lambda *_: recorder.end("", "optimizer")),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _on_device(device: torch.device, tensors: Sequence[torch.Tensor]) -> int:
    """Return the bytes of the storages of ``tensors`` on ``device``, each counted once; shards include padding."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.device == device}
    return sum(storages.values())


def _totals(recorder: Recorder, meter: MemoryMeter | None) -> list[tuple[float, int]]:
    """Return when the allocator's count changed, in seconds since the start, and the new counts."""
    if meter is None:
        return [(sample.at_s, sample.allocated or 0) for sample in recorder.samples]
    counts = [(at - recorder.started, count) for at, count in meter.timeline]
    at_start = [meter.start_bytes, *(count for at, count in counts if at <= 0)][-1]
    return [(0.0, at_start), *((at, count) for at, count in counts if at > 0)]


def _timeline(recorder: Recorder, totals: Sequence[tuple[float, int]], held: _Held) -> MemoryTimeline:
    """Split each moment's total by use; samples and totals are valid until the next one."""
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
    """Return the indices to keep: the start, the end, and from each short stretch the moment with the most bytes."""
    best: dict[int, tuple[float, int]] = {}
    for at in times:
        if not 0 <= at <= seconds:
            continue
        total = totals[max(0, bisect.bisect_right(total_times, at) - 1)][1]
        # The start is a stretch of its own: in a long step, the first stretch also holds the first activations.
        stretch = 1 + int(at / seconds * (TIMELINE_POINTS - 2)) if at else 0
        if stretch not in best or total > best[stretch][1]:
            best[stretch] = (at, total)
    return [best[stretch] for stretch in sorted(best)]
