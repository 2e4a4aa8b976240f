"""What a run says about itself: frozen values that the loop hands to sinks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


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
        train_rows: Rows trained on.
        validation_rows: Rows held out.
        unit_table: The sharded units, as text.
        notes: Facts about the data worth knowing: lengths, what truncation cut.
        resumed_step: Steps taken before, by the run that this one goes on; 0: it starts anew.
    """

    output_dir: str
    world_size: int
    device: str
    total_steps: int
    steps_per_epoch: int
    parameters: int
    train_rows: int
    validation_rows: int
    unit_table: str
    notes: tuple[str, ...] = ()
    resumed_step: int = 0


@dataclass(frozen=True)
class StepReport:
    """One optimizer step; the same on every rank but for times and memory.

    Attributes:
        step: Number of the step, from 1.
        epoch: Epochs trained after the step, a fraction within an epoch.
        loss: Mean loss per target token over all ranks and micro-batches, before the step's update.
        grad_norm: Norm of the whole gradient before clipping.
        learning_rate: Learning rate of the update.
        target_tokens: Tokens the loss is over, of all ranks.
        tokens: Tokens read and written, padding left out, of all ranks.
        seconds: Wall time of the step on this rank.
        memory_bytes: Peak memory of this rank so far: the allocator's on CUDA, the process's resident set on CPU.
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
        reference: Text it should have written.
    """

    source: str
    prediction: str
    reference: str


@dataclass(frozen=True)
class EvaluationReport:
    """One evaluation on the held-out rows; the same on every rank but for the time.

    Attributes:
        step: Step after which it was made.
        epoch: Epochs trained by then.
        loss: Mean loss per target token over all held-out rows.
        metric: Name of the task's metric.
        value: The metric, from 0 to 1.
        baseline: The metric of predictions that need no model, from 0 to 1.
        baseline_name: What those predictions are.
        predictions: One for each held-out row, in the order of the file.
        seconds: Wall time on this rank.
    """

    step: int
    epoch: float
    loss: float
    metric: str
    value: float
    baseline: float
    baseline_name: str
    predictions: tuple[Prediction, ...]
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """JSON-able, without the predictions."""
        fields = ("step", "epoch", "loss", "metric", "value", "baseline", "baseline_name", "seconds")
        return {"kind": "evaluation", **{name: getattr(self, name) for name in fields}}


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
        memory: What each rank held, in rank order.
        output_dir: Where the model and the files of the run are.
        config: The settings of the run, with their defaults filled in.
        versions: Versions of what the result depends on.
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
    memory: Sequence[RankMemory]
    output_dir: str
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    predictions: tuple[Prediction, ...]

    def as_dict(self) -> dict[str, Any]:
        """JSON-able, without the predictions; ``peak_bytes_per_rank`` is in rank order."""
        fields = asdict(self)
        del fields["predictions"]
        fields["peak_bytes_per_rank"] = [rank.peak for rank in self.memory]
        return fields
