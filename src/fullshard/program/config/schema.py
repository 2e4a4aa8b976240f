"""The run file: every option with its type, default and description. No other module defines option names.

Option names are those of Hugging Face's ``TrainingArguments`` and example scripts where one exists there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, field_serializer, field_validator, model_validator

from fullshard.errors import ConfigError
from fullshard.program.config.data import DataConfig
from fullshard.program.config.model import ModelConfig
from fullshard.program.config.preferences import require_metrics, require_objective
from fullshard.program.config.section import (
    ASKED,
    FREE,
    REPORTED,
    SAME,
    STATE,
    ConfigSection,
    Option,
    Searched,
    fields_of,
    option_at,
    options_of,
    section_in,
)
from fullshard.program.config.sequence import require_splittable
from fullshard.program.config.speed import SpeedConfig
from fullshard.program.config.training import TrainingConfig
from fullshard.program.metrics import METRICS, needs_text


class ShardingConfig(ConfigSection):
    """How the model is sharded over the ranks. `sharding: auto` is short for `sharding: {auto: true}`."""

    auto: Annotated[bool | tuple[str, ...], FREE] = False
    """Search for the fastest settings that fit at the start of training, among those that the run file leaves open, as
    `fullshard plan --fit` does. The choice is recorded, and a resumed run keeps it."""
    strategy: Annotated[
        Literal["full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2"],
        Option("free", searched=Searched("all", ("no_shard", "shard_grad_op", "full_shard"))),
    ] = "full_shard"
    """full_shard: shard parameters, gradients and optimizer state; shard_grad_op: the same, but parameters stay
    gathered from forward to backward; no_shard: shard nothing and all-reduce gradients; hybrid_shard,
    hybrid_shard_zero2: like the first two within each machine, replicated across machines."""
    wrap: Annotated[str | PositiveInt | tuple[str, ...], FREE] = "auto"
    """Which modules become units: auto (the repeated blocks, or the only one of a list; none of these in a model of at
    most 1,000,000 parameters: one unit), none (one unit), a list of class names, or a number: modules with at least
    that many parameters, not counting those of units inside them."""
    prefetch: Annotated[Literal["backward_pre", "backward_post", "none"], FREE] = "backward_pre"
    """When backward gathers the next unit. backward_pre: before the current unit's backward; backward_post: after its
    gradients are sent; none: when it is needed."""
    cpu_offload: Annotated[bool, Option("free", searched=Searched("last", (False, True)))] = False
    """Keep shards, gradients and optimizer state in host memory."""
    frozen: Annotated[
        Literal["shard", "replicate", "auto"],
        Option(
            "free",
            searched=Searched(
                "all", ("replicate", "shard"), needs="model.adapter", idle=("sharding.strategy", "no_shard")
            ),
        ),
    ] = "shard"
    """How frozen parameters are kept, such as the model under an adapter. shard: sharded; replicate: on every rank,
    without communication; auto: replicated if they take at most a quarter of a rank's memory."""

    tables: Annotated[Literal["auto", "gather", "home"], FREE] = "auto"
    """How large embeddings and output layers are used. gather: gathered like the rest; home: tokens travel to the ranks
    that have their rows; auto: on CPU ranks home where that sends fewer bytes, otherwise gather; on GPUs, and for
    preferences, gather."""
    sequence_parallel: Annotated[PositiveInt, FREE] = 1
    """Ranks that share each row, of which each has a part of the tokens: for rows whose activations do not fit on one.
    They read one batch together, so a step has a batch for each group of so many ranks."""

    @field_validator("wrap", mode="plain")
    @classmethod
    def _wrap_names_or_size(cls, value: object) -> str | int | tuple[str, ...]:
        if isinstance(value, str) and value in ("auto", "none"):
            return value
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        if isinstance(value, (list, tuple)) and value and all(isinstance(name, str) for name in value):
            return tuple(value)
        raise ValueError(
            "expected auto, none, a list of class names such as [T5Block] or a number of parameters such as 100000000; "
            f"got {value!r}"
        )

    @field_serializer("wrap")
    def _plain_wrap(self, value: str | int | tuple[str, ...]) -> str | int | list[str]:
        return list(value) if isinstance(value, tuple) else value


if TYPE_CHECKING:
    MetricName = str
else:
    MetricName = Literal[tuple(METRICS)]


