"""What users do around forward and backward, in ways that are easy to get silently wrong."""

import gc
import weakref
from collections import defaultdict

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fullshard import MixedPrecision, clip_grad_norm_, full_tensors, fully_shard, no_sync, unsharded
from fullshard.core.engine.step.unit import Unit
from fullshard.core.testing import run_ranks
from fullshard.errors import ProcessGroupError, ShardingError
from support.models import Block, TinyLM, batches, lm_loss, lm_with_frozen_parts, seq2seq_loss, t5
from support.parity import (
    alone,
    assert_gradients,
    assert_gradients_alike,
    on_ranks,
    replicas,
    rows_for,
    sharded_gradients,
    weights_of,
    where_sharded,
)

SIZE = 2


def compare(make, scenario, *, steps=3, tolerance=1e-5, **options):
    """Run ``scenario(model, optimizer, rows)`` unsharded and sharded and compare the weights after some steps."""
    reference, models = replicas(make, SIZE)
    data = batches(steps, 2 * SIZE)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for tokens in data:
        scenario(reference, optimizer, tokens)
    expected = {name: p.detach().clone() for name, p in reference.named_parameters()}

    def work(comm):
        model = fully_shard(models[comm.rank], comm, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for tokens in data:
            scenario(model, optimizer, rows_for(comm, tokens))
        assert model._fullshard_runtime.tracker.live["gathered"] == 0
        return weights_of(model)

    for weights in run_ranks(SIZE, work):
        for name, value in weights.items():
            torch.testing.assert_close(value, expected[name], atol=tolerance, rtol=0, msg=name)


def test_gradients_may_be_cleared_between_forward_and_backward():
    def scenario(model, optimizer, tokens):
        loss = lm_loss(model, tokens)
        model.zero_grad()
        loss.backward()
        optimizer.step()

    compare(TinyLM, scenario)


@pytest.mark.parametrize("between", ["forward", "submodule", "no_grad"])
def test_a_look_at_the_model_between_backward_and_step_does_not_make_it_stale(between):
    def scenario(model, optimizer, tokens):
        optimizer.zero_grad()
        lm_loss(model, tokens).backward()
        if between == "forward":
            lm_loss(model, tokens)
        elif between == "submodule":
            model.embed(tokens)
        else:
            with torch.no_grad():
                model.embed(tokens)
        optimizer.step()
        if between == "forward":
            model.zero_grad()

    def tidy(model, optimizer, tokens):
        scenario(model, optimizer, tokens)
        with torch.no_grad():
            model(tokens)

    compare(TinyLM, tidy)


def test_clipping_and_optimizers_see_shards_after_a_forward_without_backward():
    reference, models = replicas(TinyLM, SIZE)
    tokens = batches(1, 2 * SIZE)[0]
    lm_loss(reference, tokens).backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in reference.parameters() if p.grad is not None])

    def work(comm):
        model = fully_shard(models[comm.rank], comm)
        lm_loss(model, rows_for(comm, tokens)).backward()
        loss = lm_loss(model, rows_for(comm, tokens))
        assert all(hasattr(p, "shard_meta") for p in model.parameters())
        names = [name for _, tensors in full_tensors(model) for name in tensors]
        assert len(names) == len(set(names))
        # Without the root's gradients it would be 2 % off; why not 1e-5: "An open question" in docs/evidence/log.md.
        torch.testing.assert_close(clip_grad_norm_(model, 1e9), expected, rtol=1e-4, atol=0)
        assert loss.isfinite()
        return sharded_gradients(model)

    assert_gradients(run_ranks(SIZE, work), reference)  # each element, by name: no row lacks a rank's part


@pytest.mark.parametrize("how", ["autograd.grad", "backward(inputs)"])
def test_a_backward_that_asks_for_other_inputs_leaves_no_weight_gradients(how):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Block(24, 40), Block(24, 40)])

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    x = torch.randn(4, 24, generator=torch.Generator().manual_seed(0))

    def run(model, rows):
        mine = rows(x).clone().requires_grad_()
        loss = model(mine).square().mean()
        if how == "autograd.grad":
            (gradient,) = torch.autograd.grad(loss, mine)
        else:
            loss.backward(inputs=[mine])
            gradient = mine.grad
        assert gradient.abs().sum() > 0
        assert all(p.grad is None for p in model.parameters())
        model(mine.detach()).square().mean().backward()

    assert_gradients_alike(Model, run, SIZE)


class Dropping(TinyLM):
    """Can leave a block out, as layer dropping does."""

    drop = None

    def forward(self, tokens):
        x = self.embed(tokens)
        for index, block in enumerate(self.blocks):
            x = x if index == self.drop else block(x)
        return self.head(x)


