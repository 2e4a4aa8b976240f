"""One optimizer step over all ranks: count tokens, forward, backward, clip, update, report."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from fullshard.comm import Comm
from fullshard.data import Batch
from fullshard.errors import TrainingError
from fullshard.models import PLAIN, Objective
from fullshard.optim import ShardedGradScaler, clip_grad_norm_
from fullshard.train.forward import loss_sum
from fullshard.train.reporting.reports import StepReport

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class StepSpec:
    """Number, rate and limits of one step.

    Attributes:
        step: Number of the step, from 1.
        epoch: Epochs trained after it.
        learning_rate: Learning rate of its update.
        max_grad_norm: Norm that the full gradient is clipped to; None: it is not clipped.
        causal: Whether source and target are one sequence (decoder-only).
        stop: Whether a stop was requested on this rank; the report has whether it was on any rank.
        objective: Label smoothing and z-loss.
        on_nonfinite: If the loss or the gradient is not finite: ``stop`` ends the run, ``skip`` skips the step.
        precision: The run's precision, for the advice in errors.
    """

    step: int
    epoch: float
    learning_rate: float
    max_grad_norm: float | None
    causal: bool
    stop: bool = False
    objective: Objective = PLAIN
    on_nonfinite: Literal["stop", "skip"] = "stop"
    precision: str = "fp32"


def train_step(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[Batch],
    comm: Comm,
    spec: StepSpec,
    scaler: ShardedGradScaler | None = None,
) -> StepReport:
    """Take one optimizer step; every rank calls it with its own micro-batches, equally many.

    The loss is the sum over all target tokens of all ranks and micro-batches divided by their number, so world size and
    accumulation do not change it. In fp16, if the loss is finite and the gradient is not, the step is skipped and the
    loss scale halved, as long as it is at least 1.

    Args:
        model: The sharded model, in training mode.
        optimizer: Over the model's local shards.
        micro_batches: This rank's, on the CPU, at least one.
        comm: The ranks the model is sharded over.
        spec: Number, rate and limits of this step.
        scaler: Scales the loss in fp16.

    Returns:
        The report, with the same loss, norm and counts on every rank.

    Raises:
        TrainingError: The loss or the gradient's norm is not finite; on every rank, before the weights change.
    """
    started = time.perf_counter()
    totals = _count(micro_batches, comm, spec)
    optimizer.zero_grad(set_to_none=True)
    loss_scale = None if scaler is None else scaler.get_scale()
    # The engine averages gradients over ranks; times the world size makes it their sum.
    total = _accumulate(model, micro_batches, comm, spec, comm.size / totals.target_tokens, scaler)
    if scaler is not None:
        scaler.unscale_(optimizer)
    norm = clip_grad_norm_(model, math.inf)
    loss, grad_norm = torch.stack([total / totals.target_tokens, norm.to(total)]).tolist()
    # Loss and norm are global, so every rank decides the same.
    finite = math.isfinite(loss) and math.isfinite(grad_norm)
    # A gradient that overflowed may be finite with a smaller scale.
    overflow = loss_scale is not None and loss_scale >= 1 and math.isfinite(loss)
    if not finite and spec.on_nonfinite == "stop" and not overflow:
        raise TrainingError(_nonfinite_message(model, micro_batches, comm, spec, loss, grad_norm))
    _update(model, optimizer, spec, norm if finite else None, scaler)
    return StepReport(
        step=spec.step,
        epoch=spec.epoch,
        loss=loss,
        grad_norm=grad_norm,
        learning_rate=spec.learning_rate,
        target_tokens=totals.target_tokens,
        tokens=totals.tokens,
        seconds=time.perf_counter() - started,
        memory_bytes=peak_memory_bytes(comm.device),
        stop_requested=totals.stop,
        memory_bytes_per_rank=totals.memory,
        skipped=not finite,
        loss_scale=loss_scale,
    )


@dataclass(frozen=True)
class _Totals:
    """Counts over all ranks.

    Attributes:
        target_tokens: Target tokens of the step.
        tokens: All tokens of the step, without padding.
        stop: Whether a stop was requested on any rank.
        memory: Peak bytes of each rank.
    """

    target_tokens: int
    tokens: int
    stop: bool
    memory: tuple[int, ...]


def _count(micro_batches: Sequence[Batch], comm: Comm, spec: StepSpec) -> _Totals:
    """Sum the counts over ranks and micro-batches; one all-reduce also carries stop requests and each rank's memory."""
    target_tokens = sum(batch.target_tokens for batch in micro_batches)
    tokens = sum(batch.tokens for batch in micro_batches)
    counts = [target_tokens, tokens, int(spec.stop), *[0] * comm.size]
    counts[3 + comm.rank] = peak_memory_bytes(comm.device)
    totals = torch.tensor(counts, device=comm.device)
    comm.all_reduce(totals).wait()
    target_tokens, tokens, stop, *memory = totals.tolist()
    return _Totals(target_tokens, tokens, stop > 0, tuple(memory))


def _accumulate(
    model: PreTrainedModel,
    micro_batches: Sequence[Batch],
    comm: Comm,
    spec: StepSpec,
    factor: float,
    scaler: ShardedGradScaler | None,
) -> Tensor:
    """Run backward on ``factor`` times each micro-batch's summed loss; return the losses' sum over all ranks, 0-d."""
    total = torch.zeros((), device=comm.device)
    expected_gradient = factor if scaler is None else factor * scaler.get_scale()
    for batch in micro_batches:
        on_device = batch.to(comm.device)
        loss = loss_sum(
            model, on_device, causal=spec.causal, objective=spec.objective, expected_gradient=expected_gradient
        )
        scaled = loss * factor
        (scaled if scaler is None else scaler.scale(scaled)).backward()
        total += loss.detach()
    comm.all_reduce(total).wait()
    return total


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


def _nonfinite_message(
    model: torch.nn.Module,
    micro_batches: Sequence[Batch],
    comm: Comm,
    spec: StepSpec,
    loss: float,
    grad_norm: float,
) -> str:
    """Return an error message with the rows and the parameters that are not finite; every rank calls it."""
    mine = [index for batch in micro_batches for index in batch.indices]
    bad = [p for p in model.parameters() if p.grad is not None and not p.grad.isfinite().all()]
    names = [p.shard_meta.name for p in bad]  # type: ignore[attr-defined]
    gathered = comm.all_gather_object((mine, names))
    rows = "; ".join(f"rank {rank}: {_some(indices)}" for rank, (indices, _) in enumerate(gathered))
    # Several ranks may have a part of one parameter.
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
