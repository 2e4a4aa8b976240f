"""Evaluation on held-out rows under sharding: each rank has a share of the rows, and every row counts once."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fullshard.core.comm import Comm
from fullshard.core.engine import has_tables_at_home, unsharded
from fullshard.errors import ConfigError, InvariantError
from fullshard.program.config import RunConfig
from fullshard.program.data import CollateSpec, EpochPlan, TokenizedSet, batches
from fullshard.program.data.examples import Example
from fullshard.program.metrics import (
    METRICS,
    REWARDS,
    Baseline,
    Scores,
    baselines,
    counted_words,
    needs_text,
    require_packages,
    score,
)
from fullshard.program.models import Preference, reward_means, uncompiled
from fullshard.program.train.evaluation.generation import GenerationSpec, generate, require_right_text
from fullshard.program.train.reporting.reports import EvaluationReport, Prediction
from fullshard.program.train.setup.model import loss_sum, preference_of, row_logps
from fullshard.program.train.setup.sequence import Readers

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class HeldOut:
    """The held-out rows, and the label set of the training rows."""

    examples: Sequence[Example]  # the rows as text
    tokenized: TokenizedSet  # the same rows as token ids
    collate: CollateSpec  # padding and the kind of model
    labels: Collection[str] | None = None  # the label set of the training rows, or None
    # the most frequent training target, or that of each row's set; None if it is not known
    majority: str | Sequence[str] | None = None
    sets: Mapping[str, HeldOut] = field(default_factory=dict)  # the rows of each set of a mixture; empty: one set

    @property
    def references(self) -> list[tuple[str, ...]]:
        """The references of each row."""
        return [example.references for example in self.examples]


@dataclass(frozen=True)
class EvaluationSpec:
    """Rows, metrics and generation settings of an evaluation; the same on every rank."""

    rows: HeldOut  # the held-out rows
    batch_size: int  # rows of one rank's batch
    generation: GenerationSpec  # settings of text generation
    preference: Preference | None  # the loss to measure, of preferences; None: that of target tokens
    metrics: tuple[str, ...]  # names of the metrics; the first decides which model is the best
    baselines: Mapping[str, Baseline]  # baseline of each metric that has one
    # how words of text beyond ASCII are counted, by metric; empty: as by the metrics' packages
    words: Mapping[str, str] = field(default_factory=dict)
    sets: Mapping[str, EvaluationSpec] = field(
        default_factory=dict
    )  # the baselines of each set of a mixture; empty: one set

    @property
    def metric(self) -> str:
        """The metric that decides which model is the best."""
        return self.metrics[0]

    @property
    def baseline(self) -> Baseline | None:
        """Baseline of that metric, or None."""
        return self.baselines.get(self.metric)


def evaluation_spec(config: RunConfig, rows: HeldOut) -> EvaluationSpec:
    """Return the evaluation of the held-out rows that a run's settings describe; any rank, alone.

    Raises:
        ConfigError: A metric's package is missing, or a metric is accuracy and the targets are not a label set.
    """
    metrics = config.evaluation.every_metric
    require_packages(metrics)
    needing = [name for name in metrics if METRICS[name].confusion]
    if needing and rows.labels is None:
        others = [name for name in METRICS if needs_text([name]) and not METRICS[name].confusion]
        raise ConfigError(
            f"evaluation.metric: {needing[0]} needs a label set, but the training targets have too many different "
            f"texts. Use one of {', '.join(others)}."
        )
    return _spec_of(config, rows, metrics)


def _spec_of(config: RunConfig, rows: HeldOut, metrics: tuple[str, ...]) -> EvaluationSpec:
    """Return the evaluation of some rows, and of each set of a mixture among them."""
    settings = config.evaluation
    return EvaluationSpec(
        rows=rows,
        batch_size=config.training.per_device_eval_batch_size,
        generation=GenerationSpec.of(config),
        preference=preference_of(config),
        metrics=metrics,
        baselines=baselines(
            metrics,
            [example.source for example in rows.examples],
            rows.references,
            majority=rows.majority,
            lead_sentences=settings.lead_sentences,
        ),
        words=counted_words(metrics, rows.references),
        sets={name: _spec_of(config, one, metrics) for name, one in rows.sets.items()},
    )


def evaluate(  # noqa: PLR0913 (of the run, and of this evaluation)
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    spec: EvaluationSpec,
    comm: Comm,
    *,
    step: int,
    epoch: float,
    progress: Callable[[int, int], None] = lambda done, total: None,
    at_once: bool = False,
) -> EvaluationReport:
    """Measure loss and metrics on all held-out rows. Every rank calls it.

    During it, the model is in evaluation mode and draws no random numbers, so evaluating does not change training. Text
    is generated only if a metric needs it. The loss of all rows is measured first: by tables at home it is added up in
    another order than by gathered ones, and must not depend on ``at_once``.

    Args:
        model: The sharded model.
        tokenizer: The model's tokenizer.
        spec: Rows and metrics.
        comm: The ranks the model is sharded over.
        step: Steps trained so far, for the report.
        epoch: Epochs trained so far, for the report.
        progress: Called after each batch, on every rank, with this rank's batches done and in total; where there is
            text, after its text is written. If it raises, the evaluation ends.
        at_once: If text is generated, gather all units once and keep them until the end, instead of gathering each for
            every token; the same on every rank. Memory: the gathered model.

    Returns:
        The report, with the same numbers and predictions on every rank.
    """
    started = time.perf_counter()
    with evaluation_mode(model):
        found = _run(model, tokenizer, spec, comm, progress, at_once=at_once and needs_text(spec.metrics))
    # of all sets together
    counted = sum(one.counted for one in found)
    loss = sum(one.loss for one in found) / counted
    texts = [text for one in found for text in one.texts]
    scores = _score(spec, loss, texts)
    rewards = {name: sum(one.rewards[name] * one.counted for one in found) / counted for name in found[0].rewards}
    values = {name: rewards[name] if name in rewards else scores.values[name] for name in spec.metrics}
    rows = zip(spec.rows.examples, texts, strict=bool(texts))
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
        predictions=tuple(Prediction(row.source, text, row.references) for row, text in rows),
        seconds=time.perf_counter() - started,
        words=spec.words,
        sets=dict(zip(spec.sets, map(_set_values, spec.sets.values(), found), strict=False)),
    )


def _set_values(spec: EvaluationSpec, found: _Measured) -> dict[str, Any]:
    """Return the scores of one set, as JSON values."""
    loss = found.loss / found.counted
    scores = _score(spec, loss, found.texts)
    return {
        "rows": spec.rows.tokenized.examples,
        "loss": loss,
        "metrics": {name: found.rewards.get(name, scores.values.get(name)) for name in spec.metrics},
        "baselines": {name: one.value for name, one in spec.baselines.items()},
    }


def _score(spec: EvaluationSpec, loss: float, texts: Sequence[str]) -> Scores:
    """Return the values of all metrics, in their order."""
    return score(spec.metrics, texts, spec.rows.references, labels=spec.rows.labels or (), loss=loss)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Disable dropout and compilation of the model inside the context; restores its mode afterwards."""
    was_training = model.training
    model.eval()
    try:
        with uncompiled(model):
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
    *,
    at_once: bool,
) -> list[_Measured]:
    """Measure each set of a mixture, or the only one; the same on every rank."""
    if needs_text(spec.metrics):
        require_right_text(model, spec.batch_size)
    parts, writes = list(spec.sets.values()) or [spec], needs_text(spec.metrics)
    readers = Readers.of(model, comm)
    of_losses, of_texts = (
        [_plan(one, ranks, spec.batch_size) for one in parts] for ranks in (readers.count, comm.size)
    )
    done, total = count(1), sum(plan.num_batches for plan in (*of_losses, *(of_texts if writes else ())))

    def tell() -> None:
        progress(next(done), total)

    with ExitStack() as gathered:
        if at_once and not has_tables_at_home(model):
            gathered.enter_context(unsharded(model, write_back=False))
        losses = [_losses(model, one, comm, plan, tell) for one, plan in zip(parts, of_losses, strict=True)]
        if at_once and has_tables_at_home(model):
            gathered.enter_context(unsharded(model, write_back=False))
        texts = [
            write_texts(model, tokenizer, one.rows.tokenized, plan, one.rows.collate, one.generation, comm, tell)
            if writes
            else []
            for one, plan in zip(parts, of_texts, strict=True)
        ]
    return [_Measured(*sums, written) for sums, written in zip(losses, texts, strict=True)]


