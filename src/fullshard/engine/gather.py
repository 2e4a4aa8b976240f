"""The all-gather of a unit: takes lanes, fills their buffers, knows no parameters."""

from __future__ import annotations

from collections.abc import Sequence

from fullshard.comm import Work
from fullshard.engine.buffers import PermanentBuffer
from fullshard.engine.lane import LaneState


def start_gather(lanes: Sequence[LaneState]) -> list[Work]:
    """Issue the all-gather of every lane.

    The shard is cast straight into this rank's slice of the gathered buffer (one pass over 1/N of the unit, from host
    memory where it is offloaded), and the collective runs in place: what arrives is where the parameters' views look.

    Returns:
        One work a lane that is sharded; the buffers may be read when all are done.
    """
    works: list[Work] = []
    for state in lanes:
        if isinstance(state.full, PermanentBuffer):
            continue
        state.full.take()
        comm = state.mesh.shard
        low, high = state.lane.shard_bounds(comm.rank)
        mine = state.full.alias[low:high]
        # To the device first: a cast on the host would go through memory that is not page-locked.
        mine.copy_(state.shard.to(mine.device, non_blocking=True))
        works.append(comm.all_gather(state.full.alias, mine))
    return works
