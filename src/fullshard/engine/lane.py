"""One lane in memory: the rank's shard, the gathered buffer, the unsharded gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from fullshard.engine.buffers import Account, PermanentBuffer, ReusableBuffer
from fullshard.errors import InvariantError
from fullshard.layout import Lane


@dataclass
class Origin:
    """Where a parameter comes from.

    Attributes:
        param: The user's Parameter; it becomes the shard.
        names: Qualified names, first one first.
        slots: ``(module, key)`` where it is registered.
    """

    param: nn.Parameter
    names: tuple[str, ...]
    slots: list[tuple[nn.Module, str]]


@dataclass
class CutLane:
    """A lane whose shard has been cut from the unsharded parameters, before it has a gathered buffer.

    Attributes:
        lane: The layout.
        shard: This rank's part of the parameters, (shard_numel,).
        shapes: Unsharded shape of each placement.
        origins: Where each placement's parameter comes from.
        compute: Dtype it is gathered in.
        reduce: Dtype gradients are reduced in.
        trainable: Whether the parameters require gradients.
    """

    lane: Lane
    shard: torch.Tensor
    shapes: list[tuple[int, ...]]
    origins: list[Origin]
    compute: torch.dtype
    reduce: torch.dtype
    trainable: bool


class LaneState:
    """The buffers of one lane on one rank.

    Attributes:
        lane: The layout.
        trainable: Whether its parameters require gradients; a lane is all trainable or all frozen.
        shard: This rank's part of the parameters, (shard_numel,), in the dtype that the optimizer updates. Frozen
            lanes keep it in the compute dtype: there is nothing to update.
        full: The gathered parameters, (world_size * shard_numel,), in the compute dtype.
        shapes: Unsharded shape of each placement.
        written: Placements whose gradient is in ``gradient``.
        gradient: The unsharded gradient, (world_size * shard_numel,), in the reduce dtype; None while there is none.
    """

    def __init__(self, cut: CutLane, full: ReusableBuffer | PermanentBuffer, account: Account) -> None:
        """Take over the shard of ``cut``; ``full`` becomes its gathered buffer."""
        self.lane = cut.lane
        self.trainable = cut.trainable
        self.shard = cut.shard
        self.full = full
        self.reduce_dtype = cut.reduce
        self.shapes = cut.shapes
        self.gradient: torch.Tensor | None = None
        self.written: set[int] = set()
        self._account = account
        account.add("shards", cut.shard.nbytes)

    def add_gradient(self, place: int, gradient: torch.Tensor) -> None:
        """Copy (with cast) the gradient of placement ``place`` into the lane, or add it to what arrived before."""
        view, fresh = self.gradient_of(place)
        if fresh:
            view.copy_(gradient)
        else:
            view.add_(gradient)

    def gradient_of(self, place: int) -> tuple[torch.Tensor, bool]:
        """Where the gradient of placement ``place`` goes, in the parameter's shape, for the caller to write.

        Returns:
            The view, and whether it holds nothing yet (then the caller overwrites it, else adds).
        """
        if self.gradient is None:
            self._make_gradient()
        assert self.gradient is not None
        start, numel = self.lane.placements[place].start, self.lane.placements[place].numel
        fresh = place not in self.written
        self.written.add(place)
        return self.gradient[start : start + numel].view(self.shapes[place]), fresh

    def _make_gradient(self) -> None:
        """Allocate without clearing: what stays unwritten is zeroed once, at reduce time."""
        numel = self.lane.world_size * self.lane.shard_numel
        self.gradient = torch.empty(numel, dtype=self.reduce_dtype, device=self.full.tensor.device)
        self._account.add("gradients", self.gradient.nbytes)

    def complete_gradient(self) -> torch.Tensor:
        """The whole unsharded gradient, zeros in padding and where nothing arrived."""
        if not self.trainable:
            raise InvariantError("a frozen lane has no gradient to reduce")
        if self.gradient is None:
            self._make_gradient()
        assert self.gradient is not None
        for low, high in self.lane.gaps():
            self.gradient[low:high].zero_()
        for place, placement in enumerate(self.lane.placements):
            if place not in self.written:
                self.gradient[placement.start : placement.start + placement.numel].zero_()
        self.written.clear()
        return self.gradient

    def drop_gradient(self) -> None:
        """Free the unsharded gradient."""
        if self.gradient is not None:
            self._account.add("gradients", -self.gradient.nbytes)
        self.gradient = None
        self.written.clear()
