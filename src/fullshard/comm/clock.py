"""When things happen on the stream that computes: what a recorded step is measured with."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fullshard.comm.protocol import Work


class Clock(Protocol):
    """Marks moments now, and says later how many seconds lie between them."""

    def mark(self) -> Any:
        """The moment at which the compute stream has done everything that it was given so far."""
        ...

    def arrival(self, works: Sequence[Work]) -> Any | None:
        """The moment at which the last of ``works`` is complete; None where only waiting for them tells."""
        ...

    def seconds(self, since: Any, marks: Sequence[Any]) -> list[float]:
        """How long after ``since`` each of ``marks`` was; on CUDA this waits for the device."""
        ...


class CpuClock:
    """The CPU's own time; its marks are those of ``time.perf_counter``."""

    def mark(self) -> float:
        """See :meth:`Clock.mark`: now."""
        return time.perf_counter()

    def arrival(self, works: Sequence[Work]) -> None:
        """See :meth:`Clock.arrival`: ranks take what the others have when they wait for it."""

    def seconds(self, since: float, marks: Sequence[float]) -> list[float]:
        """See :meth:`Clock.seconds`."""
        return [mark - since for mark in marks]


class CudaClock:
    """Events on CUDA's streams: the time of the device, which the CPU runs ahead of."""

    def __init__(self, device: torch.device) -> None:
        """Mark moments of ``device``."""
        self._device = device
        self._side = torch.cuda.Stream(device)

    def mark(self) -> torch.cuda.Event:
        """See :meth:`Clock.mark`."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def arrival(self, works: Sequence[Work]) -> torch.cuda.Event | None:
        """See :meth:`Clock.arrival`: a stream that does nothing else waits for them."""
        if not all(isinstance(work, dist.Work) for work in works):
            return None  # those of our own do something when they are waited for
        with torch.cuda.stream(self._side):
            for work in works:
                work.wait()
            return self.mark()

    def seconds(self, since: torch.cuda.Event, marks: Sequence[torch.cuda.Event]) -> list[float]:
        """See :meth:`Clock.seconds`."""
        torch.cuda.synchronize(self._device)
        return [since.elapsed_time(mark) / 1e3 for mark in marks]


def clock_of(device: torch.device) -> Clock:
    """The :class:`Clock` of what runs on ``device``."""
    return CudaClock(device) if device.type == "cuda" else CpuClock()
