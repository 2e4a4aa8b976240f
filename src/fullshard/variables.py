"""Environment variables by which a launcher informs its ranks of a run's attempts; importable without torch."""

from __future__ import annotations

ATTEMPT_VARIABLE = "FULLSHARD_ATTEMPT"
"""Number of times that the ranks were started before: 0, 1, …"""

SCRATCH_VARIABLE = "FULLSHARD_KEEP_DIR"
"""Directory for this machine's ranks that outlives an attempt, in memory if the system has such a file system; the
launcher creates it, and removes it at the end."""

SCRATCH_LOCK_NAME = "lock"
"""File in that directory which the launcher creates at its start and keeps locked as long as it lives."""

RESTARTS_VARIABLE = "FULLSHARD_MAX_RESTARTS"
"""Number of remaining restarts, if one launcher decides it; with 0 the ranks take no snapshots."""
