"""Ranks as threads follow the protocol, and report ranks that diverge."""

import pytest
import torch

from fullshard.core.comm import Comm
from fullshard.core.testing import RecordingComm, run_ranks
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
    # Rank r gives r of its own number to each rank before it and nothing to those after it.
    sent = [torch.full((comm.rank if r <= comm.rank else 0,), float(comm.rank)) for r in range(comm.size)]
    received = [torch.empty(r if comm.rank <= r else 0) for r in range(comm.size)]
    comm.exchange(received, sent).wait()
    comm.barrier()
    return {
        "full": full.tolist(), "in_place": in_place.tolist(), "reduced": reduced.item(), "total": total.item(),
        "largest": largest.item(), "told": told.item(), "gathered": None if gathered is None else gathered.tolist(),
        "exchanged": [part.tolist() for part in received], "objects": comm.all_gather_object({"rank": comm.rank}),
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
        assert got["exchanged"] == [[float(r)] * r if rank <= r else [] for r in range(size)]
        assert got["objects"] == [{"rank": r} for r in range(size)]


def test_different_collectives_are_an_error_on_every_rank():
    def work(comm):
        with pytest.raises(MismatchError, match="different collectives"):
            comm.all_reduce(torch.zeros(1 + comm.rank)).wait()

    run_ranks(3, work)


def test_collectives_for_different_purposes_are_different_ones():
    def work(comm):
        comm.announce(f"unit {comm.rank}")
        shard = torch.zeros(1)
        for wrong in (
            lambda: comm.all_gather(torch.zeros(comm.size), shard),
            lambda: comm.reduce_scatter(shard, torch.zeros(comm.size)),
            lambda: comm.broadcast(shard),
            lambda: comm.gather(shard, torch.zeros(comm.size) if comm.rank == 0 else None),
        ):
            with pytest.raises(MismatchError, match=r"rank 0: .* \(unit 0\); rank 1: .* \(unit 1\)\. Every rank must"):
                wrong()

    run_ranks(2, work)


def test_ranks_that_announce_different_things_can_find_out_that_they_differ():
    def work(comm):
        comm.announce(f"unit {comm.rank}")
        total = torch.tensor([comm.rank])
        comm.all_reduce(total).wait()
        comm.barrier()
        return total.item(), comm.all_gather_object(comm.rank)

    assert run_ranks(2, work) == [(1, [0, 1])] * 2


def test_a_rank_that_waits_in_vain_says_what_for():
    def work(comm):
        ledger = RecordingComm(comm)
        ledger.announce("gather of unit blocks.3 to rank 0")
        if comm.rank == 0:
            with pytest.raises(MismatchError, match=r"waited in gather .* \(gather of unit blocks\.3 to rank 0\), but"):
                ledger.gather(torch.zeros(1), torch.zeros(2))

    run_ranks(2, work, timeout_s=0.2)


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
        "all_gather", "all_gather", "reduce_scatter", "all_reduce", "all_reduce", "broadcast", "gather",
        "exchange", "barrier", "all_gather_object",
    ]  # fmt: skip
    assert sent == [8, 4, 4, 8, 8, 8, 8, 4, 0, 0]
