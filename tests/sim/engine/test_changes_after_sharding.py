"""What users change after sharding: what is frozen, dtypes, values; and the ways to call the model beside forward."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fullshard import MixedPrecision, fully_shard, register_forward_method, unsharded
from fullshard.core.engine import full_state_dict, root_held
from fullshard.core.testing import RecordingComm, run_ranks
from fullshard.errors import MismatchError, ShardingError
from support.models import KINDS, TinyLM, batches, lm_loss, t5
from support.parity import (
    ROWS_PER_RANK,
    assert_gradients,
    assert_same_run,
    optimizer_for,
    replicas,
    sharded_gradients,
    train_sharded,
    train_unsharded,
)

pytestmark = pytest.mark.parity

SIZE = 2


def rows_of(tokens, comm):
    return tokens[comm.rank * ROWS_PER_RANK : (comm.rank + 1) * ROWS_PER_RANK]


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
    "freeze a block": {2: freeze("blocks.1")},
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


@pytest.mark.parametrize("options", [{}, {"frozen": "replicate"}], ids=["shard", "replicate"])
@pytest.mark.parametrize("name", CHANGES)
def test_freezing_and_unfreezing_between_steps(name, options):
    make = partly_frozen if "when sharded" in name else TinyLM
    reference, models = replicas(make, SIZE)
    data = batches(6, SIZE * ROWS_PER_RANK)
    run_with_changes(reference, CHANGES[name], data)

    def work(comm):
        model = fully_shard(models[comm.rank], comm, **options)
        run_with_changes(model, CHANGES[name], data, lambda tokens: rows_of(tokens, comm))
        with unsharded(model):
            return {name: p.detach().clone() for name, p in model.named_parameters()}

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
        tokens = rows_of(batches(1, SIZE * ROWS_PER_RANK)[0], comm)
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


def test_a_block_frozen_later_is_not_reduced_any_more():
    _, models = replicas(TinyLM, SIZE)

    def work(comm):
        ledger = RecordingComm(comm)
        model = fully_shard(models[comm.rank], ledger)
        counts = []
        for step, tokens in enumerate(batches(3, 2)):
            if step == 1:
                model.blocks[1].requires_grad_(False)
            ledger.entries.clear()
            lm_loss(model, tokens).backward()
            counts.append(ledger.names.count("reduce_scatter"))
        return counts, model._fullshard_runtime.units[2].trainable

    for counts, trainable in run_ranks(SIZE, work):
        assert counts == [5, 4, 4]
        assert not trainable


def test_ranks_that_freeze_differently_are_told():
    _, models = replicas(TinyLM, SIZE)

    def work(comm):
        model = fully_shard(models[comm.rank], comm)
        lm_loss(model, batches(1, 2)[0]).backward()
        if comm.rank:
            model.blocks[1].up.requires_grad_(False)
        with pytest.raises(MismatchError):
            lm_loss(model, batches(1, 2)[0]).backward()
        return True

    assert all(run_ranks(SIZE, work, timeout_s=20))


def test_casting_after_sharding_is_followed():
    reference, models = replicas(TinyLM, SIZE)
    data = batches(4, SIZE * ROWS_PER_RANK)
    plain = train_unsharded(copy.deepcopy(reference).double(), lm_loss, data)

    def work(comm):
        model = fully_shard(models[comm.rank], comm)
        lm_loss(model, data[0])
        model.double()
        run = train_sharded(model, comm, lm_loss, data, sharded=True)
        assert {p.dtype for p in model.parameters()} == {torch.float64}
        return run

    for run in run_ranks(SIZE, work):
        assert_same_run(run, plain, tolerance=1e-6)


def test_casting_under_a_precision_policy_changes_the_shards_only():
    _, models = replicas(TinyLM, SIZE)

    def work(comm):
        model = fully_shard(models[comm.rank], comm, mp_policy=MixedPrecision(param="bfloat16"))
        model.double()
        seen = []
        model.blocks[0].up.register_forward_hook(lambda m, a, o: seen.append(o.dtype))
        lm_loss(model, batches(1, 2)[0]).backward()
        grads = {p.grad.dtype for p in model.parameters() if p.grad is not None}
        return seen[0], {p.dtype for p in model.parameters()}, grads

    for seen, shards, grads in run_ranks(SIZE, work):
        assert seen == torch.bfloat16
        assert shards == grads == {torch.float64}


def test_casting_a_part_of_a_unit_is_refused():
    def work(comm):
        model = fully_shard(TinyLM(), comm)
        model.blocks[0].up.double()
        with pytest.raises(ShardingError, match="Only some parameters of unit"):
            lm_loss(model, batches(1, 2)[0])

    run_ranks(1, work)


@pytest.mark.parametrize("kind", ["lm", "t5", "lm_frozen_parts"])
@pytest.mark.parametrize("size", [2, 3])
def test_load_state_dict_gives_each_rank_its_rows(kind, size):
    make, _ = KINDS[kind]
    torch.manual_seed(5)
    wanted = make()
    _, models = replicas(make, size)

    def work(comm):
        model = fully_shard(models[comm.rank], comm)
        assert model.load_state_dict(wanted.state_dict()) == ([], [])
        with unsharded(model):
            return {name: p.detach().clone() for name, p in model.named_parameters()}

    for weights in run_ranks(size, work):
        assert all(torch.equal(weights[name], p) for name, p in wanted.named_parameters())


def test_a_state_dict_that_does_not_fit_changes_nothing():
    state = {name: value.clone() for name, value in TinyLM().state_dict().items()}
    odd = {name: value for name, value in state.items() if "blocks.0.up" not in name} | {"more": torch.zeros(1)}
    wide = state | {"blocks.1.up.weight": torch.zeros(3, 3)}

    def work(comm):
        model = fully_shard(TinyLM(), comm)
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(ShardingError, match=r"lacks blocks.0.up.weight; the model has no more"):
            model.load_state_dict(odd)
        with pytest.raises(
            ShardingError, match=r"blocks.1.up.weight has shape \(3, 3\) where the model has \(40, 24\)"
        ):
            model.load_state_dict(wide)
        with pytest.raises(ShardingError, match="assign"):
            model.load_state_dict(state, assign=True)
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        missing, unexpected = model.load_state_dict(odd, strict=False)
        return missing, unexpected

    assert run_ranks(1, work) == [(["blocks.0.up.weight"], ["more"])]


class TwoTower(nn.Module):
    """A method beside forward that uses the root's own parameters, and one that calls forward."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3)])
        self.scale = nn.Parameter(torch.full((8,), 0.5))
        self.table = nn.Parameter(torch.randn(5, 8))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x * self.scale

    def score(self, x, y):
        return F.linear(x, self.table) @ F.linear(y, self.table).T

    def both(self, x):
        return self.forward(x).square().mean() + self(x).mean()


