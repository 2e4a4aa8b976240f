"""A rank of a world of threads or of processes, a small model, and training runs that the behaviours look at."""

import copy

import torch

from fullshard import ShardingStrategy, TransformerBlocks, clip_grad_norm_, fully_shard
from fullshard.core.comm import SoloComm
from fullshard.core.testing import RecordingComm
from support.parity import (
    assert_gradients,
    is_sharded as is_sharded,
    optimizer_for,
    sharded_gradients,
    steps_for,
    weights_of as weights_of,
)
from support.tiny_lm import TinyLM, batches, lm_loss

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
        if collective == "all_gather_object":
            return  # on GPUs, the first missing gradient makes ranks agree on a group in host memory
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


BLOCKS = TransformerBlocks({"Block"})
LAYERS = 3
BLOCK_NAMES = tuple(f"blocks.{i}" for i in range(LAYERS))
UNITS = ("(root)", *BLOCK_NAMES)
HYBRID = ShardingStrategy.HYBRID_SHARD


def lm(reentrant=None, cls=TinyLM, layers=LAYERS):
    """Blocks that no number of ranks divides evenly, a tied head, a module that is never used."""
    return cls(reentrant, layers=layers, width=12, hidden=20)


def expect(got, wanted, what="it"):
    """Equality with both sides in the message."""
    assert got == wanted, f"{what}: {got} instead of {wanted}"


def data_for(ranks, steps=None, rows=2):
    """Joint batches of tokens, ``rows`` for each rank; a run's steps by default."""
    return [tokens.to(ranks.device) for tokens in batches(steps or ranks.steps, rows * ranks.size, length=7)]


def runtime(model):
    return model._fullshard_runtime


def gathered(model):
    """Names of the units whose full parameters are in memory."""
    return {unit.name for unit in runtime(model).units if unit.state.value != "sharded"}


def clip(model, max_norm=1.0, p=2.0):
    """Clip the gradients of a sharded model or of one that is not."""
    if is_sharded(model):
        return clip_grad_norm_(model, max_norm, p).item()
    return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, p).item()


def finish_step(model, optimizer, loss):
    """Clip, step, clear; returns ``loss`` as a number and the norm of the gradients."""
    norm = clip(model)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), norm


def plain_step(loss_of):
    """The usual step: ``step(model, optimizer, batch, number)`` returns the loss and the norm of the gradients."""

    def step(model, optimizer, batch, _number):
        loss = loss_of(model, batch)
        loss.backward()
        return finish_step(model, optimizer, loss)

    return step


def assert_weights(ours, reference, tolerance=1e-5):
    """``ours`` by name are those of the model ``reference``."""
    expected = dict(reference.named_parameters())
    expect(ours.keys(), expected.keys(), "names")
    for name, value in ours.items():
        worst = (value - expected[name].to(value.device)).abs().max().item()
        assert worst <= tolerance, f"{name} differs by {worst:.1e}"


def assert_rows(model, reference, tolerance=1e-5):
    """The gradients of this rank's rows are those of the model ``reference``."""
    assert_gradients([sharded_gradients(model)], reference, tolerance)


def compare(ranks, make, step, *, data=None, reference_step=None, sharded=None, tolerance=1e-5, **options):
    """Train on joint batches unsharded, and sharded on this rank's rows; figures and weights must agree.

    Args:
        ranks: The world.
        make: Makes the model.
        step: ``step(model, optimizer, batch, number)`` trains it and returns figures whose mean over ranks is that of
            the unsharded run: the loss, the norm of the gradients.
        data: Joint batches, a step each.
        reference_step: For the unsharded model, where that takes another one.
        sharded: Shards the model in place of ``fully_shard(model, **options)``.
        tolerance: Largest difference of a weight, and of a figure beside 1 or itself.
        options: For ``fully_shard``.

    Returns:
        The sharded model.
    """
    data = data_for(ranks) if data is None else [batch.to(ranks.device) for batch in data]
    reference, model = ranks.alike(make), ranks.alike(make)
    plain = optimizer_for(reference)
    expected = [(reference_step or step)(reference, plain, batch, number) for number, batch in enumerate(data)]
    model = shard(ranks, model, **options) if sharded is None else sharded(model)
    optimizer = optimizer_for(model)
    for number, batch in enumerate(data):
        figures = ranks.means(step(model, optimizer, ranks.rows(batch), number))
        for got, wanted in zip(figures, expected[number], strict=True):
            assert abs(got - wanted) <= tolerance * max(1.0, abs(wanted)), (
                f"step {number}: {figures} instead of {expected[number]}"
            )
    assert_weights(weights_of(model), reference, tolerance)
    expect(runtime(model).tracker.live["gathered"], 0, "gathered bytes after training")
    return model


def shard(ranks, model, *, mesh=None, strategy=ShardingStrategy.FULL_SHARD, wrap=BLOCKS, **options):
    """``fully_shard`` with the world's mesh for the strategy, one unit a block."""
    return fully_shard(model, mesh or ranks.mesh_for(strategy), strategy=strategy, wrap=wrap, **options)


lm_step = plain_step(lm_loss)
