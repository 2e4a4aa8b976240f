"""What is gathered ahead: how far, in which order, within which bound. It never changes what is computed."""

import pytest
import torch

from fullshard import BackwardPrefetch, Prefetch, TransformerBlocks, fully_shard
from fullshard.core.testing import RecordingComm, run_ranks
from fullshard.errors import ConfigError, WrapError
from support.models import KINDS, TinyLM, batches, lm_loss
from support.parity import ROWS_PER_RANK, replicas, train_sharded

SIZE = 2


class Naming(RecordingComm):
    """Keeps what was announced before each collective, and when a block computes."""

    def __init__(self, inner):
        super().__init__(inner)
        self.log, self.what = [], ""

    def announce(self, what):
        self.what = what
        super().announce(what)

    def all_gather(self, full, shard):
        self.log.append(self.what.removeprefix("all-gather of unit ").removeprefix("blocks."))
        return super().all_gather(full, shard)


LISTS = {"forward_lists": {"blocks.0": ["blocks.2", "blocks.1"], "blocks.1": []}}
LISTS |= {"backward_lists": {"blocks.3": ["blocks.1"]}}
BOUND = {"forward_lists": {"blocks.0": ["blocks.1", "blocks.2", "blocks.3"]}, "max_in_flight": 2, "ahead": 3}
ORDERS = {
    "one unit ahead": ({}, "(root) 0 1 run0 2 run1 3 run2 run3", "3 2 run3 1 run2 0 run1 run0"),
    "two units ahead": ({"ahead": 2}, "(root) 0 1 2 run0 3 run1 run2 run3", "3 2 1 run3 0 run2 run1 run0"),
    "none in forward, and in backward after the gradients went out": (
        {"forward": False, "backward": BackwardPrefetch.BACKWARD_POST},
        "(root) 0 run0 1 run1 2 run2 3 run3",
        "3 run3 2 run2 1 run1 0 run0",
    ),
    "lists take the place of the order": (LISTS, "(root) 0 2 1 run0 run1 3 run2 run3", "3 1 run3 2 run2 0 run1 run0"),
    "the bound holds back lists": (BOUND, "(root) 0 1 run0 2 run1 3 run2 run3", "3 2 run3 1 run2 0 run1 run0"),
}
"""Gathers by block, and where each block computes, in forward and in backward."""


@pytest.mark.parametrize("case", ORDERS)
def test_units_are_gathered_in_this_order(case):
    options, *expected = ORDERS[case]
    _, models = replicas(TinyLM, SIZE)

    def work(comm):
        ledger = Naming(comm)
        blocks = TransformerBlocks({"Block"})
        model = fully_shard(models[comm.rank], ledger, wrap=blocks, prefetch=Prefetch(**options))
        for number, block in enumerate(model.blocks):
            block.norm.register_forward_hook(lambda *_, n=number: ledger.log.append(f"run{n}"))
            block.norm.register_full_backward_hook(lambda *_, n=number: ledger.log.append(f"run{n}"))
        for tokens in batches(2, 2):
            ledger.log.clear()
            lm_loss(model, tokens).backward()
        middle = ledger.log.index("run3") + 1
        return " ".join(ledger.log[:middle]), " ".join(ledger.log[middle:])

    assert list(run_ranks(SIZE, work)[0]) == expected


@pytest.mark.parity
@pytest.mark.parametrize(
    ("kind", "prefetch"),
    [
        ("t5", Prefetch(ahead=3)),
        ("lm_reentrant_two_forwards", Prefetch(ahead=3)),
        ("lm_checkpoint", Prefetch(forward=False, backward=BackwardPrefetch.NONE)),
        ("lm_two_forwards", Prefetch(ahead=2, max_in_flight=2)),
        ("lm_checkpoint_reentrant", Prefetch(ahead=2, max_in_flight=2)),
        ("t5", Prefetch(ahead=2, backward=BackwardPrefetch.BACKWARD_POST)),
        ("lm_checkpoint", Prefetch(ahead=2, backward=BackwardPrefetch.BACKWARD_POST)),
    ],
)
def test_numbers_stay_the_same_to_the_bit(kind, prefetch):
    make, loss_of = KINDS[kind]
    data = batches(4, 2 * ROWS_PER_RANK)

    def runs(**options):
        _, models = replicas(make, SIZE)
        return run_ranks(SIZE, lambda comm: train_sharded(models[comm.rank], comm, loss_of, data, **options))

    for run, other in zip(runs(prefetch=prefetch), runs(), strict=True):
        assert run[:2] == other[:2]
        assert all(torch.equal(run[2][name], other[2][name]) for name in run[2])


def test_what_cannot_be():
    with pytest.raises(ConfigError, match="at least 1"):
        Prefetch(ahead=0)
    with pytest.raises(WrapError, match=r"name blocks.9; the units are \(root\), blocks.0"):
        run_ranks(1, lambda comm: fully_shard(TinyLM(), comm, prefetch=Prefetch(forward_lists={"blocks.9": []})))
