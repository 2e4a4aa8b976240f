"""Memory of a rank: the peak of a block of code, what it may still allocate, and the pools that ranks share."""

from __future__ import annotations

import gc
import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.autograd.profiler import profile

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


LOGITS_AT_ONCE = {"cpu": 1 << 23, "cuda": 1 << 27}
"""The most logits that a loss computes at once. Each chunk reads the head three times. Of 8,192 tokens and 128,256
words an H200 took 122 ms with 2^25, 66 with 2^27, 57 with 2^28, and 0.2 and 1.3 GB more than with 2^25."""

_PLANNED: ContextVar[int | None] = ContextVar("planned memory", default=None)


@contextmanager
def planned_memory(nbytes: int | None) -> Iterator[None]:
    """Context of a plan for a GPU of ``nbytes``, whose tensors are on the CPU; None: a plan for CPU ranks."""
    token = _PLANNED.set(nbytes)
    try:
        yield
    finally:
        _PLANNED.reset(token)


def on_gpu(device: torch.device) -> bool:
    """Return whether ``device`` is a GPU, or a plan's for one."""
    return device.type == "cuda" or _PLANNED.get() is not None


def logits_at_once(device: torch.device) -> int:
    """Return the most logits that a loss computes at once on ``device``, or on the planned one."""
    return LOGITS_AT_ONCE["cuda" if on_gpu(device) else "cpu"]


def device_memory_bytes(device: torch.device) -> int:
    """Return the memory available to a rank on ``device``: the GPU's, or its share of the host's.

    Inside :func:`planned_memory` it is the planned device's.
    """
    whole = whole_memory_bytes(device)
    return whole if on_gpu(device) else whole // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def whole_memory_bytes(device: torch.device) -> int:
    """Return the same, but of a host all of it: it does not depend on how many ranks there are."""
    planned = _PLANNED.get()
    if planned is not None:
        return planned
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
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

    def __init__(self, device: torch.device, beside_bytes: int = 0) -> None:
        """Measure tensors on ``device``; on CPU all but ``beside_bytes``, which are there all along."""
        self.device = device
        self._beside_bytes = beside_bytes
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
        self.start_bytes = live_tensor_bytes() - self._beside_bytes
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


_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")

_LIMITS = {"memory.max": "memory.current", "memory.limit_in_bytes": "memory.usage_in_bytes"}
"""Files of a control group with its limit and its usage: version 2, version 1."""

_RECLAIMED = {"inactive_file", "active_file", "slab_reclaimable", "total_inactive_file", "total_active_file"}
"""Lines of a control group's ``memory.stat`` for memory that the system reclaims before it refuses any. For version 1
the totals: lines without that word do not count nested groups."""


def free_memory(device: torch.device) -> dict[str, int]:
    """Return the bytes that this process may still allocate for tensors on ``device``, by pool; any rank.

    Ranks that name the same pool share it. A GPU is a pool. On the CPU the machine is one, and so is each control group
    around this process that has a limit. The system's caches and swap count as free, because they delay an allocation
    without refusing it. Memory that this process already holds, such as its libraries, is not free.

    Returns:
        Bytes by the pool's name: kind, colon, identifier. Empty if the system does not report free memory, as on
        all systems but Linux.
    """
    if device.type == "cuda":  # not run on a GPU yet
        free, _ = torch.cuda.mem_get_info(device)
        return {f"GPU: {torch.cuda.get_device_properties(device).uuid}": free}
    try:
        machine = _machine()
        memory = _numbers(_PROC / "meminfo", unit=1024)
        swap = memory["SwapFree:"]
        inside = {f"control group: {machine} {name}": left + swap for name, left in _groups()}
        return {f"machine: {machine}": memory["MemAvailable:"] + swap, **inside}
    except (OSError, KeyError, ValueError):
        return {}


def lacking(ranks: Sequence[tuple[int, Mapping[str, int]]], share: float = 1.0) -> tuple[str, int, int] | None:
    """Return a pool with too little memory for its ranks, what they need and what it has; None if there is enough.

    ``ranks`` are the bytes that each needs, and the bytes of each pool that it shares; they may take a ``share`` of it.
    """
    return next((one for one in demands(ranks) if one[1] > share * one[2]), None)


def demands(ranks: Sequence[tuple[int, Mapping[str, int]]]) -> list[tuple[str, int, int]]:
    """Return each pool with what its ranks need of it and what it has; see :func:`lacking`."""
    free: dict[str, int] = {}
    for _, pools in ranks:
        for pool, size in pools.items():
            free[pool] = min(size, free.get(pool, size))
    return [(pool, sum(size for size, pools in ranks if pool in pools), there) for pool, there in free.items()]


def _machine() -> str:
    """Return a name shared by this machine's processes and by no other machine."""
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename


def _groups() -> Iterator[tuple[str, int]]:
    """Yield the control groups around this process that limit memory, and the bytes left in each."""
    space = os.stat(_PROC / "self/ns/cgroup").st_ino  # paths are only valid inside a namespace
    for line in (_PROC / "self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = _GROUPS / "memory" if controllers else _GROUPS
        for place in (Path(path), *Path(path).parents):
            left = _left(root / place.relative_to("/"))
            if left is not None:
                yield f"{space} {controllers}:{place}", left


def _left(group: Path) -> int | None:
    """Return the bytes left in a control group; None if it has no limit or is not visible from here."""
    for limit_file, used_file in _LIMITS.items():
        try:
            limit, used = ((group / name).read_text().strip() for name in (limit_file, used_file))
            stat = _numbers(group / "memory.stat")
        except OSError:
            continue
        if limit == "max":
            return None
        totals = any(name.startswith("total_") for name in stat)
        kept = (size for name, size in stat.items() if name in _RECLAIMED and name.startswith("total_") == totals)
        return int(limit) - int(used) + sum(kept)
    return None


def _numbers(path: Path, unit: int = 1) -> dict[str, int]:
    """Return the first number of each line of a file, by the line's first word."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) * unit for words in lines if len(words) > 1}
