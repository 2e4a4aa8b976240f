"""Memory that shows its misuse, and collectives that are as late as they may be, for ranks as threads.

On CPU what was given back often still holds what it held, and the collectives of threads are over when they are issued:
a read of unwritten or released memory, or of a result that was not waited for, gives right numbers by luck. Here
buffers hold nan wherever nobody has written yet, results arrive at ``Work.wait()`` and are nan before it, and what was
given to a collective is compared at ``settle`` with what it was when it was issued.
"""

import threading
import weakref

import torch

from fullshard.core.comm.device import Device
from fullshard.core.engine.setup import api
from fullshard.core.testing.threads import ThreadComm

NAN_BYTE = 0xFF
"""Of all floating dtypes, a number of such bytes is nan."""


def _fill(storage):
    if storage.device.type == "cpu" and storage.nbytes():
        torch.empty(0, dtype=torch.uint8).set_(storage).fill_(NAN_BYTE)


def poison(tensor):
    """Have nan, or what no index may be, in a contiguous tensor."""
    if tensor.numel():
        tensor.detach().view(-1).view(torch.uint8).fill_(NAN_BYTE)


class PoisonedDevice(Device):
    """The CPU, whose memory holds nan before it is written and when it is given back."""

    def allocate(self, storage, nbytes):
        super().allocate(storage, nbytes)
        _fill(storage)

    def release(self, storage):
        for work in tuple(_here.__dict__.get("unsettled", ())):
            work.check_release(storage)
        _fill(storage)
        super().release(storage)

    def empty(self, numel, dtype):
        buffer = super().empty(numel, dtype)
        _fill(buffer.untyped_storage())
        return buffer


def install(monkeypatch):
    """Give every model that is sharded on the CPU from now on such a device."""
    made = api.device_of
    monkeypatch.setattr(api, "device_of", lambda device: (PoisonedDevice if device.type == "cpu" else made)(device))


_here = threading.local()


class MisuseError(Exception):
    """A buffer of a collective was changed or released too early."""


dropped = []
"""Names of collectives that were waited for and let go of before other ranks had read what was given to them."""


class LateWork:
    """A collective whose result is in a place of its own until it is waited for.

    Attributes:
        given: What other ranks may read until this is settled: tensors.
    """

    def __init__(self, name, targets, results, *given):
        self.name = name
        self.waited = False
        self.arriving = list(zip(targets, results, strict=True))
        for target in targets:
            poison(target)
        self.given = given
        self.before = [part.clone() for part in given]
        if given:
            _here.__dict__.setdefault("unsettled", weakref.WeakSet()).add(self)

    def wait(self):
        for target, result in self.arriving:
            target.copy_(result)
        self.arriving = []
        self.waited = True

    def __del__(self):
        if self.waited and self.given:
            dropped.append(self.name)

    def settle(self):
        for part, before in zip(self.given, self.before, strict=True):
            if not torch.equal(part.reshape(-1).view(torch.uint8), before.reshape(-1).view(torch.uint8)):
                raise MisuseError(f"{self.name}: what was given to it was changed before it was settled")
        self.given = self.before = ()

    def check_release(self, storage):
        if any(part.untyped_storage()._cdata == storage._cdata for part in self.given):
            raise MisuseError(f"{self.name}: what was given to it is released before it was settled")


class LateComm(ThreadComm):
    """Ranks as threads with collectives that end when they are waited for, as those of processes may."""

    def __init__(self, comm):
        super().__init__(comm.world, comm.rank)

    def split(self, groups):
        return LateComm(super().split(groups))

    def all_gather(self, full, shard):
        slices = full.view(self.size, -1)
        mine, result = slices[self.rank], torch.empty_like(full)
        if mine.data_ptr() != shard.data_ptr():
            mine.copy_(shard)
        super().all_gather(result, mine)
        others = [rank for rank in range(self.size) if rank != self.rank]
        arrived = result.view(self.size, -1)
        return LateWork(self.announced, [slices[r] for r in others], [arrived[r] for r in others], mine)

    def reduce_scatter(self, shard, full):
        result = torch.empty_like(shard)
        super().reduce_scatter(result, full)
        return LateWork(self.announced, [shard], [result], full)

    def all_reduce(self, tensor, op="sum"):
        result = tensor.detach().clone()
        super().all_reduce(result, op)
        return LateWork(self.announced, [tensor], [result])

    def exchange(self, received, sent):
        results = [torch.empty_like(part) for part in received]
        super().exchange(results, [part.clone() for part in sent])
        others = [part for rank, part in enumerate(sent) if rank != self.rank and part.numel()]
        return LateWork(self.announced, received, results, *others)

    def gather(self, shard, full, target=0):
        result = None if full is None else torch.empty_like(full)
        super().gather(shard, result, target)
        return LateWork(self.announced, [] if full is None else [full], [] if full is None else [result])
