"""Collectives in host memory, played on the CPU; and the cases that they must pass there and on a GPU.

On the CPU the copies are made at once by the thread that runs collectives, so a program that reads a result or changes
what it sent before it has waited is found out by its numbers.
"""

import datetime
import sys

import torch
import torch.distributed as dist

from fullshard import CPUOffload, fully_shard, optim
from fullshard.core.comm import GlooComm
from fullshard.core.comm.staged import Stage, StagedComm
from support.behaviours import BEHAVIOURS, Ranks
from support.collectives import PIECE as PIECE, check_collectives
from support.optimizers import LAYOUTS, batches, of_rank, train, update_errors, whole, zoo
from support.rank_script import traceback_of

ALONE_S = 15.0  # how long a rank waits for one that failed


class HostStaging:
    """The CPU as a device whose copies are made at once."""

    device = torch.device("cpu")

    def issued(self):
        return None

    def begin(self, mark):
        pass

    def copy(self, target, source):
        target.copy_(source)

    def settle(self):
        pass

    def copied(self):
        return None

    def wait(self, mark):
        pass

    def empty_host(self, nbytes):
        return torch.empty(nbytes, dtype=torch.uint8)


def on_host(group):
    """The staged group that the CPU plays."""
    return StagedComm(GlooComm(group, direct=False), Stage(HostStaging()))


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


OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3),
    "Adafactor": lambda params: optim.Adafactor(params),
    "Muon": lambda params: optim.Muon(params, lr=1e-2, ns_dtype=torch.float32),
    "AdamW8bit": lambda params: optim.AdamW8bit(params, lr=1e-3),
}


def optimizers(comm):
    """Ten steps are those of the same optimizer over the group that copies nothing."""
    data = [of_rank(batch, comm.rank) for batch in batches(10, comm.size)]
    data = [tuple(part.to(comm.device) for part in batch) for batch in data]
    for name, make in OPTIMIZERS.items():
        for layout in (*LAYOUTS.values(), {"wrap": None, "offload_policy": CPUOffload()}):
            trained = []
            for group in (comm, comm.inner):
                model = fully_shard(zoo(), group, **layout)
                train(model, make(model.parameters()), data)
                trained.append({key: value.cpu() for key, value in whole(model).items()})
            errors = update_errors(*trained)
            assert max(errors.values()) <= 1e-4, (name, errors)


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