class EvaluationConfig(ConfigSection):
    """Metrics on the held-out rows, and text generation."""

    metric: Annotated[MetricName, Option("evaluation", travels=True, also=("metric_for_best_model",))] = "exact_match"
    """Metric that selects the best model, one of the [metrics](#metrics) below; with preferences
    (training.objective) rewards/accuracies, of kto rewards/margins, unless it is set."""
    metrics: Annotated[tuple[MetricName, ...], ASKED] = ()
    """Additional metrics to report."""
    lead_sentences: Annotated[PositiveInt, ASKED] = 1
    """Number of leading source sentences that form the baseline of metrics of texts, such as rouge, bleu and chrf."""
    num_samples_shown: Annotated[NonNegativeInt, REPORTED] = 5
    """Predictions printed next to their references at the end."""
    max_new_tokens: Annotated[
        PositiveInt | None, Option("same", travels=True, also=("generation_max_length", "val_max_target_length"))
    ] = None
    """Maximum tokens generated per row; null: those of the longest target, or data.max_target_length where rows are
    streamed or there is no run."""
    min_new_tokens: Annotated[NonNegativeInt, Option("evaluation", travels=True)] = 0
    """Minimum tokens generated per row. This and the options below replace the model's own generation settings also
    where they are left out, unlike in Hugging Face's generate: a score then means the same for every model."""
    num_beams: Annotated[PositiveInt, Option("evaluation", travels=True, also=("generation_num_beams",))] = 1
    """Width of the beam search; 1: greedy."""
    length_penalty: Annotated[float, Option("evaluation", travels=True)] = 1.0
    """Exponent of the length that divides beam scores; the greater, the longer the texts. Needs num_beams of at least
    2."""
    no_repeat_ngram_size: Annotated[NonNegativeInt, Option("evaluation", travels=True)] = 0
    """Length of token sequences that may not repeat within a prediction; 0: no limit."""

    @property
    def every_metric(self) -> tuple[str, ...]:
        """The metric that selects the best model, and the additional ones."""
        return tuple(dict.fromkeys((self.metric, *self.metrics)))

    @model_validator(mode="after")
    def _no_idle_options(self) -> Self:
        if self.length_penalty != 1.0 and self.num_beams == 1:
            raise ValueError(f"length_penalty: {self.length_penalty} needs num_beams of at least 2; got 1")
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens must be at most max_new_tokens; got {self.min_new_tokens} and {self.max_new_tokens}"
            )
        return self


class CardConfig(ConfigSection):
    """Facts for the model card that a run cannot know."""

    data_license: Annotated[str | None, REPORTED] = None
    """Licence of the data, such as cc-by-4.0."""
    language: Annotated[tuple[str, ...], REPORTED] = ()
    """Languages of the data as ISO 639-1 codes, such as [en, de]."""
    benchmark_task: Annotated[str | None, REPORTED] = None
    """The task's id in the eval.yaml of the benchmark data.dataset_name, if that is one on the Hub and the held-out
    rows are the benchmark's. The result is then written to .eval_results/ in the Hub's format."""


