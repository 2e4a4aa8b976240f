"""One optimizer step over all ranks: count tokens, forward, backward, clip, update, report; one is recorded."""

from __future__ import annotations

import bisect
import functools
import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from fullshard.core.comm import Comm, MemoryMeter, device_of
from fullshard.core.engine import Recorder, no_all_reduce, no_sync, record, units
from fullshard.core.engine.extension.float8 import precompute_float8_scales
from fullshard.core.optim import ShardedGradScaler, clip_grad_norm_
from fullshard.core.shards import rows_of
from fullshard.errors import TrainingError
from fullshard.program.data import Batch
from fullshard.program.models import PLAIN, Objective, Preference, RouterLoss, reward_means
from fullshard.program.train.evaluation.evaluate import evaluation_mode
from fullshard.program.train.reporting.reports import MemoryTimeline, RankTrace, StepReport, StepTrace
from fullshard.program.train.setup.model import losses, preference_loss, summed_divergence
from fullshard.program.train.setup.optimizers import held_state_bytes
from fullshard.program.train.setup.sequence import Readers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class StepSpec:
    """Number, rate and limits of one step."""

    step: int  # number of the step, from 1
    epoch: float  # epochs trained after it
    learning_rate: float  # learning rate of its update
    max_grad_norm: float | None  # norm that the full gradient is clipped to; None: it is not clipped
    causal: bool  # whether source and target are one sequence (decoder-only)
    stop: bool = False  # whether a stop was requested on this rank; the report says whether it was on any rank
    objective: Objective = PLAIN  # label smoothing and z-loss
    preference: Preference | None = None  # the loss of preferences, instead of the tokens'
    router_loss: RouterLoss | None = None  # the routers' own loss of a mixture of experts; None: it is not trained
    # if the loss or the gradient is not finite: ``stop`` ends the run, ``skip`` skips the step
    on_nonfinite: Literal["stop", "skip"] = "stop"
    precision: str = "fp32"  # the run's precision, for the advice in errors
    unsharded: bool = False  # whether micro-batches add up full gradients, which the last one reduces


def issue_step(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[Batch],
    comm: Comm,
    spec: StepSpec,
    scaler: ShardedGradScaler | None = None,
    *,
    late: bool = False,
) -> IssuedStep:
    """Take one optimizer step; every rank calls it with its own micro-batches, equally many.

    The loss is the sum over all target tokens of all ranks and micro-batches divided by their number, so world size and
    accumulation do not change it. If rows have weights, each token counts with its row's weight in both the sum and the
    number. The loss of preferences is summed over them, and divided by their number. The routers' own loss is not a
    sum over tokens: each micro-batch's counts in proportion to its tokens. In fp16, if the loss is finite but the
    gradient is not, the step is skipped and the loss scale is halved, as long as it is at least 1.

    ``micro_batches`` are on the CPU or on the device. ``late`` updates the weights before loss and norm are known, so
    that nothing waits for the device; allowed only if steps are never skipped. The returned step's report has the same
    loss, norm and counts on every rank.

    Raises:
        TrainingError: The loss or the gradient's norm is not finite; on every rank, before the weights change. With
            ``late`` the report raises it, and they have changed.
    """
    assert not late or (scaler is None and spec.on_nonfinite == "stop"), "skipping is decided before the update"
    started = time.perf_counter()
    device = device_of(comm.device)
    # Of ranks that share rows, one counts them; losses and gradients are sums over all ranks' own tokens.
    counts = _count(micro_batches if Readers.of(model, comm).first else (), comm, spec)
    optimizer.zero_grad(set_to_none=True)
    loss_scale = None if scaler is None else scaler.get_scale()
    total, router, *rewards = _accumulate(model, micro_batches, comm, spec, counts, scaler)
    if scaler is not None:
        scaler.unscale_(optimizer)
    norm = clip_grad_norm_(model, math.inf)
    measured = torch.stack([total / counts[0].to(total.dtype), norm.to(total), router])
    numbers = torch.cat([measured.double(), counts, *(one.double().reshape(1) for one in rewards)])
    on_host = device.empty_host(numbers.numel(), torch.float64, pinned=True)
    issued = IssuedStep(spec, started, loss_scale, comm, on_host, device.copy_to_host([(on_host, numbers)]))
    if late:
        _update(model, optimizer, spec, norm, None)
        return issued
    if issued.ends_run:
        raise TrainingError(_nonfinite_message(model, micro_batches, comm, spec, *issued.loss_and_norm))
    _update(model, optimizer, spec, norm if issued.finite else None, scaler)
    return issued


