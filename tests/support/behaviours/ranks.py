"""One rank of a world of threads or of processes, as the behaviours see it."""

import copy

import torch

from fullshard.core.comm import SoloComm
from fullshard.core.policy import ShardingStrategy
from fullshard.core.testing import RecordingComm
from support.parity import steps_for

SHORT = {"all_gather": "AG", "reduce_scatter": "RS", "all_reduce": "AR"}


class Ledger(RecordingComm):
    """Records each collective with the unit that it was announced for, and what a behaviour notes between them.

    ``AG blocks.1`` is an all-gather for the unit ``blocks.1``, a bare ``AR`` an all-reduce that is for no unit.
    """

    def __init__(self, inner):
        super().__init__(inner)
        self.events = []
        self.what = ""

    def announce(self, what):
        self.what = what
        super().announce(what)

    def _note(self, collective, sent_bytes=0):
        super()._note(collective, sent_bytes)
        unit = self.what.partition(" of unit ")[2]
        self.events.append(f"{SHORT.get(collective, collective)} {unit}".rstrip())

    def clear(self):
        self.events.clear()
        self.entries.clear()

    def of(self, *kinds):
        """The events so far of these kinds."""
        return [event for event in self.events if event.partition(" ")[0] in kinds]


class Ranks:
    """All ranks of the world, seen from one.

    Attributes:
        comm: All of them in one group.
        rank: This one.
        size: How many there are.
        replicate: For the hybrid strategies, the group of ranks that hold the same shards.
        shard: For the hybrid strategies, the group that shares the shards of a replica.
        spare: Another group of all ranks, for what leaves a group useless.
        device: Where models and batches are.
    """

    def __init__(self, comm, replicate, shard, spare):
        self.comm = comm
        self.rank, self.size, self.device = comm.rank, comm.size, comm.device
        self.replicate, self.shard = replicate, shard
        self.spare = spare

    @classmethod
    def as_threads(cls, comm):
        """A rank among threads; replicas of two ranks each, where their number is even."""
        everyone = list(range(comm.size))
        replicate, shard = None, None
        if comm.size % 2 == 0:
            replicate = comm.split([everyone[0::2], everyone[1::2]])
            shard = comm.split([everyone[first : first + 2] for first in everyone[::2]])
        return cls(comm, replicate, shard, comm.split([everyone]))

    @classmethod
    def as_processes(cls, comm, spare, axes=None):
        """A rank among processes; without ``axes``, replicate and shard, each is a replica of its own."""
        return cls(comm, *(axes or (comm, SoloComm(comm.device))), spare)

    @property
    def exact(self):
        """Whether two ways to the same sums give the same bits: a GPU's libraries choose kernels by alignment."""
        return self.device.type == "cpu"

    @property
    def steps(self):
        """How many steps a run of this world is compared for."""
        return steps_for(self.size)

    @property
    def axes(self):
        """The mesh of the hybrid strategies."""
        return self.replicate, self.shard

    def mesh_for(self, strategy):
        """What ``fully_shard`` takes for ``strategy``."""
        return self.axes if strategy.needs_two_axes else self.comm

    def copies_of(self, strategy):
        """How many ranks hold the same shard."""
        if strategy is ShardingStrategy.NO_SHARD:
            return self.size
        return self.replicate.size if strategy.needs_two_axes else 1

    def ledger(self):
        """The group of all ranks, recorded."""
        return Ledger(self.comm)

    def rows(self, batch):
        """This rank's rows of a joint batch, where models are."""
        each = len(batch) // self.size
        return batch[self.rank * each : (self.rank + 1) * each].to(self.device)

    def means(self, figures):
        """The mean over ranks of each of some numbers."""
        return [sum(column) / self.size for column in zip(*self.comm.all_gather_object(figures), strict=True)]

    def alike(self, make):
        """A model with the same values on every rank and in every call; every rank calls it.

        One rank makes it while the others wait: threads share torch's default generator, which checkpointing uses.
        """
        made = None
        self.comm.barrier()
        if self.rank == 0:
            torch.manual_seed(0)
            made = make()
        made = copy.deepcopy(self.comm.all_gather_object(made)[0])
        return made.to(self.device) if isinstance(made, torch.nn.Module) else made