class RunConfig(ConfigSection):
    """All settings of a run."""

    output_dir: Annotated[Path, Option("free", names="place", planned=False)]
    """Directory that the run writes to, relative to the working directory."""
    seed: Annotated[NonNegativeInt, SAME] = 42
    """Seed of new weights, the order of rows and dropout."""
    nproc: Annotated[PositiveInt | None, Option("free", own_machine=True)] = None
    """Ranks on this machine; null: one per GPU, or 2 on the CPU. More ranks than GPUs are refused."""
    resume: Annotated[
        Literal["auto", "previous", "never"] | Path | str,
        Option("free", names="place", planned=False, also=("resume_from_checkpoint",)),
    ] = "auto"
    """auto: resume an unfinished run in output_dir; previous: the same, but if its newest checkpoint is damaged, from
    the one before it; never: start from scratch and delete its checkpoints; or the path or URL of a checkpoint to
    resume from. A finished run is only replaced with never."""
    model: Annotated[ModelConfig, STATE]
    data: Annotated[DataConfig, SAME]
    training: Annotated[TrainingConfig, SAME] = Field(default_factory=TrainingConfig)
    speed: Annotated[SpeedConfig, SAME] = SpeedConfig()
    sharding: Annotated[ShardingConfig, SAME] = ShardingConfig()
    evaluation: Annotated[EvaluationConfig, SAME] = EvaluationConfig()
    card: Annotated[CardConfig, SAME] = CardConfig()

    @model_validator(mode="before")
    @classmethod
    def _choices_of_preferences(cls, values: Any) -> Any:
        """Choose the metric of preferences if there is none, and that output layers are gathered."""
        if not isinstance(values, Mapping):
            return values
        training, evaluation = values.get("training"), values.get("evaluation") or {}
        objective = training.get("objective", "sft") if isinstance(training, Mapping) else "sft"
        if objective == "sft":
            return values
        sharding = values.get("sharding") or {}
        sharding = {"auto": True} if sharding == "auto" else sharding
        if isinstance(sharding, Mapping) and sharding.get("tables", "auto") == "auto":
            values = {**values, "sharding": {**sharding, "tables": "gather"}}
        if isinstance(evaluation, Mapping) and evaluation.get("metric") is None:
            metric = "rewards/margins" if objective == "kto" else "rewards/accuracies"
            values = {**values, "evaluation": {**evaluation, "metric": metric}}
        return values

    @field_validator("sharding", mode="before")
    @classmethod
    def _auto(cls, value: object) -> object:
        return {"auto": True} if value == "auto" else value

    @field_validator("resume", mode="plain")
    @classmethod
    def _word_or_path(cls, value: object) -> str | Path:
        if value in ("auto", "previous", "never"):
            return str(value)
        if isinstance(value, (str, Path)) and str(value):
            return str(value) if "://" in str(value) else Path(value)
        raise ValueError(f"expected auto, previous, never or the path of a checkpoint; got {value!r}")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        """Refuse options of different sections that contradict each other."""
        if self.training.eval_strategy != "no" and not self.data.holds_out:
            raise ValueError(
                f"training.eval_strategy: {self.training.eval_strategy} needs held-out rows: give "
                "data.validation_file or data.validation_fraction, or set training.eval_strategy: no"
            )
        require_objective(self.training, self.data, self.model, self.sharding.tables)
        require_metrics(self.training, self.evaluation.every_metric)
        self._fitting_text()
        if self.data.weights and self.training.per_device_train_batch_tokens is not None:
            raise ValueError(
                "training.per_device_train_batch_tokens makes steps of the same rows in every epoch, and a set with a "
                "weight gives other rows to each: use training.per_device_train_batch_size, or remove the weights"
            )
        if self.training.precision == "fp8" and self.model.quantization is not None:
            raise ValueError(
                f"training.precision: fp8 computes the linear layers under the adapter in fp8, and model.quantization: "
                f"{self.model.quantization.type} keeps the same layers in its own format. Leave one of them out"
            )
        if {"liger", "compile"} <= {*self.ways}:
            raise ValueError(
                "speed.ways: liger and compile: with both, losses became NaN after two steps on a GPU (torch 2.11, "
                "liger-kernel 0.8.5), because Liger's norms write over gradients that compiled blocks still read. "
                "Leave liger out: compiled blocks fuse norms and gated layers themselves"
            )
        require_splittable(self.sharding.sequence_parallel, self.model, self.training, self.ways)
        if self.card.benchmark_task is not None and self.data.dataset_name is None:
            raise ValueError("card.benchmark_task names a task of the benchmark data.dataset_name, which is not set")
        return self

    def _fitting_text(self) -> None:
        """Refuse what does not go with plain text."""
        if self.data.text_column is None:
            return
        if self.training.objective != "sft":
            raise ValueError(
                f"training.objective: {self.training.objective} needs pairs of completions, and plain text "
                "(data.text_column) has none. Leave one of them out"
            )
        if self.training.packing:
            raise ValueError(
                "training.packing joins rows that are shorter than others, and with data.text_column all rows are "
                "full. Leave it out"
            )
        texts = [name for name in self.evaluation.every_metric if needs_text([name])]
        if texts and self.training.eval_strategy != "no":
            raise ValueError(
                f"evaluation.metric: {' and '.join(texts)} of generated texts, and plain text (data.text_column) has "
                "no targets to compare them with. Set evaluation.metric: perplexity"
            )

    @property
    def ways(self) -> tuple[str, ...]:
        """The ways of the run: ``speed.ways`` once chosen, and ``compile`` also for ``training.torch_compile``."""
        compiled = ("compile",) if self.training.torch_compile else ()
        return tuple(dict.fromkeys((*(() if self.speed.ways == "auto" else self.speed.ways), *compiled)))

    def of_set(self, name: str | None) -> RunConfig:
        """Return the settings for new rows; of a mixture, with the columns and prefix of one of its sets.

        Raises:
            ConfigError: There is no such set, or none is named although there are several.
        """
        parts = self.data.parts
        chosen = next(iter(parts)) if name is None and len(parts) == 1 else name
        if chosen is not None and chosen in parts and (name is None or self.data.sets):
            return self.model_copy(update={"data": parts[chosen]})
        if not self.data.sets:
            raise ConfigError(f"--set {name} names a set of a mixture, but the run has one set. Leave it out.")
        problem = "The rows could be of any set" if name is None else f"The mixture has no set {name}"
        raise ConfigError(f"{problem}: name the one whose columns and prefix apply, --set {' or '.join(parts)}.")

    def as_plain(self) -> Mapping[str, Any]:
        """Return the configuration with all defaults filled in, as values that JSON and YAML can represent."""
        return self.model_dump(mode="json")

    def as_flat(self) -> dict[str, Any]:
        """Return the settings by dotted key, such as ``training.learning_rate``, without empty mappings."""
        return {key: value for key, value in flat_settings(self.as_plain()) if value != {}}


def option_of(key: str) -> Option:
    """Return what the program knows of the option of a run file at a dotted key; see :func:`option_at`."""
    return option_at(RunConfig, key)


def options() -> dict[str, Option]:
    """Return what the program knows of every option of the run file by dotted key; see :func:`options_of`."""
    return options_of(RunConfig)


def flat_settings(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings by dotted key, in their order."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat_settings(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def changed_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that differ from their defaults, by dotted key; any process.

    Args:
        values: The settings by section, as a run records them; those of another version may have other keys.
    """
    defaults = {
        key: json.loads(json.dumps(field.get_default(call_default_factory=True), default=str))
        for key, field in fields_of(RunConfig)
        if not field.is_required() and section_in(field) is None
    }
    found = {key: value for key, value in flat_settings(values) if key in defaults or value not in (None, [], {})}
    return {key: value for key, value in found.items() if key not in defaults or value != defaults[key]}
