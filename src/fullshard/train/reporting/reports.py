"""Reports: frozen values that a run passes to its sinks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from fullshard.train.reporting.flops import Flops
from fullshard.train.reporting.scores import Confusion

EndedBy = Literal["steps", "time", "early_stopping"]


@dataclass(frozen=True)
class RunStart:
    """Report of the start of a run, before its first step.

    Attributes:
        output_dir: Where the run writes.
        world_size: Number of ranks.
        device: Kind of device the ranks compute on: ``cpu`` or ``cuda``.
        total_steps: Optimizer steps of the run.
        steps_per_epoch: Optimizer steps of one epoch.
        parameters: Elements of all parameters, a tied one counted once.
        optimizer: Name of the optimizer for people.
        train_rows: Rows trained on.
        validation_rows: Rows held out.
        unit_table: The sharded units, as text.
        config: The settings of the run, with defaults filled in.
        versions: Versions of the packages that the result depends on.
        padding_share: Share of padding among all positions of an epoch's batches.
        flops: FLOPs of a token and of the devices; None if the devices' are not known.
        notes: Notes for the user, such as lengths and truncated rows.
        resumed_step: Steps trained before the checkpoint that the run resumes from; 0 for a new run.
    """

    output_dir: str
    world_size: int
    device: str
    total_steps: int
    steps_per_epoch: int
    parameters: int
    optimizer: str
    train_rows: int
    validation_rows: int
    unit_table: str
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    padding_share: float
    flops: Flops | None = None
    notes: tuple[str, ...] = ()
    resumed_step: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-able values."""
        return asdict(self)


@dataclass(frozen=True)
class StepReport:
    """Report of one optimizer step; the same on every rank except for times and memory.

    Attributes:
        step: Number of the step, from 1.
        epoch: Epochs trained after the step, a fraction within an epoch.
        loss: Mean per target token over all ranks and micro-batches, before the update, with label smoothing and
            z-loss.
        grad_norm: Norm of the full gradient before clipping.
        learning_rate: Learning rate of the update.
        target_tokens: Target tokens of all ranks.
        tokens: Source and target tokens of all ranks, without padding.
        seconds: Wall time of the step on this rank.
        memory_bytes: Peak memory of this rank so far: the allocator's on CUDA, the process's resident set on CPU.
        memory_bytes_per_rank: The same of every rank at the start of the step, in rank order.
        skipped: Whether loss or gradient was not finite, so that the weights were not changed.
        loss_scale: Factor on the loss in fp16.
        stop_requested: Whether a stop was requested on any rank when the step began.
    """

    step: int
    epoch: float
    loss: float
    grad_norm: float
    learning_rate: float
    target_tokens: int
    tokens: int
    seconds: float
    memory_bytes: int
    memory_bytes_per_rank: tuple[int, ...] = ()
    skipped: bool = False
    loss_scale: float | None = None
    stop_requested: bool = False

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all ranks per second of this step."""
        return self.tokens / self.seconds

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-able values, with the rate."""
        values = asdict(self)
        del values["stop_requested"]
        return {"kind": "step", **values, "tokens_per_second": self.tokens_per_second}


@dataclass(frozen=True)
class Prediction:
    """Prediction for one held-out row.

    Attributes:
        source: Source text of the row, without the prefix.
        prediction: Text that the model generated.
        references: Correct texts, at least one.
    """

    source: str
    prediction: str
    references: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return a line of ``predictions.jsonl``."""
        return {"input": self.source, "prediction": self.prediction, "references": list(self.references)}


@dataclass(frozen=True)
class EvaluationReport:
    """Report of one evaluation on the held-out rows; the same on every rank except for the time.

    Attributes:
        step: Step after which it was made.
        epoch: Epochs trained at that time.
        loss: Mean loss per target token over all held-out rows.
        metric: Name of the metric that decides which model is the best.
        value: Its value; from 0 to 1, except for perplexity.
        baseline: The metric of predictions that need no model, or None.
        baseline_name: Description of those predictions.
        metrics: Value of each metric; the first is ``metric``.
        baselines: Baseline of each metric that has one.
        confusion: The confusion matrix if a metric is accuracy, else None.
        predictions: One for each held-out row, in the order of the data; empty if no metric needs text.
        seconds: Wall time on this rank.
    """

    step: int
    epoch: float
    loss: float
    metric: str
    value: float
    baseline: float | None
    baseline_name: str | None
    metrics: Mapping[str, float]
    baselines: Mapping[str, float]
    confusion: Confusion | None
    predictions: tuple[Prediction, ...]
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-able values, without predictions and confusion matrix."""
        fields = ("step", "epoch", "loss", "metric", "value", "baseline", "baseline_name", "metrics", "baselines")
        return {"kind": "evaluation", **{name: getattr(self, name) for name in (*fields, "seconds")}}

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> EvaluationReport:
        """Return the report that ``dataclasses.asdict`` was called on, also if JSON has turned tuples into lists."""
        confusion = values["confusion"]
        if confusion is not None:
            cells = tuple((right, written, rows) for right, written, rows in confusion["cells"])
            confusion = Confusion(tuple(confusion["labels"]), cells)
        predictions = tuple(
            Prediction(one["source"], one["prediction"], tuple(one["references"])) for one in values["predictions"]
        )
        return cls(**{**values, "confusion": confusion, "predictions": predictions})


