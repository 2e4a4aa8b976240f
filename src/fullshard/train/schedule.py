"""The learning rate of each step as a pure function, so that a resumed run needs the step number only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Schedule:
    """Factor on the learning rate for each optimizer step.

    Attributes:
        kind: ``linear``: from 1 after warm-up down to 0 after the last step. ``step``: times ``gamma`` every
            ``step_epochs`` epochs, as torch's ``StepLR`` stepped once an epoch. ``constant``: 1.
        total_steps: Optimizer steps of the run.
        steps_per_epoch: Optimizer steps of one epoch.
        warmup_steps: Steps over which the factor first rises linearly from 0.
        step_epochs: Epochs between two decays of ``step``.
        gamma: Factor of each decay of ``step``.
    """

    kind: Literal["linear", "step", "constant"]
    total_steps: int
    steps_per_epoch: int
    warmup_steps: int = 0
    step_epochs: int = 1
    gamma: float = 1.0

    def factor(self, step: int) -> float:
        """Factor for one step.

        Args:
            step: Steps taken before it; the first step has 0.

        Returns:
            From 0 to 1.
        """
        if step < self.warmup_steps:
            return step / self.warmup_steps
        if self.kind == "linear":
            return max(0.0, (self.total_steps - step) / max(1, self.total_steps - self.warmup_steps))
        if self.kind == "step":
            return self.gamma ** (step // self.steps_per_epoch // self.step_epochs)
        return 1.0
