"""The run file: every option, its type, its default and what it means. Nothing else decides what an option is called.

Option names are those of Hugging Face's ``TrainingArguments`` and example scripts where one exists there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PlainSerializer,
    PositiveFloat,
    PositiveInt,
    field_serializer,
    field_validator,
    model_validator,
)

FrozenMapping = Annotated[
    dict[str, Any],
    AfterValidator(lambda values: MappingProxyType(dict(values))),
    PlainSerializer(dict, return_type=dict),
]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """Base of all sections: frozen, and no key but those declared."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
        serialize_by_alias=True,
        protected_namespaces=(),
    )


class TokenizerConfig(Section):
    """A tokenizer trained on the training data and saved with the model."""

    vocab_size: PositiveInt = 2000
    """Most pieces of the vocabulary, special tokens included."""


class ModelConfig(Section):
    """The model: an existing one or a new one."""

    path: Path | None = None
    """Local Hugging Face directory with config.json, weights and tokenizer. Exactly one of path and config."""
    config: FrozenMapping | None = None
    """model_type and options of a Hugging Face configuration; the weights are new. Exactly one of path and config."""
    tokenizer: TokenizerConfig | None = None
    """How to train the tokenizer. Needed with config; with path the tokenizer is the directory's."""
    model_class: Literal["auto", "seq2seq", "causal"] = Field(default="auto", alias="class")
    """Encoder-decoder (seq2seq) or decoder-only (causal); auto: what the configuration says."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.path is None) == (self.config is None):
            given = "neither" if self.path is None else "both"
            raise ValueError(f"exactly one of path and config must be given; got {given}")
        if self.config is not None and self.tokenizer is None:
            raise ValueError("config needs a tokenizer section beside it, such as tokenizer: {vocab_size: 2000}")
        if self.path is not None and self.tokenizer is not None:
            raise ValueError("tokenizer goes with config only: a model loaded from path brings its own tokenizer")
        return self


class DataConfig(Section):
    """The rows to learn from and to evaluate on."""

    train_file: Path
    """A .csv or .jsonl file, relative to the run file's directory or to the working directory."""
    validation_file: Path | None = None
    """Held-out rows for evaluation, in the same format; null only when training.eval_strategy is no."""
    source_column: str
    """Column of the text the model reads."""
    target_column: str
    """Column of the text the model is to write."""
    source_prefix: str = ""
    """Text put before every source, such as "summarize: "."""
    max_source_length: PositiveInt = 512
    """Most tokens of a source; the rest is cut off and counted."""
    max_target_length: PositiveInt = 128
    """Most tokens of a target; the rest is cut off and counted."""
    max_train_samples: PositiveInt | None = None
    """Use only the first rows for training; null: all."""
    max_eval_samples: PositiveInt | None = None
    """Use only the first rows for evaluation; null: all."""


