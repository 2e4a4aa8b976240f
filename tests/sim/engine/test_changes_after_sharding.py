"""What users change after sharding: what is frozen, dtypes, values; and the ways to call the model beside forward."""

import pytest
import torch
from torch import nn

from fullshard import MixedPrecision, fully_shard, register_forward_method, unsharded
from fullshard.core.engine import full_state_dict, root_unsharded
from fullshard.core.testing import run_ranks
from fullshard.errors import MismatchError, ShardingError
from support.models import KINDS, TinyLM, batches, lm_loss
from support.parity import (
    ROWS_PER_RANK,
    alone,
    assert_gradients_alike,
    on_ranks,
    optimizer_for,
    replicas,
    rows_for,
    weights_of,
)

pytestmark = pytest.mark.parity

SIZE = 2


def run_with_changes(model, changes, data, take=lambda tokens: tokens):
    """Train a step for each of ``data``; ``changes[i](model)`` comes before step i."""
    optimizer, losses = optimizer_for(model), []
    for step, tokens in enumerate(data):
        changes.get(step, lambda model: None)(model)
        loss = lm_loss(model, take(tokens))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def freeze(*names):
    def change(model):
        for name in names:
            model.get_submodule(name).requires_grad_(False)

    return change


def unfreeze(*names):
    def change(model):
        for name in names:
            model.get_submodule(name).requires_grad_(True)

    return change


CHANGES = {
    "freeze and unfreeze a block": {1: freeze("blocks.1", "blocks.2"), 3: unfreeze("blocks.1")},
    "freeze part of a block": {2: freeze("blocks.1.up", "blocks.2.norm")},
    "unfreeze what was frozen when sharded": {3: unfreeze("blocks.0", "blocks.3.up")},
    "freeze all but the root": {2: freeze("blocks")},
}


def partly_frozen():
    model = TinyLM()
    model.blocks[0].requires_grad_(False)
    model.blocks[3].up.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("name", "frozen"), [*((name, "shard") for name in CHANGES), *((name, "replicate") for name in list(CHANGES)[1:3])]
)
def test_freezing_and_unfreezing_between_steps(name, frozen):
    make = partly_frozen if "when sharded" in name else TinyLM
    reference, models = replicas(make, SIZE)
    data = batches(6, SIZE * ROWS_PER_RANK)
    run_with_changes(reference, CHANGES[name], data)

    def work(comm):
        model = fully_shard(models[comm.rank], comm, frozen=frozen)
        run_with_changes(model, CHANGES[name], data, lambda tokens: rows_for(comm, tokens))
        return weights_of(model)

    for weights in run_ranks(SIZE, work):
        for name, p in reference.named_parameters():
            assert (weights[name] - p).abs().max() <= 1e-5, name


def test_a_block_kept_in_bfloat16_while_frozen_trains_in_float32_when_unfrozen():
    """It stays gathered after backward, and its memory is another one from then on."""
    reference, models = replicas(partly_frozen, SIZE)
    weights = reference.blocks[0].state_dict()

    def work(comm):
        model = fully_shard(models[comm.rank], comm, mp_policy=MixedPrecision(param="bf16"))
        runtime = model._fullshard_runtime
        for unit in runtime.units:
            runtime.configure(unit, reshard_after_backward=False)
        frozen = list(model.blocks[0].parameters())
        assert {p.dtype for p in frozen} == {torch.bfloat16}
        tokens = rows_for(comm, batches(1, SIZE * ROWS_PER_RANK)[0])
        before = lm_loss(model, tokens)
        before.backward()
        unfreeze("blocks.0")(model)
        after = lm_loss(model, tokens)
        after.backward()
        assert torch.equal(before, after)
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.blocks[0].parameters())
        with unsharded(model):
            for name, value in model.blocks[0].state_dict().items():
                torch.testing.assert_close(value.float(), weights[name].bfloat16().float(), atol=0, rtol=0)

    run_ranks(SIZE, work)


