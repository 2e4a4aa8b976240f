"""Evaluation on held-out rows under sharding: ranks in lockstep, each its share, every row counted once."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from fullshard.comm import Comm
from fullshard.config import RunConfig
from fullshard.config.evaluation import Metric
from fullshard.data import CollateSpec, EpochPlan, TokenizedSet, batches
from fullshard.data.examples import Example
from fullshard.errors import ConfigError, InvariantError
from fullshard.train.evaluation.generation import GenerationSpec, generate, require_right_text
from fullshard.train.evaluation.metrics import (
    Baseline,
    baselines,
    needs_text,
    perplexity,
    require_packages,
    score,
)
from fullshard.train.forward import loss_sum
from fullshard.train.reporting.reports import EvaluationReport, Prediction
from fullshard.train.reporting.scores import Scores

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class HeldOut:
    """The rows that are evaluated on, and what the training rows say of them.

    Attributes:
        examples: The rows as the data has them.
        tokenized: The same rows as ids.
        collate: Padding and the kind of model.
        labels: The label set of the training rows; None: there is none.
        majority: The most frequent training target; None: not known.
    """

    examples: Sequence[Example]
    tokenized: TokenizedSet
    collate: CollateSpec
    labels: Collection[str] | None = None
    majority: str | None = None

    @property
    def references(self) -> list[tuple[str, ...]]:
        """The right answers of each row."""
        return [example.references for example in self.examples]


@dataclass(frozen=True)
class EvaluationSpec:
    """What is evaluated and how; the same on every rank.

    Attributes:
        rows: The held-out rows.
        batch_size: Rows of one rank's batch.
        generation: How text is written.
        metrics: What is measured; the first decides which model is the best.
        baselines: For each metric that has one, what predictions without a model score.
    """

    rows: HeldOut
    batch_size: int
    generation: GenerationSpec
    metrics: tuple[Metric, ...]
    baselines: Mapping[str, Baseline]

    @property
    def metric(self) -> Metric:
        """The metric that decides."""
        return self.metrics[0]

    @property
    def baseline(self) -> Baseline | None:
        """That metric's baseline; None where there is none."""
        return self.baselines.get(self.metric)


def evaluation_spec(config: RunConfig, rows: HeldOut) -> EvaluationSpec:
    """What a run's settings say of its evaluation; any rank, alone.

    Args:
        config: The run's settings.
        rows: The held-out rows.

    Raises:
        ConfigError: A metric's package is missing, or accuracy is asked for and the targets are no label set.
    """
    settings = config.evaluation
    metrics = tuple(dict.fromkeys((settings.metric, *settings.metrics)))
    require_packages(metrics)
    if "accuracy" in metrics and rows.labels is None:
        raise ConfigError(
            "evaluation.metric: accuracy is for label sets, and the training targets have more different texts than "
            "one. Use exact_match, rougeL, bleu or chrf."
        )
    return EvaluationSpec(
        rows=rows,
        batch_size=config.training.per_device_eval_batch_size,
        generation=GenerationSpec.of(config),
        metrics=metrics,
        baselines=baselines(
            metrics,
            [example.source for example in rows.examples],
            rows.references,
            majority=rows.majority,
            lead_sentences=settings.lead_sentences,
        ),
    )


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
    """Measure loss and metrics on all held-out rows; on every rank together.

    The model is in evaluation mode meanwhile and draws no random numbers, so evaluating does not change training. No
    text is generated where no metric needs any.

    Args:
        model: The sharded model.
        tokenizer: Turns generated ids into text.
        spec: Rows and metrics.
        comm: The ranks the model is sharded over.
        step: Steps trained so far, for the report.
        epoch: Epochs trained so far, for the report.
        progress: Told this rank's batches done and in all, after each batch; on every rank together. What it raises
            ends the evaluation.

    Returns:
        The report, with the same numbers and predictions on every rank.
    """
    started = time.perf_counter()
    with evaluation_mode(model):
        loss, texts = _run(model, tokenizer, spec, comm, progress)
    scores = Scores({})
    if texts:
        scores = score(spec.metrics, texts, spec.rows.references, labels=spec.rows.labels or ())
    values = {name: perplexity(loss) if name == "perplexity" else scores.values[name] for name in spec.metrics}
    return EvaluationReport(
        step=step,
        epoch=epoch,
        loss=loss,
        metric=spec.metric,
        value=values[spec.metric],
        baseline=spec.baseline.value if spec.baseline else None,
        baseline_name=spec.baseline.name if spec.baseline else None,
        metrics=values,
        baselines={name: one.value for name, one in spec.baselines.items()},
        confusion=scores.confusion,
        predictions=tuple(
            Prediction(example.source, text, example.references)
            for example, text in zip(spec.rows.examples, texts, strict=bool(texts))
        ),
        seconds=time.perf_counter() - started,
    )


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """While entered, the model does not drop out; afterwards it is in the mode it was in."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@torch.no_grad()
def _run(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    spec: EvaluationSpec,
    comm: Comm,
    progress: Callable[[int, int], None],
) -> tuple[float, list[str]]:
    """Mean loss per target token and a text for every row, on every rank; no texts where none is needed."""
    rows = spec.rows
    # The order of evaluation changes no number, so rows of one length go together.
    lengths = rows.tokenized.lengths
    plan = EpochPlan(len(rows.tokenized), comm.size, spec.batch_size, training=False, lengths=lengths)
    # Sum and count in float64: exact counts, and a sum that the number of batches does not blur.
    totals = torch.zeros(2, dtype=torch.float64, device=comm.device)
    mine: list[tuple[int, str]] = []
    writes = needs_text(spec.metrics)
    if writes:
        require_right_text(model, spec.batch_size)
    for done, cpu_batch in enumerate(batches(rows.tokenized, plan, comm.rank, rows.collate), start=1):
        batch = cpu_batch.to(comm.device)
        totals[0] += loss_sum(model, batch, causal=rows.collate.causal)
        totals[1] += batch.target_tokens
        if writes:
            texts = generate(model, tokenizer, batch, comm, spec.generation)
            written = zip(batch.indices, batch.fillers, texts, strict=True)
            mine += [(index, text) for index, filler, text in written if not filler]
        progress(done, plan.num_batches)
    comm.all_reduce(totals).wait()
    loss_total, target_tokens = totals.tolist()
    texts = gather_texts(mine, len(rows.tokenized), comm) if writes else []
    return loss_total / target_tokens, texts


def gather_texts(mine: Sequence[tuple[int, str]], rows: int, comm: Comm) -> list[str]:
    """All ranks' texts in the order of the rows, on every rank; every rank calls it.

    Args:
        mine: This rank's, each with the index of its row.
        rows: Number of rows.
        comm: The ranks.

    Raises:
        InvariantError: A row has no text, or two.
    """
    everyone = sorted(pair for share in comm.all_gather_object(list(mine)) for pair in share)
    if [index for index, _ in everyone] != list(range(rows)):
        raise InvariantError(f"{rows} rows have {len(everyone)} predictions.")
    return [text for _, text in everyone]
