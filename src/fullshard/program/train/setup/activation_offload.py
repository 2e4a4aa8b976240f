"""Activations in host memory between forward and backward: copied on a side stream while blocks compute."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fullshard.core.comm import Device, Work
from fullshard.core.engine.registry import runtime_of
from fullshard.core.transformers_private import around_checkpoint

LEAST_BYTES = 1 << 20
"""Smallest storage to offload; many small copies would cost more than they free."""

_STREAM = "activations"


class _Copy:
    """A storage that blocks saved: on the device, in host memory, or both."""

    def __init__(self, saved: Tensor) -> None:
        storage = saved.untyped_storage()
        self.alive = weakref.ref(storage)
        self.device: Tensor | None = torch.empty(0, dtype=torch.uint8, device=saved.device).set_(storage)
        self.host: Tensor | None = None
        self.arrives: Work | None = None  # the copy back that is under way
        self.users = 0  # groups that need it on the device
        self.saved: Tensor | None = saved  # for its version
        self.version = saved._version
        self.changed = False

    def use(self, saved: Tensor | None = None) -> None:
        """Count a group that needs it on the device, where ``saved`` still is."""
        self.users += 1
        if self.device is None and saved is not None:
            self.device = torch.empty(0, dtype=torch.uint8, device=saved.device).set_(saved.untyped_storage())

    def leave(self) -> None:
        """Free it on the device once no group needs it there; on the compute stream, which has waited for copies."""
        self.users -= 1
        if not self.users:
            self.check()
            self.device = self.saved = None

    def ready(self) -> Tensor:
        """Return it on the device, where a group has it, for the compute stream.

        Raises:
            RuntimeError: It was changed in place since it was saved; torch raises this for what it keeps itself.
        """
        self.check()
        if self.changed:
            raise RuntimeError(
                "A tensor that backward needs was modified by an inplace operation after it was saved; it is offloaded "
                "by training.activation_offload."
            )
        if self.arrives is not None:
            self.arrives.wait()
            self.arrives = None
        assert self.device is not None, "a group has it there"
        return self.device

    def check(self) -> None:
        """Note whether it was changed in place since it was saved: then a copy may have either content."""
        self.changed = self.changed or (self.saved is not None and self.saved._version != self.version)


class _Group:
    """What one block saved. Autograd's saved tensors keep it alive, so it ends with the last of them.

    Attributes:
        before: The group of the block that ran before, which backward needs next.
        there: True while its copies are on the device, or on the way there.
    """

    def __init__(self, before: _Group | None, device: Device) -> None:
        self.before = before
        self.there = True
        self._leaves = False  # whether it was copied to the host
        self._device = device
        self._copies: dict[_Copy, None] = {}
        self._under_way: list[Work] = []

    def add(self, copy: _Copy, saved: Tensor) -> None:
        """Take a storage that the block saved."""
        if copy not in self._copies:
            self._copies[copy] = None
            copy.use(saved)

    def to_host(self) -> None:
        """Copy to host memory what is not there yet, behind what the block computed."""
        self._leaves = True
        pairs = []
        for copy in self._copies:
            if copy.host is None and copy.device is not None:
                copy.host = self._device.empty_host(copy.device.numel(), torch.uint8, pinned=True)
                pairs.append((copy.host, copy.device))
        self._start(pairs)

    def fetch(self) -> None:
        """Copy back to the device what is not there, into memory of the compute stream."""
        gone = [copy for copy in self._copies if copy.device is None]
        pairs = []
        for copy in gone:
            assert copy.host is not None, "it was left after the copy to the host"
            copy.device = self._device.empty(copy.host.numel(), torch.uint8)
            pairs.append((copy.device, copy.host))
        work = self._start(pairs)
        for copy in gone:
            copy.arrives = work
        for copy in self._copies:
            copy.use()
        self.there = True

    def _start(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Work | None:
        if not pairs:
            return None
        self._under_way.append(self._device.on_side_stream(_STREAM, partial(_copy_all, pairs)))
        return self._under_way[-1]

    def leave(self) -> None:
        """Free its copies on the device if it was offloaded, as far as other groups do not need them."""
        if self._leaves:
            self._free()

    def _free(self) -> None:
        while self._under_way:
            self._under_way.pop().wait()  # the compute stream waits, on which the memory is freed
        if self.there:
            self.there = False
            for copy in self._copies:
                copy.leave()

    def __del__(self) -> None:
        """Wait for copies under way, whose memory would otherwise be freed under them."""
        self._free()


def _copy_all(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for target, source in pairs:
            target.copy_(source, non_blocking=True)


class _Saved:
    """A tensor that autograd saved: how it lies in its storage."""

    def __init__(self, copy: _Copy, group: _Group, saved: Tensor) -> None:
        self.copy, self.group, self.dtype = copy, group, saved.dtype
        self.form = saved.storage_offset(), saved.size(), saved.stride()


class ActivationOffload:
    """Offloads what blocks save for backward, by hooks on the blocks.

    Two blocks' activations are on the device in forward: those of the running block, and those under way to the host.
    In backward they are fetched a block ahead. What the last block saves stays, because backward needs it first. Also
    gathered parameters stay, whose memory the engine frees and fills itself; so do tensors below ``LEAST_BYTES``.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], device: Device) -> None:
        """Watch ``blocks``, in the order of their forward, of a sharded ``model``; ``device`` makes the copies."""
        self._model, self._device = model, device
        self._where = runtime_of(model).device.device
        self._known: dict[int, weakref.ref[_Copy]] = {}
        self._kept = self._storages_to_keep()
        self._group: _Group | None = None  # of the block that runs
        self._leaving: _Group | None = None  # of the block before, under way to the host
        self._before: weakref.ref[_Group] | None = None
        self._reached: weakref.WeakSet[_Group] = weakref.WeakSet()  # on the device in backward
        self._hooks: saved_tensors_hooks | None = None
        model.register_forward_pre_hook(self._start)
        for block in blocks:
            end = partial(self._end, last=block is blocks[-1])
            # Outside of a checkpoint, which saves nothing but its inputs if no hooks are between it and its block.
            if not around_checkpoint(block, self._begin, end):
                # Inside of the engine's hooks: after its gather, and before it frees the parameters.
                block.register_forward_pre_hook(self._begin)
                block.register_forward_hook(end, prepend=True, always_call=True)

    def _start(self, _model: nn.Module, _args: Any) -> None:
        """Forget the last forward; lanes may have other memory since, which is not looked up again for each block."""
        if torch.is_grad_enabled():
            self._known.clear()
            self._before = None
            self._kept = self._storages_to_keep()

    def _begin(self, *_: Any) -> None:
        if not torch.is_grad_enabled() or self._hooks is not None:  # a block inside of another, or of itself
            return
        self._group = _Group(None if self._before is None else self._before(), self._device)
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.__enter__()

    def _end(self, *_: Any, last: bool) -> None:
        if self._hooks is None or self._group is None:
            return
        self._hooks.__exit__()
        group, leaving = self._group, self._leaving
        self._hooks = self._group = self._leaving = None
        self._before = weakref.ref(group)
        if not last:
            group.to_host()
            self._leaving = group
        if leaving is not None:
            leaving.leave()

    def _storages_to_keep(self) -> set[int]:
        lanes = [lane for unit in runtime_of(self._model).units for lane in unit.lanes]
        kept = [tensor for lane in lanes for tensor in (lane.full.tensor, lane.shard)]
        return {tensor.untyped_storage()._cdata for tensor in (*kept, *self._model.buffers())}

    def _pack(self, saved: Tensor) -> Tensor | _Saved:
        assert self._group is not None, "hooks are on while a block runs"
        if type(saved) is not Tensor or saved.layout is not torch.strided or not saved.is_floating_point():
            return saved
        storage = saved.untyped_storage()
        if saved.device != self._where or storage.nbytes() < LEAST_BYTES or storage._cdata in self._kept:
            return saved
        known = self._known.get(storage._cdata)
        copy = None if known is None else known()
        if copy is None or copy.alive() is None or copy.version != saved._version:
            copy = _Copy(saved)
            self._known[storage._cdata] = weakref.ref(copy)
        self._group.add(copy, saved)
        return _Saved(copy, self._group, saved)

    def _unpack(self, saved: Tensor | _Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        self._reach(saved.group)
        there = saved.copy.ready()
        with torch.no_grad():
            return torch.empty(0, dtype=saved.dtype, device=there.device).set_(there.untyped_storage(), *saved.form)

    def _reach(self, group: _Group) -> None:
        """Have a group on the device, and the next one on its way; free those behind."""
        if not group.there:
            group.fetch()
        ahead = group.before
        for other in list(self._reached):
            if other is not group and other is not ahead:
                other.leave()
                self._reached.discard(other)
        self._reached.add(group)
        if ahead is not None and ahead not in self._reached:
            if not ahead.there:
                ahead.fetch()
            self._reached.add(ahead)
