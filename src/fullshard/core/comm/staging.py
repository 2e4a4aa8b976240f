"""Copies between a device and page-locked host memory, on a separate stream, for collectives in host memory."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Staging(Protocol):
    """The operations that :class:`fullshard.core.comm.staged.StagedComm` needs of a device. Marks are opaque.

    ``issued`` and ``wait`` are called by the rank's program and concern its current stream. The others are called by
    the thread that runs collectives and concern the staging stream, which runs copies in order.

    Attributes:
        device: Device of the tensors; a CUDA device with its index.
    """

    device: torch.device

    def issued(self) -> Any:
        """Return a mark of everything issued to the current stream so far."""
        ...

    def begin(self, mark: Any) -> None:
        """Make later copies start after ``mark``."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Start copying between tensors of one dtype and size; host tensors come from :meth:`empty_host`."""
        ...

    def settle(self) -> None:
        """Wait until all copies so far are complete and the CPU may use their host memory."""
        ...

    def copied(self) -> Any:
        """Return an event that is reached when all copies issued so far are complete."""
        ...

    def wait(self, mark: Any) -> None:
        """Make the current stream wait for the event ``mark``."""
        ...

    def empty_host(self, nbytes: int) -> torch.Tensor:
        """Return ``nbytes`` of page-locked host memory with undefined content."""
        ...


class CudaStaging:
    """Copies from and to one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        """Copy from and to ``device``; without an index, the current one."""
        self.device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
        self._side = torch.cuda.Stream(self.device)

    def issued(self) -> torch.cuda.Event:
        """See :meth:`Staging.issued`."""
        return self._mark(torch.cuda.current_stream(self.device))

    def begin(self, mark: torch.cuda.Event) -> None:
        """See :meth:`Staging.begin`."""
        self._side.wait_event(mark)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See :meth:`Staging.copy`."""
        with torch.cuda.device(self.device), torch.cuda.stream(self._side):
            target.copy_(source, non_blocking=True)

    def settle(self) -> None:
        """See :meth:`Staging.settle`."""
        self._side.synchronize()

    def copied(self) -> torch.cuda.Event:
        """See :meth:`Staging.copied`."""
        return self._mark(self._side)

    def wait(self, mark: torch.cuda.Event) -> None:
        """See :meth:`Staging.wait`."""
        torch.cuda.current_stream(self.device).wait_event(mark)

    def empty_host(self, nbytes: int) -> torch.Tensor:
        """See :meth:`Staging.empty_host`."""
        # Page-locking uses a device: a thread's default is the first one, on which this rank may have nothing.
        with torch.cuda.device(self.device):
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def _mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(stream)
        return event
