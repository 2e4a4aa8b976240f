"""How many processes the kernel has killed because memory ran out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class MemoryKills:
    """Number of processes killed for memory since the system, or the control group, began."""

    count: int
    of_group: bool  # in this process's control group; False: on the entire machine, whose processes are anyone's


def memory_kills() -> MemoryKills | None:
    """Return how many processes were killed for memory: of this process's control group, otherwise of the machine.

    None if the system does not say, as all but Linux.
    """
    machine = _PROC / "vmstat"
    for file in (*_groups(), machine):
        try:
            lines = [line.split() for line in file.read_text().splitlines()]
        except OSError:
            continue
        found = [int(count) for name, count in (line for line in lines if len(line) == 2) if name == "oom_kill"]
        if found:
            return MemoryKills(found[0], of_group=file != machine)
    return None


def _groups() -> list[Path]:
    """Return the files that may count for the control group, in version 2 and 1."""
    files = []
    try:
        for line in (_PROC / "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                files.append(_GROUPS / path.lstrip("/") / "memory.events")
            elif "memory" in controllers.split(","):
                files.append(_GROUPS / "memory" / path.lstrip("/") / "memory.oom_control")
    except OSError:
        return []
    return files
