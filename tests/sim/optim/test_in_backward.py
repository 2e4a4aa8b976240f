"""Optimizer steps inside backward: the run of an ordinary optimizer, without the gradients of a full model."""

import copy
import math
from collections import Counter
from functools import partial

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint

from fullshard import clip_grad_norm_, fully_shard, memory_summary, no_sync
from fullshard.core.optim import ShardedGradScaler, step_in_backward
from fullshard.core.optim.average import ExponentialMovingAverage
from fullshard.core.shards import rows_of
from fullshard.core.testing import run_ranks
from fullshard.errors import CheckpointError, ConfigError, ShardingError
from support.models import KINDS, TinyLM, batches, lm_loss
from support.parity import (
    ROWS_PER_RANK,
    alone,
    assert_gradients,
    on_ranks,
    optimizer_for,
    replicas,
    rows_for,
    sharded_gradients,
    weights_of,
)

pytestmark = pytest.mark.parity

KINDS_STEPPED = ("lm_two_forwards", "lm_reentrant_two_forwards", "lm_frozen_parts", "t5")

AdamW = partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1)


def is_block(module):
    return type(module).__name__ in {"Block", "T5Block", "BartEncoderLayer", "BartDecoderLayer"}


def assert_equal_weights(ours, reference, tolerance=1e-5):
    for name, param in reference.named_parameters():
        torch.testing.assert_close(
            ours[name], param.detach(), atol=tolerance, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("kind", KINDS_STEPPED)
def test_steps_equal_the_unsharded_run(kind):
    """Of the plain model it is behaviour 35."""
    make, loss_of = KINDS[kind]
    reference, models = replicas(make, 2)
    data = batches(6, 2 * ROWS_PER_RANK)
    optimizer = optimizer_for(reference)
    for tokens in data:
        optimizer.zero_grad()
        loss_of(reference, tokens).backward()
        optimizer.step()

    def work(comm):
        model = fully_shard(models[comm.rank], comm, wrap=is_block)
        step_in_backward(model, AdamW)
        for tokens in data:
            loss_of(model, rows_for(comm, tokens)).backward()
            assert all(p.grad is None for p in model.parameters())
        return weights_of(model)

    for weights in run_ranks(2, work):
        assert_equal_weights(weights, reference)


def test_the_gradients_of_two_units_at_most_exist_at_once():
    def work(comm, model):
        seen = []

        class Watched(torch.optim.SGD):
            def step(self, closure=None):
                if hasattr(self.param_groups[0]["params"][0], "shard_meta"):  # not the one on trial
                    seen.append(memory_summary(model)["gradients"])
                super().step(closure)

        steps = step_in_backward(model, lambda params: Watched(params, lr=0.1))
        lm_loss(model, batches(1, 2)[0]).backward()
        by_unit = [sum(p.sharded.nbytes for p in unit.params) for unit in model._fullshard_runtime.units]
        assert memory_summary(model)["gradients"] == 0
        used = [name for name in steps.optimizers if not name.startswith("unused")]
        return max(seen), by_unit, len(seen), len(used)

    for peak, by_unit, count, used in on_ranks(2, TinyLM, work, wrap=is_block):
        assert peak <= sum(sorted(by_unit)[-2:]) < sum(by_unit) / 2
        assert count == used


def test_accumulation_inside_no_sync_steps_once_with_the_sum():
    reference, models = replicas(TinyLM, 2)
    data = batches(4, 2 * ROWS_PER_RANK)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for tokens in data:
        lm_loss(reference, tokens).backward()
    optimizer.step()

    def work(comm):
        model = fully_shard(models[comm.rank], comm)
        step_in_backward(model, partial(torch.optim.SGD, lr=0.1))
        with no_sync(model):
            for tokens in data[:-1]:
                lm_loss(model, rows_for(comm, tokens)).backward()
        lm_loss(model, rows_for(comm, data[-1])).backward()
        return weights_of(model)

    for weights in run_ranks(2, work):
        assert_equal_weights(weights, reference)


def test_a_parameter_that_only_another_rank_used_is_updated_on_all_ranks():
    class Gated(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, x, *, both):
            return self.second(self.first(x)) if both else self.first(x)

    reference, models = replicas(Gated, 2)
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(2))
    optimizer = AdamW(reference.parameters())
    ((reference(x[:1], both=True).sum() + reference(x[1:], both=False).sum()) / 2).backward()
    optimizer.step()

    def work(comm):
        model = fully_shard(models[comm.rank], comm, wrap=None)
        step_in_backward(model, AdamW)
        model(x[comm.rank : comm.rank + 1], both=comm.rank == 0).sum().backward()
        return weights_of(model)

    for weights in run_ranks(2, work):
        assert_equal_weights(weights, reference)


