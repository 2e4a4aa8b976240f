"""Evaluation on held-out rows under sharding: ranks in lockstep, each its share, every row counted once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fullshard.comm import Comm
from fullshard.data import Batch, CollateSpec, EpochPlan, Example, TokenizedSet, batches
from fullshard.errors import InvariantError
from fullshard.train.metrics import Baseline, MetricName, score
from fullshard.train.reports import EvaluationReport, Prediction
from fullshard.train.step import loss_sum

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class EvaluationSpec:
    """What is evaluated and how; the same on every rank.

    Attributes:
        examples: Held-out rows as the file has them.
        tokenized: The same rows as ids.
        collate: Padding and the kind of model.
        batch_size: Rows of one rank's batch.
        max_new_tokens: Most tokens generated for a row.
        metric: The task's metric.
        baseline: What predictions without a model score.
    """

    examples: Sequence[Example]
    tokenized: TokenizedSet
    collate: CollateSpec
    batch_size: int
    max_new_tokens: int
    metric: MetricName
    baseline: Baseline


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    spec: EvaluationSpec,
    comm: Comm,
    *,
    step: int,
    epoch: float,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> EvaluationReport:
    """Measure loss and metric on all held-out rows; on every rank together.

    The model is in evaluation mode meanwhile and draws no random numbers, so evaluating does not change training.

    Args:
        model: The sharded model.
        tokenizer: Turns generated ids into text.
        spec: Rows and metric.
        comm: The ranks the model is sharded over; the default process group when there are several.
        step: Steps trained so far, for the report.
        epoch: Epochs trained so far, for the report.
        progress: Told this rank's batches done and in all, after each batch; on every rank together. What it raises
            ends the evaluation.

    Returns:
        The report, with the same numbers and predictions on every rank.
    """
    started = time.perf_counter()
    was_training = model.training
    model.eval()
    try:
        loss, texts = _run(model, tokenizer, spec, comm, progress)
    finally:
        model.train(was_training)
    predictions = tuple(
        Prediction(example.source, text, example.target) for example, text in zip(spec.examples, texts, strict=True)
    )
    return EvaluationReport(
        step=step,
        epoch=epoch,
        loss=loss,
        metric=spec.metric,
        value=score(spec.metric, texts, [example.target for example in spec.examples]),
        baseline=spec.baseline.value,
        baseline_name=spec.baseline.name,
        predictions=predictions,
        seconds=time.perf_counter() - started,
    )


@torch.no_grad()
def _run(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    spec: EvaluationSpec,
    comm: Comm,
    progress: Callable[[int, int], None],
) -> tuple[float, list[str]]:
    """Mean loss per target token and a text for every row, on every rank."""
    # The order of evaluation changes no number, so rows of one length go together.
    lengths = spec.tokenized.lengths
    plan = EpochPlan(len(spec.tokenized), comm.size, spec.batch_size, training=False, lengths=lengths)
    # Sum and count in float64: exact counts, and a sum that the number of batches does not blur.
    totals = torch.zeros(2, dtype=torch.float64, device=comm.device)
    mine: list[tuple[int, str]] = []
    for done, cpu_batch in enumerate(batches(spec.tokenized, plan, comm.rank, spec.collate), start=1):
        batch = cpu_batch.to(comm.device)
        totals[0] += loss_sum(model, batch, causal=spec.collate.causal)
        totals[1] += batch.target_tokens
        texts = generate(model, tokenizer, batch, comm, max_new_tokens=spec.max_new_tokens)
        rows = zip(batch.indices, batch.fillers, texts, strict=True)
        mine += [(index, text) for index, filler, text in rows if not filler]
        progress(done, plan.num_batches)
    comm.all_reduce(totals).wait()
    loss_total, target_tokens = totals.tolist()
    everyone = sorted(pair for share in comm.all_gather_object(mine) for pair in share)
    if [index for index, _ in everyone] != list(range(len(spec.tokenized))):
        raise InvariantError(f"Evaluation of {len(spec.tokenized)} rows gathered {len(everyone)} predictions.")
    return loss_total / target_tokens, [text for _, text in everyone]


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    batch: Batch,
    comm: Comm,
    *,
    max_new_tokens: int,
) -> list[str]:
    """Write a text for each row of a batch, greedily; on every rank together.

    Args:
        model: The sharded model, in evaluation mode.
        tokenizer: Turns generated ids into text.
        batch: On the model's device.
        comm: The ranks the model is sharded over. With several, a rank whose rows are finished goes on in step with the
            others, over the default process group.
        max_new_tokens: Most tokens generated for a row.

    Returns:
        A text for each row, fillers included.
    """
    ids = model.generate(  # type: ignore[operator]
        input_ids=batch.prompt_ids_BP,
        attention_mask=batch.prompt_mask_BP,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        num_beams=1,
        use_cache=True,
        synced_gpus=comm.size > 1,
    )
    if not model.config.is_encoder_decoder:
        ids = ids[:, batch.prompt_ids_BP.shape[1] :]  # a decoder repeats its prompt
    return [text.strip() for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]
