"""Reports: frozen values that a run passes to its sinks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeVar

from fullshard.core.engine import TraceEvent
from fullshard.program.metrics import Confusion
from fullshard.program.train.reporting.flops import Flops

EndedBy = Literal["steps", "time", "early_stopping"]

T = TypeVar("T")


def spread(rows: Sequence[T], most: int) -> list[T]:
    """Return at most ``most`` of ``rows``, evenly spaced, because files are often sorted."""
    count = min(most, len(rows))
    return [rows[place * len(rows) // count] for place in range(count)]


@dataclass(frozen=True)
class SetFacts:
    """One set of a mixture."""

    name: str  # its name in the run file
    weight: float | None  # its weight in the run file; None: none has one
    train_rows: int  # its training rows
    epoch_rows: int  # rows that it contributes to an epoch
    validation_rows: int  # its held-out rows
    content: str  # hash of its training rows and of how they are read


@dataclass(frozen=True)
class RunStart:
    """Report of the start of a run, before its first step."""

    output_dir: str  # where the run writes
    world_size: int  # number of ranks
    device: str  # kind of device the ranks compute on: ``cpu`` or ``cuda``
    total_steps: int  # optimizer steps of the run
    steps_per_epoch: int  # optimizer steps of one epoch
    parameters: int  # elements of all parameters, a tied one counted once
    optimizer: str  # display name of the optimizer
    train_rows: int  # rows trained on
    validation_rows: int  # rows held out
    unit_table: str  # the sharded units, as text
    config: Mapping[str, Any]  # the settings of the run, with defaults filled in
    versions: Mapping[str, str]  # versions of the packages that the result depends on
    padding_share: float  # share of padding among all positions of an epoch's batches
    architecture: str  # class of the model, inside its adapter if it has one
    causal: bool  # whether source and target are one sequence (decoder-only)
    hardware: str  # name of rank 0's GPU, or of its CPU
    content: Mapping[str, str]  # size and hash of each local file or directory that a setting names, by dotted key
    base_license: str | None = None  # licence that the base model's own card states; None: it states none
    flops: Flops | None = None  # FLOPs of a token and of the devices; None if the devices' are not known
    notes: tuple[str, ...] = ()  # notes for the user, such as lengths and truncated rows
    conversations: bool = False  # whether the training rows are conversations
    # of each set of conversations the system's turns that they begin with; None: they differ
    system_turns: Mapping[str, Any] = field(default_factory=dict)
    # some training rows as the model sees them: kind and text of each part of a row
    shown_rows: tuple[tuple[tuple[str, str], ...], ...] = ()
    resumed_step: int = 0  # steps trained before the checkpoint that the run resumes from; 0 for a new run
    evaluated_step: int = 0  # step of the last evaluation before the start; 0 if there was none
    time_limit_s: float | None = None  # seconds that the run may still train; None: no limit
    plan: Mapping[str, Any] | None = None  # the fullest rank's plan, and each rank's memory; None if there is none
    sets: tuple[SetFacts, ...] = ()  # the sets of a mixture; empty: the run has one set
    # the quantised base model, which checkpoints do not hold: name, directory, digest, quantisation; None: none
    base: Mapping[str, str] | None = None
    # what the run chose by itself, by dotted key of its setting: the value, and why in parentheses
    chosen: Mapping[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-able values."""
        return asdict(self)


@dataclass(frozen=True)
class StepReport:
    """Report of one optimizer step; the same on every rank except for times and memory."""

    step: int  # number of the step, from 1
    epoch: float  # epochs trained after the step, a fraction within an epoch
    # mean per target token over all ranks and micro-batches, before the update, with label smoothing, z-loss and
    # ``router_loss``
    loss: float
    grad_norm: float  # norm of the full gradient before clipping
    learning_rate: float  # learning rate of the update
    target_tokens: int  # target tokens of all ranks
    tokens: int  # source and target tokens of all ranks, without padding
    seconds: float  # wall time of the step on this rank
    memory_bytes: int  # peak memory of this rank so far: the allocator's on CUDA, the process's resident set on CPU
    memory_bytes_per_rank: tuple[int, ...] = ()  # the same of every rank at the start of the step, in rank order
    reserved_bytes: int = 0  # most that the allocator of a CUDA rank has reserved so far, at the start of the step
    skipped: bool = False  # whether loss or gradient was not finite, so that the weights were not changed
    loss_scale: float | None = None  # factor on the loss in fp16
    router_loss: float | None = None  # the routers' own part of the loss; None: there is none
    # means over the step's preferences before the update, by TRL's names: rewards/chosen, rewards/rejected,
    # rewards/margins, rewards/accuracies of pairs, kl of kto; empty without preferences
    rewards: Mapping[str, float] = field(default_factory=dict)
    stop_requested: bool = False  # whether a stop was requested on any rank when the step began

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all ranks per second of this step."""
        return self.tokens / self.seconds

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-able values, with the rate."""
        values = asdict(self)
        values |= values.pop("rewards")
        del values["stop_requested"]
        if self.router_loss is None:
            del values["router_loss"]
        if not self.reserved_bytes:
            del values["reserved_bytes"]
        return {"kind": "step", **values, "tokens_per_second": self.tokens_per_second}


