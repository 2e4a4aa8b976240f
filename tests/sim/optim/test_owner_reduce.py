"""Values of split parameters are reduced among the ranks that hold them, and sent to no other rank."""

import pytest
import torch

from fullshard.core.optim.exchange import OwnerReduce, OwnerValue
from fullshard.core.testing import RecordingComm, run_ranks

OWNERS = [range(0, 2), range(1, 4), range(0, 4), range(2, 4)]
SIZES = [7, 5, 1, 2]


def share(comm, **options):
    """This rank's values of all that it owns: ``rank + 1`` times 1, 2, …; the ledger's entry and the results."""
    ledger = RecordingComm(comm)
    mine = {
        index: OwnerValue(owners, (comm.rank + 1) * torch.arange(1.0, SIZES[index] + 1))
        for index, owners in enumerate(OWNERS)
        if comm.rank in owners
    }
    OwnerReduce(ledger, list(mine.values()), "numbers", **options).wait()
    return {index: shared.value.tolist() for index, shared in mine.items()}, ledger


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("op", ["sum", "max"])
def test_owners_have_the_total_of_all_owners(op, at_once):
    for rank, (totals, ledger) in enumerate(run_ranks(4, lambda comm: share(comm, op=op, at_once=at_once))):
        assert list(totals) == [index for index, owners in enumerate(OWNERS) if rank in owners]
        for index, total in totals.items():
            factor = {"sum": sum, "max": max}[op](owner + 1 for owner in OWNERS[index])
            assert total == [factor * number for number in range(1, SIZES[index] + 1)]
        assert ledger.names == ["exchange"] * (1 if at_once else 2)


def test_bytes_are_those_of_a_ring_among_the_owners():
    value = {"numel": 12}

    def work(comm):
        ledger = RecordingComm(comm)
        owned = [OwnerValue(range(1, 4), torch.ones(value["numel"]))] if comm.rank > 0 else []
        OwnerReduce(ledger, owned, "numbers").wait()
        at_once = RecordingComm(comm)
        OwnerReduce(at_once, owned, "numbers", at_once=True).wait()
        return ledger.sent_bytes, at_once.sent_bytes

    others, ring, all_pairs = (0, 0), 2 * 2 * 12 * 4 // 3, 2 * 12 * 4
    assert run_ranks(4, work) == [others, *[(ring, all_pairs)] * 3]


def test_a_world_without_values_still_meets():
    def work(comm):
        OwnerReduce(comm, [], "nothing").wait()
        return comm.rank

    assert run_ranks(3, work) == [0, 1, 2]
