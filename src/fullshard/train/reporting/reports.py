"""What a run says about itself: frozen values that the loop hands to sinks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from fullshard.train.reporting.flops import Flops
from fullshard.train.reporting.scores import Confusion

EndedBy = Literal["steps", "time", "early_stopping"]


@dataclass(frozen=True)
class RunStart:
    """Known before the first step.

    Attributes:
        output_dir: Where the run writes.
        world_size: Number of ranks.
        device: Kind of device the ranks compute on: ``cpu`` or ``cuda``.
        total_steps: Optimizer steps the run will take.
        steps_per_epoch: Optimizer steps of one epoch.
        parameters: Elements of all parameters, a tied one counted once.
        optimizer: What people call the optimizer.
        train_rows: Rows trained on.
        validation_rows: Rows held out.
        unit_table: The sharded units, as text.
        config: The settings of the run, with their defaults filled in.
        versions: Versions of what the result depends on.
        padding_share: Padding among all positions of an epoch's batches.
        flops: What a token costs, and what the devices could do; None where that is not known.
        notes: Facts about the data worth knowing: lengths, what truncation cut.
        resumed_step: Steps taken before, by the run that this one goes on; 0: it starts anew.
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
        """JSON-able."""
        return asdict(self)


@dataclass(frozen=True)
class StepReport:
    """One optimizer step; the same on every rank but for times and memory.

    Attributes:
        step: Number of the step, from 1.
        epoch: Epochs trained after the step, a fraction within an epoch.
        loss: What is minimised, label smoothing and z-loss included: its mean per target token over all ranks and
            micro-batches, before the step's update.
        grad_norm: Norm of the whole gradient before clipping.
        learning_rate: Learning rate of the update.
        target_tokens: Tokens the loss is over, of all ranks.
        tokens: Tokens read and written, padding left out, of all ranks.
        seconds: Wall time of the step on this rank.
        memory_bytes: Peak memory of this rank so far: the allocator's on CUDA, the process's resident set on CPU.
        memory_bytes_per_rank: The same of every rank when the step began, in rank order.
        skipped: Whether loss or gradient was no finite number, and the weights were left as they were.
        loss_scale: With fp16, what the loss was multiplied by.
        stop_requested: Whether some rank had been asked to stop when the step began.
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
        """JSON-able, with the rate."""
        values = asdict(self)
        del values["stop_requested"]
        return {"kind": "step", **values, "tokens_per_second": self.tokens_per_second}


@dataclass(frozen=True)
class Prediction:
    """What the model wrote for one held-out row.

    Attributes:
        source: Text of the row, without the prefix.
        prediction: Text the model generated.
        references: Texts that are right answers, at least one.
    """

    source: str
    prediction: str
    references: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """A line of ``predictions.jsonl``."""
        return {"input": self.source, "prediction": self.prediction, "references": list(self.references)}


@dataclass(frozen=True)
class EvaluationReport:
    """One evaluation on the held-out rows; the same on every rank but for the time.

    Attributes:
        step: Step after which it was made.
        epoch: Epochs trained by then.
        loss: Mean loss per target token over all held-out rows.
        metric: Name of the metric that decides which model is the best.
        value: Its value, from 0 to 1; of perplexity the perplexity.
        baseline: The metric of predictions that need no model; None where there is none.
        baseline_name: What those predictions are.
        metrics: All that was measured, by name; the first is ``metric``.
        baselines: The baselines of those that have one.
        confusion: With accuracy, which label was written for which.
        predictions: One for each held-out row, in the order of the data; none where no metric needs text.
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
        """JSON-able, without predictions and confusion matrix."""
        fields = ("step", "epoch", "loss", "metric", "value", "baseline", "baseline_name", "metrics", "baselines")
        return {"kind": "evaluation", **{name: getattr(self, name) for name in (*fields, "seconds")}}

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> EvaluationReport:
        """What ``dataclasses.asdict`` gave, also where JSON has made lists of tuples."""
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
    """A checkpoint that is on the disk, whole.

    Attributes:
        step: Step after which it was made.
        path: Its directory.
        nbytes: Size of all its files.
        seconds: From the beginning of the save to its commit.
        stall_seconds: How long of that training stood still.
    """

    step: int
    path: str
    nbytes: int
    seconds: float
    stall_seconds: float

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {"kind": "checkpoint", **asdict(self)}


@dataclass(frozen=True)
class RankMemory:
    """Tensor bytes of one rank.

    Attributes:
        rank: The rank.
        parameters: Its shards of the parameters.
        gradients: Its shards of the gradients.
        optimizer: Its optimizer state.
        gathered_peak: Most bytes of gathered parameters at once.
        gradient_buffer_peak: Most bytes of unsharded gradient buffers at once.
        peak: Most tensor bytes at once in a training step. CUDA: over the whole run, by the allocator. CPU: over one
            step, the one with the longest batch of the first epoch, by the allocator's own events.
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
    """The outcome of a run; the best evaluation's numbers are those of the saved model, None when it never evaluated.

    Attributes:
        metric: Name of the task's metric.
        value: The saved model's metric, from 0 to 1.
        baseline: The metric of predictions that need no model, from 0 to 1.
        baseline_name: What those predictions are.
        loss: The saved model's loss on the held-out rows.
        best_step: Step after which the saved model was as it is.
        steps: Steps taken.
        epochs: Epochs taken.
        train_loss: Loss of the last step.
        train_seconds: Wall time from the first step to the end: steps, evaluations and saving.
        step_seconds: Wall time of the steps alone.
        evaluation_seconds: Wall time of the evaluations alone.
        tokens: Tokens trained on, padding left out, of all ranks.
        tokens_per_second: ``tokens / step_seconds``.
        world_size: Number of ranks.
        device: Kind of device: ``cpu`` or ``cuda``.
        parameters: Elements of all parameters, a tied one counted once.
        optimizer: What people call the optimizer.
        memory: What each rank held, in rank order.
        output_dir: Where the model and the files of the run are.
        config: The settings of the run, with their defaults filled in.
        versions: Versions of what the result depends on.
        ended_by: What ended the run: ``steps``, ``time`` or ``early_stopping``.
        skipped_steps: Steps that were left out because loss or gradient was no finite number.
        metrics: All that was measured of the saved model, by name.
        baselines: Of those that have one, the baselines.
        confusion: With accuracy, which label the saved model wrote for which.
        predictions: The saved model's, one for each held-out row.
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
        """JSON-able, without the predictions; ``peak_bytes_per_rank`` is in rank order."""
        fields = asdict(self)
        del fields["predictions"]
        fields["peak_bytes_per_rank"] = [rank.peak for rank in self.memory]
        return fields