def test_ranks_that_freeze_differently_are_told():
    def work(comm, model):
        lm_loss(model, batches(1, 2)[0]).backward()
        if comm.rank:
            model.blocks[1].up.requires_grad_(False)
        with pytest.raises(MismatchError):
            lm_loss(model, batches(1, 2)[0]).backward()
        return True

    assert all(on_ranks(SIZE, TinyLM, work))


def test_casting_under_a_precision_policy_changes_the_shards_only():
    def work(comm, model):
        model.double()
        seen = []
        model.blocks[0].up.register_forward_hook(lambda m, a, o: seen.append(o.dtype))
        lm_loss(model, batches(1, 2)[0]).backward()
        grads = {p.grad.dtype for p in model.parameters() if p.grad is not None}
        return seen[0], {p.dtype for p in model.parameters()}, grads

    for seen, shards, grads in on_ranks(SIZE, TinyLM, work, mp_policy=MixedPrecision(param="bfloat16")):
        assert seen == torch.bfloat16
        assert shards == grads == {torch.float64}


def test_casting_a_part_of_a_unit_is_refused():
    model = alone(TinyLM())
    model.blocks[0].up.double()
    with pytest.raises(ShardingError, match="Only some parameters of unit"):
        lm_loss(model, batches(1, 2)[0])


@pytest.mark.parametrize(("kind", "size"), [("lm", 2), ("t5", 3), ("lm_frozen_parts", 3)])
def test_load_state_dict_gives_each_rank_its_rows(kind, size):
    make, _ = KINDS[kind]
    torch.manual_seed(5)
    wanted = make()

    def work(comm, model):
        assert model.load_state_dict(wanted.state_dict()) == ([], [])
        return weights_of(model)

    for weights in on_ranks(size, make, work):
        assert all(torch.equal(weights[name], p) for name, p in wanted.named_parameters())


def test_a_state_dict_that_does_not_fit_changes_nothing():
    state = {name: value.clone() for name, value in TinyLM().state_dict().items()}
    odd = {name: value for name, value in state.items() if "blocks.0.up" not in name} | {"more": torch.zeros(1)}
    wide = state | {"blocks.1.up.weight": torch.zeros(3, 3)}

    model = alone(TinyLM())
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ShardingError, match=r"lacks blocks.0.up.weight; the model has no more"):
        model.load_state_dict(odd)
    with pytest.raises(ShardingError, match=r"blocks.1.up.weight has shape \(3, 3\) where the model has \(40, 24\)"):
        model.load_state_dict(wide)
    with pytest.raises(ShardingError, match="assign"):
        model.load_state_dict(state, assign=True)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert model.load_state_dict(odd, strict=False) == (["blocks.0.up.weight"], ["more"])


class CallsForward(nn.Module):
    """A method beside forward that calls it."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.scale = nn.Parameter(torch.full((8,), 0.5))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x).tanh()
        return x * self.scale

    def both(self, x):
        return self.forward(x).square().mean() + self(x).mean()


def test_a_registered_method_may_call_forward():
    """Methods of the root and of blocks that use parameters themselves are behaviour 38."""
    data = torch.randn(4 * SIZE, 8, generator=torch.Generator().manual_seed(0))

    def shard(model, comm):
        model = fully_shard(model, comm, wrap=lambda module: type(module) is nn.Linear)
        register_forward_method(model, "both")
        with pytest.raises(ShardingError, match="no method thrice"):
            register_forward_method(model, "thrice")
        return model

    assert_gradients_alike(CallsForward, lambda model, rows: model.both(rows(data)).backward(), SIZE, shard=shard)


def test_changes_inside_unsharded_are_written_back_while_a_loop_holds_the_root_too():
    reference, models = replicas(TinyLM, SIZE)

    def work(comm):
        model = fully_shard(models[comm.rank], comm)
        with root_unsharded(model), unsharded(model), torch.no_grad():
            for param in model.parameters():
                param.add_(1.0)
        return full_state_dict(model)

    after = run_ranks(SIZE, work)[0]
    for name, value in reference.state_dict().items():
        assert torch.equal(after[name], value + 1.0), name
