"""Snapshots: state in the memory of the machine that outlives a rank, and from which a restarted attempt continues."""

from fullshard.state.resilience.scratch import ScratchDirectory as ScratchDirectory
from fullshard.state.resilience.snapshot_buffer import (
    Snapshot as Snapshot,
    SnapshotHeader as SnapshotHeader,
    checksums as checksums,
)
from fullshard.state.resilience.snapshots import (
    Every as Every,
    OfOtherRanks as OfOtherRanks,
    Snapshots as Snapshots,
    room_of as room_of,
)