def _plan(spec: EvaluationSpec, ranks: int, batch_size: int) -> EpochPlan:
    """Return the rows of each of ``ranks`` readers."""
    # The order of rows does not change the result, so rows of similar length are batched together.
    rows = spec.rows.tokenized
    of_rows = {"lengths": rows.lengths, "together": rows.together}
    return EpochPlan(len(rows), ranks, batch_size, training=False, **of_rows)


@dataclass(frozen=True)
class _Measured:
    """Measurements on some rows."""

    loss: float  # summed over what is counted
    counted: float  # target tokens; of preferences their number
    rewards: Mapping[str, float]  # metrics of preferences
    texts: list[str]  # generated text of each row; empty if no metric needs text


def _losses(
    model: PreTrainedModel, spec: EvaluationSpec, comm: Comm, plan: EpochPlan, tell: Callable[[], None]
) -> tuple[float, float, dict[str, float]]:
    """Return the summed loss of the rows of one set, what they count, and the metrics of preferences.

    They are the same on every rank.
    """
    if spec.preference is not None:
        rows = spec.rows.tokenized
        logps_2N = logps_of_rows(model, rows, comm, spec.rows.collate, plan, tell)
        loss, rewards = of_preferences(spec.preference, rows, logps_2N)
        return loss, rows.examples, rewards
    causal = spec.rows.collate.causal
    # Sum and count in float64: the count is exact, and the sum does not depend on the number of batches.
    totals = torch.zeros(2, dtype=torch.float64, device=comm.device)
    readers = Readers.of(model, comm)
    for batch in batches(spec.rows.tokenized, plan, readers.index, spec.rows.collate):
        totals[0] += loss_sum(model, batch.to(comm.device), causal=causal)
        if readers.first:
            totals[1] += batch.target_tokens
        tell()
    comm.all_reduce(totals).wait()
    loss, counted = totals.tolist()
    return loss, counted, {}


