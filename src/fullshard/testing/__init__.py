"""Ranks as threads and a recording communicator, for tests. No production code imports them."""

from fullshard.comm import LedgerEntry as LedgerEntry, RecordingComm as RecordingComm
from fullshard.testing.threads import ThreadComm as ThreadComm, run_ranks as run_ranks
