"""The directory that a launcher keeps between the attempts of a run and announces to the ranks."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from fullshard.variables import ATTEMPT_VARIABLE, RESTARTS_VARIABLE, SCRATCH_LOCK_NAME, SCRATCH_VARIABLE

_BEGUN = "begun"


@dataclass(frozen=True)
class ScratchDirectory:
    """State that one run keeps on this machine between attempts."""

    directory: Path  # of this run, inside the launcher's
    attempt: int  # the number of this attempt, from 0
    last: bool = False  # True if there is no later attempt to keep state for

    @classmethod
    def of(cls, run: object) -> ScratchDirectory | None:
        """Return where the run with the checkpoints ``run`` keeps its state; None without a launcher that restarts."""
        kept, attempt = os.environ.get(SCRATCH_VARIABLE), int(os.environ.get(ATTEMPT_VARIABLE, "0"))
        last = os.environ.get(RESTARTS_VARIABLE) == "0"
        if not kept or (last and attempt == 0):
            return None
        name = hashlib.sha256(str(run).encode()).hexdigest()[:16]
        return cls(Path(kept, name), attempt, last)

    def mean_life_s(self) -> float | None:
        """Return the mean duration of the attempts so far; None in the first one. Any rank."""
        with contextlib.suppress(OSError):
            since = (self.directory.parent / SCRATCH_LOCK_NAME).stat().st_mtime
            return (time.time() - since) / self.attempt if self.attempt else None
        return None

    def begun(self) -> int:
        """Return on how many ranks the run began, if an earlier attempt passed its start on this machine, else 0.

        Any rank calls it, alone.
        """
        path = self.directory / _BEGUN
        return int(path.read_text()) if self.attempt > 0 and path.exists() else 0

    def mark_begun(self, ranks: int) -> None:
        """Record that everything the run replaces is deleted: later attempts continue and never start over.

        Args:
            ranks: Number of ranks at the run's start; any rank writes it.

        Raises:
            OSError: The file system refused.
        """
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self.directory / _BEGUN
        own = path.with_name(f"{_BEGUN}.{os.getpid()}")  # each rank of the machine writes the same
        own.write_text(str(ranks))
        os.replace(own, path)
