"""How many processes the kernel has killed because memory ran out."""

from __future__ import annotations

from pathlib import Path

_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def memory_kills() -> int | None:
    """Return how many processes were killed for memory: of this process's control group, otherwise of the machine.

    None if the system does not say, as all but Linux.
    """
    for file in _counters():
        try:
            lines = [line.split() for line in file.read_text().splitlines()]
        except OSError:
            continue
        found = [int(count) for name, count in (line for line in lines if len(line) == 2) if name == "oom_kill"]
        if found:
            return found[0]
    return None


def _counters() -> list[Path]:
    """Return the files that may count: of the control group in version 2 and 1, and of the machine."""
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
    return [*files, _PROC / "vmstat"]
