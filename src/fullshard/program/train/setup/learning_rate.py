"""The learning rate of each step as a pure function, so that a resumed run needs only the step number."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from fullshard.program.config import RunConfig
from fullshard.program.config.training import TrainingConfig


@dataclass(frozen=True)
class LearningRateSchedule:
    """Factor on the learning rate of each optimizer step."""

    # ``linear``: from 1 after warm-up down to 0 after the last step. ``cosine``: the same along half a cosine, as
    # Hugging Face's ``get_cosine_schedule_with_warmup``. ``step``: multiplied by ``gamma`` every ``step_epochs``
    # epochs, as torch's ``StepLR`` stepped once an epoch. ``constant``: 1
    kind: Literal["linear", "cosine", "step", "constant"]
    total_steps: int  # optimizer steps of the run
    steps_per_epoch: int  # optimizer steps of one epoch
    warmup_steps: int = 0  # steps over which the factor first rises linearly from 0
    warmup_share: float | None = None  # the share of all steps that they are, if that was asked for
    step_epochs: int = 1  # epochs between two decays of ``step``
    gamma: float = 1.0  # factor of each decay of ``step``

    def factor(self, step: int) -> float:
        """Return the factor, from 0 to 1, of the step after ``step`` steps."""
        if step < self.warmup_steps:
            return step / self.warmup_steps
        left = max(0.0, (self.total_steps - step) / max(1, self.total_steps - self.warmup_steps))
        if self.kind == "linear":
            return left
        if self.kind == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * (1.0 - left)))
        if self.kind == "step":
            return self.gamma ** (step // self.steps_per_epoch // self.step_epochs)
        return 1.0

    def within(self, limit_s: float, *, steps: int, seconds: float, pace_s: float) -> LearningRateSchedule:
        """Return the schedule of as many steps as fit a time limit, so that a decay ends with the time.

        Args:
            limit_s: The limit, in seconds of the whole run.
            steps: Steps taken.
            seconds: Seconds that have passed.
            pace_s: Seconds of a step from now on, with its share of evaluations; 0: not measured, nothing changes.
        """
        if pace_s <= 0.0:
            return self
        total = min(self.total_steps, steps + max(1, ceil((limit_s - seconds) / pace_s)))
        warmup = self.warmup_steps if self.warmup_share is None else ceil(self.warmup_share * total)
        return replace(self, total_steps=total, warmup_steps=warmup)


def learning_rate_schedule(config: RunConfig, steps_per_epoch: int) -> LearningRateSchedule:
    """Return the learning rate schedule of a run, including its number of steps."""
    settings = config.training
    total_steps = settings.max_steps or ceil(steps_per_epoch * settings.num_train_epochs)
    warmup = settings.warmup_steps
    return LearningRateSchedule(
        kind=settings.lr_scheduler_type,
        total_steps=total_steps,
        steps_per_epoch=steps_per_epoch,
        warmup_steps=ceil(warmup * total_steps) if warmup < 1 else int(warmup),
        warmup_share=warmup if 0 < warmup < 1 else None,
        step_epochs=settings.lr_step_size,
        gamma=settings.lr_gamma,
    )


def learning_rate(settings: TrainingConfig, schedule: LearningRateSchedule, step: int, skipped: int) -> float:
    """Return the learning rate of one step.

    Args:
        settings: The run's settings; with ``learning_rate: null`` Adafactor uses relative step sizes (arXiv:1804.04235,
            section 8), and this is the size before it is scaled for each parameter.
        schedule: Factors of the steps.
        step: Number of the step, from 1.
        skipped: Skipped steps before it, which Adafactor does not count.
    """
    if settings.learning_rate is None:
        return min(1e-2, 1.0 / math.sqrt(step - skipped))
    return settings.learning_rate * schedule.factor(step - 1)
