"""One lane in memory: the rank's shard, the gathered buffer, the unsharded gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from fullshard.comm import Device, Mesh
from fullshard.engine.step.buffers import Account, PermanentBuffer, ReusableBuffer
from fullshard.engine.step.precision import Dtypes
from fullshard.errors import InvariantError
from fullshard.layout import LaneLayout


@dataclass
class Origin:
    """Where a parameter comes from.

    Attributes:
        param: The user's Parameter; it becomes the shard.
        names: Qualified names, first one first.
        slots: ``(module, key)`` where it is registered.
        table: Whether it is alone in its lane, because it is a large embedding.
    """

    param: nn.Parameter
    names: tuple[str, ...]
    slots: list[tuple[nn.Module, str]]
    table: bool


@dataclass
class CutLane:
    """A lane whose shard has been cut from the unsharded parameters, before it has a gathered buffer.

    Attributes:
        layout: Where its parameters lie.
        mesh: The ranks that share it.
        shard: This rank's part of the parameters, (shard_numel,).
        shapes: Unsharded shape of each placement.
        origins: Where each placement's parameter comes from.
        dtypes: What it is kept, gathered and reduced in.
        trainable: Whether the parameters require gradients.
        whole: Whether the shard is the whole lane by policy, and serves as the gathered buffer where it can.
        pinned: Whether the shard lives in page-locked host memory.
    """

    layout: LaneLayout
    mesh: Mesh
    shard: torch.Tensor
    shapes: list[tuple[int, ...]]
    origins: list[Origin]
    dtypes: Dtypes
    trainable: bool
    whole: bool
    pinned: bool


class Lane:
    """The buffers of one lane on one rank.

    Attributes:
        layout: Where its parameters lie.
        mesh: The ranks that share it.
        trainable: Whether any of its parameters requires gradients. A lane is made all trainable or all frozen; one
            that is frozen in part later keeps its layout, so that optimizers' states keep their rows.
        dtypes: What it is kept, gathered and reduced in.
        shard: This rank's part of the parameters, (shard_numel,), in the dtype that the optimizer updates. Frozen
            lanes keep it in the compute dtype: there is nothing to update.
        full: The gathered parameters, (world_size * shard_numel,), in the compute dtype.
        shapes: Unsharded shape of each placement.
        written: Placements whose gradient is in ``gradient``.
        gradient: The unsharded gradient, (world_size * shard_numel,), in the reduce dtype; None while there is none.
        partial: The sum of gradients of this shard over the shard group, (shard_numel,), that replicas have not added
            up yet; None while there is none.
    """

    def __init__(self, cut: CutLane, device: Device, account: Account) -> None:
        """Take over the shard of ``cut``; the gathered buffer's memory is held."""
        self.layout = cut.layout
        self.mesh = cut.mesh
        self.trainable = cut.trainable
        self.dtypes = cut.dtypes
        self.shard = cut.shard
        self.shapes = cut.shapes
        self.whole = cut.whole
        self.pinned = cut.pinned
        self.device = device
        self.account = account
        self.gradient: torch.Tensor | None = None
        self.partial: torch.Tensor | None = None
        self.written: set[int] = set()
        self.full = self._make_full()
        account.add("shards", cut.shard.nbytes)

    @property
    def numel(self) -> int:
        """Elements of the gathered lane, padding included."""
        return self.layout.world_size * self.layout.shard_numel

    @property
    def offloaded(self) -> bool:
        """Whether the shard lives in host memory while the unit computes on a device."""
        return self.shard.device != self.device.device

    def _make_full(self) -> ReusableBuffer | PermanentBuffer:
        if self.whole and self.shard.dtype == self.dtypes.compute and not self.offloaded:
            return PermanentBuffer(self.shard)
        return ReusableBuffer(self.numel, self.dtypes.compute, self.device, self.account)

    def retype(self, dtypes: Dtypes) -> None:
        """Keep, gather and reduce in other dtypes from now on; parameters must be bound to the new memory."""
        self.account.add("shards", -self.shard.nbytes)
        self.shard = self.shard.to(dtypes.shard)
        if self.pinned:
            self.shard = self.device.pin(self.shard)
        self.account.add("shards", self.shard.nbytes)
        self.dtypes = dtypes
        self.full.release()
        self.full = self._make_full()

    def to_host(self, shard: torch.Tensor) -> torch.Tensor:
        """A reduced gradient, (shard_numel,), on its way to the host memory of the shard; see ``Device.host_ready``."""
        host = self.device.empty_host(shard.numel(), self.shard.dtype, pinned=self.pinned)

        def copy() -> None:
            # Cast on the device: a cast on the host would read what the copy has not brought yet.
            host.copy_(shard.to(host.dtype), non_blocking=True)

        self.device.aside("offload", copy).wait()
        return host

    def join(self, mesh: Mesh, account: Account) -> None:
        """Become part of a larger model: the same ranks, counted in its account; nothing but the shard may be held."""
        # Groups that are equal still count their messages each for itself: one model speaks through one mesh.
        whole = self.mesh.shard_group.size == 1 and mesh.shard_group.size > 1
        self.mesh = Mesh(self.mesh.shard_group, mesh.everyone) if whole else mesh
        self.account.add("shards", -self.shard.nbytes)
        account.add("shards", self.shard.nbytes)
        self.account = account
        if isinstance(self.full, ReusableBuffer):
            self.full.account = account

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
        start, numel = self.layout.placements[place].start, self.layout.placements[place].numel
        fresh = place not in self.written
        self.written.add(place)
        return self.gradient[start : start + numel].view(self.shapes[place]), fresh

    def _make_gradient(self) -> None:
        """Allocate without clearing: what stays unwritten is zeroed once, at reduce time."""
        self.gradient = self.device.empty(self.numel, self.dtypes.reduce)
        self.account.add("gradients", self.gradient.nbytes)

    def complete_gradient(self) -> torch.Tensor:
        """The whole unsharded gradient, zeros in padding and where nothing arrived."""
        if not self.trainable:
            raise InvariantError("a frozen lane has no gradient to reduce")
        if self.gradient is None:
            self._make_gradient()
        assert self.gradient is not None
        for low, high in self.layout.gaps():
            self.gradient[low:high].zero_()
        for place, placement in enumerate(self.layout.placements):
            if place not in self.written:
                self.gradient[placement.start : placement.start + placement.numel].zero_()
        self.written.clear()
        return self.gradient

    def drop_gradient(self) -> None:
        """Free the unsharded gradient."""
        if self.gradient is not None:
            self.account.add("gradients", -self.gradient.nbytes)
        self.gradient = None
        self.written.clear()
