"""The run file's ``training`` section: the training loop and its optimizer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    Strict,
    StrictBool,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from fullshard.program.config.section import (
    ASKED,
    FREE,
    REPORTED,
    SAME,
    STATE,
    ConfigSection,
    Fraction,
    FrozenMapping,
    Option,
    Searched,
)

Tracker = Literal["tensorboard", "wandb", "mlflow", "trackio"]
ObjectiveName = Literal["sft", "dpo", "ipo", "simpo", "orpo", "kto"]
OptimizerName = Literal["adamw", "adafactor", "muon", "adamw_8bit", "adamw_bf16"]

ScheduleName = Literal[
    "linear",
    "cosine",
    "constant",
    "step",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "polynomial",
    "inverse_sqrt",
    "warmup_stable_decay",
]

_SCHEDULE_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "cosine": ("num_cycles",),
    "cosine_with_restarts": ("num_cycles",),
    "cosine_with_min_lr": ("min_lr", "min_lr_rate", "num_cycles"),
    "cosine_warmup_with_min_lr": ("min_lr", "min_lr_rate", "num_cycles", "warmup_lr_rate"),
    "polynomial": ("lr_end", "power"),
    "inverse_sqrt": ("timescale",),
    "warmup_stable_decay": (
        *("num_decay_steps", "num_stable_steps"),
        *("warmup_type", "decay_type", "min_lr_ratio", "num_cycles"),
    ),
}
"""Options of transformers' schedules; its functions check their values where a run is prepared."""

_SCHEDULE_NEEDS: Mapping[str, tuple[str, ...]] = {
    "cosine_with_min_lr": ("min_lr", "min_lr_rate"),
    "cosine_warmup_with_min_lr": ("min_lr", "min_lr_rate"),
    "warmup_stable_decay": ("num_decay_steps",),
}
"""Options of which a schedule needs one."""

_NOT_OF_OPTIMIZER: Mapping[str, tuple[str, ...]] = {"adafactor": ("adam_beta1", "adam_beta2", "adam_epsilon")}
"""Options that an optimizer does not use. Setting one is an error, and they are not recorded."""


NEW_MODEL_LEARNING_RATE = 2e-3
"""Peak learning rate to suggest for a small model with random weights."""


def auto_precision(gpu: str | None, *, bf16: bool = False) -> tuple[str, str]:
    """Return what ``precision: auto`` is, and why.

    Args:
        gpu: Name of the ranks' GPU; None: they compute on CPUs.
        bf16: True if all of the GPUs compute bfloat16 in hardware.
    """
    if gpu is None:
        return "fp32", "ranks compute on CPUs"
    return ("bf16", f"{gpu} computes it in hardware") if bf16 else ("fp32", f"{gpu} has no bfloat16 arithmetic")


class PushConfig(ConfigSection):
    """Uploads to the Hugging Face Hub. `push_to_hub: owner/name` is short for `push_to_hub: {repo: owner/name}`."""

    repo: Annotated[str, REPORTED]
    """Repository: owner/name."""
    private: Annotated[bool, REPORTED] = False
    """Upload to a private repository only."""
    checkpoints: Annotated[bool, REPORTED] = False
    """Also upload each new best model, in the background while training continues."""

    @field_validator("repo")
    @classmethod
    def _has_an_owner(cls, value: str) -> str:
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", value):
            raise ValueError("expected owner/name, such as ada/my-t5")
        return value


class ProfileConfig(ConfigSection):
    """A trace of torch.profiler."""

    steps: Annotated[tuple[PositiveInt, PositiveInt], REPORTED]
    """First and last step to profile, counted from 1, both included."""

    @field_validator("steps")
    @classmethod
    def _ascending(cls, value: tuple[int, int]) -> tuple[int, int]:
        if value[0] > value[1]:
            raise ValueError(f"expected the first and the last step, such as [10, 13]; got {list(value)}")
        return value


