"""The timetable of a run: its steps, and after which of them it evaluates and saves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

from fullshard.program.config import TrainingConfig
from fullshard.program.data import Batch, step_sizes, steps
from fullshard.program.train.run.assemble import Assembly


@dataclass(frozen=True)
class Position:
    """The progress of a run."""

    step: int  # steps trained
    epoch: float  # epochs trained, a fraction within an epoch
    ends_epoch: bool  # whether the step is the last one of an epoch


@dataclass(frozen=True)
class StepInput:
    """Input of one step."""

    position: Position  # position after the step
    micro_batches: list[Batch]  # this rank's micro-batches, on the CPU


def saves_between_steps(settings: TrainingConfig, *, evaluates: bool) -> bool:
    """Return True if some checkpoint is written while steps continue; those before an evaluation are not."""
    if settings.save_strategy == "no":
        return False
    if not evaluates or settings.eval_strategy != settings.save_strategy:
        return True
    return settings.save_steps is not None and settings.save_steps % (settings.eval_steps or 1) != 0


class Timetable:
    """The steps of a run, and after which of them it evaluates and saves; the same on every rank."""

    def __init__(self, parts: Assembly) -> None:
        """Follow the settings, the plan and the schedule in ``parts``."""
        self._parts = parts
        self._settings = parts.config.training
        self._per_epoch = parts.schedule.steps_per_epoch
        self._total = parts.schedule.total_steps

    def position(self, step: int) -> Position:
        """Return the position after ``step`` steps."""
        return Position(step, step / self._per_epoch, step % self._per_epoch == 0)

    def steps_after(self, resumed_step: int) -> Iterator[StepInput]:
        """Yield the steps after ``resumed_step``; micro-batches are collated on demand."""
        parts = self._parts
        collate = replace(parts.collate, packed=self._settings.packing)
        first_epoch, taken = divmod(resumed_step, self._per_epoch)
        for epoch in range(first_epoch, ceil(self._total / self._per_epoch)):
            start = taken if epoch == first_epoch else 0
            stream = steps(parts.train_set, parts.plan.for_epoch(epoch), parts.comm.rank, collate, start=start)
            for step, micro_batches in enumerate(stream, start=epoch * self._per_epoch + start + 1):
                if step > self._total:
                    return
                yield StepInput(self.position(step), micro_batches)

    def evaluation_is_due(self, position: Position) -> bool:
        """Return True if the run evaluates here: by ``eval_strategy``, and always after the last step."""
        if self._parts.evaluation is None:
            return False
        return self._is_due(position, self._settings.eval_strategy, self._settings.eval_steps)

    def checkpoint_is_due(self, position: Position) -> bool:
        """Return True if the run saves a checkpoint here: by ``save_strategy``, and always after the last step.

        The finished run saves its model anyway, but only a checkpoint has the optimizer's state.
        """
        return self._is_due(position, self._settings.save_strategy, self._settings.save_steps)

    def _is_due(self, position: Position, strategy: str, steps: int | None) -> bool:
        if strategy == "no":
            return False
        if position.step == self._total:
            return True
        return position.ends_epoch if steps is None else position.step % steps == 0

    def heaviest_step(self, resumed_step: int) -> int:
        """Return the step to trace: the one of the current epoch with rank 0's largest padded micro-batch.

        It is not the first step, which has no optimizer state yet, unless that is the only one. The same on every rank;
        0 if no step is left after ``resumed_step``.
        """
        parts = self._parts
        epoch, taken = divmod(resumed_step, self._per_epoch)
        before = epoch * self._per_epoch
        left = min(self._per_epoch, self._total - before)
        causal, packed = parts.collate.causal, self._settings.packing
        sizes = step_sizes(parts.plan.for_epoch(epoch), parts.train_set, 0, causal=causal, packed=packed)
        later = range(taken or 1, left) or range(taken, left)
        return before + 1 + max(later, key=sizes.__getitem__) if later else 0