def test_registered_methods_train_as_unsharded():
    reference, models = replicas(TwoTower, SIZE)
    data = torch.randn(4 * SIZE, 8, generator=torch.Generator().manual_seed(0))

    def loss_of(model, x):
        return model.score(x, x * 2).mean() + model.both(x)

    for part in range(SIZE):
        (loss_of(reference, data[part * 4 : part * 4 + 4]) / SIZE).backward()

    def work(comm):
        model = fully_shard(models[comm.rank], comm, wrap=lambda m: isinstance(m, nn.Sequential))
        register_forward_method(model, "score")
        register_forward_method(model, "both")
        loss_of(model, data[comm.rank * 4 : comm.rank * 4 + 4]).backward()
        return sharded_gradients(model)

    assert_gradients(run_ranks(SIZE, work), reference)


def test_a_registered_method_of_a_block():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 6))

        def forward(self, x):
            return x @ self.weight

        def twice(self, x):
            return x @ self.weight @ self.weight

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block()])

        def forward(self, x):
            return self.blocks[1](self.blocks[0].twice(x))

    reference, models = replicas(Model, SIZE)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    reference(x).square().mean().backward()

    def work(comm):
        model = fully_shard(models[comm.rank], comm)
        register_forward_method(model, "blocks.0.twice")
        model(x[comm.rank * 2 : comm.rank * 2 + 2]).square().mean().backward()
        return sharded_gradients(model)

    assert_gradients(run_ranks(SIZE, work), reference)
    with pytest.raises(ShardingError, match="no method thrice"):
        run_ranks(1, lambda comm: register_forward_method(fully_shard(Model(), comm), "thrice"))


def test_generation_inference_mode_and_training_take_turns():
    reference, models = replicas(t5, SIZE)
    data = batches(2, SIZE * ROWS_PER_RANK)
    prompt = batches(1, 2, seed=3)[0]
    _, loss_of = KINDS["t5"]
    plain = train_unsharded(reference, loss_of, data)
    expected = reference.eval().generate(prompt, max_new_tokens=6, do_sample=False)

    def work(comm):
        model = fully_shard(models[comm.rank], comm).eval()
        with torch.inference_mode():
            loss_of(model, prompt)
        model.generate(prompt, max_new_tokens=3, do_sample=False)
        run = train_sharded(model.train(), comm, loss_of, data, sharded=True)
        return run, model.eval().generate(prompt, max_new_tokens=6, do_sample=False)

    for run, made in run_ranks(SIZE, work):
        assert_same_run(run, plain)
        assert torch.equal(made, expected)


def test_changes_inside_unsharded_are_written_back_inside_root_held_too():
    reference, models = replicas(TinyLM, SIZE)

    def work(comm):
        model = fully_shard(models[comm.rank], comm)
        with root_held(model), unsharded(model), torch.no_grad():
            for param in model.parameters():
                param.add_(1.0)
        return full_state_dict(model)

    after = run_ranks(SIZE, work)[0]
    for name, value in reference.state_dict().items():
        assert torch.equal(after[name], value + 1.0), name
