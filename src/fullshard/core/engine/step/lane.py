"""A lane in memory: this rank's shard, the gathered buffer and the unsharded gradient.

A buffer's memory is freed and allocated again while tensors view it; a tracker has the bytes of all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import torch

from fullshard.core.comm import Device, Mesh, Work
from fullshard.core.engine.step.precision import Dtypes
from fullshard.core.layout import LaneLayout
from fullshard.core.torch_private import foreach_copy, foreach_zero
from fullshard.errors import InvariantError


class BufferTracker:
    """Bytes of the engine's buffers, now and at most, by kind.

    Attributes:
        live: Bytes per kind now. Kinds: ``shards``, ``gathered``, ``gradients`` (unsharded, waiting for their reduce).
        peak: Highest ``live`` per kind.
        peak_total: Highest sum over kinds.
        watch: Called after each change.
    """

    def __init__(self) -> None:
        """Start at zero."""
        self.live: dict[str, int] = {"shards": 0, "gathered": 0, "gradients": 0}
        self.peak = dict(self.live)
        self.peak_total = 0
        self.watch: Callable[[], None] = lambda: None

    def add(self, kind: str, nbytes: int) -> None:
        """Add ``nbytes`` of ``kind``; a negative number subtracts."""
        self.live[kind] += nbytes
        self.peak[kind] = max(self.peak[kind], self.live[kind])
        self.peak_total = max(self.peak_total, sum(self.live.values()))
        self.watch()


class PermanentBuffer:
    """The gathered buffer of a lane that is not sharded: the shard itself, which is never freed.

    Attributes:
        tensor: The shard with its own version counter, so that autograd does not take an optimizer's update for an
            in-place change of what it saved.
        alias: The same memory.
        version: See :class:`ReusableBuffer`.
        nbytes: 0, because it needs no memory in addition to the shard.
    """

    held = True
    nbytes = 0

    def __init__(self, shard: torch.Tensor) -> None:
        """Alias ``shard``, (shard_numel,)."""
        self.tensor = shard.data
        self.alias = shard.data
        self.version = 0

    def take(self) -> None:
        """Do nothing: the memory is always allocated."""

    def release(self) -> None:
        """Do nothing: the memory is never freed."""


class ReusableBuffer:
    """A flat tensor whose memory is freed and allocated again while views of it stay alive.

    Autograd saves views of parameters (``F.linear`` saves ``weight.t()``). Replacing attributes does not reach them;
    resizing the storage under all of them does. Content is written through ``alias``, which has its own version
    counter, so that autograd does not take a gather for an in-place change of what it saved.

    Attributes:
        tensor: The flat tensor that parameters view; never written.
        alias: The same memory, for writing.
        version: Version of ``tensor`` when its content arrived; a later one shows that a user's module wrote to it.
        nbytes: Size of the memory.
        tracker: Counts it.
    """

    def __init__(self, tensor: torch.Tensor, device: Device, tracker: BufferTracker) -> None:
        """Own the memory of ``tensor``, which has all of it; ``release`` frees it."""
        self.tensor = tensor
        self.alias = self.tensor.data
        self.version = 0
        self._storage = self.tensor.untyped_storage()
        self.nbytes = self._storage.nbytes()
        self._device = device
        self.tracker = tracker
        tracker.add("gathered", self.nbytes)

    @property
    def held(self) -> bool:
        """True if the memory is allocated."""
        return self._storage.nbytes() == self.nbytes

    def take(self) -> None:
        """Allocate memory with undefined content; do nothing if it is allocated."""
        if not self.held:
            self._device.allocate(self._storage, self.nbytes)
            self.tracker.add("gathered", self.nbytes)

    def release(self) -> None:
        """Free the memory; every view is unreadable until the next ``take``."""
        if self.held and self.nbytes:
            self._device.release(self._storage)
            self.tracker.add("gathered", -self.nbytes)


HELD_BYTES = 1 << 25
"""Gradients of a lane wait to be copied together until they take this much; more takes a GPU longer than a launch."""


class LaneState(Enum):
    """Content of a lane's gathered buffer."""

    SHARDED = "sharded"
    """Nothing; its memory is free."""
    GATHERING = "gathering"
    """An all-gather writes to it."""
    GATHERED = "gathered"
    """The full parameters."""
    SPENT = "spent"
    """Nothing: freed early in this backward, because no operation left in it reads the parameters."""
    HOME = "home"
    """Nothing: a table's rows stay with their ranks, which exchange them (``engine/tables``)."""


def predivisor(mesh: Mesh, dtype: torch.dtype) -> float:
    """Return the divisor of float16 gradients before the sum: the power of two nearest to sqrt(ranks); else 1.

    Sums of 65,504 and more overflow float16. Dividing by the number of ranks before the sum would flush small gradients
    to zero, so half of the division is done before it and half after. Dividing by a power of two is exact.
    """
    return 2.0 ** round(0.5 * (mesh.size.bit_length() - 1)) if dtype == torch.float16 else 1.0


