"""Units made by hand: bottom-up calls, names, groups of modules, and small neighbours merged by the engine."""

import pytest
import torch
from torch import nn

from fullshard import MixedPrecision, Named, ShardingStrategy, TransformerBlocks, fully_shard, units
from fullshard.core.comm import SoloComm
from fullshard.core.engine.setup import wrap
from fullshard.core.testing import RecordingComm, run_ranks
from fullshard.errors import ProcessGroupError, ShardingError, WrapError
from support.models import KINDS, TinyLM, batches, lm_loss
from support.parity import (
    ROWS_PER_RANK,
    alone,
    assert_same_run,
    assert_trains_alike,
    on_ranks,
    optimizer_for,
    replicas,
    train_sharded,
    train_unsharded,
)

pytestmark = pytest.mark.parity

SIZE = 2
PAIRS = Named(("blocks.0", "blocks.1"), ("blocks.2", "blocks.3"))


def bottom_up(model, comm, **options):
    for block in model.blocks:
        fully_shard(block, comm, **options)
    return fully_shard(model, comm)


@pytest.mark.parametrize("kind", ["lm_two_forwards", "lm_checkpoint", "lm_checkpoint_reentrant"])
def test_bottom_up_calls_give_the_unsharded_run(kind):
    assert_trains_alike(*KINDS[kind], steps=4, shard=bottom_up)


def test_bottom_up_calls_make_the_units_of_one_call():
    one = alone(TinyLM(), wrap=TransformerBlocks({"Block"}))
    other = bottom_up(TinyLM(), SoloComm(torch.device("cpu")))
    names = [[p.shard_meta.name for p in model.parameters()] for model in (one, other)]
    assert type(other.blocks[0]).__name__ == "Block"
    assert not hasattr(other.blocks[0], "_fullshard_runtime")
    assert units(one) == units(other)
    assert names[0] == names[1]


def test_nested_calls_and_a_wrap_policy_in_between():
    def shard(model, comm):
        fully_shard(model.blocks[0].up, comm)
        fully_shard(model.blocks[0], comm, wrap=None)
        model = fully_shard(model, comm, wrap=TransformerBlocks({"Block"}))
        assert [row.unit for row in units(model).rows] == [
            "(root)", "blocks.0", "blocks.0.up", "blocks.1", "blocks.2", "blocks.3",
        ]  # fmt: skip
        return model

    assert_trains_alike(TinyLM, lm_loss, steps=4, shard=shard)


def test_each_call_keeps_its_own_policies():
    def work(comm):
        ledger = RecordingComm(comm)
        torch.manual_seed(0)
        model = TinyLM()
        fully_shard(model.blocks[0], ledger, mp_policy=MixedPrecision(param="bfloat16", output="float32"))
        for block in model.blocks[1:]:
            fully_shard(block, ledger, strategy=ShardingStrategy.SHARD_GRAD_OP)
        model = fully_shard(model, ledger)
        seen = []
        model.blocks[0].up.register_forward_hook(lambda m, a, o: seen.append(o.dtype))
        model.blocks[1].up.register_forward_hook(lambda m, a, o: seen.append(o.dtype))
        loss = lm_loss(model, batches(1, 2)[0])
        ledger.entries.clear()
        loss.backward()
        return seen, ledger.names.count("all_gather")

    seen, gathers = run_ranks(1, work)[0]
    assert seen == [torch.bfloat16, torch.float32]
    assert gathers == 1  # blocks[0]; the others and the root stayed gathered


@pytest.mark.parametrize("kind", ["lm_two_forwards", "lm_checkpoint", "lm_reentrant_two_forwards", "t5"])
def test_several_modules_as_one_unit_give_the_unsharded_run(kind):
    groups = Named(("encoder.block.0", "encoder.block.1"), "decoder.block.0") if kind == "t5" else PAIRS
    assert_trains_alike(*KINDS[kind], steps=4, wrap=groups)


def test_a_group_is_gathered_once_each_way():
    def work(ledger, model):
        for tokens in batches(2, 2):
            ledger.entries.clear()
            lm_loss(model, tokens).backward()
        return ledger.names

    names = on_ranks(SIZE, TinyLM, work, recorded=True, wrap=PAIRS)[0]
    assert names.count("all_gather") == 3 + 2
    assert names.count("reduce_scatter") == 3


