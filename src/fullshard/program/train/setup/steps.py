"""The steps of a run: how many, which rows each has, how these are divided over ranks, and at which learning rate."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil
from typing import TYPE_CHECKING, Any, cast

import torch
import transformers

from fullshard.errors import ConfigError
from fullshard.program.config import RunConfig
from fullshard.program.config.training import ScheduleName, TrainingConfig
from fullshard.program.data import BatchPlan, CollateSpec, EpochPlan, Mixture, TokenizedSet, TokenPlan, fixed_shapes
from fullshard.program.train.reporting.reports import SetFacts
from fullshard.program.train.setup.prepare import Prepared
from fullshard.program.train.setup.sequence import readers

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LambdaLR


@dataclass(frozen=True)
class BatchPartition:
    """How the rows of one optimizer step are partitioned over ranks and micro-batches."""

    ranks: int  # number of ranks that read rows; groups of them, where ranks share rows
    each: int  # rows of a micro-batch on one rank; with a token budget, its tokens including padding
    accumulation: int  # micro-batches of a rank
    by_tokens: bool  # whether micro-batches are cut by tokens

    @classmethod
    def of(cls, config: RunConfig, ranks: int) -> BatchPartition:
        """Return the partition that the settings request on a number of ranks."""
        settings = config.training
        tokens = settings.per_device_train_batch_tokens
        each = settings.per_device_train_batch_size if tokens is None else tokens
        return cls(readers(config, ranks), each, settings.gradient_accumulation_steps, tokens is not None)

    @classmethod
    def began(cls, values: Mapping[str, Any]) -> BatchPartition | None:
        """Return the partition at a run's start from the values of a checkpoint; None if an older version wrote it."""
        try:
            found = cls(**values["division"])
        except (KeyError, TypeError):
            return None
        sizes = (found.ranks, found.each, found.accumulation)
        return found if all(type(size) is int and size > 0 for size in sizes) else None

    @property
    def global_batch(self) -> int:
        """Rows of one step; with a token budget, its tokens including padding."""
        return self.ranks * self.each * self.accumulation

    @property
    def group(self) -> int:
        """Rows of similar length that are together: those of a step; with a token budget, its micro-batches."""
        return self.ranks * self.accumulation if self.by_tokens else self.global_batch

    def on(self, ranks: int) -> BatchPartition:
        """Return the partition of the same rows over another number of ranks, in micro-batches that are not larger.

        Raises:
            ConfigError: They cannot be divided equally.
        """
        if ranks == self.ranks:
            return self
        parts = self.ranks * self.accumulation if self.by_tokens else self.global_batch
        if parts % ranks:
            what = "micro-batches" if self.by_tokens else "rows"
            raise ConfigError(
                f"The run began on {self.ranks} ranks with {parts} {what} a step, and {ranks} ranks cannot share them "
                f"equally. Start it on a number of ranks that divides {parts}."
            )
        share = parts // ranks
        if self.by_tokens:
            return replace(self, ranks=ranks, accumulation=share)
        each = next(rows for rows in range(self.each, 0, -1) if share % rows == 0)
        return replace(self, ranks=ranks, each=each, accumulation=share // each)

    def settings(self, config: RunConfig) -> RunConfig:
        """Return the settings that request this partition."""
        each = "per_device_train_batch_tokens" if self.by_tokens else "per_device_train_batch_size"
        changed = {each: self.each, "gradient_accumulation_steps": self.accumulation}
        return config.model_copy(update={"training": config.training.model_copy(update=changed)})


def began_with(asked: BatchPartition, began: BatchPartition | None) -> BatchPartition:
    """Return the partition that a run keeps: the one it ``began`` with, unless the settings now request another.

    ``asked`` is for the current ranks, ``began`` for those that the run had then; None: not known.
    """
    if began is None or replace(asked, ranks=began.ranks) != began:
        return asked
    return began


def make_plan(
    config: RunConfig, train_set: TokenizedSet, world_size: int, *, causal: bool, group: int | None = None
) -> BatchPlan:
    """Return the plan of the first epoch, whose ``for_epoch`` returns the others; any rank, with the same result.

    Ranks that share rows are one rank of the plan.

    ``group`` is :attr:`BatchPartition.group` of the run's start; None: it starts here.

    Raises:
        DataError: A row is longer than the token budget.
    """
    settings = config.training
    group = group or BatchPartition.of(config, world_size).group
    world_size = readers(config, world_size)
    if settings.per_device_train_batch_tokens is None:
        return EpochPlan(
            num_rows=len(train_set),
            world_size=world_size,
            batch_size=settings.per_device_train_batch_size,
            seed=config.seed,
            lengths=train_set.lengths if settings.train_sampling_strategy == "group_by_length" else None,
            group_rows=group,
            accumulation=settings.gradient_accumulation_steps,
            mixture=make_mixture(config, train_set),
            together=train_set.together,
        )
    return TokenPlan(
        source_lengths=train_set.source_ids.lengths,
        target_lengths=train_set.target_ids.lengths,
        causal=causal,
        world_size=world_size,
        batch_tokens=settings.per_device_train_batch_tokens,
        accumulation=settings.gradient_accumulation_steps,
        seed=config.seed,
        group=group,
    )


def training_batches(config: RunConfig, spec: CollateSpec, plan: BatchPlan, train_set: TokenizedSet) -> CollateSpec:
    """Return how training batches are made: packed, and for compiled blocks of fixed shapes; any rank, alone.

    ``spec`` is that of the tokenizer, and ``plan`` of :func:`make_plan`.
    """
    spec = replace(spec, packed=config.training.packing, shortest=config.sharding.sequence_parallel)
    return replace(spec, shapes=fixed_shapes(plan, train_set, spec)) if "compile" in config.ways else spec


def make_mixture(config: RunConfig, train_set: TokenizedSet) -> Mixture | None:
    """Return the shares of the sets of a run in an epoch; None if they have no weights, so that each row comes once."""
    weights = config.data.weights
    # A mixture of one set is that set, whatever its weight.
    rows = tuple(count // train_set.together for count in train_set.set_rows)
    return Mixture(rows, weights, config.seed) if weights and rows else None


def mixture_notes(config: RunConfig, prepared: Prepared) -> list[str]:
    """Return a line with the rows of each set in an epoch, for a mixture with weights; any rank."""
    mixture = make_mixture(config, prepared.train_set)
    if mixture is None:
        return []
    total = sum(mixture.rows)
    parts = [
        f"{one.name} {count:,} ({count / total:.1%}, {count / rows:.2f} times its {rows:,})"
        for one, count, rows in zip(prepared.sets, mixture.counts, mixture.rows, strict=True)
    ]
    return [f"mixture: an epoch of {total:,} rows has {', '.join(parts)}"]


def set_facts(config: RunConfig, prepared: Prepared) -> tuple[SetFacts, ...]:
    """Return the recorded facts of each set of a mixture, empty if there is none; any rank."""
    mixture = make_mixture(config, prepared.train_set)
    counts = [one.train_set.examples for one in prepared.sets] if mixture is None else mixture.counts
    return tuple(
        SetFacts(
            name=one.name,
            weight=config.data.sets[one.name].weight,
            train_rows=one.train_set.examples,
            epoch_rows=count,
            validation_rows=0 if one.held_out_set is None else one.held_out_set.examples,
            content=one.content,
        )
        for one, count in zip(prepared.sets, counts, strict=True)
        if one.name
    )


@dataclass(frozen=True)
class LearningRateSchedule:
    """Factor on the learning rate of each optimizer step."""

    # Transformers' schedules, of which ``constant`` warms up too, and ``step``: multiplied by ``gamma`` every
    # ``step_epochs`` epochs, as torch's ``StepLR`` stepped once an epoch
    kind: ScheduleName
    total_steps: int  # optimizer steps of the run
    steps_per_epoch: int  # optimizer steps of one epoch
    warmup_steps: int = 0  # steps over which the factor first rises linearly from 0
    warmup_share: float | None = None  # the share of all steps that they are, if that was asked for
    step_epochs: int = 1  # epochs between two decays of ``step``
    gamma: float = 1.0  # factor of each decay of ``step``
    peak: float = 1.0  # the learning rate that factors multiply, of which some options are parts
    options: Mapping[str, Any] = field(default_factory=dict)  # of transformers' schedule, by its names

    @property
    def follows_steps(self) -> bool:
        """Whether the factors after warm-up depend on the number of steps, and so on a time limit."""
        return self.kind not in ("constant", "step", "inverse_sqrt") and self.options.get("num_stable_steps") is None

    def factor(self, step: int) -> float:
        """Return the factor, from 0 to 1, of the step after ``step`` steps."""
        if self.kind not in ("linear", "cosine", "constant", "step") or self.options:
            return self._theirs(step)
        # As transformers' but for the rounding of cosine. Its own functions import peft, a fifth of a rank's imports.
        if step < self.warmup_steps:
            return step / self.warmup_steps
        if self.kind == "step":
            return self.gamma ** (step // self.steps_per_epoch // self.step_epochs)
        left = max(0.0, (self.total_steps - step) / max(1, self.total_steps - self.warmup_steps))
        if self.kind == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * (1.0 - left)))
        return left if self.kind == "linear" else 1.0

    @cached_property
    def _theirs(self) -> Callable[[int], float]:
        """Transformers' function from steps to factors."""
        optimizer = torch.optim.SGD([torch.zeros(())], lr=self.peak)
        given = {"num_warmup_steps": self.warmup_steps, "num_training_steps": self.total_steps}
        own = dict(self.options)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Both num_training_steps and num_stable_steps")
            theirs = transformers.get_scheduler(self.kind, optimizer, **given, scheduler_specific_kwargs=own)
        return cast("LambdaLR", theirs).lr_lambdas[0]

    def within(self, limit_s: float, *, steps: int, seconds: float, pace_s: float) -> LearningRateSchedule:
        """Return the schedule of as many steps as fit a time limit, so that a decay ends with the time.

        ``steps`` were taken in ``seconds``, and ``pace_s`` are the seconds of a step from now on, with its share of
        evaluations; 0: not measured, nothing changes.
        """
        if pace_s <= 0.0:
            return self
        total = min(self.total_steps, steps + max(1, ceil((limit_s - seconds) / pace_s)))
        # Where the decay counts from the warm-up but not to the end, another warm-up would make the rate jump.
        moves = self.follows_steps or self.kind in ("constant", "step")
        warmup = ceil(self.warmup_share * total) if self.warmup_share is not None and moves else self.warmup_steps
        return replace(self, total_steps=total, warmup_steps=warmup)


def learning_rate_schedule(config: RunConfig, steps_per_epoch: int) -> LearningRateSchedule:
    """Return the learning rate schedule of a run, including its number of steps.

    Raises:
        ConfigError: ``training.lr_scheduler_kwargs`` has values that the schedule does not take.
    """
    settings = config.training
    total_steps = settings.max_steps or ceil(steps_per_epoch * settings.num_train_epochs)
    warmup, kind, options = settings.warmup_steps, settings.lr_scheduler_type, settings.lr_scheduler_kwargs
    schedule = LearningRateSchedule(
        kind=kind,
        total_steps=total_steps,
        steps_per_epoch=steps_per_epoch,
        warmup_steps=ceil(warmup * total_steps) if warmup < 1 else int(warmup),
        warmup_share=warmup if 0 < warmup < 1 else None,
        step_epochs=settings.lr_step_size,
        gamma=settings.lr_gamma,
        peak=settings.learning_rate or 1.0,
        options=options,
    )
    try:
        factors = [schedule.factor(step) for step in (0, min(schedule.warmup_steps, total_steps - 1), total_steps - 1)]
        if not all(0 <= factor <= 1 + 1e-9 for factor in factors):
            raise ValueError(f"the rate would be {max(factors, key=abs):g} times learning_rate")
        decays = options.get("num_decay_steps", 0)
        if schedule.warmup_steps + decays > total_steps and decays:
            raise ValueError(
                f"{schedule.warmup_steps:,} steps of warm-up and {decays:,} of decay are more than the run's "
                f"{total_steps:,}"
            )
    except (TypeError, ValueError, ArithmeticError) as error:
        given = f"training.lr_scheduler_type: {kind} with lr_scheduler_kwargs: {dict(options)}"
        raise ConfigError(f"{given} cannot be used: {error}.") from error
    return schedule


def schedule_notes(config: RunConfig, schedule: LearningRateSchedule) -> list[str]:
    """Return a note if there is a time limit that the schedule does not follow; any rank."""
    if config.training.max_train_minutes is None or schedule.follows_steps:
        return []
    kind = schedule.kind
    return [f"training.max_train_minutes: lr_scheduler_type: {kind} does not follow it, and decays as without a limit"]


def learning_rate(settings: TrainingConfig, schedule: LearningRateSchedule, step: int, skipped: int) -> float:
    """Return the learning rate of the ``step``-th step, from 1, before which so many were ``skipped``.

    With ``learning_rate: null`` Adafactor uses relative step sizes (arXiv:1804.04235, section 8), and this is the size
    before it is scaled for each parameter; Adafactor does not count skipped steps.
    """
    if settings.learning_rate is None:
        return min(1e-2, 1.0 / math.sqrt(step - skipped))
    return settings.learning_rate * schedule.factor(step - 1)