@dataclass(eq=False)
class Lane:
    """The buffers of one lane on one rank.

    ::

        SHARDED --issue_gather--> GATHERING --finish_gather--> GATHERED --release--> SHARDED
                                                                  |  ^
                                                       free_early v  | reclaim, then gathered again
                                                                SPENT

    Attributes:
        layout: Where its parameters lie.
        mesh: The ranks that share it.
        shard: This rank's part of the parameters, (shard_numel,), in the dtype that the optimizer updates. Frozen
            lanes keep it in the compute dtype, since nothing updates it.
        shapes: Full shape of each placement.
        dtypes: Dtypes it is kept, gathered and reduced in.
        trainable: True if any of its parameters requires gradients. A lane starts all trainable or all frozen; one
            that is partly frozen later keeps its layout, so that rows keep their place in optimizer states.
        replicated: True if each rank keeps the full lane, so that the shard also serves as gathered buffer if it can.
        pinned: True if the shard is in page-locked host memory.
        device: The device that its unit computes on.
        tracker: Bytes of the engine's buffers.
        full: The gathered buffer, (world_size * shard_numel,), in the compute dtype; made by ``allocate``.
        state: What ``full`` holds.
        gather_work: The all-gather under way, or None.
        unsettled: A finished all-gather from which other ranks may still read, or None.
        gradient: The unsharded gradient, (world_size * shard_numel,), in the reduce dtype, or None.
        written: Placements whose gradient is in ``gradient`` or held.
        held: Gradients of ``held_bytes`` that are not in ``gradient`` yet, each with the view that it is copied to.
        partial: The gradient of this shard summed over the shard group but not yet over replicas, (shard_numel,), or
            None.
    """

    layout: LaneLayout
    mesh: Mesh
    shard: torch.Tensor
    shapes: list[tuple[int, ...]]
    dtypes: Dtypes
    trainable: bool
    replicated: bool
    pinned: bool
    device: Device
    tracker: BufferTracker
    full: ReusableBuffer | PermanentBuffer = field(init=False)
    state: LaneState = LaneState.SHARDED
    gather_work: Work | None = None
    unsettled: Work | None = None
    gradient: torch.Tensor | None = None
    written: set[int] = field(default_factory=set)
    held: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    held_bytes: int = 0
    partial: torch.Tensor | None = None

    def allocate(self) -> None:
        """Make the gathered buffer, whose memory is held until ``release``."""
        self.full = self._make_full()
        self.tracker.add("shards", self.shard.nbytes)

    @property
    def numel(self) -> int:
        """Elements of the gathered buffer, padding included."""
        return self.layout.world_size * self.layout.shard_numel

    @property
    def offloaded(self) -> bool:
        """True if the shard is in host memory while the unit computes on another device."""
        return self.shard.device != self.device.device

    # Parameters

    @property
    def own_part(self) -> torch.Tensor:
        """This rank's slice of the gathered buffer, (shard_numel,), outside autograd's version counting."""
        low, high = self.layout.shard_bounds(self.mesh.shard_group.rank)
        return self.full.alias[low:high]

    def full_view(self, place: int) -> torch.Tensor:
        """Return the full parameter of placement ``place``, in its shape."""
        placement = self.layout.placements[place]
        return self.full.tensor[placement.start : placement.stop].view(self.shapes[place])

    def has_changed(self) -> bool:
        """Return True if this rank's gathered part differs from its shard; the lane is gathered."""
        return not torch.equal(self.own_part, self.shard.to(self.own_part))

    def expect_writes(self) -> None:
        """Prepare a gathered lane for :meth:`write_back`."""

    def write_back(self) -> None:
        """Copy what was changed in the gathered parameters into this rank's shard, element by element."""
        # Only where they differ: a shard is wider than the compute dtype, and unchanged elements must keep their bits.
        changed = (self.own_part != self.shard.to(self.own_part)).to(self.shard.device)
        self.shard[changed] = self.own_part.to(self.shard.device)[changed].to(self.shard.dtype)

    def issue_gather(self) -> None:
        """Start the all-gather of a sharded lane; a replicated one needs no communication.

        The shard is cast straight into this rank's slice of the gathered buffer (one pass over 1/N of the lane, from
        host memory if offloaded), and the collective runs in place: parameters are views of its output.
        """
        self.state = LaneState.GATHERING
        if isinstance(self.full, PermanentBuffer):
            return
        self.full.take()
        mine = self.own_part
        # To the device first: a cast on the host would go through memory that is not page-locked.
        mine.copy_(self.shard.to(mine.device, non_blocking=True))
        self.gather_work = self.mesh.shard_group.all_gather(self.full.alias, mine)

    def finish_gather(self) -> None:
        """Mark the all-gather as finished; the caller has waited for ``gather_work``."""
        self.state = LaneState.GATHERED
        self.full.version = self.full.tensor._version
        self.unsettled, self.gather_work = self.gather_work or self.unsettled, None

    def free_early(self) -> None:
        """Free the gathered buffer of a gathered, settled lane while its unit stays gathered."""
        self.full.release()
        self.state = LaneState.SPENT

    def reclaim(self) -> None:
        """Make the next gather of the unit include this lane, if it was freed early."""
        if self.state is LaneState.SPENT:
            self.state = LaneState.SHARDED

    def release(self) -> None:
        """Free the gathered buffer; no gather may be under way, and other ranks must have read their part."""
        if self.gather_work is not None or self.unsettled is not None:
            raise InvariantError(f"a lane was released in state {self.state.value} while its gather was not settled")
        self.full.release()
        self.state = LaneState.SHARDED

    def retype(self, dtypes: Dtypes) -> None:
        """Move to new memory of these dtypes; the caller binds the parameters to it."""
        self.tracker.add("shards", -self.shard.nbytes)
        self.shard = self.shard.to(dtypes.shard, copy=True)
        if self.pinned:
            self.shard = self.device.pin(self.shard)
        self.tracker.add("shards", self.shard.nbytes)
        self.dtypes = dtypes
        self.full.release()
        self.full = self._make_full()

    def _make_full(self) -> ReusableBuffer | PermanentBuffer:
        if self.replicated and self.shard.dtype == self.dtypes.compute and not self.offloaded:
            return PermanentBuffer(self.shard)
        return ReusableBuffer(self.device.empty(self.numel, self.dtypes.compute), self.device, self.tracker)

    # Gradients

    def add_gradient(self, place: int, gradient: torch.Tensor) -> None:
        """Take the gradient of placement ``place``, to be copied with others, or add it to what arrived before."""
        view, empty = self.gradient_of(place)
        if not empty:
            view.add_(gradient)
            return
        self.held.append((view, gradient))
        self.held_bytes += gradient.nbytes
        if self.held_bytes >= HELD_BYTES:
            self.copy_held()

    def copy_held(self) -> None:
        """Copy (with cast) the held gradients into the lane, in one operator, and free them."""
        if self.held:
            views, gradients = [view for view, _ in self.held], [gradient for _, gradient in self.held]
            foreach_copy(views, gradients)
        self.held, self.held_bytes = [], 0

    def gradient_of(self, place: int) -> tuple[torch.Tensor, bool]:
        """Return where the caller writes the gradient of placement ``place``.

        Returns:
            A view in the parameter's shape, and whether it is still unwritten (then the caller overwrites, else adds).
        """
        gradient = self._gradient()
        start, numel = self.layout.placements[place].start, self.layout.placements[place].numel
        empty = place not in self.written
        if not empty:
            self.copy_held()
        self.written.add(place)
        return gradient[start : start + numel].view(self.shapes[place]), empty

    def _gradient(self) -> torch.Tensor:
        """Return the gradient buffer, allocated without clearing: what stays unwritten is zeroed once, when reduced."""
        if self.gradient is None:
            self.gradient = self.device.empty(self.numel, self.dtypes.reduce)
            self.tracker.add("gradients", self.gradient.nbytes)
        return self.gradient

    def complete_gradient(self) -> torch.Tensor:
        """Return the unsharded gradient, (world_size * shard_numel,), with zeros in padding and where none arrived."""
        if not self.trainable:
            raise InvariantError("a frozen lane has no gradient to reduce")
        self.copy_held()
        gradient = self._gradient()
        unset = [gradient[low:high] for low, high in self.layout.gaps()]
        unset += [self.gradient_of(place)[0] for place in range(len(self.shapes)) if place not in self.written]
        if unset:
            foreach_zero(unset)
        self.written.clear()
        return gradient

    @property
    def holds_gradient(self) -> bool:
        """True while a gradient waits to be reduced or is being reduced."""
        return self.gradient is not None

    def start_sum(self) -> tuple[torch.Tensor, Work | None]:
        """Start to sum the unsharded gradient over the shard group; return this rank's slice and what to wait for."""
        full, comm = self.complete_gradient(), self.mesh.shard_group
        divisor = predivisor(self.mesh, full.dtype)
        if divisor != 1.0:
            full.div_(divisor)
        if comm.size == 1:
            # The gradient of an unsharded lane is its own shard: nothing is copied.
            return full.to(self.dtypes.reduce_sum), None
        shard = full.new_empty(self.layout.shard_numel, dtype=self.dtypes.reduce_sum)
        return shard, comm.reduce_scatter(shard, full)

    def drop_gradient(self) -> None:
        """Free the unsharded gradient."""
        if self.gradient is not None:
            self.tracker.add("gradients", -self.gradient.nbytes)
        self.gradient = None
        self.held, self.held_bytes = [], 0
        self.written.clear()

    def to_host(self, shard: torch.Tensor) -> torch.Tensor:
        """Start copying a reduced gradient, (shard_numel,), to host memory; ``Device.host_ready`` waits for it."""
        host = self.device.empty_host(shard.numel(), self.shard.dtype, pinned=self.pinned)

        def copy() -> None:
            # Cast on the device: a cast on the host would read what the copy has not brought yet.
            host.copy_(shard.to(host.dtype), non_blocking=True)

        self.device.on_side_stream("offload", copy).wait()
        return host
