"""Environment variables by which a launcher tells its ranks about the attempts of a run; read without torch."""

from __future__ import annotations

ATTEMPT_VARIABLE = "FULLSHARD_ATTEMPT"
"""How often the ranks were started before: 0, 1, …"""

KEEP_VARIABLE = "FULLSHARD_KEEP_DIR"
"""Directory of this machine's ranks that outlives an attempt, in memory where the system has such a file system; the
launcher makes it, and removes it at the end."""

KEEP_LOCK_NAME = "lock"
"""File in that directory which the launcher makes when it starts, and holds locked as long as it lives."""

RESTARTS_VARIABLE = "FULLSHARD_MAX_RESTARTS"
"""How often the ranks may still be started again, where one launcher decides it; with 0 they take no snapshots."""
