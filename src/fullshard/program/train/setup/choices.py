"""What a run chooses by itself, and advice: a line for each setting that an expert would question."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil

from torch import nn

from fullshard.core.engine.registry import runtime_of
from fullshard.program.config import RunConfig
from fullshard.program.config.training import NEW_MODEL_LEARNING_RATE
from fullshard.program.data import BatchPlan, TokenizedSet
from fullshard.program.metrics import needs_text
from fullshard.program.train.setup.devices import Choice, Devices, precision_choice
from fullshard.program.train.setup.model import attention_choice, loss_choice
from fullshard.program.train.setup.prepare import Prepared
from fullshard.program.train.setup.steps import BatchPartition


def choices(
    config: RunConfig,
    devices: Devices,
    model: nn.Module,
    memory_bytes: int | None = None,
    *,
    before: Sequence[Choice] = (),
) -> tuple[Choice, ...]:
    """Return what a run chooses by itself; any rank.

    ``config`` says ``auto`` where the user did not choose; ``before`` is what was chosen for it before, and comes
    first. ``model`` is sharded; ``memory_bytes``: see :func:`~fullshard.program.train.setup.model.prepare_model`.
    """
    tf32 = "for matrix products of float32" if devices.gpu else "without effect: ranks compute on CPUs"
    found = (
        *before,
        precision_choice(config, devices),
        Choice("training.tf32", str(config.training.tf32).lower(), tf32),
        attention_choice(model, config, gpu=devices.gpu),
        loss_choice(model, config, memory_bytes),
        _searched(config),
        _frozen(config, model),
        _tables(config, devices),
    )
    # Of two for one setting the first, which was chosen before.
    return tuple({one.setting: one for one in reversed(found) if one is not None}.values())[::-1]


def _searched(config: RunConfig) -> Choice | None:
    """Return the result of ``sharding: auto``, which is recorded in the settings."""
    found = config.sharding.auto
    if isinstance(found, bool):
        return None
    return Choice("sharding", " ".join(found) or "the run file's own settings", "the fastest settings found that fit")


def _frozen(config: RunConfig, model: nn.Module) -> Choice | None:
    if config.sharding.frozen != "auto":
        return None
    runtime = runtime_of(model)
    lanes = [lane for unit in runtime.units for lane in unit.lanes if not lane.trainable]
    if not lanes:
        return None
    kept = all(lane.layout.world_size == 1 for lane in lanes)
    less = "at most" if kept else "more than"
    return Choice("sharding.frozen", "replicate" if kept else "shard", f"{less} a quarter of a rank's memory")


def _tables(config: RunConfig, devices: Devices) -> Choice | None:
    if config.sharding.tables != "auto":
        return None
    if devices.gpu:
        return Choice("sharding.tables", "gather", "ranks compute on GPUs")
    return Choice("sharding.tables", "home or gather", "on CPUs, whichever sends fewer bytes for a batch")


_STEPS_AN_EPOCH = 10
"""Fewest steps an epoch with a suggested batch."""

_FAR = 4
"""A limit is far above the longest target from this factor on."""

_LOW = 10
"""Factor by which a learning rate is too low for a new model."""

_LEAST_SAVED = 32
"""Tokens a row that a lower limit must save to be worth mentioning."""


def advice(config: RunConfig, prepared: Prepared, plan: BatchPlan, world_size: int) -> tuple[str, ...]:
    """Return lines of advice for a run's user, empty if nothing is unusual; any rank."""
    return (
        *_on_steps(config, plan.num_steps),
        *_on_learning_rate(config),
        *_on_objective(config),
        *_on_batch(config, prepared.train_set.examples, plan.num_steps, world_size),
        # Rows of plain text are cut anywhere in it.
        *(_on_shared_rows(prepared.train_set, prepared.held_out_set) if config.data.text_column is None else ()),
        *_on_limit(config, prepared),
    )


