"""The lock that a run holds on its checkpoints: its name, its message, and whether it is held; imports no torch."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from fullshard.errors import CheckpointError

CHECKPOINTS_NAME = "checkpoints"
"""Directory in a run's own with its checkpoints."""

LOCK_NAME = "lock"
"""File in that directory which rank 0 keeps locked; it names the process."""

_LOCKS = Path("/proc/locks")
"""Linux's list of locks. Asking for the lock itself would, for a moment, keep it from the run that is to have it."""


def taken(directory: Path) -> CheckpointError:
    """Return the error that another run writes to a directory."""
    holder = "unknown, its lock file was deleted"
    with suppress(OSError):
        holder = (directory / LOCK_NAME).read_text(errors="replace")[:4096].strip() or "unknown"
    return CheckpointError(
        f"Another run is writing to {directory} (process {holder}); two runs would delete each other's "
        "checkpoints. Wait until it finishes, stop it, or choose another directory."
    )


def require_untaken(directory: Path) -> None:
    """Check that no process of this machine holds the lock, as far as the system says; the run's rank 0 takes it later.

    Raises:
        CheckpointError: One does.
    """
    try:
        locked = {line.split()[-3].rpartition(":")[2] for line in _LOCKS.read_text().splitlines() if " FLOCK " in line}
        held = {str(path.stat().st_ino) for path in (directory, directory / LOCK_NAME)}
    except (OSError, IndexError):
        return
    if held <= locked:
        raise taken(directory)
