"""What a way is: a change of how a model computes, which leaves what it computes as it was but for rounding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Part = Literal["kernels", "attention", "blocks"]
"""What a way changes, in the order in which ways are applied. A run has at most one way for each part."""


@dataclass(frozen=True)
class Facts:
    """What a way may ask about a run, besides its model."""

    device: torch.device  # where the ranks compute
    dtype: torch.dtype  # that the blocks compute in
    packing: bool  # whether a sequence has several rows
    longest: int  # most tokens of a row: of source and target, for a causal model of both joined
    assumed: bool = False  # whether the device is that of a data sheet, which has all that kernels need


class Way(Protocol):
    """One way. Methods are called alike on every rank, with the same arguments."""

    @property
    def name(self) -> str:
        """The name in ``speed.ways``."""
        ...

    @property
    def purpose(self) -> str:
        """One sentence for users: what is computed how, and for which models."""
        ...

    @property
    def part(self) -> Part:
        """What it changes."""
        ...

    @property
    def exact(self) -> bool:
        """True if results are equal to the bit; False: they round differently."""
        ...

    def misfit(self, model: PreTrainedModel, facts: Facts) -> str | None:
        """Return why the way does not apply, with the rule and the value that breaks it; None if it applies."""
        ...

    def apply(self, model: PreTrainedModel, facts: Facts) -> None:
        """Change the model in place, before it is sharded; called once, only if there is no misfit.

        ``model`` has its adapter, and is on the CPU or the meta device. Names of modules and parameters do not change.
        """
        ...