def _on_steps(config: RunConfig, an_epoch: int) -> Iterator[str]:
    steps, epochs = config.training.max_steps, config.training.num_train_epochs
    if steps is not None and steps != ceil(an_epoch * epochs):
        yield (
            f"training.max_steps: {steps:,} steps, {steps / an_epoch:.2f} epochs; training.num_train_epochs={epochs:g} "
            "does not count"
        )


def _on_learning_rate(config: RunConfig) -> Iterator[str]:
    rate = config.training.learning_rate
    if config.model.config is None or rate is None or rate * _LOW >= NEW_MODEL_LEARNING_RATE:
        return
    yield (
        f"the model starts from random weights, and training.learning_rate={rate:g} is for pretrained ones: a new "
        f"small model learns little with less than about training.learning_rate={NEW_MODEL_LEARNING_RATE:g}"
    )


def _on_objective(config: RunConfig) -> Iterator[str]:
    objective = config.training.objective
    # orpo's loss is also that of the targets.
    if config.model.config is not None and objective not in ("sft", "orpo"):
        yield (
            f"the model starts from random weights, and training.objective: {objective} is for a model that answers "
            "already: train one on the good answers first, or with orpo"
        )


def _on_batch(config: RunConfig, rows: int, steps: int, world_size: int) -> Iterator[str]:
    settings = config.training
    partition = BatchPartition.of(config, world_size)
    batch, accumulation = partition.global_batch, settings.gradient_accumulation_steps
    if steps > 1:
        return
    if settings.per_device_train_batch_tokens is not None:
        yield (
            f"an epoch of {rows:,} rows is one step of up to {batch:,} tokens: lower "
            f"training.per_device_train_batch_tokens (now {settings.per_device_train_batch_tokens:,}) for more steps"
        )
        return
    better = max(1, rows // (partition.ranks * accumulation * _STEPS_AN_EPOCH))
    fewer = " with training.gradient_accumulation_steps=1" if better == 1 and accumulation > 1 else ""
    what = "larger than all" if batch > rows else "as large as all"
    remedy = f"training.per_device_train_batch_size={better}{fewer} gives more steps"
    yield f"the batch of {batch:,} rows is {what} {rows:,} training rows, so an epoch is one step: {remedy}"


def _on_shared_rows(train: TokenizedSet, held_out: TokenizedSet | None) -> Iterator[str]:
    """Compare training and held-out rows by the token ids of source and target."""
    if held_out is None or train.source is not None:  # streamed rows would all have to be tokenized
        return
    wanted = {_key(held_out, row) for row in range(len(held_out))}
    found = {key for row in range(len(train)) if (key := _key(train, row)) in wanted}
    shared = sum(_key(held_out, row) in found for row in range(len(held_out))) if found else 0
    if shared:
        yield (
            f"{shared:,} of {len(held_out):,} held-out rows are training rows too, so the score is partly memory: "
            "remove them from one side"
        )


def _key(rows: TokenizedSet, row: int) -> tuple[bytes, bytes]:
    return rows.source_ids[row].tobytes(), rows.target_ids[row].tobytes()


def _on_limit(config: RunConfig, prepared: Prepared) -> Iterator[str]:
    settings = config.evaluation
    if prepared.held_out_set is None or not needs_text(settings.every_metric):
        return
    limit = settings.max_new_tokens or config.data.max_target_length
    longest = max(one.target_stats.longest for one in (prepared.train_set, prepared.held_out_set))
    if limit == prepared.longest_target:
        yield f"evaluations write up to {limit} tokens a row, as the longest target has (evaluation.max_new_tokens)"
    if limit >= _FAR * longest and limit - longest >= _LEAST_SAVED:
        yield (
            f"evaluations write up to {limit} tokens a row and the longest target has {longest}: "
            f"evaluation.max_new_tokens={-(-longest * 3 // 2 // 8) * 8} ends runaway texts sooner"
        )
