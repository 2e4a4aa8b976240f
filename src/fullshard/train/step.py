"""One optimizer step over all ranks: count, forward, backward, clip, update, report."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from fullshard.comm import Comm
from fullshard.data import IGNORED_LABEL, Batch
from fullshard.errors import TrainingError
from fullshard.optim import clip_grad_norm_
from fullshard.train.reports import StepReport

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class StepSpec:
    """What one step is told.

    Attributes:
        step: Number of the step, from 1.
        epoch: Epochs trained after it.
        learning_rate: Learning rate of its update.
        max_grad_norm: Norm that the whole gradient is scaled down to; None leaves it.
        causal: Whether source and target are one sequence (decoder-only).
        stop: Whether this rank is asked to stop; the report says whether any is.
    """

    step: int
    epoch: float
    learning_rate: float
    max_grad_norm: float | None
    causal: bool
    stop: bool = False


def train_step(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    micro_batches: Sequence[Batch],
    comm: Comm,
    spec: StepSpec,
) -> StepReport:
    """Take one optimizer step; on every rank together, each with its own micro-batches, equally many.

    The loss is the sum over all target tokens of all ranks and micro-batches divided by their number, so world size and
    accumulation do not change it.

    Args:
        model: The sharded model, in training mode.
        optimizer: Over the model's local shards.
        micro_batches: This rank's, on the CPU, at least one.
        comm: The ranks the model is sharded over.
        spec: Number, rate and limits of this step.

    Returns:
        The report, with the same loss, norm and counts on every rank.

    Raises:
        TrainingError: The loss or the gradient's norm is not finite; on every rank, before the weights are changed.
    """
    started = time.perf_counter()
    # 1. Count once, over all ranks and micro-batches; the wish to stop travels along.
    counts = [_target_tokens(micro_batches), _tokens(micro_batches, spec.causal), int(spec.stop)]
    totals = torch.tensor(counts, device=comm.device)
    comm.all_reduce(totals).wait()
    target_tokens, tokens, stop = totals.tolist()
    # 2. Forward and backward. The engine averages gradients over ranks; times the world size makes it their sum.
    optimizer.zero_grad(set_to_none=True)
    total = _accumulate(model, micro_batches, comm, scale=comm.size / target_tokens, causal=spec.causal)
    # 3. Clip (an infinite limit measures the norm and leaves the gradient), check, update.
    limit = math.inf if spec.max_grad_norm is None else spec.max_grad_norm
    norm = clip_grad_norm_(model, limit)
    mean_loss, grad_norm = torch.stack([total / target_tokens, norm.to(total)]).tolist()
    _require_finite(mean_loss, grad_norm, spec)
    for group in optimizer.param_groups:
        group["lr"] = spec.learning_rate
    optimizer.step()
    return StepReport(
        step=spec.step,
        epoch=spec.epoch,
        loss=mean_loss,
        grad_norm=grad_norm,
        learning_rate=spec.learning_rate,
        target_tokens=target_tokens,
        tokens=tokens,
        seconds=time.perf_counter() - started,
        memory_bytes=peak_memory_bytes(comm.device),
        stop_requested=stop > 0,
    )


def _accumulate(
    model: PreTrainedModel, micro_batches: Sequence[Batch], comm: Comm, *, scale: float, causal: bool
) -> Tensor:
    """Backward of ``scale`` times each micro-batch's summed loss; the sum of those losses over all ranks, 0-d."""
    total = torch.zeros((), device=comm.device)
    for batch in micro_batches:
        loss = loss_sum(model, batch.to(comm.device), causal=causal)
        (loss * scale).backward()
        total += loss.detach()
    comm.all_reduce(total).wait()
    return total


def loss_sum(model: PreTrainedModel, batch: Batch, *, causal: bool) -> Tensor:
    """Cross-entropy summed over the target tokens of one batch; on every rank together, as every forward.

    Args:
        model: The sharded model.
        batch: On the model's device.
        causal: Whether source and target are one sequence (decoder-only).

    Returns:
        0-d float32; zero for a batch of fillers.
    """
    inputs = {"input_ids": batch.input_ids_BS, "attention_mask": batch.attention_mask_BS, "use_cache": False}
    if causal:
        # Position t predicts label t + 1.
        logits_BTV = model(**inputs).logits[:, :-1]
        labels_BT = batch.labels_BT[:, 1:]
    else:
        shifted = model.prepare_decoder_input_ids_from_labels(labels=batch.labels_BT)  # type: ignore[operator]
        logits_BTV = model(**inputs, decoder_input_ids=shifted).logits
        labels_BT = batch.labels_BT
    return functional.cross_entropy(
        logits_BTV.float().flatten(0, 1), labels_BT.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
    )


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory this rank has used: the allocator's on CUDA, the process's peak resident set on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def _target_tokens(micro_batches: Sequence[Batch]) -> int:
    return sum(batch.target_tokens for batch in micro_batches)


def _tokens(micro_batches: Sequence[Batch], causal: bool) -> int:  # noqa: FBT001
    """Tokens without padding and fillers: sources and targets; of a causal model the joined sequences."""
    read = sum(int(batch.attention_mask_BS[~torch.tensor(batch.fillers)].sum()) for batch in micro_batches)
    return read if causal else read + _target_tokens(micro_batches)


def _require_finite(loss: float, grad_norm: float, spec: StepSpec) -> None:
    """Stop before a step that would spoil the weights; loss and norm are global, so every rank stops alike."""
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return
    limit = "off" if spec.max_grad_norm is None else f"{spec.max_grad_norm:g}"
    raise TrainingError(
        f"Step {spec.step}: the loss is {loss} and the gradient's norm {grad_norm}; both must be finite numbers. The "
        f"weights are those of step {spec.step - 1}. Learning rate {spec.learning_rate:g}, max_grad_norm {limit}: "
        "lower training.learning_rate, add training.warmup_steps, or set training.precision=fp32."
    )
