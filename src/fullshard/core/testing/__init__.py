"""Ranks as threads, for tests. No production code imports this room."""

from fullshard.core.comm import LedgerEntry as LedgerEntry, RecordingComm as RecordingComm
from fullshard.core.testing.threads import ThreadComm as ThreadComm, run_ranks as run_ranks