def test_a_frozen_group_below_all_that_trains_is_not_gathered_in_backward():
    def make():
        model = TinyLM()
        for frozen in (model.embed, model.blocks[0], model.blocks[1]):
            frozen.requires_grad_(False)
        return model

    def work(ledger, model):
        loss = lm_loss(model, batches(1, 2)[0])
        ledger.entries.clear()
        loss.backward()
        return ledger.names

    assert [names.count("all_gather") for names in on_ranks(SIZE, make, work, recorded=True, wrap=PAIRS)] == [1, 1]


def test_a_list_of_modules_is_one_unit_of_the_root():
    def shard(model, comm):
        fully_shard(model.blocks[0], comm)
        pair = [model.blocks[2], model.blocks[3]]
        assert fully_shard(pair, comm) is pair
        model = fully_shard(model, comm)
        assert [row.unit for row in units(model).rows] == ["(root)", "blocks.0", "blocks.2 + blocks.3"]
        return model

    assert_trains_alike(TinyLM, lm_loss, steps=4, shard=shard)


class Skipping(TinyLM):
    """Leaves out the second block, the last of its group, in every other forward."""

    def forward(self, tokens):
        x = self.embed(tokens)
        self.calls = getattr(self, "calls", 0) + 1
        for number, block in enumerate(self.blocks):
            if number != 1 or self.calls % 2:
                x = block(x)
        return self.head(x)


def test_a_group_whose_last_module_does_not_run_is_closed_by_the_next_unit():
    for model in assert_trains_alike(Skipping, lm_loss, SIZE, steps=4, wrap=PAIRS):
        assert model._fullshard_runtime.tracker.live["gathered"] == 0


@pytest.mark.parametrize("kind", ["lm", "lm_reentrant_two_forwards", "lm_frozen_parts", "t5"])
def test_tiny_neighbours_are_merged_and_the_run_stays_the_same(kind, monkeypatch):
    monkeypatch.setattr(wrap, "TINY_NUMEL", 6000)

    def shard(model, comm):
        model = fully_shard(model, comm)
        if kind == "lm":
            assert [row.unit for row in units(model).rows] == ["(root)", "blocks.0 .. 1", "blocks.2 .. 3"]
        return model

    assert_trains_alike(*KINDS[kind], steps=4, shard=shard)


def test_a_choice_of_the_users_is_never_merged(monkeypatch):
    monkeypatch.setattr(wrap, "TINY_NUMEL", 10**9)

    assert len(units(alone(TinyLM(), wrap=TransformerBlocks({"Block"}))).rows) == 5


def test_an_optimizer_made_before_any_call_trains_the_shards():
    reference, models = replicas(TinyLM, SIZE)
    data = batches(3, SIZE * ROWS_PER_RANK)
    plain = train_unsharded(reference, lm_loss, data)

    def work(comm):
        optimizer = optimizer_for(models[comm.rank])
        model = bottom_up(models[comm.rank], comm)
        return train_sharded(model, comm, lm_loss, data, sharded=True, optimizer=optimizer)

    for run in run_ranks(SIZE, work):
        assert_same_run(run, plain)


def test_what_cannot_be_sharded_by_hand():
    model = TinyLM()
    with pytest.raises(WrapError, match=r"no module named 'blocks\.9'"):
        alone(model, wrap=Named("blocks.9"))
    with pytest.raises(WrapError, match="more than once"):
        alone(model, wrap=Named("blocks.0", ("blocks.0", "blocks.1")))
    alone(model.embed, wrap=None)
    with pytest.raises(WrapError, match="tied to a parameter of a block"):
        alone(model)
    model = bottom_up(TinyLM(), SoloComm(torch.device("cpu")))
    with pytest.raises(ShardingError, match="sharded already"):
        alone(model)


def test_blocks_sharded_over_further_ranks_are_refused():
    _, models = replicas(TinyLM, SIZE)

    def work(comm):
        model = models[comm.rank]
        half = comm.split([[0], [1]])
        fully_shard(model.blocks[0], comm)
        with pytest.raises(ProcessGroupError, match=r"over 1 x 2 ranks .* names 1 x 1\. The ranks of a part must be"):
            fully_shard(model, half)

    run_ranks(SIZE, work)


def test_a_block_may_be_called_alone_before_the_root_takes_it_in():
    def work(comm):
        torch.manual_seed(0)
        block = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), comm, wrap=None)
        return block(torch.ones(1, 4)).sum().item()

    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(4, 4), nn.ReLU())(torch.ones(1, 4)).sum().item()
    assert run_ranks(1, work)[0] == pytest.approx(expected)
