"""Snapshots: state in the memory of the machine that outlives a rank, and from which a restarted attempt continues."""

from fullshard.resilience.keep import KeepDirectory as KeepDirectory
from fullshard.resilience.slot import Described as Described, Snapshot as Snapshot, checksums as checksums
from fullshard.resilience.snapshots import (
    Every as Every,
    OfOtherRanks as OfOtherRanks,
    Snapshots as Snapshots,
    room_of as room_of,
)
