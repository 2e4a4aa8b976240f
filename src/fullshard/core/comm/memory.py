"""Peak tensor memory of a block of code, as counted by the allocator."""

from __future__ import annotations

import gc
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any

import torch
from torch.autograd.profiler import profile

from fullshard.core.comm.placement import SHARED
from fullshard.core.torch_private import is_traceable_wrapper, plain_functions


def live_tensor_bytes() -> int:
    """Return the bytes of all distinct CPU storages that Python can reach, allocated before a meter started."""
    gc.collect()
    storages: dict[int, int] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # isinstance() makes some lazy module attributes warn
        tensors = [o for o in gc.get_objects() if isinstance(o, torch.Tensor) and o.device.type == "cpu"]
    with plain_functions():
        for tensor in tensors:
            # A DTensor has no memory of its own; its local tensor is listed too, as are the parts of a sparse tensor.
            if tensor.layout != torch.strided or is_traceable_wrapper(tensor):
                continue
            storage = tensor.untyped_storage()
            if storage.device.type == "cpu":  # a compiler's fake tensors have no memory and a symbolic size
                storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


LOGITS_AT_ONCE = {"cpu": 1 << 23, "cuda": 1 << 26}
"""The most logits that a loss computes at once. Each chunk reads the head three times: of 128,256 words a GPU takes 523
tokens, more than the 295 from which an H100's bf16 products no longer wait for its memory."""

_PLANNED: ContextVar[int | None] = ContextVar("planned memory", default=None)


@contextmanager
def planned_memory(nbytes: int | None) -> Iterator[None]:
    """Context of a plan for a GPU of ``nbytes``, whose tensors are on the CPU; None: a plan for CPU ranks."""
    token = _PLANNED.set(nbytes)
    try:
        yield
    finally:
        _PLANNED.reset(token)


def logits_at_once(device: torch.device) -> int:
    """Return the most logits that a loss computes at once on ``device``, or on the planned one."""
    return LOGITS_AT_ONCE["cuda" if device.type == "cuda" or _PLANNED.get() is not None else "cpu"]


def device_memory_bytes(device: torch.device) -> int:
    """Return the memory available to a rank on ``device``: the device's, or its share of a shared one or the host's.

    Inside :func:`planned_memory` it is the planned device's.
    """
    whole = whole_memory_bytes(device)
    on_host = device.type != "cuda" and _PLANNED.get() is None
    return whole // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if on_host else whole


def whole_memory_bytes(device: torch.device) -> int:
    """Return the same, but of a host all of it: it does not depend on how many ranks there are."""
    planned = _PLANNED.get()
    if planned is not None:
        return planned
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory // SHARED.ranks
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def allocated_bytes(device: torch.device) -> int | None:
    """Return the tensor bytes on ``device`` counted by its caching allocator; None on the CPU, which has none."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


class MemoryMeter:
    """Context manager that measures one rank's peak tensor bytes; one at a time in a process.

    On CUDA it reads the caching allocator's peak. On CPU it records allocations with torch's profiler, which also sees
    temporaries inside operators, and adds what was live before. Memory that was allocated before and is freed inside
    counts as held until the end, because the profiler does not report its size. The profiler is slow: measure steps
    whose duration does not matter.

    Attributes:
        start_bytes: Tensor bytes live on entry.
        peak_bytes: Highest number of tensor bytes live at once, in total; set on exit.
        timeline: On CPU, set on exit: times at which the count changed, as values of ``time.perf_counter``, and the
            count.
    """

    def __init__(self, device: torch.device) -> None:
        """Measure tensors on ``device``."""
        self.device = device
        self.start_bytes = 0
        self.peak_bytes = 0
        self.timeline: list[tuple[float, int]] = []

    def __enter__(self) -> MemoryMeter:
        """Start measuring."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self.start_bytes = torch.cuda.memory_allocated(self.device)
            return self
        self.start_bytes = live_tensor_bytes()
        self._epoch_s = time.time() - time.perf_counter()  # the profiler's clock is the wall clock
        # Not torch.profiler's: under torch 2.11 it warns once of lost events, although none are lost here.
        self._profile = profile(profile_memory=True, use_kineto=True)
        self._profile.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop and set ``peak_bytes``."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self.peak_bytes = torch.cuda.max_memory_allocated(self.device)
            return
        self._profile.__exit__(kind, error, trace)
        recorded: Any = self._profile.kineto_results
        live = self.start_bytes
        for event in recorded.events():
            if event.name() == "[memory]":
                live += event.nbytes()
                self.timeline.append((event.start_ns() / 1e9 - self._epoch_s, live))
        self.peak_bytes = max([self.start_bytes, *(count for _, count in self.timeline)])
        del self._profile
