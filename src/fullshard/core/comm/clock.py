"""Timestamps of the compute stream, for the timeline of a recorded step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from fullshard.core.comm.protocol import Work


class Clock:
    """Records moments of the compute stream and returns the seconds between them. As written here, of the CPU."""

    def mark(self) -> Any:
        """Record the moment at which the compute stream has finished everything issued so far."""
        return time.perf_counter()

    def arrival(self, works: Sequence[Work]) -> Any | None:
        """Record the moment at which the last of ``works`` is complete; None if only waiting for them would tell.

        On the CPU None, because ranks transfer data when they wait.
        """
        return None

    def seconds(self, since: Any, marks: Sequence[Any]) -> list[float]:
        """Return the seconds from ``since`` to each of ``marks``; on CUDA this waits for the device."""
        return [mark - since for mark in marks]


class CudaClock(Clock):
    """Events on CUDA streams, which give the time of the device: the CPU runs ahead of it."""

    def __init__(self, device: torch.device) -> None:
        """Record moments of ``device``."""
        self._device = device
        self._side = torch.cuda.Stream(device)

    def mark(self) -> torch.cuda.Event:
        """See :meth:`Clock.mark`."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def arrival(self, works: Sequence[Work]) -> torch.cuda.Event | None:
        """See :meth:`Clock.arrival`: recorded on a stream that only waits for them."""
        if not all(isinstance(work, dist.Work) for work in works):
            return None  # fullshard's own works transfer data while they are waited for
        with torch.cuda.stream(self._side):
            for work in works:
                work.wait()
            return self.mark()

    def seconds(self, since: torch.cuda.Event, marks: Sequence[torch.cuda.Event]) -> list[float]:
        """See :meth:`Clock.seconds`."""
        torch.cuda.synchronize(self._device)
        return [since.elapsed_time(mark) / 1e3 for mark in marks]


def clock_of(device: torch.device) -> Clock:
    """Return the :class:`Clock` for ``device``."""
    return CudaClock(device) if device.type == "cuda" else Clock()