@torch.no_grad()
def logps_of_rows(
    model: PreTrainedModel,
    rows: TokenizedSet,
    comm: Comm,
    collate: CollateSpec,
    plan: EpochPlan,
    tell: Callable[[], None],
) -> Tensor:
    """Return the log-probability of each row's target and the number of its tokens, (2, N), float64, on the CPU.

    Every rank calls it, in evaluation mode, and gets the same; ``tell`` is called after each batch.
    """
    rows = replace(rows, desirable=None)  # related and unrelated completions alike
    totals = torch.zeros(2, len(rows), dtype=torch.float64, device=comm.device)
    for batch in batches(rows, plan, comm.rank, collate):
        found = torch.stack(row_logps(model, batch.to(comm.device), causal=collate.causal)).double()
        mine = [place for place, filler in enumerate(batch.fillers) if not filler]
        # Each row is one rank's, so that the sum over ranks is its value.
        totals[:, [batch.indices[place] for place in mine]] = found[:, mine]
        tell()
    comm.all_reduce(totals).wait()
    return totals.cpu()


def of_preferences(preference: Preference, rows: TokenizedSet, logps_2N: Tensor) -> tuple[float, dict[str, float]]:
    """Return the loss summed over preferences, and their metrics; any rank, alone.

    ``logps_2N`` is that of :func:`logps_of_rows`.
    """
    logps_N, tokens_N = logps_2N
    reference_N = torch.zeros_like(logps_N) if rows.reference is None else torch.from_numpy(rows.reference)
    if rows.desirable is None:
        found = preference.of_pairs(logps_N, tokens_N, reference_N)
    else:
        divergence = (logps_N - reference_N)[1::2].mean().clamp(min=0)
        labels = torch.from_numpy(rows.desirable)
        found = preference.of_labels(logps_N[::2], reference_N[::2], labels, divergence)
    means = reward_means(found.rewards.sum(1).tolist(), paired=rows.desirable is None)
    return float(found.losses_P.sum()), {name: means[name] for name in REWARDS if name in means}


def write_texts(  # noqa: PLR0913 (of the model, of the rows, and the ranks)
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: TokenizedSet,
    plan: EpochPlan,
    collate: CollateSpec,
    generation: GenerationSpec,
    comm: Comm,
    tell: Callable[[], None] = lambda: None,
) -> list[str]:
    """Return a text for every row, in their order. Every rank calls it, writes those of its batches and gets all.

    ``tell`` is called after each batch.

    Raises:
        InvariantError: A row has no text, or two.
    """
    mine: list[tuple[int, str]] = []
    for batch in batches(rows, plan, comm.rank, collate):
        texts = generate(model, tokenizer, batch.to(comm.device), generation)
        written = zip(batch.indices, batch.fillers, texts, strict=True)
        mine += [(index, text) for index, filler, text in written if not filler]
        tell()
    everyone = sorted(pair for share in comm.all_gather_object(mine) for pair in share)
    if [index for index, _ in everyone] != list(range(len(rows))):
        raise InvariantError(f"{len(rows)} rows have {len(everyone)} predictions, or a row has none or two.")
    return [text for _, text in everyone]
