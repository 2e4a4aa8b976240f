"""Memory that is given back and taken again while tensors view it, and the account of it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fullshard.comm import Device


class Account:
    """Bytes of buffers the engine holds right now and held at most, by kind.

    Attributes:
        live: Bytes per kind now. Kinds: ``shards``, ``gathered``, ``gradients`` (unsharded, waiting for their reduce).
        peak: Highest ``live`` per kind.
        watch: Called after each change while a step is recorded.
    """

    def __init__(self) -> None:
        """Start with nothing."""
        self.live: dict[str, int] = {"shards": 0, "gathered": 0, "gradients": 0}
        self.peak = dict(self.live)
        self.peak_total = 0
        self.watch: Callable[[], None] | None = None

    def add(self, kind: str, nbytes: int) -> None:
        """Take (or with a negative number give back) ``nbytes`` of ``kind``."""
        self.live[kind] += nbytes
        self.peak[kind] = max(self.peak[kind], self.live[kind])
        self.peak_total = max(self.peak_total, sum(self.live.values()))
        if self.watch is not None:
            self.watch()


class PermanentBuffer:
    """The gathered buffer of a lane that is not sharded: the shard itself, which stays.

    Attributes:
        tensor: The shard under a version counter of its own: the optimizer's updates are not in-place changes of what
            autograd saved.
        alias: The same memory.
        nbytes: 0: it costs nothing beside the shard.
    """

    held = True
    nbytes = 0

    def __init__(self, shard: torch.Tensor) -> None:
        """Stand for ``shard``, (shard_numel,)."""
        self.tensor = shard.data
        self.alias = shard.data

    def take(self) -> None:
        """Nothing: the memory is there."""

    def release(self) -> None:
        """Nothing: the memory stays."""


class ReusableBuffer:
    """A flat tensor whose memory comes and goes while views of it live on.

    Autograd saves views of parameters (``F.linear`` saves ``weight.t()``), which no re-pointing of attributes reaches;
    resizing the one storage under all of them does. Content is written through ``alias``, which has a version counter
    of its own, so that autograd does not take a gather for an in-place change of what it saved.

    Attributes:
        tensor: The flat tensor that parameters are views of; never written.
        alias: The same memory for writing.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: Device, account: Account) -> None:
        """Take the memory; ``release`` gives it back."""
        self.tensor = device.empty(numel, dtype)
        self.alias = self.tensor.data
        self._storage = self.tensor.untyped_storage()
        self.nbytes = self._storage.nbytes()
        self._device = device
        self.account = account
        account.add("gathered", self.nbytes)

    @property
    def held(self) -> bool:
        """Whether the memory is there."""
        return self._storage.nbytes() == self.nbytes

    def take(self) -> None:
        """Get memory, with undefined content; nothing where it is there."""
        if not self.held:
            self._device.take(self._storage, self.nbytes)
            self.account.add("gathered", self.nbytes)

    def release(self) -> None:
        """Give the memory back; every view becomes unreadable until the next ``take``."""
        if self.held and self.nbytes:
            self._device.release(self._storage)
            self.account.add("gathered", -self.nbytes)