@dataclass(eq=False)
class IssuedStep:
    """A step issued to the device. Reading any of its numbers waits until the device has computed them."""

    spec: StepSpec
    started: float  # when, by the counter of this process
    loss_scale: float | None
    comm: Comm
    on_host: Tensor  # the numbers, which may be read after ``wait()``
    wait: Callable[[], None]

    @functools.cached_property
    def _numbers(self) -> list[float]:
        self.wait()
        return self.on_host.tolist()

    @property
    def loss_and_norm(self) -> tuple[float, float]:
        """The loss including the routers' own, and the norm of the gradient."""
        loss, norm, router = self._numbers[:3]
        return loss + router, norm

    @property
    def finite(self) -> bool:
        """True if both are finite. They are global, so every rank decides the same."""
        return all(map(math.isfinite, self.loss_and_norm))

    @property
    def ends_run(self) -> bool:
        """True if loss or gradient is not finite, such steps are not skipped, and a smaller loss scale cannot help."""
        scale = self.loss_scale
        overflowed = scale is not None and scale >= 1 and math.isfinite(self.loss_and_norm[0])
        return not self.finite and self.spec.on_nonfinite == "stop" and not overflowed

    def report(self, since: float = 0.0) -> StepReport:
        """Return the report. ``since``: when the previous step was known to be done, if after this one's start.

        Raises:
            TrainingError: Loss or norm is not finite, and the step was not skipped; on every rank.
        """
        spec, (loss, norm) = self.spec, self.loss_and_norm
        end = 7 + 2 * self.comm.size
        tokens, stop, target_tokens, *memory = map(int, self._numbers[4:end])
        memory, reserved = memory[: self.comm.size], memory[self.comm.size :]
        if self.ends_run:
            raise TrainingError(
                f"Step {spec.step}: the loss is {loss} and the gradient norm is {norm}; both must be finite. The "
                "weights have been updated with it; nothing is saved from here on. Resume from the last checkpoint "
                f"with a learning rate below {spec.learning_rate:g} or more training.warmup_steps, or set "
                "training.on_nonfinite=skip to skip such steps."
            )
        return StepReport(
            step=spec.step,
            epoch=spec.epoch,
            loss=loss,
            grad_norm=norm,
            learning_rate=spec.learning_rate,
            target_tokens=target_tokens,
            tokens=tokens,
            seconds=time.perf_counter() - max(self.started, since),
            memory_bytes=peak_memory_bytes(self.comm.device),
            stop_requested=stop > 0,
            memory_bytes_per_rank=tuple(memory),
            reserved_bytes=max(reserved),
            skipped=not self.finite,
            loss_scale=self.loss_scale,
            router_loss=None if spec.router_loss is None else self._numbers[2],
            rewards={} if spec.preference is None else self._rewards(spec.preference, self._numbers[end:]),
        )

    def _rewards(self, preference: Preference, sums: Sequence[float]) -> dict[str, float]:
        """Return the rewards of a step of preferences, by TRL's names."""
        *sides, divergence = sums
        found = reward_means(sides, paired=preference.name != "kto")
        return found | ({"kl": divergence} if preference.name == "kto" else {})


def _count(micro_batches: Sequence[Batch], comm: Comm, spec: StepSpec) -> Tensor:
    """Return over all ranks: weights of target tokens, tokens, requests to stop, target tokens, each rank's memory.

    Of preferences the weights are their number. Tokens exclude padding; memory is the peak, then what is
    reserved. In float64, exact for counts, (4 + 2 ranks,), on the device, where the loss is divided by them: reading
    them would wait for the previous step.
    """
    target_tokens = sum(batch.target_tokens for batch in micro_batches)
    target_weight = sum(batch.target_weight for batch in micro_batches)
    tokens = sum(batch.tokens for batch in micro_batches)
    counts = [target_weight, tokens, int(spec.stop), target_tokens, *[0] * (2 * comm.size)]
    counts[4 + comm.rank] = peak_memory_bytes(comm.device)
    counts[4 + comm.size + comm.rank] = reserved_memory_bytes(comm.device)
    totals = device_of(comm.device).from_host(torch.tensor(counts, dtype=torch.float64))
    comm.all_reduce(totals).wait()
    return totals


def _accumulate(
    model: PreTrainedModel,
    micro_batches: Sequence[Batch],
    comm: Comm,
    spec: StepSpec,
    counts: Tensor,
    scaler: ShardedGradScaler | None,
) -> list[Tensor]:
    """Run backward on each micro-batch; return the summed loss and the mean of the routers' over all ranks, 0-d.

    Of preferences, the sums of :attr:`PreferenceLosses.rewards` and the divergence follow.
    """
    total = torch.zeros(2 if spec.preference is None else 7, device=comm.device)
    divergence = _divergence(model, micro_batches, comm, spec, counts)
    # The engine averages gradients over ranks; multiplied by the world size, they are the sum.
    factor = comm.size / counts[0]
    expected_gradient = factor.float() * (1.0 if scaler is None else scaler.get_scale())
    held_back = no_sync if spec.unsharded else no_all_reduce
    for left, batch in zip(range(len(micro_batches))[::-1], micro_batches, strict=True):
        loss, router, rewards = _losses(model, batch.to(comm.device), spec, expected_gradient, divergence)
        scaled = loss * factor.to(loss.dtype)
        total[0] += loss.detach()
        total[2:] += rewards
        if router is not None:
            share = (batch.tokens / counts[1]).to(router.dtype)
            scaled = scaled + router * (comm.size * share)
            total[1] += router.detach() * share
        with held_back(model) if left else nullcontext():
            (scaled if scaler is None else scaler.scale(scaled)).backward()
    comm.all_reduce(total).wait()
    return [*total] if spec.preference is None else [*total, divergence]