@dataclass(frozen=True)
class Prediction:
    """Prediction for one held-out row."""

    source: str  # source text of the row, without the prefix
    prediction: str  # text that the model generated
    references: tuple[str, ...]  # correct texts, at least one

    @property
    def right(self) -> bool:
        """True if it equals a reference, whatever blanks are between words."""
        return " ".join(self.prediction.split()) in {" ".join(text.split()) for text in self.references}

    def as_dict(self) -> dict[str, Any]:
        """Return a line of ``predictions.jsonl``."""
        return {"input": self.source, "prediction": self.prediction, "references": list(self.references)}


@dataclass(frozen=True)
class EvaluationReport:
    """Report of one evaluation on the held-out rows; the same on every rank except for the time."""

    step: int  # step after which it was made
    epoch: float  # epochs trained at that time
    loss: float  # mean loss per target token over all held-out rows
    metric: str  # name of the metric that decides which model is the best
    value: float  # its value; from 0 to 1, except for perplexity
    baseline: float | None  # the metric of predictions that need no model, or None
    baseline_name: str | None  # description of those predictions
    metrics: Mapping[str, float]  # value of each metric; the first is ``metric``
    baselines: Mapping[str, float]  # baseline of each metric that has one
    confusion: Confusion | None  # the confusion matrix if a metric is accuracy, else None
    # predictions in the order of the held-out rows; empty if no metric needs text
    predictions: tuple[Prediction, ...]
    seconds: float  # wall time on this rank
    # for each set of a mixture by name, the same fields: rows, loss, metrics and baselines; empty: one set
    sets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    # how words of text beyond ASCII are counted, by metric; empty: as by the metrics' packages
    words: Mapping[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-able values, without predictions and confusion matrix."""
        fields = ("step", "epoch", "loss", "metric", "value", "baseline", "baseline_name", "metrics", "baselines")
        values = {"kind": "evaluation", **{name: getattr(self, name) for name in (*fields, "seconds")}}
        values |= {"words": self.words} if self.words else {}
        return values | ({"sets": self.sets} if self.sets else {})

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> EvaluationReport:
        """Return the report that ``dataclasses.asdict`` was called on, also if JSON has turned tuples into lists."""
        confusion = None if values["confusion"] is None else Confusion.from_values(values["confusion"])
        predictions = tuple(
            Prediction(one["source"], one["prediction"], tuple(one["references"])) for one in values["predictions"]
        )
        return cls(**{**values, "confusion": confusion, "predictions": predictions})


@dataclass(frozen=True)
class CheckpointReport:
    """Report of a complete checkpoint on disk."""

    step: int  # step after which it was saved
    path: str  # its directory
    nbytes: int  # size of all its files
    seconds: float  # time from the start of the save to its commit
    stall_seconds: float  # part of that time during which training was blocked

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-able values."""
        return {"kind": "checkpoint", **asdict(self)}


@dataclass(frozen=True)
class RankMemory:
    """Tensor bytes of one rank."""

    rank: int
    parameters: int  # its shards of the parameters
    gradients: int  # its shards of the gradients
    optimizer: int  # its optimizer state
    gathered_peak: int  # peak of gathered parameters
    gradient_buffer_peak: int  # peak of unsharded gradient buffers
    # peak of all tensors in a training step. CUDA: over the run, by the allocator's count. CPU: in the traced step, the
    # one with the longest batch of the first epoch, by the allocator's events
    peak: int
    reserved: int = 0  # CUDA: most bytes that its allocator has reserved over the run, which other programs cannot use


@dataclass(frozen=True)
class RunSummary:
    """Summary of a finished run; the metrics are those of the saved model, None if the run never evaluated."""

    metric: str | None  # name of the metric that decides which model is the best
    value: float | None  # the saved model's metric
    baseline: float | None  # the metric of predictions that need no model, or None
    baseline_name: str | None  # description of those predictions
    loss: float | None  # the saved model's loss on the held-out rows
    best_step: int  # step after which the saved model was evaluated
    steps: int  # steps taken
    epochs: float  # epochs taken
    train_loss: float  # loss of the last step
    train_seconds: float  # wall time of the run: steps, evaluations and saving
    step_seconds: float  # wall time of the steps alone
    evaluation_seconds: float  # wall time of the evaluations alone
    tokens: int  # tokens trained on, of all ranks, without padding
    tokens_per_second: float  # ``tokens / step_seconds``
    world_size: int  # number of ranks
    device: str  # kind of device: ``cpu`` or ``cuda``
    parameters: int  # elements of all parameters, a tied one counted once
    optimizer: str  # display name of the optimizer
    memory: Sequence[RankMemory]  # tensor bytes of each rank, in rank order
    output_dir: str  # directory of the model and the files of the run
    config: Mapping[str, Any]  # the settings of the run, with defaults filled in
    versions: Mapping[str, str]  # versions of the packages that the result depends on
    ended_by: EndedBy  # what ended the run: ``steps``, ``time`` or ``early_stopping``
    skipped_steps: int  # steps that were skipped because loss or gradient was not finite
    metrics: Mapping[str, float]  # value of each metric
    baselines: Mapping[str, float]  # baseline of each metric that has one
    intervals: Mapping[str, tuple[float, float]]  # 95 % interval of each metric that is a mean over held-out rows
    confusion: Confusion | None  # the confusion matrix if a metric is accuracy, else None
    predictions: tuple[Prediction, ...]  # predictions of the saved model, one for each held-out row
    sets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # as in :class:`EvaluationReport`
    words: Mapping[str, str] = field(default_factory=dict)  # as in :class:`EvaluationReport`
    compile_seconds: float = 0.0  # wall time of compiling blocks, of ``step_seconds``; 0: they are not compiled

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-able values, without the predictions; ``peak_bytes_per_rank`` is in rank order."""
        fields = asdict(self)
        del fields["predictions"]
        fields["peak_bytes_per_rank"] = [rank.peak for rank in self.memory]
        return fields


TRACE_NAME = "trace.json"
"""The file of a run that holds its trace."""


@dataclass(frozen=True)
class MemoryTimeline:
    """Bytes on one rank's compute device during the step, by use; all sequences are equally long.

    At each moment the uses sum to the allocator's count.
    """

    seconds: tuple[float, ...]  # time from the start of the step
    parameters: tuple[int, ...]  # shards of the parameters
    gradients: tuple[int, ...]  # shards of the gradients, and unsharded gradients that wait to be reduced
    optimizer: tuple[int, ...]  # state of the optimizer
    gathered: tuple[int, ...]  # gathered parameters
    activations: tuple[int, ...]  # everything else that was allocated in the step: activations and temporaries
    other: tuple[int, ...]  # everything else that was allocated before the step: data, buffers of the model


@dataclass(frozen=True)
class RankTrace:
    """The step on one rank."""

    rank: int
    seconds: float  # length of the step
    peak_bytes: int  # peak tensor bytes; on CUDA over the run so far
    events: tuple[TraceEvent, ...]  # sorted by their start
    memory: MemoryTimeline  # use of its memory


@dataclass(frozen=True)
class StepTrace:
    """The trace of one step on all ranks, which start together; each rank has its own clock."""

    step: int
    device: str  # kind of device: ``cpu`` or ``cuda``
    units: tuple[str, ...]  # names of the units, root first
    ranks: tuple[RankTrace, ...]  # traces in rank order

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-able values; times are rounded to the microsecond."""
        return _rounded(asdict(self))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StepTrace:
        """Return the trace that :meth:`as_dict` was called on.

        Raises:
            KeyError, TypeError: ``values`` are something else.
        """
        ranks = [
            RankTrace(
                **{
                    **one,
                    "events": tuple(TraceEvent(**event) for event in one["events"]),
                    "memory": MemoryTimeline(**{name: tuple(column) for name, column in one["memory"].items()}),
                }
            )
            for one in values["ranks"]
        ]
        return cls(values["step"], values["device"], tuple(values["units"]), tuple(ranks))


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(one) for one in value]
    return round(value, 6) if isinstance(value, float) else value