@dataclass(frozen=True)
class CheckpointReport:
    """Report of a complete checkpoint on disk.

    Attributes:
        step: Step after which it was saved.
        path: Its directory.
        nbytes: Size of all its files.
        seconds: Time from the start of the save to its commit.
        stall_seconds: Part of that time during which training was blocked.
    """

    step: int
    path: str
    nbytes: int
    seconds: float
    stall_seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-able values."""
        return {"kind": "checkpoint", **asdict(self)}


@dataclass(frozen=True)
class RankMemory:
    """Tensor bytes of one rank.

    Attributes:
        rank: The rank.
        parameters: Its shards of the parameters.
        gradients: Its shards of the gradients.
        optimizer: Its optimizer state.
        gathered_peak: Peak of gathered parameters.
        gradient_buffer_peak: Peak of unsharded gradient buffers.
        peak: Peak of all tensors in a training step. CUDA: over the run, by the allocator's count. CPU: in the traced
            step, the one with the longest batch of the first epoch, by the allocator's events.
    """

    rank: int
    parameters: int
    gradients: int
    optimizer: int
    gathered_peak: int
    gradient_buffer_peak: int
    peak: int


@dataclass(frozen=True)
class RunSummary:
    """Summary of a finished run; the metrics are those of the saved model, None if the run never evaluated.

    Attributes:
        metric: Name of the metric that decides which model is the best.
        value: The saved model's metric.
        baseline: The metric of predictions that need no model, or None.
        baseline_name: Description of those predictions.
        loss: The saved model's loss on the held-out rows.
        best_step: Step after which the saved model was evaluated.
        steps: Steps taken.
        epochs: Epochs taken.
        train_loss: Loss of the last step.
        train_seconds: Wall time of the run: steps, evaluations and saving.
        step_seconds: Wall time of the steps alone.
        evaluation_seconds: Wall time of the evaluations alone.
        tokens: Tokens trained on, of all ranks, without padding.
        tokens_per_second: ``tokens / step_seconds``.
        world_size: Number of ranks.
        device: Kind of device: ``cpu`` or ``cuda``.
        parameters: Elements of all parameters, a tied one counted once.
        optimizer: Name of the optimizer for people.
        memory: Tensor bytes of each rank, in rank order.
        output_dir: Directory of the model and the files of the run.
        config: The settings of the run, with defaults filled in.
        versions: Versions of the packages that the result depends on.
        ended_by: What ended the run: ``steps``, ``time`` or ``early_stopping``.
        skipped_steps: Steps that were skipped because loss or gradient was not finite.
        metrics: Value of each metric.
        baselines: Baseline of each metric that has one.
        confusion: The confusion matrix if a metric is accuracy, else None.
        predictions: Predictions of the saved model, one for each held-out row.
    """

    metric: str | None
    value: float | None
    baseline: float | None
    baseline_name: str | None
    loss: float | None
    best_step: int
    steps: int
    epochs: float
    train_loss: float
    train_seconds: float
    step_seconds: float
    evaluation_seconds: float
    tokens: int
    tokens_per_second: float
    world_size: int
    device: str
    parameters: int
    optimizer: str
    memory: Sequence[RankMemory]
    output_dir: str
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    ended_by: EndedBy
    skipped_steps: int
    metrics: Mapping[str, float]
    baselines: Mapping[str, float]
    confusion: Confusion | None
    predictions: tuple[Prediction, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-able values, without the predictions; ``peak_bytes_per_rank`` is in rank order."""
        fields = asdict(self)
        del fields["predictions"]
        fields["peak_bytes_per_rank"] = [rank.peak for rank in self.memory]
        return fields
