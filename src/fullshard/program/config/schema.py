"""The run file: every option with its type, default and description. No other module defines option names.

Option names are those of Hugging Face's ``TrainingArguments`` and example scripts where one exists there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import NonNegativeInt, PositiveInt, field_serializer, field_validator, model_validator

from fullshard.core.policy import ShardingStrategy
from fullshard.errors import ConfigError
from fullshard.program.config.data import DataConfig
from fullshard.program.config.evaluation import EvaluationConfig
from fullshard.program.config.model import ModelConfig
from fullshard.program.config.section import ConfigSection
from fullshard.program.config.training import TrainingConfig


class ShardingConfig(ConfigSection):
    """How the model is sharded over the ranks. `sharding: auto` is short for `sharding: {auto: true}`."""

    auto: bool | tuple[str, ...] = False
    """Search for the fastest settings that fit at the start of training, among those that the run file leaves open, as
    `fullshard plan --fit` does. The choice is recorded, and a resumed run keeps it."""
    strategy: Literal["full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2"] = "full_shard"
    """full_shard: shard parameters, gradients and optimizer state; shard_grad_op: the same, but parameters stay
    gathered from forward to backward; no_shard: shard nothing and all-reduce gradients; hybrid_shard,
    hybrid_shard_zero2: like the first two within each machine, replicated across machines."""
    wrap: str | PositiveInt | tuple[str, ...] = "auto"
    """Which modules become units: auto (the repeated blocks, or the only one of a list; none of these in a model of at
    most 1,000,000 parameters: one unit), none (one unit), a list of class names, or a number: modules with at least
    that many parameters, not counting those of units inside them."""
    prefetch: Literal["backward_pre", "backward_post", "none"] = "backward_pre"
    """When backward gathers the next unit. backward_pre: before the current unit's backward; backward_post: after its
    gradients are sent; none: when it is needed."""
    cpu_offload: bool = False
    """Keep shards, gradients and optimizer state in host memory."""
    frozen: Literal["shard", "replicate", "auto"] = "shard"
    """How frozen parameters are kept, such as the model under an adapter. shard: sharded; replicate: on every rank,
    without communication; auto: replicated if they take at most a quarter of a rank's memory."""

    tables: Literal["auto", "gather", "home"] = "auto"
    """How large embeddings and output layers are used. gather: gathered like the rest; home: tokens travel to the ranks
    that have their rows; auto: on CPU ranks home where that sends fewer bytes, otherwise gather; on GPUs gather."""

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


class CardConfig(ConfigSection):
    """Facts for the model card that a run cannot know."""

    data_license: str | None = None
    """Licence of the data, such as cc-by-4.0."""
    language: tuple[str, ...] = ()
    """Languages of the data as ISO 639-1 codes, such as [en, de]."""
    benchmark_task: str | None = None
    """The task's id in the eval.yaml of the benchmark data.dataset_name, if that is one on the Hub and the held-out
    rows are the benchmark's. The result is then written to .eval_results/ in the Hub's format."""


class RunConfig(ConfigSection):
    """All settings of a run."""

    output_dir: Path
    """Directory that the run writes to, relative to the working directory."""
    seed: NonNegativeInt = 42
    """Seed of new weights, the order of rows and dropout."""
    nproc: PositiveInt | None = None
    """Ranks on this machine; null: one per GPU, or 2 on the CPU. More ranks than GPUs share the GPUs, which is slow."""
    resume: Literal["auto", "previous", "never"] | Path | str = "auto"
    """auto: resume an unfinished run in output_dir; previous: the same, but if its newest checkpoint is damaged, from
    the one before it; never: start from scratch and delete its checkpoints; or the path or URL of a checkpoint to
    resume from. A finished run is only replaced with never."""
    model: ModelConfig
    data: DataConfig
    training: TrainingConfig = TrainingConfig()
    sharding: ShardingConfig = ShardingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    card: CardConfig = CardConfig()

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
    def _has_rows_to_evaluate(self) -> Self:
        if self.training.eval_strategy != "no" and not self.data.holds_out:
            raise ValueError(
                f"training.eval_strategy: {self.training.eval_strategy} needs held-out rows: give "
                "data.validation_file or data.validation_fraction, or set training.eval_strategy: no"
            )
        return self

    @model_validator(mode="after")
    def _fitting_weights(self) -> Self:
        if self.data.weights and self.training.per_device_train_batch_tokens is not None:
            raise ValueError(
                "training.per_device_train_batch_tokens makes steps of the same rows in every epoch, and a set with a "
                "weight gives other rows to each: use training.per_device_train_batch_size, or remove the weights"
            )
        return self

    @model_validator(mode="after")
    def _has_messages_to_round(self) -> Self:
        if self.training.messages is not None and not ShardingStrategy(self.sharding.strategy).shards:
            raise ValueError(
                f"training.messages: {self.training.messages} rounds what is gathered and reduce-scattered, but "
                f"sharding.strategy: {self.sharding.strategy} does neither. Leave one of them out"
            )
        return self

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

    @model_validator(mode="after")
    def _names_its_benchmark(self) -> Self:
        if self.card.benchmark_task is not None and self.data.dataset_name is None:
            raise ValueError("card.benchmark_task names a task of the benchmark data.dataset_name, which is not set")
        return self

    def as_plain(self) -> Mapping[str, Any]:
        """Return the configuration with all defaults filled in, as values that JSON and YAML can represent."""
        return self.model_dump(mode="json")

    def as_flat(self) -> dict[str, Any]:
        """Return the settings by dotted key, such as ``training.learning_rate``."""
        return dict(_flatten(self.as_plain()))


def _flatten(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Return nested settings by dotted key."""
    flat: list[tuple[str, Any]] = []
    for key, value in values.items():
        flat += _flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(f"{prefix}{key}", value)]
    return flat
