"""The exact sequence of collectives of a step, read from the ledger."""

import pytest
import torch
from torch import nn

from fullshard import fully_shard, no_sync, unsharded
from fullshard.core.engine.step.lane import LaneState
from fullshard.core.testing import RecordingComm, run_ranks
from support.models import TinyLM, batches, lm_loss
from support.parity import assert_gradients, replicas, sharded_gradients

SHORT = {"all_gather": "AG", "reduce_scatter": "RS", "all_reduce": "AR"}


def steps(make, loss_of=lm_loss, *, size=2, count=3):
    """Collectives of the forward and of the backward of the last of ``count`` steps, and bytes sent, per rank."""
    _, models = replicas(make, size)
    data = batches(count, 2 * size)

    def work(comm):
        ledger = RecordingComm(comm)
        model = fully_shard(models[comm.rank], ledger)
        for tokens in data:
            ledger.entries.clear()
            loss = loss_of(model, tokens[2 * comm.rank : 2 * comm.rank + 2])
            forward = [SHORT[name] for name in ledger.names]
            loss.backward()
            model.zero_grad()
        return forward, [SHORT[name] for name in ledger.names][len(forward) :], ledger.sent_bytes, model

    return run_ranks(size, work)


def test_four_units_gather_twice_and_reduce_once():
    for forward, backward, _, _ in steps(TinyLM):
        # the root, then the blocks; each block's gather goes out before the block ahead of it computes
        assert forward == ["AG"] * 5
        # the root is still there; the last all-reduce tells which parameters were used anywhere
        assert backward == ["AG", "AG", "RS", "AG", "RS", "AG", "RS", "RS", "RS", "AR"]


def test_a_frozen_block_that_needs_no_input_gradient_is_not_gathered_in_backward():
    def make():
        model = TinyLM()
        model.embed.weight.requires_grad_(False)
        model.blocks[0].requires_grad_(False)
        return model

    for forward, backward, _, _ in steps(make):
        assert forward == ["AG"] * 6  # the root has a frozen lane and one for the module that is never used
        assert backward.count("AG") == 3
        assert backward.count("RS") == 4  # three blocks, and the root for the module that is never used


def test_bytes_on_the_wire_are_two_gathers_and_one_reduce_of_each_block():
    for _, _, sent, model in steps(TinyLM):
        runtime = model._fullshard_runtime
        shard_bytes = {unit.name: sum(lane.shard.nbytes for lane in unit.lanes) for unit in runtime.units}
        blocks = sum(nbytes for name, nbytes in shard_bytes.items() if name != "(root)")
        used_flags = 8 * (2 + sum(len(unit.params) for unit in runtime.units))  # int64, all-reduced
        assert sent == 3 * blocks + 2 * shard_bytes["(root)"] + used_flags


def test_no_sync_reduces_nothing_until_the_next_backward():
    reference, models = replicas(TinyLM, 2)
    first, second = batches(2, 4)
    (lm_loss(reference, first) + lm_loss(reference, second)).backward()

    def work(comm):
        ledger = RecordingComm(comm)
        model = fully_shard(models[comm.rank], ledger)
        rows = slice(2 * comm.rank, 2 * comm.rank + 2)
        with no_sync(model):
            lm_loss(model, first[rows]).backward()
        assert "reduce_scatter" not in ledger.names
        assert all(p.grad is None for p in model.parameters())
        lm_loss(model, second[rows]).backward()
        return sharded_gradients(model)

    assert_gradients(run_ranks(2, work), reference)


def test_accumulated_shards_equal_the_gradient_of_the_sum():
    reference, models = replicas(TinyLM, 2)
    data = batches(3, 4)
    for tokens in data:
        lm_loss(reference, tokens).backward()

    def work(comm):
        model = fully_shard(models[comm.rank], comm)
        for tokens in data:
            lm_loss(model, tokens[2 * comm.rank : 2 * comm.rank + 2]).backward()
        return sharded_gradients(model)

    assert_gradients(run_ranks(2, work), reference)


class PickyLM(TinyLM):
    """Leaves the last block's output out of the loss where ``skip`` says so."""

    skip = False

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks[:-1]:
            x = block(x)
        last = self.blocks[-1](x)
        return self.head(x if self.skip else last)


def test_a_block_that_one_rank_does_not_use_reduces_zeros_there_and_nothing_hangs():
    reference, models = replicas(PickyLM, 2)
    tokens = batches(1, 4)[0]
    halves = [tokens[:2], tokens[2:]]
    reference.skip = False
    (lm_loss(reference, halves[0]) / 2).backward()
    reference.skip = True
    (lm_loss(reference, halves[1]) / 2).backward()

    def work(comm):
        model = fully_shard(models[comm.rank], comm)
        model.skip = comm.rank == 1
        for _ in range(2):
            model.zero_grad()
            lm_loss(model, halves[comm.rank]).backward()
        return sharded_gradients(model)

    assert_gradients(run_ranks(2, work, timeout_s=20), reference)


