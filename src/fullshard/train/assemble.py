"""From a run's settings to its parts: data, tokenizer, sharded model, optimizer, schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from fullshard.comm import Comm, together
from fullshard.config import RunConfig
from fullshard.data import CollateSpec, Example, TokenizedSet, TokenizeSpec, read_rows, tokenize
from fullshard.engine import check_wrapped, fully_shard
from fullshard.errors import ConfigError
from fullshard.layout.sharded import ShardMeta
from fullshard.models import (
    build_model,
    build_skeleton,
    converted_names,
    enable_activation_checkpointing,
    is_causal,
    load_model,
    load_tokenizer,
    train_tokenizer,
)
from fullshard.policy import MixedPrecision, TransformerBlocks, WrapPolicy
from fullshard.saving import Pretrained
from fullshard.train.evaluate import EvaluationSpec
from fullshard.train.metrics import baseline
from fullshard.train.schedule import Schedule

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Assembly:
    """The parts of a run on one rank.

    Attributes:
        config: The run's settings.
        comm: The ranks.
        tokenizer: The model's tokenizer.
        model: The sharded model, in training mode.
        optimizer: Over this rank's shards.
        schedule: Learning rate factor of each step.
        train_set: Ids of the training rows.
        collate: Padding and the kind of model.
        evaluation: What is evaluated; None when the run never evaluates.
        parameters: Elements of all parameters, a tied one counted once.
        notes: What is worth knowing about how the model was loaded.
    """

    config: RunConfig
    comm: Comm
    tokenizer: PreTrainedTokenizerBase
    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    train_set: TokenizedSet
    collate: CollateSpec
    evaluation: EvaluationSpec | None
    parameters: int
    notes: tuple[str, ...]


def assemble(config: RunConfig, comm: Comm) -> Assembly:
    """Build every part of a run; on every rank together, with the same settings.

    Args:
        config: The run's settings.
        comm: The ranks to shard over.

    Returns:
        The parts.

    Raises:
        UserError: Data, model or settings do not fit together; on every rank, with the same text.
    """
    train_rows = together(comm, lambda: read_train_rows(config))
    held_out = together(comm, lambda: _read_held_out(config))
    tokenizer = together(comm, lambda: make_tokenizer(config, train_rows))
    model = together(comm, lambda: make_model(config, tokenizer))
    weights, notes = None, ()
    if config.model.path is not None:
        skeleton = model
        model, weights, notes = together(comm, lambda: choose_loader(skeleton, config, tokenizer))
    causal = is_causal(model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if config.training.gradient_checkpointing:
        together(comm, lambda: enable_activation_checkpointing(model))
    spec = TokenizeSpec(
        max_source_length=config.data.max_source_length,
        max_target_length=config.data.max_target_length,
        source_prefix=config.data.source_prefix,
        causal=causal,
    )
    collate = CollateSpec(cast(int, tokenizer.pad_token_id), causal=causal)
    train_set = together(comm, lambda: tokenize(train_rows, tokenizer, spec))
    evaluation = None
    if held_out:
        held_out_set = together(comm, lambda: tokenize(held_out, tokenizer, spec))
        evaluation = _evaluation_spec(config, train_rows, held_out, held_out_set, collate)
    shard_model(model, config, comm, weights=weights)
    return Assembly(
        config=config,
        comm=comm,
        tokenizer=tokenizer,
        model=model,
        optimizer=make_optimizer(model, config),
        schedule=make_schedule(config, len(train_set), comm.size),
        train_set=train_set,
        collate=collate,
        evaluation=evaluation,
        parameters=parameters,
        notes=notes,
    )


def read_train_rows(config: RunConfig) -> list[Example]:
    """The training rows, in the order of the file.

    Raises:
        DataError: The file cannot be used.
    """
    data = config.data
    return read_rows(data.train_file, data.source_column, data.target_column)[: data.max_train_samples]


def make_tokenizer(config: RunConfig, train_rows: Sequence[Example]) -> PreTrainedTokenizerBase:
    """The model directory's tokenizer, or one trained on the training rows.

    Raises:
        ModelError: It cannot be loaded or trained.
    """
    if config.model.path is not None:
        return load_tokenizer(config.model.path)
    assert config.model.tokenizer is not None, "the schema asks for a tokenizer section beside model.config"
    texts = [config.data.source_prefix + row.source for row in train_rows] + [row.target for row in train_rows]
    return train_tokenizer(texts, config.model.tokenizer.vocab_size)


def make_model(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The unsharded model: of ``model.config`` on the CPU, alike on every rank; of ``model.path`` on the meta device.

    Raises:
        ModelError: It cannot be built.
    """
    if config.model.path is not None:
        return build_skeleton(config.model.path, tokenizer, model_class=config.model.model_class)
    assert config.model.config is not None, "the schema asks for one of path and config"
    return build_model(config.model.config, tokenizer, model_class=config.model.model_class, seed=config.seed)