class TrainingConfig(ConfigSection):
    """The training loop and its optimizer."""

    objective: Annotated[ObjectiveName, Option("same", travels=True, before="sft")] = "sft"
    """What is trained. sft: the target; kto: desirable completions and not undesirable ones; the others: that a chosen
    completion is preferred to a rejected one, by the loss of that name. dpo, ipo and kto compare with the model at the
    start of training, simpo and orpo need no reference. Micro-batches count pairs, of kto rows. See
    docs/guides/preferences.md."""
    beta: Annotated[PositiveFloat, Option("same", travels=True, before=0.1)] = 0.1
    """Preferences: how strongly the model is held to the reference; of simpo the factor of the reward, of orpo the
    weight of the odds. As in TRL; simpo's paper takes 2 or more."""
    simpo_gamma: Annotated[NonNegativeFloat, Option("same", travels=True, before=0.5)] = 0.5
    """simpo: margin by which the chosen completion's reward is to be greater; as in TRL."""
    desirable_weight: Annotated[PositiveFloat, Option("same", before=1.0)] = 1.0
    """kto: factor on the losses of desirable completions, for tables that have more of one kind; as in TRL."""
    undesirable_weight: Annotated[PositiveFloat, Option("same", before=1.0)] = 1.0
    """kto: factor on the losses of undesirable completions."""
    per_device_train_batch_size: Annotated[
        PositiveInt, Option("free", also=("batch_size", "per_gpu_train_batch_size", "train_batch_size"))
    ] = 8
    """Rows per micro-batch on each rank."""
    per_device_train_batch_tokens: Annotated[PositiveInt | None, FREE] = None
    """Instead of a number of rows: maximum tokens per micro-batch on each rank, sources and targets together, including
    padding. A micro-batch has as many rows as fit."""
    per_device_eval_batch_size: Annotated[
        PositiveInt, Option("free", travels=True, also=("per_gpu_eval_batch_size", "val_batch_size"))
    ] = 8
    """Rows per evaluation batch on each rank."""
    gradient_accumulation_steps: Annotated[PositiveInt, FREE] = 1
    """Micro-batches per optimizer step."""
    accumulate: Annotated[Literal["auto", "sharded", "unsharded"], FREE] = "auto"
    """How a step adds up its micro-batches' gradients. sharded: reduce each into the shards; unsharded: keep full fp32
    gradients on every rank and reduce them once, which sends less. auto: unsharded where that sends less and the plan
    fits in 90 % of the free memory, else sharded; a resumed run keeps the choice. The two round
    sums differently: set one for results that do not depend on free memory. Hugging Face's sync_each_batch: true
    is sharded."""
    train_sampling_strategy: Annotated[Literal["group_by_length", "random"], SAME] = "group_by_length"
    """group_by_length: batch rows of similar length; random: like torch's DistributedSampler, and the default of
    Hugging Face."""
    packing: Annotated[bool, SAME] = False
    """Concatenate the rows of a micro-batch into one sequence without padding. Attention stays within each row, so loss
    and gradients equal those of the padded batch, also of preferences, whose completions are the rows. For the models
    listed in docs/concepts/training.md."""
    num_train_epochs: Annotated[PositiveFloat, Option("same", also=("epochs", "num_epochs"))] = 3
    """Passes over the training rows."""
    max_steps: Annotated[PositiveInt | None, SAME] = None
    """Train this many optimizer steps, over as many epochs as that takes, whatever num_train_epochs says; null or -1:
    num_train_epochs decides."""
    max_train_minutes: Annotated[PositiveFloat | None, FREE] = None
    """Stop after the step in which this many minutes have passed, including evaluations, if that comes first. The
    learning rate's schedule then follows the time: it is that of the steps that fit at the pace so far, so a decay ends
    with the time. Such a run depends on the clock, and so does a resumed one."""
    optimizer: Annotated[OptimizerName, Option("state", before="adamw")] = "adamw"
    """adamw; adafactor: T5's optimizer, with one state element per row and column, as in Hugging Face's Trainer; muon:
    orthogonalized momentum for the matrices inside the model, AdamW for the rest, at AdamW's learning rate; adamw_8bit,
    adamw_bf16: AdamW with state of 8 or 16 bits per element."""
    learning_rate: Annotated[PositiveFloat | None, Option("same", also=("lr",))] = 5e-5
    """Peak learning rate. null: adafactor's relative steps, min(0.01, 1 / sqrt(step)) times the root mean square of
    each parameter; needs lr_scheduler_type: constant and no warm-up."""
    weight_decay: Annotated[NonNegativeFloat, SAME] = 0.0
    """Decoupled weight decay of any optimizer. As in Hugging Face's Trainer, parameters whose name contains bias or
    norm do not decay, nor do those of layer norms; with muon, no vectors."""
    adam_beta1: Annotated[Fraction, SAME] = 0.9
    """AdamW's decay rate of the gradient's mean; not with adafactor."""
    adam_beta2: Annotated[Fraction, SAME] = 0.999
    """AdamW's decay rate of the squared gradient's mean; not with adafactor."""
    adam_epsilon: Annotated[PositiveFloat, SAME] = 1e-8
    """AdamW's epsilon; not with adafactor."""
    lr_scheduler_type: Annotated[ScheduleName, Option("same", also=("scheduler",))] = "linear"
    """linear, cosine: decay to zero at the last step; constant, which warms up too, unlike Hugging Face's (there
    constant_with_warmup, accepted here as another name); step: times lr_gamma every lr_step_size epochs. The others are
    Hugging Face's of the same name. With max_train_minutes, inverse_sqrt, constant, step, and warmup_stable_decay with
    num_stable_steps do not follow the time."""
    lr_scheduler_kwargs: Annotated[FrozenMapping, SAME] = Field(default_factory=dict)
    """The schedule's own options, by Hugging Face's names: num_cycles of cosine, cosine_with_restarts,
    cosine_with_min_lr and cosine_warmup_with_min_lr; min_lr or min_lr_rate, one of which the last two need, and
    warmup_lr_rate of the last; lr_end and power of polynomial; timescale of inverse_sqrt; num_decay_steps, which
    warmup_stable_decay needs, and its num_stable_steps, warmup_type, decay_type, min_lr_ratio and num_cycles."""
    warmup_steps: Annotated[NonNegativeFloat, Option("same", also=("warmup_ratio",))] = 0
    """Optimizer steps in which the learning rate rises from zero to its peak; below 1: share of all steps."""
    lr_step_size: Annotated[PositiveInt, SAME] = 1
    """Epochs between decays; needs lr_scheduler_type: step."""
    lr_gamma: Annotated[PositiveFloat, SAME] = 0.7
    """Factor of each decay; needs lr_scheduler_type: step."""
    ema_decay: Annotated[Fraction | None, STATE] = None
    """Keep an exponential moving average of the trained weights: after each step, this number times the average plus
    the rest of the weights. Evaluations, the best model and the published one are the average's. It takes 4 bytes a
    trained parameter, sharded. null or 0: no average."""
    max_grad_norm: Annotated[PositiveFloat | None, SAME] = 1.0
    """Clip gradients to this norm over all ranks; null or 0: no clipping."""
    label_smoothing_factor: Annotated[Fraction, Option("same", also=("label_smoothing",))] = 0.0
    """Share of each target's probability that is distributed over the vocabulary in training."""
    neftune_noise_alpha: Annotated[PositiveFloat | None, SAME] = None
    """NEFTune: in training, add uniform noise of up to this number / sqrt(tokens x width) to the embeddings of a
    micro-batch, padding included, as Hugging Face's Trainer does; of an encoder-decoder on both sides. null or 0: no
    noise."""
    z_loss: Annotated[NonNegativeFloat, SAME] = 0.0
    """Weight of the squared log of the softmax's normalizer in the training loss; keeps logits small."""
    precision: Annotated[Literal["auto", "fp32", "bf16", "fp16", "fp8"], ASKED] = "auto"
    """Compute dtype. auto: bf16 if all GPUs compute it in hardware, else fp32; a resumed run keeps the choice. Shards,
    gradient reduction and optimizer steps stay in fp32; fp16 scales the loss. fp8: as bf16, but linear layers of the
    blocks multiply in fp8 while training; see docs/guides/fp8.md."""
    fp8_scales: Annotated[Literal["tensorwise", "rowwise"], SAME] = "tensorwise"
    """Numbers that share a scale in fp8: tensorwise, a weight or a micro-batch's activations; rowwise, a row of them,
    which is more accurate and slower."""
    allow_emulation: Annotated[bool, SAME] = False
    """Allow fp8 on CPUs, where its products are computed in fp32 from rounded numbers: for tests, as it is slow."""
    tf32: Annotated[bool, Option("same", before=True)] = True
    """On GPUs, compute fp32 matrix products in TF32, with 10 bits of mantissa; Hugging Face leaves it to torch, whose
    default is not to."""
    allow_fp16: Annotated[bool, SAME] = False
    """Allow fp16 for a model whose activations are known to overflow in it, such as T5."""
    fused_cross_entropy: Annotated[
        bool | Literal["auto"], Option("free", searched=Searched("rank", ("auto", True)))
    ] = "auto"
    """Compute the loss from the last hidden states in chunks, so that the full logits are never in memory. auto: where
    they could take more than 5 % of the memory of a GPU, or of the machine, and the model allows it."""
    gradient_checkpointing: Annotated[
        StrictBool | Annotated[NonNegativeInt, Strict()] | Literal["auto"],
        Option("free", searched=Searched("rank", ("auto", True))),
    ] = "auto"
    """Recompute blocks' activations in backward instead of storing them, which is exact; Hugging Face also calls it
    activation_checkpointing. true: of all blocks; a number: of so many, evenly spread over the model, an encoder's
    blocks before its decoder's. auto: of the fewest with which the run's plan fits into 90 % of a GPU's free memory,
    or on CPU ranks into all that is free; of none if it fits without or if there is no plan."""
    activation_offload: Annotated[bool, SAME] = False
    """On GPUs, keep activations that are not recomputed in page-locked host memory between forward and backward, copied
    while blocks compute, which is exact. The last block's stay, and tensors below 1 MiB. On CPU ranks it changes
    nothing: activations are in host memory anyway."""
    torch_compile: Annotated[bool, SAME] = False
    """Compile each block with torch.compile."""
    on_nonfinite: Annotated[Literal["stop", "skip"], SAME] = "stop"
    """On a non-finite loss or gradient: stop the run, or skip and count the step."""
    eval_strategy: Annotated[Literal["epoch", "steps", "no"], Option("free", also=("evaluation_strategy",))] = "epoch"
    """When to evaluate: after each epoch, every eval_steps optimizer steps, or never; unless never, also after the
    last step. Hugging Face's default is no."""
    eval_steps: Annotated[PositiveInt | None, FREE] = None
    """Optimizer steps between evaluations, a whole number; required with eval_strategy: steps, else not allowed.
    Hugging Face also takes a share of all steps."""
    early_stopping_patience: Annotated[PositiveInt | None, FREE] = None
    """End the run after this many consecutive evaluations without improvement; null: never."""
    early_stopping_threshold: Annotated[NonNegativeFloat, FREE] = 0.0
    """Minimum improvement of the metric for early stopping. Metrics are shares from 0 to 1, so 0.01 is one percentage
    point. It does not affect which model is kept as the best."""
    logging_steps: Annotated[PositiveInt, REPORTED] = 1
    """Optimizer steps between records in the metrics file and in trackers. Hugging Face's default is 500."""
    save_strategy: Annotated[Literal["epoch", "steps", "no"], FREE] = "epoch"
    """When to save a checkpoint: after each epoch, every save_steps optimizer steps, or only when the run is stopped;
    unless no, also after the last step. Hugging Face's default is steps, every 500."""
    save_steps: Annotated[PositiveInt | None, FREE] = None
    """Optimizer steps between checkpoints, a whole number; required with save_strategy: steps, else not allowed.
    Hugging Face's default is 500, and it also takes a share of all steps."""
    save_total_limit: Annotated[PositiveInt | None, FREE] = 2
    """Number of newest checkpoints to keep; null: all, Hugging Face's default. The best model is kept in addition."""
    checkpoints_to: Annotated[str | None, FREE] = None
    """URL of a prefix in an object store (s3://bucket/run, opened by fsspec) for this run's checkpoints; null:
    output_dir/checkpoints. Everything else of the run stays in output_dir."""
    report_to: Annotated[tuple[Tracker, ...], REPORTED] = ()
    """Trackers to report to, if they are installed: tensorboard, wandb, mlflow, trackio. Empty or none, Hugging Face's
    word: none."""
    profile: Annotated[ProfileConfig | None, REPORTED] = None
    """Write a trace of torch.profiler into output_dir/profile, one file a rank: {steps: [10, 13]}. These steps take
    longer. See docs/guides/slow-step.md."""
    run_name: Annotated[str | None, REPORTED] = None
    """Name of the run in trackers; null: the last component of output_dir."""

    @property
    def preference_has_reference(self) -> bool:
        """True if the loss compares with the model at the start of training."""
        return self.objective in ("dpo", "ipo", "kto")

    @field_validator("checkpoints_to")
    @classmethod
    def _url(cls, value: str | None) -> str | None:
        if value is not None and not value.partition("://")[2].strip("/"):
            raise ValueError(f"expected a URL such as s3://bucket/run; got {value!r}")
        return value

    push_to_hub: Annotated[PushConfig | None, REPORTED] = None
    """Upload the finished run's model and card, without texts of rows, with the token from HF_TOKEN or of `hf auth
    login`: owner/name, or a mapping with repo, private, checkpoints. A failed upload is only reported. Hugging Face's
    true with hub_model_id is the repository's name here; null or false: no upload."""

    @field_validator("push_to_hub", mode="before")
    @classmethod
    def _repo_or_mapping(cls, value: object) -> object:
        if value is True:
            raise ValueError("expected the repository to upload to, such as ada/my-t5; got true")
        return {"repo": value} if isinstance(value, str) else value or None

    @field_validator("eval_strategy", "save_strategy", mode="before")
    @classmethod
    def _undo_yaml_no(cls, value: object) -> object:
        """Undo YAML 1.1's reading of a bare ``no`` as false."""
        return "no" if value is False else value

    @field_validator("max_steps", "max_grad_norm", "neftune_noise_alpha", "ema_decay", mode="before")
    @classmethod
    def _unset_as_in_hugging_face(cls, value: object, info: ValidationInfo) -> object:
        """Accept Hugging Face's numbers for an option that is not set."""
        unset = -1 if info.field_name == "max_steps" else 0
        return None if value == unset and value is not False else value

    @field_validator("warmup_steps")
    @classmethod
    def _steps_or_share(cls, value: float) -> float:
        if value >= 1 and value != int(value):
            raise ValueError(f"expected a whole number of steps, or a share of all steps below 1; got {value}")
        return value

    @field_validator("lr_scheduler_type", mode="before")
    @classmethod
    def _warmup_is_apart(cls, value: object) -> object:
        """Accept Hugging Face's separate name for a constant rate with warm-up; refuse what follows a metric."""
        if value in ("reduce_lr_on_plateau", "greedy"):
            raise ValueError(
                f"{value} follows a metric, and schedules here are known before the first step; use inverse_sqrt, or "
                "early_stopping_patience to end a run that no longer improves"
            )
        return "constant" if value == "constant_with_warmup" else value

    @field_validator("lr_scheduler_kwargs", mode="before")
    @classmethod
    def _numbers(cls, value: object) -> object:
        """Read 1e-7 as a number, as all other options do; YAML 1.1 reads text."""
        if not isinstance(value, Mapping):
            return value
        number = re.compile(r"[-+]?[0-9.]+e[-+]?[0-9]+", re.IGNORECASE)
        return {k: float(one) if isinstance(one, str) and number.fullmatch(one) else one for k, one in value.items()}

    @field_validator("report_to", mode="before")
    @classmethod
    def _one_or_several(cls, value: object) -> object:
        if value is None or value == "none":
            return ()
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _fits_the_optimizer(self) -> Self:
        """Report all contradictions with the optimizer at once, with the overrides that resolve them."""
        problems: list[str] = []
        overrides: list[str] = []
        optimizer = self.optimizer if self.learning_rate is not None else "adafactor"
        if self.optimizer != optimizer:
            problems.append(
                f"learning_rate: null needs optimizer: adafactor, which has relative steps; got {self.optimizer}"
            )
            overrides.append("training.optimizer=adafactor")
        written = [name for name in _NOT_OF_OPTIMIZER.get(optimizer, ()) if name in self.model_fields_set]
        if written:
            problems.append(f"optimizer: {optimizer} does not use {' and '.join(written)}")
            overrides += [f"training.{name}=null" for name in written]
        if self.learning_rate is None and (self.lr_scheduler_type != "constant" or self.warmup_steps):
            problems.append(
                "learning_rate: null leaves the learning rate to adafactor, without a schedule: it needs "
                f"lr_scheduler_type: constant and warmup_steps: 0; got {self.lr_scheduler_type} and "
                f"{self.warmup_steps:g}"
            )
            overrides += ["training.lr_scheduler_type=constant", "training.warmup_steps=0"]
        if problems:
            remedy = " ".join(overrides)
            raise ValueError(f"{'; '.join(problems)}. Change it in the file, or on the command line: {remedy}")
        return self

    @model_serializer(mode="wrap")
    def _without_unused(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Drop options that the optimizer does not use: otherwise a recorded run would be refused when read again."""
        unused = _NOT_OF_OPTIMIZER.get(self.optimizer, ())
        return {name: value for name, value in handler(self).items() if name not in unused}

    @model_validator(mode="after")
    def _pushes_the_best_so_far(self) -> Self:
        if self.push_to_hub is not None and self.push_to_hub.checkpoints and self.eval_strategy == "no":
            raise ValueError(
                "push_to_hub.checkpoints uploads each new best model, which needs evaluations; got eval_strategy: no"
            )
        return self

    @model_validator(mode="after")
    def _fits_the_schedule(self) -> Self:
        kind, given = self.lr_scheduler_type, self.lr_scheduler_kwargs.keys()
        known, needed = _SCHEDULE_OPTIONS.get(kind, ()), _SCHEDULE_NEEDS.get(kind, ())
        if others := sorted(given - set(known)):
            has = ", ".join(known) or "no options"
            raise ValueError(f"lr_scheduler_kwargs has {', '.join(others)}, and lr_scheduler_type: {kind} has {has}")
        if needed and not given & set(needed):
            raise ValueError(f"lr_scheduler_type: {kind} needs {' or '.join(needed)} in lr_scheduler_kwargs")
        return self

    @model_validator(mode="after")
    def _no_idle_options(self) -> Self:
        if self.lr_scheduler_type != "step" and (names := self.given("lr_step_size", "lr_gamma")):
            raise ValueError(f"{' and '.join(names)} need lr_scheduler_type: step; got {self.lr_scheduler_type}")
        for kind in ("eval", "save"):
            strategy, steps = getattr(self, f"{kind}_strategy"), getattr(self, f"{kind}_steps")
            if (strategy == "steps") != (steps is not None):
                raise ValueError(
                    f"{kind}_steps is set if, and only if, {kind}_strategy is steps; "
                    f"got {kind}_strategy: {strategy}, {kind}_steps: {steps}"
                )
        if self.per_device_train_batch_tokens is not None and self.train_sampling_strategy == "random":
            raise ValueError(
                "per_device_train_batch_tokens needs train_sampling_strategy: group_by_length; in random order the "
                "number of steps would differ between epochs"
            )
        if self.per_device_train_batch_tokens is not None and self.given("per_device_train_batch_size"):
            raise ValueError(
                "per_device_train_batch_size and per_device_train_batch_tokens both size a batch; give one"
            )
        if self.early_stopping_patience is None and self.given("early_stopping_threshold"):
            raise ValueError("early_stopping_threshold needs early_stopping_patience")
        if self.early_stopping_patience is not None and self.eval_strategy == "no":
            raise ValueError("early_stopping_patience needs evaluations; got eval_strategy: no")
        for precision, names in (("fp16", ("allow_fp16",)), ("fp8", ("fp8_scales", "allow_emulation"))):
            if self.precision != precision and (given := self.given(*names)):
                raise ValueError(f"{given[0]} needs precision: {precision}; got {self.precision}")
        return self
