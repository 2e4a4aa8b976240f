"""What is gathered ahead: how far, in which order, within which bound. It never changes what is computed."""

import pytest
import torch

from fullshard import BackwardPrefetch, Prefetch, TransformerBlocks, fully_shard
from fullshard.core.testing import RecordingComm, run_ranks
from fullshard.errors import ConfigError, WrapError
from support.models import KINDS, TinyLM, batches, lm_loss
from support.parity import ROWS_PER_RANK, replicas, train_sharded

SIZE = 2
BLOCKS = [f"blocks.{i}" for i in range(4)]


class Naming(RecordingComm):
    """Keeps what was announced before each collective, and when a block computes."""

    def __init__(self, inner):
        super().__init__(inner)
        self.log, self.what = [], ""

    def announce(self, what):
        self.what = what
        super().announce(what)

    def all_gather(self, full, shard):
        self.log.append(self.what.removeprefix("all-gather of unit "))
        return super().all_gather(full, shard)


def log_of(prefetch, models):
    """Of the second step of a TinyLM: gathers by unit, and ``run N`` where block N computes, forward and backward."""

    def work(comm):
        ledger = Naming(comm)
        model = fully_shard(models[comm.rank], ledger, wrap=TransformerBlocks({"Block"}), prefetch=prefetch)
        for number, block in enumerate(model.blocks):
            block.norm.register_forward_hook(lambda *_, n=number: ledger.log.append(f"run {n}"))
            block.norm.register_full_backward_hook(lambda *_, n=number: ledger.log.append(f"run {n}"))
        for tokens in batches(2, 2):
            ledger.log.clear()
            lm_loss(model, tokens).backward()
        middle = ledger.log.index("run 3") + 1
        return ledger.log[:middle], ledger.log[middle:]

    return run_ranks(SIZE, work)[0]


def logs(**options):
    _, models = replicas(TinyLM, SIZE)
    return log_of(Prefetch(**options), models)


def test_one_unit_ahead():
    forward, backward = logs()
    assert forward == ["(root)", "blocks.0", "blocks.1", "run 0", "blocks.2", "run 1", "blocks.3", "run 2", "run 3"]
    assert backward == ["blocks.3", "blocks.2", "run 3", "blocks.1", "run 2", "blocks.0", "run 1", "run 0"]


def test_two_units_ahead():
    forward, backward = logs(ahead=2)
    assert forward == ["(root)", *BLOCKS[:3], "run 0", "blocks.3", "run 1", "run 2", "run 3"]
    assert backward == ["blocks.3", "blocks.2", "blocks.1", "run 3", "blocks.0", "run 2", "run 1", "run 0"]


def test_no_forward_prefetch():
    forward, _ = logs(forward=False)
    assert forward == ["(root)", *(part for n in range(4) for part in (f"blocks.{n}", f"run {n}"))]


def test_after_the_gradients_went_out():
    _, backward = logs(backward=BackwardPrefetch.BACKWARD_POST)
    assert backward == [part for n in reversed(range(4)) for part in (f"blocks.{n}", f"run {n}")]


def test_explicit_lists_take_the_place_of_the_order():
    forward, backward = logs(
        forward_lists={"blocks.0": ["blocks.2", "blocks.1"], "blocks.1": []}, backward_lists={"blocks.3": ["blocks.1"]}
    )
    assert forward == ["(root)", "blocks.0", "blocks.2", "blocks.1", "run 0", "run 1", "blocks.3", "run 2", "run 3"]
    assert backward == ["blocks.3", "blocks.1", "run 3", "blocks.2", "run 2", "blocks.0", "run 1", "run 0"]


def test_the_bound_on_units_in_flight_holds_back_lists():
    forward, _ = logs(forward_lists={"blocks.0": BLOCKS[1:]}, max_in_flight=2, ahead=3)
    assert forward == ["(root)", "blocks.0", "blocks.1", "run 0", "blocks.2", "run 1", "blocks.3", "run 2", "run 3"]


@pytest.mark.parity
@pytest.mark.parametrize("kind", ["t5", "lm_two_forwards", "lm_checkpoint", "lm_checkpoint_reentrant"])
@pytest.mark.parametrize(
    "prefetch",
    [
        Prefetch(ahead=3),
        Prefetch(forward=False, backward=BackwardPrefetch.NONE),
        Prefetch(ahead=2, max_in_flight=2),
        Prefetch(ahead=2, backward=BackwardPrefetch.BACKWARD_POST),
    ],
    ids=["three ahead", "none", "bounded", "two ahead, post"],
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