def choose_loader(
    skeleton: PreTrainedModel, config: RunConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[PreTrainedModel, Pretrained | None, tuple[str, ...]]:
    """Whether ``model.path`` is read shard by shard, or its files need what only transformers' own loader does.

    Args:
        skeleton: The model on the meta device.
        config: The run's settings, with ``model.path``.
        tokenizer: The model's.

    Returns:
        The skeleton and the weights to shard it with; or the loaded model, None, and a note that says so.

    Raises:
        CheckpointError: A file is missing or damaged.
        ModelError: Transformers cannot load it either.
    """
    path = config.model.path
    assert path is not None, "called for model.path only"
    weights = Pretrained(path)
    converted = converted_names(skeleton, weights.names())
    reason = f"transformers converts {len(converted)} of its tensors ({converted[0]}, …)" if converted else None
    reason = reason or weights.misfit(skeleton)
    if reason is None:
        return skeleton, weights, ()
    model = load_model(path, tokenizer, model_class=config.model.model_class)
    return model, None, (f"{path} was loaded whole on every rank, not shard by shard: {reason}",)


def shard_model(
    model: nn.Module,
    config: RunConfig,
    comm: Comm,
    device: torch.device | None = None,
    weights: Pretrained | None = None,
) -> None:
    """Shard a model in place as the settings say; on every rank together.

    Args:
        model: On the CPU or the meta device.
        config: The run's settings.
        comm: The ranks to shard over.
        device: Where shards live; None: the ranks' device.
        weights: What the shards are filled with; None: the model's own values, or initial ones.

    Raises:
        UserError: Wrapping, precision or weights do not fit the model.
    """
    wrap = config.sharding.wrap
    policy: WrapPolicy = wrap if isinstance(wrap, str) else TransformerBlocks(wrap)
    precision = MixedPrecision()
    if config.training.precision == "bf16":
        precision = MixedPrecision(param="bfloat16", reduce="float32")
    fully_shard(
        model,
        comm,
        wrap=None if policy == "none" else policy,
        mp_policy=precision,
        device=device or comm.device,
        weights=weights,
    )
    check_wrapped(model)


def make_optimizer(model: nn.Module, config: RunConfig) -> torch.optim.AdamW:
    """Fused AdamW over this rank's shards. As in Hugging Face's Trainer, vectors (biases, norms) do not decay.

    Args:
        model: The sharded model.
        config: The run's settings.
    """
    settings = config.training
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # A rank may hold no row of a parameter; one that holds none at all keeps the empty shards, which AdamW allows.
    held = [parameter for parameter in trainable if parameter.numel()] or trainable
    if not held:
        raise ConfigError("The model has no trainable parameters.")
    groups = [
        {"params": [p for p in held if _dims(p) >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in held if _dims(p) < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_epsilon,
        fused=True,
    )


def make_schedule(config: RunConfig, train_rows: int, world_size: int) -> Schedule:
    """The learning rate factor of each step, and with it the number of steps.

    The last step of an epoch may have fewer micro-batches than ``gradient_accumulation_steps``.

    Args:
        config: The run's settings.
        train_rows: Number of training rows.
        world_size: Number of ranks.
    """
    settings = config.training
    micro_batches = ceil(ceil(train_rows / world_size) / settings.per_device_train_batch_size)
    steps_per_epoch = ceil(micro_batches / settings.gradient_accumulation_steps)
    total_steps = steps_per_epoch * settings.num_train_epochs
    if settings.max_steps is not None:
        total_steps = min(total_steps, settings.max_steps)
    return Schedule(
        kind=settings.lr_scheduler_type,
        total_steps=total_steps,
        steps_per_epoch=steps_per_epoch,
        warmup_steps=settings.warmup_steps,
        step_epochs=settings.lr_step_size,
        gamma=settings.lr_gamma,
    )


def _dims(parameter: nn.Parameter) -> int:
    """Dimensions of the unsharded parameter."""
    meta: ShardMeta = parameter.shard_meta  # type: ignore[attr-defined]
    return len(meta.global_shape)


def _read_held_out(config: RunConfig) -> list[Example]:
    """The held-out rows; none when the run never evaluates."""
    data = config.data
    if config.training.eval_strategy == "no" or data.validation_file is None:
        return []
    return read_rows(data.validation_file, data.source_column, data.target_column)[: data.max_eval_samples]


def _evaluation_spec(
    config: RunConfig,
    train_rows: Sequence[Example],
    held_out: Sequence[Example],
    held_out_set: TokenizedSet,
    collate: CollateSpec,
) -> EvaluationSpec:
    metric = config.evaluation.metric
    return EvaluationSpec(
        examples=held_out,
        tokenized=held_out_set,
        collate=collate,
        batch_size=config.training.per_device_eval_batch_size,
        max_new_tokens=config.evaluation.max_new_tokens or config.data.max_target_length,
        metric=metric,
        baseline=baseline(
            metric,
            [row.target for row in train_rows],
            [row.source for row in held_out],
            [row.target for row in held_out],
        ),
    )
