"""The directory that a launcher keeps between the attempts of a run; it tells the ranks where it is."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

KEEP_VARIABLE = "FULLSHARD_KEEP_DIR"
"""Variable with the launcher's directory, in memory where the system has such a file system; removed at the end."""

ATTEMPT_VARIABLE = "FULLSHARD_ATTEMPT"
"""Variable with the number of the attempt: 0, and one more each time the launcher starts the ranks again."""

RESTARTS_VARIABLE = "FULLSHARD_MAX_RESTARTS"
"""Variable with how often the launcher may start the ranks again; with 0 nobody needs their state."""

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

    def begun(self) -> bool:
        """Return whether an earlier attempt passed its start on this machine; any rank, alone."""
        return self.attempt > 0 and (self.directory / _BEGUN).exists()

    def mark_begun(self) -> None:
        """Note that what the run replaces is deleted: from here on an attempt continues, and never starts over.

        Raises:
            OSError: The file system refused.
        """
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        (self.directory / _BEGUN).touch()