def _divergence(
    model: PreTrainedModel, micro_batches: Sequence[Batch], comm: Comm, spec: StepSpec, counts: Tensor
) -> Tensor:
    """Return kto's reference point over the micro-batches of all ranks, 0-d; of other losses zero, with no forward."""
    total = torch.zeros((), device=comm.device)
    if spec.preference is None or spec.preference.name != "kto":
        return total
    with evaluation_mode(model):  # the reference was computed in it
        for batch in micro_batches:
            total += summed_divergence(model, batch.to(comm.device), causal=spec.causal)
    comm.all_reduce(total).wait()
    return (total / counts[0].to(total.dtype)).clamp(min=0)


def _losses(
    model: PreTrainedModel, batch: Batch, spec: StepSpec, expected_gradient: Tensor, divergence: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the loss of a micro-batch, summed, the routers' own loss or None, and the rewards' sums, (5,) or (0,)."""
    if spec.preference is not None:
        loss, rewards = preference_loss(model, batch, spec.preference, divergence, causal=spec.causal)
        return loss, None, rewards
    found = losses(
        model,
        batch,
        spec.router_loss,
        causal=spec.causal,
        objective=spec.objective,
        expected_gradient=expected_gradient,
    )
    return *found, divergence.new_zeros(0)


def _update(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    spec: StepSpec,
    norm: Tensor | None,
    scaler: ShardedGradScaler | None,
) -> None:
    """Clip and step; if ``norm`` is None, because something is not finite, drop the gradients instead."""
    if norm is not None and spec.max_grad_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), spec.max_grad_norm, norm)
    for group in optimizer.param_groups:
        group["lr"] = spec.learning_rate
    if norm is not None:
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
        # Not in a hook of the optimizer, which sees this rank's rows alone.
        precompute_float8_scales(model)
    if scaler is not None:
        scaler.update()
    if norm is None:
        optimizer.zero_grad(set_to_none=True)


def peak_memory_bytes(device: torch.device) -> int:
    """Return this rank's peak memory: the allocator's on CUDA, the process's peak resident set on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def reserved_memory_bytes(device: torch.device) -> int:
    """Return the most that this rank's allocator has reserved on CUDA; 0 on the CPU, whose allocator keeps nothing."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0


def _nonfinite_message(
    model: torch.nn.Module, micro_batches: Sequence[Batch], comm: Comm, spec: StepSpec, loss: float, grad_norm: float
) -> str:
    """Return an error message with the rows and parameters that are not finite. Every rank calls it."""
    mine = [index for batch in micro_batches for index in batch.indices]
    bad = [p for p in model.parameters() if p.grad is not None and not rows_of(p.grad).isfinite().all()]
    names = [p.shard_meta.name for p in bad]  # type: ignore[attr-defined]
    gathered = comm.all_gather_object((mine, names))
    rows = "; ".join(f"rank {rank}: {_some(indices)}" for rank, (indices, _) in enumerate(gathered))
    # Several ranks may hold parts of one parameter.
    spoiled = list(dict.fromkeys(name for _, names in gathered for name in names))
    where = f" The gradient is not finite in {len(spoiled)} parameters: {_some(spoiled, 5)}." if spoiled else ""
    limit = "off" if spec.max_grad_norm is None else f"{spec.max_grad_norm:g}"
    precise = "" if spec.precision == "fp32" else f", set training.precision=fp32 (it is {spec.precision})"
    return (
        f"Step {spec.step}: the loss is {loss} and the gradient norm is {grad_norm}; both must be finite. The weights "
        f"are those after step {spec.step - 1}. Training rows of the step: {rows}.{where} The learning rate is "
        f"{spec.learning_rate:g}, max_grad_norm is {limit}: lower training.learning_rate, add training.warmup_steps"
        f"{precise}, or set training.on_nonfinite=skip to skip such steps."
    )


def _some(values: Sequence[object], most: int = 20) -> str:
    return ", ".join(str(value) for value in values[:most]) + (", …" if len(values) > most else "")


TIMELINE_POINTS = 400
"""Maximum number of moments in a memory timeline."""


def traced_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    comm: Comm,
    take: Callable[[], StepReport],
    beside_bytes: int = 0,
) -> tuple[StepReport, StepTrace]:
    """Take a step and record it. Every rank calls it, and each rank must be a process.

    On the CPU the allocator's events are recorded, which slows the step down; ``beside_bytes`` of tensors in its memory
    are not the step's. Returns the report of ``take``, and the
    trace of all ranks, the same on every rank.
    """
    # Gradients of earlier steps that are freed while the meter runs would count as held until the end.
    optimizer.zero_grad()
    comm.barrier()
    shards = [p.data.untyped_storage() for p in model.parameters() if p.device == comm.device]  # they include padding
    parameters = sum({one.data_ptr(): one.nbytes() for one in shards}.values())
    before = held_state_bytes(optimizer, comm.device)
    meter = MemoryMeter(comm.device, beside_bytes) if comm.device.type == "cpu" else None
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
