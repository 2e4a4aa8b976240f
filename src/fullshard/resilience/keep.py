"""The directory that a launcher keeps between the attempts of a run; it tells the ranks where it is."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from fullshard.variables import ATTEMPT_VARIABLE, KEEP_VARIABLE, RESTARTS_VARIABLE

_BEGUN = "begun"


@dataclass(frozen=True)
class KeepDirectory:
    """What one run keeps on this machine between attempts."""

    directory: Path  # of this run, inside the launcher's
    attempt: int  # the number of this attempt, from 0

    @classmethod
    def of(cls, run: object) -> KeepDirectory | None:
        """Return where the run with the checkpoints ``run`` keeps its state; None without a launcher that restarts."""
        kept = os.environ.get(KEEP_VARIABLE)
        if not kept or os.environ.get(RESTARTS_VARIABLE) == "0":
            return None
        name = hashlib.sha256(str(run).encode()).hexdigest()[:16]
        return cls(Path(kept, name), int(os.environ.get(ATTEMPT_VARIABLE, "0")))

    def begun(self) -> int:
        """Return on how many ranks the run began, if an earlier attempt passed its start on this machine, else 0.

        Any rank calls it, alone.
        """
        path = self.directory / _BEGUN
        return int(path.read_text()) if self.attempt > 0 and path.exists() else 0

    def mark_begun(self, ranks: int) -> None:
        """Note that what the run replaces is deleted: from here on an attempt continues, and never starts over.

        Args:
            ranks: The number of ranks when the run began; any rank writes it, alone.

        Raises:
            OSError: The file system refused.
        """
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self.directory / _BEGUN
        own = path.with_name(f"{_BEGUN}.{os.getpid()}")  # each rank of the machine writes the same
        own.write_text(str(ranks))
        os.replace(own, path)