def test_accumulated_gradients_of_a_block_that_the_next_micro_batch_leaves_out_stay():
    first, second = batches(2, 2 * SIZE)

    def run(model, rows):
        model.drop = None
        lm_loss(model, rows(first)).backward()
        model.drop = 1
        lm_loss(model, rows(second)).backward()

    assert_gradients_alike(Dropping, run, SIZE)


def test_two_forwards_with_a_backward_each():
    def scenario(model, optimizer, tokens):
        optimizer.zero_grad()
        one, two = lm_loss(model, tokens), lm_loss(model, tokens.flip(1))
        one.backward()
        two.backward()
        optimizer.step()

    compare(TinyLM, scenario)


@pytest.mark.parametrize("container", ["list", "defaultdict"])
def test_what_a_unit_puts_into_its_arguments_reaches_the_caller(container):
    class Collects(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x, seen):
            y = self.linear(x).relu()
            if container == "list":
                seen.append(y)
            else:
                seen[f"y{len(seen)}"] = y
            return y

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(50, 6)
            self.blocks = nn.ModuleList([Collects(), Collects(), Collects()])

        def forward(self, tokens):
            x = self.embed(tokens)
            seen = [] if container == "list" else defaultdict(list)
            for block in self.blocks:
                x = block(x, seen)
            assert len(seen) == 3
            return sum((y.sum() for y in (seen if container == "list" else seen.values())), x.sum())

    def scenario(model, optimizer, tokens):
        optimizer.zero_grad()
        (model(tokens) / tokens.shape[0] / 100).backward()
        optimizer.step()

    compare(Model, scenario)


def test_a_unit_with_trainable_inputs_in_a_list_and_frozen_weights():
    class Adapter(nn.Module):
        def __init__(self):
            super().__init__()
            self.frozen = nn.Linear(6, 6)
            self.frozen.requires_grad_(False)
            self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 6, bias=False)

        def forward(self, xs):
            return [self.frozen(xs[0]) + self.up(self.down(xs[0]))]

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(50, 6)
            self.blocks = nn.ModuleList([Adapter(), Adapter(), Adapter()])

        def forward(self, tokens):
            xs = [self.embed(tokens)]
            for block in self.blocks:
                xs = block(xs)
            return xs[0]

    def scenario(model, optimizer, tokens):
        optimizer.zero_grad()
        model(tokens).square().mean().backward()
        optimizer.step()

    compare(Model, scenario)


def test_what_is_written_unsharded_is_kept_in_full_precision_and_nothing_else_moves():
    def work(comm, model):
        before = {p.shard_meta.name: p.detach().clone() for p in model.parameters()}
        with unsharded(model), unsharded(model), torch.no_grad():
            model.blocks[1].up.weight.fill_(3.0)
        for p in model.parameters():
            if p.shard_meta.name == "blocks.1.up.weight":
                assert (p == 3.0).all()
            else:
                assert torch.equal(p, before[p.shard_meta.name])

    on_ranks(SIZE, TinyLM, work, mp_policy=MixedPrecision(param=torch.bfloat16))


def test_replacing_a_parameter_inside_unsharded_is_refused():
    torch.manual_seed(0)
    model = alone(TinyLM())
    with pytest.raises(ShardingError, match="replaced"), unsharded(model):
        model.blocks[0].up.weight = nn.Parameter(torch.zeros(40, 24))


def test_an_optimizer_built_before_sharding_trains_the_shards():
    reference, models = replicas(TinyLM, SIZE)
    tokens = batches(1, 2 * SIZE)[0]
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    lm_loss(reference, tokens).backward()
    plain.step()
    expected = dict(reference.named_parameters())

    def work(comm):
        optimizer = torch.optim.SGD(models[comm.rank].parameters(), lr=0.1)
        models[comm.rank].embed.weight.tag = "kept"
        model = fully_shard(models[comm.rank], comm)
        assert model.embed.weight.tag == "kept"
        lm_loss(model, rows_for(comm, tokens)).backward()
        optimizer.step()
        with unsharded(model):
            for name, p in model.named_parameters():
                torch.testing.assert_close(p, expected[name], atol=1e-5, rtol=0)

    run_ranks(SIZE, work)


def test_hooks_that_would_be_lost_are_refused():
    torch.manual_seed(0)
    model = alone(TinyLM())
    model.embed.weight.register_hook(lambda gradient: gradient * 0)
    with pytest.raises(ShardingError, match="never be called"):
        lm_loss(model, batches(1, 2)[0])


