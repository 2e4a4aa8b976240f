"""Runs of a tensor's flattened elements, and the plan of one rank's runs to save; independent of the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Piece:
    """A run of the flattened elements of one named tensor, as one rank holds it.

    Every shard that the engine makes is such a run, so a checkpoint of any world size is a set of intervals, and
    loading into another world size is the intersection of intervals.
    """

    name: str  # the tensor's name, unique in the checkpoint, such as ``model/encoder.block.0.weight``
    shape: tuple[int, ...]  # shape of the full tensor; ``()`` for a scalar
    start: int  # first element, counted in the flattened full tensor
    tensor: torch.Tensor  # the elements, (stop - start,), contiguous, on any device. Written from, or read into

    @property
    def stop(self) -> int:
        """The element just past the run."""
        return self.start + self.tensor.numel()


@dataclass
class SavePlan:
    """The training state that one rank saves; together the ranks save each element once.

    Attributes:
        pieces: Runs of tensors, none empty, on any device.
        groups: Options of the optimizer's parameter groups as JSON holds them, with parameter names under ``params``.
        scalars: The optimizer's state other than tensors, by parameter name and key.
    """

    pieces: list[Piece] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
