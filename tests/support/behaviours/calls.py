"""Behaviours 35 to 38: ways to train, fail, infer and call beside the usual loop."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fullshard import register_forward_method, step_in_backward
from support.behaviours.running import (
    compare,
    expect,
    finish_step,
    gathered,
    is_sharded,
    lm,
    lm_step,
    plain_step,
    runtime,
    shard,
)
from support.tiny_lm import lm_loss

AdamW = partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1)


def b35_optimizer_in_backward(ranks):
    def reference_step(model, optimizer, tokens, _number):
        loss = lm_loss(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return (loss.item(),)

    def step(model, _optimizer, tokens, number):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        loss = lm_loss(model, tokens)
        loss.backward()
        assert all(p.grad is None for p in model.parameters()), f"gradients are left after step {number}"
        moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
        held = {name for name, p in model.named_parameters() if not name.startswith("unused")}
        expect(moved, held, f"what step {number} moved")
        return (loss.item(),)

    def sharded(model):
        model = shard(ranks, model)
        step_in_backward(model, AdamW)
        return model

    compare(ranks, lm, step, reference_step=reference_step, sharded=sharded)


class Breaks(torch.autograd.Function):
    """Identity whose backward fails."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ZeroDivisionError


def b36_exception_then_recovery(ranks):
    def fail(model, tokens, hook):
        handle = model.blocks[1].register_forward_hook(hook)
        with pytest.raises(ZeroDivisionError):
            lm_loss(model, tokens).backward()
        handle.remove()
        model.zero_grad()

    def step(model, optimizer, tokens, number):
        if number in (0, 3, 6):
            fail(model, tokens, lambda *_: 1 / 0)
        if number in (3, 5, 8):
            fail(model, tokens, lambda _module, _args, output: Breaks.apply(output))
        figures = lm_step(model, optimizer, tokens, number)
        if is_sharded(model):
            live = runtime(model).account.live
            expect((live["gathered"], live["gradients"]), (0, 0), f"bytes left after step {number}")
        return figures

    compare(ranks, lm, step)


def b37_inference_then_train(ranks):
    def step(model, optimizer, tokens, _number):
        seen = []
        model.eval()
        with torch.inference_mode():
            seen.append(lm_loss(model, tokens).item())
        with torch.no_grad():
            seen.append(lm_loss(model, tokens).item())
        if is_sharded(model):
            expect(gathered(model), set(), "in memory after inference")
            assert not any(p.is_inference() for p in model.parameters()), "shards were made in inference mode"
        loss = lm_loss(model.train(), tokens)
        loss.backward()
        # With a graph that nothing uses: what it gathered is old when the optimizer has stepped.
        seen.append(lm_loss(model, tokens).item())
        expect(seen, [loss.item()] * 3, "losses of inference")
        return finish_step(model, optimizer, loss)

    compare(ranks, lm, step)


class TwoTower(nn.Module):
    """Methods beside ``forward`` that use parameters themselves: the root's, and a block's."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 6) / 6**0.5)

        def forward(self, x):
            return x + (x @ self.weight).tanh()

        def backwards(self, x):
            return x + (x @ self.weight.T).tanh()

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(TwoTower.Block() for _ in range(3))
        self.table = nn.Parameter(torch.randn(5, 6) / 6**0.5)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.table)

    def score(self, x, y):
        for block in self.blocks:
            x, y = block(x), block.backwards(y)
        return (F.linear(x, self.table) * F.linear(y, self.table)).sum(-1)


def b38_custom_forward_method(ranks):
    generator = torch.Generator().manual_seed(3)
    data = [torch.randn(2 * ranks.size, 6, generator=generator).to(ranks.device) for _ in range(ranks.steps)]

    def loss_of(model, x):
        return model.score(x, -x).square().mean() + model(x).square().mean()

    def sharded(model):
        model = shard(ranks, model)
        register_forward_method(model, "score")
        for number in range(3):
            register_forward_method(model, f"blocks.{number}.backwards")
        return model

    compare(ranks, TwoTower, plain_step(loss_of), data=data, sharded=sharded)
    model = sharded(ranks.alike(TwoTower))
    with torch.no_grad():
        model.score(data[0], data[0])
    expect(gathered(model), set(), "in memory after the method")
