"""A network that moves nothing but takes its time: this process is rank 0 of many, and the other ranks are not there.

A collective occupies a stream of its own for the bytes that it would move, divided by the link's bandwidth, and a
latency; two collectives of a group run one after the other, as NCCL's do. The other ranks are assumed to hold this
rank's values, so that products meet ordinary numbers, which take a GPU more time than zeros and NaN; losses mean
nothing. NCCL's kernels also take some multiprocessors, which this does not.

:class:`TimedComm` is the network for fullshard, :class:`TimedGroup` for torch's engines, over one :class:`Wire`. On a
CPU the seconds are only added up.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from fullshard.core.comm import SoloComm
from fullshard.core.comm.protocol import ReduceOp, Work

BACKEND = "timed"


@dataclass(frozen=True)
class Link:
    """What connects a rank to the others: bytes a second in each direction, and seconds of each collective."""

    name: str
    bytes_per_s: float
    latency_s: float


LINKS = (Link("NVLink, 450 GB/s", 450e9, 10e-6), Link("400 Gbit/s", 50e9, 25e-6), Link("100 Gbit/s", 12.5e9, 25e-6))


class Wire:
    """Occupies a stream for the time of each collective.

    Attributes:
        link: The link in use; None: collectives take no time.
        cycles_per_s: The rate of ``torch.cuda._sleep``.
        asked_s: Seconds asked for since :meth:`clear`.
        calls: Number of collectives since then.
    """

    def __init__(self, device: torch.device, size: int, cycles_per_s: float) -> None:
        """Carry the collectives of ``size`` ranks."""
        self.device = device
        self.size = size
        self.link: Link | None = None
        self.cycles_per_s = cycles_per_s
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._times: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.clear()

    def clear(self) -> None:
        """Forget the collectives so far."""
        self.asked_s, self.calls = 0.0, 0
        self._times.clear()

    def occupied_s(self) -> float | None:
        """Return the seconds for which the stream was occupied, by the device's clock; None on a CPU."""
        if self._stream is None:
            return None
        self._stream.synchronize()
        return sum(start.elapsed_time(end) for start, end in self._times) / 1e3

    def send(self, nbytes: int, rounds: int = 1, fill: Callable[[], object] | None = None) -> torch.cuda.Event | None:
        """Start a collective on ``nbytes``, of which all but this rank's part cross the link, ``rounds`` times.

        Args:
            fill: Writes what arrives.
        """
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            return self._occupy(nbytes, rounds, fill or (lambda: None))

    def _occupy(self, nbytes: int, rounds: int, fill: Callable[[], object]) -> torch.cuda.Event | None:
        seconds = 0.0
        if self.link is not None:
            seconds = rounds * nbytes * (self.size - 1) / self.size / self.link.bytes_per_s + self.link.latency_s
            self.asked_s += seconds
            self.calls += 1
        if self._stream is None:
            fill()
            return None
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        fill()
        if seconds:
            torch.cuda._sleep(int(seconds * self.cycles_per_s))
        end.record()
        if seconds:
            self._times.append((start, end))
        return end

    def arrived(self, end: torch.cuda.Event | None) -> None:
        """Make the current stream wait for a collective."""
        if end is not None:
            torch.cuda.current_stream(self.device).wait_event(end)


def _repeat(full: torch.Tensor, shard: torch.Tensor) -> None:
    """Write a shard as every rank's slice of ``full``; the first may be the shard itself."""
    first, others = full[: shard.numel()], full[shard.numel() :].view(-1, shard.numel())
    if first.data_ptr() != shard.data_ptr():
        first.copy_(shard)
    others.copy_(shard.expand_as(others))


class _TimedWork:
    """A collective under way, for fullshard."""

    def __init__(self, wire: Wire, end: torch.cuda.Event | None) -> None:
        self._wire, self._end = wire, end

    def wait(self) -> None:
        """See :meth:`fullshard.core.comm.protocol.Work.wait`."""
        self._wire.arrived(self._end)


class TimedComm(SoloComm):
    """What a step asks of fullshard's protocol, as rank 0; the other ranks are assumed to hold the same values."""

    def __init__(self, wire: Wire) -> None:
        """Be rank 0 of as many ranks as the wire connects."""
        super().__init__(wire.device)
        self.wire, self.size = wire, wire.size

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> Work:
        """Take the time of an all-gather."""
        super().all_gather(full[: shard.numel()], shard)
        return _TimedWork(self.wire, self.wire.send(full.nbytes, fill=partial(_repeat, full, shard)))

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor) -> Work:
        """Take the time of a reduce-scatter."""
        super().reduce_scatter(shard, full[: shard.numel()])
        return _TimedWork(self.wire, self.wire.send(full.nbytes))

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        """Take the time of an all-reduce among equal values."""
        if op == "sum":
            tensor.mul_(self.size)
        return _TimedWork(self.wire, self.wire.send(tensor.nbytes, rounds=2))

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return this rank's value for every rank."""
        return [value] * self.size


class _GroupWork(dist.Work):
    """A collective under way, for torch."""

    def __init__(self, wire: Wire, end: torch.cuda.Event | None) -> None:
        super().__init__()
        self._wire, self._end = wire, end

    def wait(self, timeout: Any = None) -> bool:
        """Make the current stream wait."""
        self._wire.arrived(self._end)
        return True

    def is_completed(self) -> bool:
        """Say that it may be waited for."""
        return True


class TimedGroup(dist.ProcessGroup):
    """A process group over a wire, as rank 0, with the collectives that FSDP2 issues.

    torch 2.13 renamed the flat collectives; both names are here.
    """

    wire: Wire

    def _set_group_name(self, name: str) -> None:
        self._name = name  # torch keeps it with a backend in C++, of which there is none

    @property
    def group_name(self) -> str:
        """Return the name by which a mesh finds the group."""
        return self._name

    def getBackendName(self) -> str:
        """Return the backend's name."""
        return BACKEND

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor, options: Any = None) -> Any:
        return _GroupWork(self.wire, self.wire.send(output.nbytes, fill=partial(_repeat, output, given)))

    def _reduce_scatter_base(self, output: torch.Tensor, given: torch.Tensor, options: Any = None) -> Any:
        mine = given[: output.numel()]
        if mine.data_ptr() != output.data_ptr():
            output.copy_(mine)
        return _GroupWork(self.wire, self.wire.send(given.nbytes))

    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base


def join(wire: Wire) -> None:
    """Make a :class:`TimedGroup` over ``wire`` this process's default group."""

    def make(_store: Any, rank: int, size: int, _timeout: Any) -> TimedGroup:
        group = TimedGroup(rank, size)
        group.wire = wire
        return group

    dist.Backend.register_backend(BACKEND, make, devices=["cpu", "cuda"])
    dist.init_process_group(BACKEND, store=HashStore(), rank=0, world_size=wire.size)