def test_learning_rates_by_hand_and_by_torchs_schedulers():
    _, models = replicas(lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)), 1)

    model = alone(models[0])
    steps = step_in_backward(model, partial(torch.optim.SGD, lr=1.0))
    schedulers = [LambdaLR(optimizer, lambda step: 0.5**step) for optimizer in steps.optimizers.values()]
    for rate in (1.0, 0.5, 0.25):
        before = [p.detach().clone() for p in model.parameters()]
        model(torch.ones(1, 4)).sum().backward()
        for scheduler in schedulers:
            scheduler.step()
        # the last bias has a gradient of one
        torch.testing.assert_close(before[-1] - list(model.parameters())[-1], torch.full((2,), rate))
    steps.set_lr(0.0)
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.ones(1, 4)).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_the_state_goes_on_where_it_was_saved():
    _, models = replicas(TinyLM, 4)
    data = batches(4, 2 * ROWS_PER_RANK)

    def train(model, comm, tokens):
        for batch in tokens:
            lm_loss(model, rows_for(comm, batch)).backward()

    def work(comm):
        whole = fully_shard(models[comm.rank], comm)
        step_in_backward(whole, AdamW)
        train(whole, comm, data)
        resumed = fully_shard(models[2 + comm.rank], comm)
        first = step_in_backward(resumed, AdamW)
        train(resumed, comm, data[:2])
        state = first.state_dict()
        assert state.keys() == {p.shard_meta.name for p in resumed.parameters() if p.nbytes}
        first.remove()
        second = step_in_backward(resumed, AdamW)
        with pytest.raises(CheckpointError, match="other parameters"):
            second.load_state_dict({**state, "nobody": {}})
        second.load_state_dict(state)
        train(resumed, comm, data[2:])
        for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
            assert torch.equal(a, b)

    run_ranks(2, work)


def test_what_needs_all_gradients_is_refused_on_every_rank_until_removed():
    def work(comm, model):  # one row: two ranks hold nothing
        steps = step_in_backward(model, partial(torch.optim.SGD, lr=0.5))
        assert len(steps.optimizers) == rows_of(model.weight).numel()
        with pytest.raises(ShardingError, match="clip_grad_norm_ cannot be used"):
            clip_grad_norm_(model, 1.0)
        with pytest.raises(ShardingError, match="step in backward"):
            step_in_backward(model, partial(torch.optim.SGD, lr=0.5))
        scaler = ShardedGradScaler("cpu")
        scaler.scale(torch.ones(()))
        with pytest.raises(ShardingError, match="ShardedGradScaler cannot be used"):
            scaler.step(torch.optim.SGD(model.parameters(), lr=0.5))
        steps.remove()
        before = model.weight.detach().clone()
        model(torch.full((1, 1), 2.0)).sum().backward()
        assert torch.equal(before, model.weight)
        return clip_grad_norm_(model, math.inf).item()

    assert on_ranks(3, lambda: torch.nn.Linear(1, 1, bias=False), work, wrap=None) == [2.0, 2.0, 2.0]


def test_a_gradient_that_comes_after_the_step_is_refused():
    """The first call of the block is recomputed in a backward of its own, after the second call's gradients."""

    class Mixed(TinyLM):
        def forward(self, tokens):
            x = checkpoint(self.blocks[0], self.embed(tokens), use_reentrant=True)
            return self.head(self.blocks[0](x))

    def work(comm, model):
        step_in_backward(model, AdamW)
        with pytest.raises(ShardingError, match=r"blocks\.0\.\S+ arrived after its optimizer had stepped"):
            lm_loss(model, batches(1, 2)[0]).backward()

    on_ranks(2, Mixed, work, wrap=is_block)


def test_gradients_that_come_in_two_parts_call_hooks_once():
    """Each call of the block is recomputed in a backward of its own, at the end of which its gradients are reduced."""

    class Twice(TinyLM):
        def forward(self, tokens):
            x = self.embed(tokens)
            for _ in range(2):
                x = checkpoint(self.blocks[0], x, use_reentrant=True)
            return self.head(x)

    reference, models = replicas(Twice, 2)
    tokens = batches(1, 2 * ROWS_PER_RANK)[0]
    lm_loss(reference, tokens).backward()

    def work(comm):
        model, calls = fully_shard(models[comm.rank], comm, wrap=is_block), Counter()
        for name, param in model.blocks[0].named_parameters():
            param.register_post_accumulate_grad_hook(lambda _, n=name: calls.update([n]))
        lm_loss(model, rows_for(comm, tokens)).backward()
        return calls, sharded_gradients(model)

    results = run_ranks(2, work)
    assert_gradients([gradients for _, gradients in results], reference)
    names = dict(reference.blocks[0].named_parameters())
    assert sum((calls for calls, _ in results), Counter()) == dict.fromkeys(names, 2)  # once on each rank


def test_a_copy_is_refused():
    def work(comm, model):
        steps = step_in_backward(model, AdamW)
        with pytest.raises(ShardingError, match=r"cannot be copied or pickled.* state_dict\(\)"):
            copy.deepcopy(steps)

    on_ranks(2, TinyLM, work, wrap=is_block)


def test_a_model_that_is_not_sharded_is_refused():
    with pytest.raises(ConfigError, match="no sharded trainable parameters"):
        step_in_backward(TinyLM(), AdamW)


@pytest.mark.parametrize(
    "use", [lambda model: step_in_backward(model, AdamW), lambda model: ExponentialMovingAverage(model, 0.9)]
)
def test_several_sharded_models_in_one_are_refused_on_every_rank(use):
    pair = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]
    parts = [pair, copy.deepcopy(pair)]

    def work(comm):
        both = torch.nn.ModuleList(fully_shard(part, comm, wrap=None) for part in parts[comm.rank])
        with pytest.raises(
            ConfigError, match="2 parameters are called 'weight': they belong to several sharded models"
        ):
            use(both)

    run_ranks(2, work)
