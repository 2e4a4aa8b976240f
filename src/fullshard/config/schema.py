"""The run file: every option, its type, its default and what it means. Nothing else decides what an option is called.

Option names are those of Hugging Face's ``TrainingArguments`` and example scripts where one exists there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import NonNegativeInt, PositiveInt, field_serializer, field_validator, model_validator

from fullshard.config.data import DataConfig
from fullshard.config.evaluation import EvaluationConfig
from fullshard.config.model import ModelConfig
from fullshard.config.section import Section
from fullshard.config.training import TrainingConfig


class ShardingConfig(Section):
    """How the model is sharded over the ranks."""

    strategy: Literal["full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2"] = "full_shard"
    """full_shard: parameters, gradients and optimizer state are sharded; shard_grad_op: the same, but what forward
    gathered stays until backward; no_shard: nothing, gradients are summed; hybrid_shard, hybrid_shard_zero2: as the
    first two over the ranks of each machine, with copies across machines."""
    wrap: str | PositiveInt | tuple[str, ...] = "auto"
    """Which modules become units: auto (the repeated blocks), none (one unit), a list of class names, or by size:
    modules with at least so many parameters of their own, beside those of units inside them."""
    prefetch: Literal["backward_pre", "backward_post", "none"] = "backward_pre"
    """When backward gathers the next unit: before the current one's backward, after its gradients went out, or not."""
    cpu_offload: bool = False
    """Shards, gradients and optimizer state live in host memory."""
    frozen: Literal["shard", "replicate", "auto"] = "shard"
    """Where frozen parameters live, such as the model under an adapter: sharded; on every rank, without communication;
    or auto: on every rank where they take at most a quarter of its memory."""

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


class RunConfig(Section):
    """A whole run file."""

    output_dir: Path
    """Directory the run writes to, relative to the working directory."""
    seed: NonNegativeInt = 42
    """Seed of weights, order of rows and dropout."""
    nproc: PositiveInt | None = None
    """Ranks on this machine; null: one for each GPU, or 2 on the CPU."""
    resume: Literal["auto", "never"] | Path = "auto"
    """auto: go on where a run in output_dir was cut short; never: start anew and delete the checkpoints there; or the
    path of a checkpoint to go on from. A run that is finished is replaced with never only."""
    model: ModelConfig
    data: DataConfig
    training: TrainingConfig = TrainingConfig()
    sharding: ShardingConfig = ShardingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @field_validator("resume", mode="plain")
    @classmethod
    def _auto_never_or_path(cls, value: object) -> str | Path:
        if value in ("auto", "never"):
            return str(value)
        if isinstance(value, (str, Path)) and str(value):
            return Path(value)
        raise ValueError(f"expected auto, never or the path of a checkpoint; got {value!r}")

    @model_validator(mode="after")
    def _has_rows_to_evaluate(self) -> Self:
        if self.training.eval_strategy != "no" and not self.data.holds_out:
            raise ValueError(
                f"training.eval_strategy: {self.training.eval_strategy} needs held-out rows: give "
                "data.validation_file or data.validation_fraction, or set training.eval_strategy: no"
            )
        return self

    def as_plain(self) -> Mapping[str, Any]:
        """The configuration with every default filled in, as values that JSON and YAML can hold."""
        return self.model_dump(mode="json")

    def as_flat(self) -> dict[str, Any]:
        """The same by dotted key, such as ``training.learning_rate``."""
        return dict(_flatten(self.as_plain()))


def _flatten(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested settings by dotted key."""
    flat: list[tuple[str, Any]] = []
    for key, value in values.items():
        flat += _flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(f"{prefix}{key}", value)]
    return flat
