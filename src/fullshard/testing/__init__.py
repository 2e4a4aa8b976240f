"""Ranks as threads, for tests. No production code imports this room."""

from fullshard.comm import LedgerEntry as LedgerEntry, RecordingComm as RecordingComm
from fullshard.testing.threads import ThreadComm as ThreadComm, run_ranks as run_ranks
