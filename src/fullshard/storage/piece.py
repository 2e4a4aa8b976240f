"""What the checkpoint room knows of a sharded tensor: a run of its flattened elements, and nothing of the engine."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Piece:
    """A run of the flattened elements of one named tensor, as one rank holds it.

    Every shard that the engine makes is such a run, so a checkpoint of any world size is a set of intervals, and
    loading into another world size is the intersection of intervals.

    Attributes:
        name: Of the tensor, unique in the checkpoint, such as ``model/encoder.block.0.weight``.
        shape: Shape of the whole tensor; ``()`` for a scalar.
        start: First element, counted in the flattened whole tensor.
        tensor: The elements, (stop - start,), contiguous, on any device. Written from, or read into.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    tensor: torch.Tensor

    @property
    def stop(self) -> int:
        """The element just past the run."""
        return self.start + self.tensor.numel()
