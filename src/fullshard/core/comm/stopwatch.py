"""Timing of device computations: by the clock on the CPU, by events of the compute stream on CUDA."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class Stopwatch(Protocol):
    """Marks moments of the compute stream."""

    def mark(self) -> Any:
        """Return the moment after everything issued so far."""
        ...

    def seconds(self, start: Any, stop: Any) -> float:
        """Return the seconds between two moments; only after :meth:`finish`."""
        ...

    def finish(self) -> None:
        """Wait until everything issued is computed."""
        ...


class CpuStopwatch:
    """The CPU's clock; see :class:`Stopwatch`."""

    def mark(self) -> float:
        """See :meth:`Stopwatch.mark`."""
        return time.perf_counter()

    def seconds(self, start: float, stop: float) -> float:
        """See :meth:`Stopwatch.seconds`."""
        return stop - start

    def finish(self) -> None:
        """See :meth:`Stopwatch.finish`: the CPU queues nothing."""


class CudaStopwatch:
    """Events of CUDA's current stream; see :class:`Stopwatch`."""

    def __init__(self, device: torch.device) -> None:
        """Time operations of ``device``."""
        self._device = device

    def mark(self) -> torch.cuda.Event:
        """See :meth:`Stopwatch.mark`."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, start: torch.cuda.Event, stop: torch.cuda.Event) -> float:
        """See :meth:`Stopwatch.seconds`."""
        return start.elapsed_time(stop) / 1e3

    def finish(self) -> None:
        """See :meth:`Stopwatch.finish`."""
        torch.cuda.synchronize(self._device)


def stopwatch_of(device: torch.device) -> Stopwatch:
    """Return the stopwatch of a device."""
    return CudaStopwatch(device) if device.type == "cuda" else CpuStopwatch()
