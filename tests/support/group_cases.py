"""Named cases on groups of processes, which get new groups after one that failed."""

import datetime
import sys

import torch.distributed as dist

from support.behaviours import BEHAVIOURS, Ranks
from support.collectives import PIECE as PIECE, check_collectives
from support.rank_script import traceback_of

ALONE_S = 15.0  # how long a rank waits for one that failed


class Groups:
    """Makes the groups of a world of processes; ``comm_of`` turns a process group into a Comm."""

    def __init__(self, comm_of):
        self.comm_of = comm_of

    def group(self, ranks=None):
        return self.comm_of(dist.new_group(ranks, timeout=datetime.timedelta(seconds=ALONE_S)))

    def axes(self):
        """Replicas of two ranks each on four ranks; on two, of one each."""
        size, rank = dist.get_world_size(), dist.get_rank()
        if size < 4:
            return None
        inside = [list(range(first, first + 2)) for first in range(0, size, 2)]
        across = [list(range(place, size, 2)) for place in range(2)]
        made = {}
        for axis, groups in (("replicate", across), ("shard", inside)):
            for ranks in groups:
                one = dist.new_group(ranks, timeout=datetime.timedelta(seconds=ALONE_S))
                if rank in ranks:
                    made[axis] = self.comm_of(one)
        return made["replicate"], made["shard"]


def run_cases(cases, names, groups, everyone):
    """Run the named cases; from name to the traceback of each rank.

    The ranks tell each other how each case went in the group ``everyone``, which nothing else uses: so they stay in
    step. After a case that failed the next ones get new groups: one in which ranks may have parted is of no use.
    """
    comm, spare, axes = groups.group(), groups.group(), groups.axes()
    outcomes = {}
    for name in names:
        print("begins:", name, file=sys.stderr, flush=True)  # the last one, if the ranks are killed
        ranks = Ranks.as_processes(comm, spare, axes)
        outcomes[name] = everyone.all_gather_object(traceback_of(cases[name], ranks))
        if any(outcomes[name]):
            comm, spare, axes = groups.group(), groups.group(), groups.axes()
    return outcomes


CASES = {"collectives": lambda ranks: check_collectives(ranks.comm), **BEHAVIOURS}
"""Each takes a :class:`Ranks`."""