class TrainingConfig(Section):
    """The training loop and its optimizer, AdamW."""

    per_device_train_batch_size: PositiveInt = 8
    """Rows of a micro-batch on each rank."""
    per_device_eval_batch_size: PositiveInt = 8
    """Rows of an evaluation batch on each rank."""
    gradient_accumulation_steps: PositiveInt = 1
    """Micro-batches per optimizer step."""
    train_sampling_strategy: Literal["random", "group_by_length"] = "random"
    """random: as torch's DistributedSampler; group_by_length: rows of similar length share a batch."""
    num_train_epochs: PositiveInt = 3
    """Passes over the training rows."""
    max_steps: PositiveInt | None = None
    """Stop after so many optimizer steps, if that comes first; null: all epochs."""
    learning_rate: PositiveFloat = 5e-5
    """Peak learning rate."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decoupled weight decay."""
    adam_beta1: Fraction = 0.9
    """AdamW's decay of the gradient's mean."""
    adam_beta2: Fraction = 0.999
    """AdamW's decay of the squared gradient's mean."""
    adam_epsilon: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    lr_scheduler_type: Literal["linear", "step", "constant"] = "linear"
    """linear: to zero at the last step; step: times lr_gamma every lr_step_size epochs; constant."""
    warmup_steps: NonNegativeInt = 0
    """Optimizer steps over which the learning rate rises from zero to its peak."""
    lr_step_size: PositiveInt = 1
    """Epochs between two decays; only with lr_scheduler_type: step."""
    lr_gamma: PositiveFloat = 0.7
    """Factor of each decay; only with lr_scheduler_type: step."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Gradients are scaled down to this norm over all ranks; null: not at all."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: compute in bf16; shards, gradient reduction and optimizer stay in fp32."""
    gradient_checkpointing: bool = False
    """Recompute each block's activations in backward instead of keeping them."""
    eval_strategy: Literal["epoch", "steps", "no"] = "epoch"
    """When to evaluate: after each epoch, every eval_steps optimizer steps, or never."""
    eval_steps: PositiveInt | None = None
    """Optimizer steps between evaluations; only and always with eval_strategy: steps."""
    logging_steps: PositiveInt = 1
    """Optimizer steps between two records of the metrics file."""
    save_strategy: Literal["epoch", "steps", "no"] = "epoch"
    """When to save a checkpoint: after each epoch, every save_steps optimizer steps, or only when told to stop."""
    save_steps: PositiveInt | None = None
    """Optimizer steps between checkpoints; only and always with save_strategy: steps."""
    save_total_limit: PositiveInt | None = 2
    """Checkpoints that are kept, the newest ones; null: all."""

    @field_validator("eval_strategy", "save_strategy", mode="before")
    @classmethod
    def _undo_yaml_no(cls, value: object) -> object:
        """YAML 1.1 reads a bare ``no`` as false."""
        return "no" if value is False else value

    @model_validator(mode="after")
    def _no_idle_options(self) -> Self:
        if self.lr_scheduler_type != "step":
            fields = type(self).model_fields
            idle = [name for name in ("lr_step_size", "lr_gamma") if getattr(self, name) != fields[name].default]
            if idle:
                names = " and ".join(idle)
                raise ValueError(f"{names} need lr_scheduler_type: step; got {self.lr_scheduler_type}")
        for kind in ("eval", "save"):
            strategy, steps = getattr(self, f"{kind}_strategy"), getattr(self, f"{kind}_steps")
            if (strategy == "steps") != (steps is not None):
                raise ValueError(
                    f"{kind}_strategy: steps and {kind}_steps go together; "
                    f"got {kind}_strategy: {strategy}, {kind}_steps: {steps}"
                )
        return self


class ShardingConfig(Section):
    """How the model is sharded over the ranks."""

    strategy: Literal["full_shard"] = "full_shard"
    """full_shard: parameters, gradients and optimizer state are sharded."""
    wrap: str | tuple[str, ...] = "auto"
    """Which modules become units: auto (the repeated blocks), none (one unit) or a list of class names."""

    @field_validator("wrap", mode="plain")
    @classmethod
    def _wrap_names(cls, value: object) -> str | tuple[str, ...]:
        if isinstance(value, str) and value in ("auto", "none"):
            return value
        if isinstance(value, (list, tuple)) and value and all(isinstance(name, str) for name in value):
            return tuple(value)
        raise ValueError(f"expected auto, none or a list of class names such as [T5Block]; got {value!r}")

    @field_serializer("wrap")
    def _plain_wrap(self, value: str | tuple[str, ...]) -> str | list[str]:
        return value if isinstance(value, str) else list(value)


class EvaluationConfig(Section):
    """What is measured on the held-out rows, by greedy generation."""

    metric: Literal["exact_match", "rougeL"] = "exact_match"
    """exact_match: share of rows written exactly; rougeL: mean longest-common-subsequence F-measure."""
    num_samples_shown: NonNegativeInt = 5
    """Predictions shown beside their references at the end."""
    max_new_tokens: PositiveInt | None = None
    """Most tokens generated for a row; null: data.max_target_length."""


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
        if self.training.eval_strategy != "no" and self.data.validation_file is None:
            raise ValueError(
                f"training.eval_strategy: {self.training.eval_strategy} needs data.validation_file; "
                "give one, or set training.eval_strategy: no"
            )
        return self

    def as_plain(self) -> Mapping[str, Any]:
        """The configuration with every default filled in, as values that JSON and YAML can hold."""
        return self.model_dump(mode="json")
