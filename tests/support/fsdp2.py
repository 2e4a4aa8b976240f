"""Models sharded by FSDP2's ``fully_shard`` on rank threads."""

from fullshard.compat.torch_fsdp.fsdp2 import fully_shard
from fullshard.core.testing import run_ranks
from support.models import TinyLM, batches
from support.parity import ROWS_PER_RANK, replicas

SIZE = 2


def shard(model, comm, **options):
    for block in model.blocks:
        fully_shard(block, mesh=comm, **options)
    return fully_shard(model, mesh=comm, **options)


def with_models(size, work, make=TinyLM):
    """Run ``work(comm, model)`` on each of ``size`` ranks, with equal models."""
    _, models = replicas(make, size)
    return run_ranks(size, lambda comm: work(comm, models[comm.rank]))


def rows_of(comm, steps):
    """Return this rank's rows of each batch."""
    first = comm.rank * ROWS_PER_RANK
    return [tokens[first : first + ROWS_PER_RANK] for tokens in batches(steps, comm.size * ROWS_PER_RANK)]
