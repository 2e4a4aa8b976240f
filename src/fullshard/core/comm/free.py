"""Memory that a rank may still allocate, and the pools that it shares with other ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

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
