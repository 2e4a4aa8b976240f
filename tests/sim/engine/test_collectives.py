"""What a step gathers, reduces and sends, read from the ledger; exact sequences are behaviours 8, 17 and 30."""

import pytest
import torch
from torch import nn

from fullshard.core.engine.step.lane import LaneState
from support.models import TinyLM, batches, lm_loss
from support.parity import assert_gradients_alike, on_ranks, rows_for

SHORT = {"all_gather": "AG", "reduce_scatter": "RS", "all_reduce": "AR"}


def last_step(make):
    """Collectives of the forward and of the backward of the third step, and bytes sent, per rank."""

    def work(ledger, model):
        for tokens in batches(3, 4):
            ledger.entries.clear()
            loss = lm_loss(model, rows_for(ledger, tokens))
            forward = [SHORT[name] for name in ledger.names]
            loss.backward()
            model.zero_grad()
        return forward, [SHORT[name] for name in ledger.names][len(forward) :], ledger.sent_bytes, model

    return on_ranks(2, make, work, recorded=True)


def test_a_frozen_block_that_needs_no_input_gradient_is_not_gathered_in_backward():
    def make():
        model = TinyLM()
        model.embed.weight.requires_grad_(False)
        model.blocks[0].requires_grad_(False)
        return model

    for forward, backward, _, _ in last_step(make):
        assert forward == ["AG"] * 6  # the root has a frozen lane and one for the module that is never used
        assert backward.count("AG") == 3
        assert backward.count("RS") == 4  # three blocks, and the root for the module that is never used


def test_bytes_on_the_wire_are_two_gathers_and_one_reduce_of_each_block():
    for _, _, sent, model in last_step(TinyLM):
        runtime = model._fullshard_runtime
        shard_bytes = {unit.name: sum(lane.shard.nbytes for lane in unit.lanes) for unit in runtime.units}
        blocks = sum(nbytes for name, nbytes in shard_bytes.items() if name != "(root)")
        used_flags = 8 * (2 + sum(len(unit.params) for unit in runtime.units))  # int64, all-reduced
        assert sent == 3 * blocks + 2 * shard_bytes["(root)"] + used_flags


def test_a_submodule_called_outside_its_unit_gathers_on_demand():
    def features(model, rows):
        tokens = rows(batches(1, 4)[0])
        outputs = model.blocks[1](model.embed(tokens)), model.blocks[2].side(model.embed(tokens))
        (outputs[0].square().mean() + outputs[1].mean()).backward()

    assert_gradients_alike(TinyLM, features)


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

    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(0))

    def work(comm, model):
        model(x).sum().backward()
        assert all(p.grad is not None for p in model.parameters())
        assert model._fullshard_runtime.tracker.live["gathered"] == 0

    with pytest.warns(UserWarning, match="finds no tensors"):
        on_ranks(2, Model, work)


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_block_is_released_before_the_backward_of_the_block_below_ends(reentrant):
    def work(comm, model):
        units, gathered = model._fullshard_runtime.units[1:], {}
        for number, block in enumerate(model.blocks):  # its norm is the last to have a backward
            block.norm.register_full_backward_hook(
                lambda *_, n=number: gathered.update({n: [unit.state is LaneState.GATHERED for unit in units]})
            )
        lm_loss(model, batches(1, 2)[0]).backward()
        return gathered

    for gathered in on_ranks(2, lambda: TinyLM(reentrant), work, wrap=lambda module: type(module).__name__ == "Block"):
        assert [gathered[number][number:] for number in range(4)] == [[True] + [False] * (3 - n) for n in range(4)]
