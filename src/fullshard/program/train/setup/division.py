"""Division of a step's rows over ranks and micro-batches, and of the same rows over another number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from fullshard.errors import ConfigError
from fullshard.program.config import RunConfig


@dataclass(frozen=True)
class Division:
    """The division of one optimizer step."""

    ranks: int  # number of ranks
    each: int  # rows of a micro-batch on one rank; with a token budget, its tokens including padding
    accumulation: int  # micro-batches of a rank
    by_tokens: bool  # whether micro-batches are cut by tokens

    @classmethod
    def of(cls, config: RunConfig, ranks: int) -> Division:
        """Return the division that the settings request on a number of ranks."""
        settings = config.training
        tokens = settings.per_device_train_batch_tokens
        each = settings.per_device_train_batch_size if tokens is None else tokens
        return cls(ranks, each, settings.gradient_accumulation_steps, tokens is not None)

    @classmethod
    def began(cls, values: Mapping[str, Any]) -> Division | None:
        """Return the division at a run's start from the values of a checkpoint; None if an older version wrote it."""
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

    def as_values(self) -> dict[str, Any]:
        """Return the values that :meth:`began` reads."""
        return asdict(self)

    def on(self, ranks: int) -> Division:
        """Return the division of the same rows over another number of ranks, in micro-batches that are not larger.

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
        """Return the settings that request this division."""
        each = "per_device_train_batch_tokens" if self.by_tokens else "per_device_train_batch_size"
        changed = {each: self.each, "gradient_accumulation_steps": self.accumulation}
        return config.model_copy(update={"training": config.training.model_copy(update=changed)})


def began_with(asked: Division, began: Division | None) -> Division:
    """Return the division that a run keeps: the one it ``began`` with, unless the settings now request another.

    Args:
        asked: The division that the settings request on the current ranks.
        began: The division they requested at the run's start, on the ranks it had then; None: not known.
    """
    if began is None or replace(asked, ranks=began.ranks) != began:
        return asked
    return began
