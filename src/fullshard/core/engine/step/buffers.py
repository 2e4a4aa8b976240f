"""Buffers whose memory is freed and allocated again while tensors view it, and an account of their bytes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fullshard.core.comm import Device
from fullshard.core.engine.step.recorder import SILENT


class Account:
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
        self.watch: Callable[[], None] = SILENT.sample

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
        account: Counts it.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: Device, account: Account) -> None:
        """Allocate the memory; ``release`` frees it."""
        self.tensor = device.empty(numel, dtype)
        self.alias = self.tensor.data
        self.version = 0
        self._storage = self.tensor.untyped_storage()
        self.nbytes = self._storage.nbytes()
        self._device = device
        self.account = account
        account.add("gathered", self.nbytes)

    @property
    def held(self) -> bool:
        """True if the memory is allocated."""
        return self._storage.nbytes() == self.nbytes

    def take(self) -> None:
        """Allocate memory with undefined content; do nothing if it is allocated."""
        if not self.held:
            self._device.allocate(self._storage, self.nbytes)
            self.account.add("gathered", self.nbytes)

    def release(self) -> None:
        """Free the memory; every view is unreadable until the next ``take``."""
        if self.held and self.nbytes:
            self._device.release(self._storage)
            self.account.add("gathered", -self.nbytes)