def test_the_encoder_alone_with_gradients_then_the_whole_model():
    def scenario(model, optimizer, tokens):
        optimizer.zero_grad()
        features = model.get_encoder()(input_ids=tokens)
        decoded = model(encoder_outputs=features, decoder_input_ids=tokens[:, :-1]).logits
        (F.cross_entropy(decoded.flatten(0, 1), tokens[:, 1:].flatten()) + features[0].square().mean()).backward()
        optimizer.step()

    compare(t5, scenario)


def test_no_sync_where_the_first_unit_has_no_trainable_input():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Block(24, 40), Block(24, 40), Block(24, 40)])
            self.table = torch.randn(50, 24, generator=torch.Generator().manual_seed(3))

        def forward(self, tokens):
            x = self.table[tokens]
            for block in self.blocks:
                x = block(x)
            return x

    first, second = batches(2, 2 * SIZE)

    def run(model, rows):
        with where_sharded(no_sync, model):
            model(rows(first)).square().mean().backward()
        model(rows(second)).square().mean().backward()

    assert_gradients_alike(Model, run, SIZE)


def test_a_sharded_model_is_freed_when_it_is_dropped():
    torch.manual_seed(0)
    model = alone(TinyLM())
    lm_loss(model, batches(1, 2)[0]).backward()
    watch = weakref.ref(model._fullshard_runtime), weakref.ref(model)
    del model
    gc.collect()
    assert [one() is None for one in watch] == [True, True]


def test_forwards_without_backward_do_not_pile_up():
    torch.manual_seed(0)
    model = alone(TinyLM())
    for _ in range(20):
        lm_loss(model, batches(1, 2)[0])
    lm_loss(model, batches(1, 2)[0])
    events = len(model._fullshard_runtime.schedule.events)
    assert events <= 2 * 2 * 5


def test_a_unit_that_returns_a_view_of_its_weight_is_refused():
    class Leaks(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 3))

        def forward(self, x):
            return self.weight[:2]

    model = alone(nn.Sequential(Leaks(), Leaks()), wrap=lambda m: isinstance(m, Leaks))
    with pytest.raises(ShardingError, match="clone"):
        model(torch.ones(1))


def test_in_place_activations_after_linears_with_a_bias():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            layers = [nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6)) for _ in range(2)]
            self.embed, self.blocks = nn.Embedding(50, 6), nn.ModuleList(layers)

        def forward(self, tokens):
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
                x[:, 0] = 0
            return x

    def scenario(model, optimizer, tokens):
        optimizer.zero_grad()
        model(tokens).square().mean().backward()
        optimizer.step()

    compare(Model, scenario)


def test_freezing_for_the_length_of_a_forward_without_gradients_is_allowed():
    torch.manual_seed(0)
    model = alone(lm_with_frozen_parts())
    trainable = [p for p in model.parameters() if p.requires_grad]
    for p in trainable:
        p.requires_grad_(False)
    with torch.no_grad():
        lm_loss(model, batches(1, 2)[0])
    for p in trainable:
        p.requires_grad_(True)
    lm_loss(model, batches(1, 2)[0]).backward()


def test_the_state_dict_inside_unsharded_is_whole_and_outlives_it():
    reference, (model,) = replicas(t5, 1)

    alone(model)
    with unsharded(model):
        state = model.state_dict()
    seq2seq_loss(model, batches(1, 2)[0])
    assert state.keys() == reference.state_dict().keys()
    assert all(torch.equal(value, state[name]) for name, value in reference.state_dict().items())


def test_training_through_a_submodule_after_a_backward_that_failed():
    torch.manual_seed(0)
    model = alone(TinyLM())
    boom = model.blocks[0].register_full_backward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        lm_loss(model, batches(1, 2)[0]).backward()
    boom.remove()
    model.zero_grad()
    model.blocks[1](torch.ones(1, 24)).sum().backward()
    assert all(p.grad is not None for p in model.blocks[1].parameters())


def test_a_failed_forward_shows_shards_even_if_another_rank_is_lost(monkeypatch):
    """Its clean-up waits for messages of that rank, which fail as well."""

    def work(comm, model):
        last = [module for module in model.modules() if isinstance(module, Block)][-1]
        last.register_forward_pre_hook(lost)
        with pytest.raises(ProcessGroupError, match="first"):
            lm_loss(model, rows_for(comm, batches(1, 2 * SIZE)[0]))
        return any(unit.unsharded for unit in model._fullshard_runtime.units)

    def lost_too(_unit):
        raise ProcessGroupError("again")

    def lost(*_):
        monkeypatch.setattr(Unit, "settle", lost_too)
        raise ProcessGroupError("first")

    assert on_ranks(SIZE, TinyLM, work) == [False] * SIZE
