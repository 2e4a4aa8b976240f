"""Ranks as threads do what the protocol says, and tell when ranks part."""

import pytest
import torch

from fullshard.comm import Comm, RecordingComm, run_ranks
from fullshard.errors import MismatchError


def collectives(comm):
    """Every collective once; returns its results."""
    shard = torch.full((2,), float(comm.rank))
    full = torch.empty(2 * comm.size)
    comm.all_gather(full, shard).wait()
    in_place = torch.zeros(comm.size)
    in_place[comm.rank] = comm.rank + 1
    comm.all_gather(in_place, in_place[comm.rank : comm.rank + 1]).wait()
    reduced = torch.empty(1)
    comm.reduce_scatter(reduced, torch.arange(comm.size, dtype=torch.float32) + comm.rank).wait()
    total, largest = torch.tensor([comm.rank]), torch.tensor([comm.rank])
    comm.all_reduce(total).wait()
    comm.all_reduce(largest, "max").wait()
    told = torch.tensor([comm.rank])
    comm.broadcast(told, source=comm.size - 1).wait()
    gathered = torch.empty(2 * comm.size) if comm.rank == 0 else None
    comm.gather(shard, gathered).wait()
    comm.barrier()
    return {
        "full": full.tolist(), "in_place": in_place.tolist(), "reduced": reduced.item(), "total": total.item(),
        "largest": largest.item(), "told": told.item(), "gathered": None if gathered is None else gathered.tolist(),
        "objects": comm.all_gather_object({"rank": comm.rank}),
    }  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_collective(size):
    for rank, got in enumerate(run_ranks(size, collectives)):
        assert got["full"] == [float(r) for r in range(size) for _ in range(2)]
        assert got["in_place"] == [float(r + 1) for r in range(size)]
        assert got["reduced"] == size * rank + sum(range(size))
        assert got["total"] == sum(range(size))
        assert got["largest"] == got["told"] == size - 1
        assert got["gathered"] == (got["full"] if rank == 0 else None)
        assert got["objects"] == [{"rank": r} for r in range(size)]


def test_different_collectives_are_an_error_on_every_rank():
    def work(comm):
        with pytest.raises(MismatchError, match="different collectives"):
            comm.all_reduce(torch.zeros(1 + comm.rank)).wait()

    run_ranks(3, work)


def test_the_rank_that_fails_is_the_one_reported():
    def work(comm):
        if comm.rank == 1:
            raise ZeroDivisionError("rank 1 did it")
        comm.barrier()

    with pytest.raises(ZeroDivisionError, match="rank 1 did it"):
        run_ranks(3, work)


def test_the_ledger_counts_what_is_sent():
    def work(comm):
        ledger = RecordingComm(comm)
        assert isinstance(ledger, Comm)
        collectives(ledger)
        return ledger.names, [entry.sent_bytes for entry in ledger.entries]

    names, sent = run_ranks(2, work)[1]
    assert names == [
        "all_gather", "all_gather", "reduce_scatter", "all_reduce", "all_reduce", "broadcast", "gather", "barrier",
        "all_gather_object",
    ]  # fmt: skip
    assert sent == [8, 4, 4, 8, 8, 8, 8, 0, 0]