def test_a_parameter_that_no_rank_used_keeps_no_gradient():
    _, models = replicas(TinyLM, 2)

    def work(comm):
        model = fully_shard(models[comm.rank], comm)
        lm_loss(model, batches(1, 2)[0]).backward()
        return {p.shard_meta.name for p in model.parameters() if p.grad is None}

    without = set().union(*run_ranks(2, work))
    assert without == {"unused.weight", "unused.bias"}


def test_an_exception_in_forward_leaves_a_model_that_trains_again():
    reference, models = replicas(TinyLM, 2)
    tokens = batches(1, 4)[0]
    lm_loss(reference, tokens).backward()

    def work(comm):
        model = fully_shard(models[comm.rank], comm)
        handle = model.blocks[2].norm.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            lm_loss(model, tokens[2 * comm.rank : 2 * comm.rank + 2])
        handle.remove()
        lm_loss(model, tokens[2 * comm.rank : 2 * comm.rank + 2]).backward()
        runtime = model._fullshard_runtime
        assert runtime.account.live["gathered"] == 0
        assert runtime.account.live["gradients"] == 0
        return sharded_gradients(model)

    assert_gradients(run_ranks(2, work), reference)


def test_an_exception_in_backward_leaves_a_model_that_trains_again():
    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ZeroDivisionError

    reference, models = replicas(TinyLM, 2)
    tokens = batches(1, 4)[0]
    lm_loss(reference, tokens).backward()

    def work(comm):
        model = fully_shard(models[comm.rank], comm)
        rows = tokens[2 * comm.rank : 2 * comm.rank + 2]
        handle = model.blocks[1].register_forward_hook(lambda _m, _a, output: Breaks.apply(output))
        with pytest.raises(ZeroDivisionError):
            lm_loss(model, rows).backward()
        handle.remove()
        model.zero_grad()
        lm_loss(model, rows).backward()
        return sharded_gradients(model)

    assert_gradients(run_ranks(2, work), reference)


def test_evaluation_in_every_mode_then_training():
    _, models = replicas(TinyLM, 2)
    tokens = batches(1, 2)[0]

    def work(comm):
        model = fully_shard(models[comm.rank], comm)
        with torch.inference_mode():
            first = lm_loss(model, tokens).item()
        with torch.no_grad():
            second = lm_loss(model, tokens).item()
        lm_loss(model, tokens)  # grad enabled, never used
        loss = lm_loss(model, tokens)
        loss.backward()
        assert model._fullshard_runtime.account.live["gathered"] == 0
        return first, second, loss.item()

    for first, second, third in run_ranks(2, work):
        assert first == second == third


def test_changes_made_unsharded_are_kept():
    _, models = replicas(TinyLM, 3)

    def work(comm):
        model = fully_shard(models[comm.rank], comm)
        with unsharded(model), torch.no_grad():
            model.blocks[1].up.weight.fill_(3.0)
            before = model.embed.weight.clone()
        with unsharded(model):
            assert (model.blocks[1].up.weight == 3.0).all()
            assert torch.equal(model.embed.weight, before)

    run_ranks(3, work)


def test_a_submodule_called_outside_its_unit_gathers_on_demand():
    reference, models = replicas(TinyLM, 2)
    tokens = batches(1, 2)[0]

    def features(model):
        return model.blocks[1](model.embed(tokens)).square().mean() + model.blocks[2].side(model.embed(tokens)).mean()

    features(reference).backward()

    def work(comm):
        model = fully_shard(models[comm.rank], comm)
        features(model).backward()
        return sharded_gradients(model)

    assert_gradients(run_ranks(2, work), reference)


def test_units_that_return_no_tensors_stay_gathered_and_say_so():
    class Wrapped:
        def __init__(self, value):
            self.value = value

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x):
            return Wrapped(self.linear(x))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.odd = nn.ModuleList([Odd(), Odd()])

        def forward(self, x):
            for odd in self.odd:
                x = odd(x).value
            return x

    _, models = replicas(Model, 2)
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(0))

    def work(comm):
        model = fully_shard(models[comm.rank], comm)
        model(x).sum().backward()
        assert all(p.grad is not None for p in model.parameters())
        assert model._fullshard_runtime.account.live["gathered"] == 0

    with pytest.warns(UserWarning, match="finds no tensors"):
        run_ranks(2, work)


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_block_is_released_before_the_backward_of_the_block_below_ends(reentrant):
    _, models = replicas(lambda: TinyLM(reentrant), 2)

    def work(comm):
        model = fully_shard(models[comm.rank], comm, wrap=lambda module: type(module).__name__ == "Block")
        units, gathered = model._fullshard_runtime.units[1:], {}
        for number, block in enumerate(model.blocks):  # its norm is the last to have a backward
            block.norm.register_full_backward_hook(
                lambda *_, n=number: gathered.update({n: [unit.state is LaneState.GATHERED for unit in units]})
            )
        lm_loss(model, batches(1, 2)[0]).backward()
        return gathered

    for gathered in run_ranks(2, work):
        assert [gathered[number][number:] for number in range(4)] == [[True] + [False] * (3 - n) for n in range(4)]
