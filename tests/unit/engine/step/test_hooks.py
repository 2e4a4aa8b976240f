"""Hooks around a unit's passes, and gradients computed in the lane."""

import contextlib
from collections import OrderedDict

import pytest
import torch
from torch import nn

from fullshard import MixedPrecision, fully_shard
from fullshard.core.engine.setup import wrap as wrapping
from fullshard.core.engine.step.lane import Lane
from fullshard.core.engine.step.unit import Keep
from fullshard.core.testing import run_ranks
from fullshard.errors import ShardingError
from support.optimizers import copies
from support.parity import assert_gradients as assert_gradients_equal, sharded_gradients


@pytest.fixture(autouse=True)
def _every_block_is_a_unit(monkeypatch):
    monkeypatch.setattr(wrapping, "TINY_NUMEL", 0)


class Block(nn.Module):
    """A block that notes what its forward sees, and returns whatever ``output`` makes of its result."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.seen = []
        self.output = lambda y: y

    def forward(self, x):
        self.seen.append((tuple(self.inner.weight.shape), x.dtype))
        return self.output(self.inner(x))


def on_two_ranks(work, last=nn.Identity, **options):
    """Call ``work(model, units)`` on two ranks: blocks a and b, then ``last``; the units by name."""
    models = copies(nn.Sequential(OrderedDict(a=Block(), b=Block(), last=last())), 2)

    def of_rank(comm):
        model = fully_shard(models[comm.rank], comm, wrap=lambda module: isinstance(module, Block), **options)
        work(model, {unit.name: unit for unit in model._fullshard_runtime.units})

    run_ranks(2, of_rank)


def shown(units):
    return {name for name, unit in units.items() if unit.unsharded}


def assert_gradients(params):
    """Every parameter of which this rank has rows has a gradient of them."""
    for param in params:
        assert param.grad is not None
        assert param.grad is None or param.grad.shape == param.shape


X = torch.ones(3, 8)


def test_a_unit_shows_full_parameters_in_its_own_forward_only():
    def work(model, units):
        during = []
        model.b.output = lambda y: during.append(shown(units)) or y
        model(X)
        assert "b" in during[0]
        assert "a" not in during[0]
        assert model.a.seen == [((8, 8), torch.float32)]
        assert shown(units) == set()
        assert model.a.inner.weight.shape != (8, 8)

    on_two_ranks(work)


def test_backward_gathers_again_and_leaves_shards_with_gradients():
    def work(model, units):
        model(X).sum().backward()
        assert shown(units) == set()
        assert_gradients(model.parameters())
        assert all(unit.open_calls == 0 for unit in units.values())

    on_two_ranks(work)


def test_inputs_are_cast_to_the_compute_dtype():
    def work(model, units):
        model(X)
        assert model.a.seen[0][1] is torch.bfloat16

    on_two_ranks(work, mp_policy=MixedPrecision(param="bf16"))


def test_a_submodule_called_alone_gathers_its_unit_for_that_call():
    def work(model, units):
        during = []
        handle = model.a.inner.register_forward_hook(lambda *_: during.append(shown(units)))
        model.a.inner(X).sum().backward()
        handle.remove()
        assert "a" in during[0]
        assert shown(units) == set()
        assert_gradients(model.a.parameters())

    on_two_ranks(work)


def test_a_submodule_that_reads_its_weight_in_backward_may_be_called_alone():
    def work(model, units):
        x = torch.linspace(-1, 1, 24).view(3, 8).requires_grad_()
        (expected,) = torch.autograd.grad(nn.LayerNorm(8)(x.tanh()).pow(3).sum(), x)
        model.last(x.tanh()).pow(3).sum().backward()
        torch.testing.assert_close(x.grad, expected)
        assert shown(units) == set()

    on_two_ranks(work, last=lambda: nn.LayerNorm(8))


@pytest.mark.parametrize("alone", [False, True])
def test_a_forward_that_fails_leaves_no_unit_open_or_shown(alone):
    def fail(_):
        raise ZeroDivisionError

    def work(model, units):
        schedule = model._fullshard_runtime.schedule
        model.b.output = fail
        with pytest.raises(ZeroDivisionError):
            (model.b if alone else model)(X)
        assert shown(units) == set()
        assert all(unit.open_calls == 0 for unit in units.values())
        assert [call.unit for _, call in schedule.events] == ([] if alone else [units["a"].index] * 2)
        model.b.output = lambda y: y
        model(X).sum().backward()

    on_two_ranks(work)


def test_the_next_forward_forgets_one_that_was_interrupted():
    def interrupt(_):
        raise KeyboardInterrupt  # torch calls no hooks then

    def work(model, units):
        runtime = model._fullshard_runtime
        model.b.output = interrupt
        with pytest.raises(KeyboardInterrupt):
            model(X)
        assert len(runtime.open_calls) == 2
        model.b.output = lambda y: y
        model(X).sum().backward()
        assert runtime.open_calls == []
        assert shown(units) == set()
        assert_gradients(model.parameters())

    on_two_ranks(work)


def test_backward_may_begin_inside_a_unit_past_its_outputs():
    """A block keeps a loss of its own, as one of experts does, so nothing tells that backward comes to it."""

    class Aside(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            self.aside = self.second(self.first(x)).square().mean()
            return x

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Aside()

        def forward(self, x):
            return self.block(x)

    reference = Model()
    models = copies(reference, 2)
    reference(X)
    reference.block.aside.backward()

    def work(comm):
        model = fully_shard(models[comm.rank], comm, wrap=lambda module: isinstance(module, Aside))
        model(X)
        model.block.aside.backward()
        return sharded_gradients(model)

    assert_gradients_equal(run_ranks(2, work), reference)


def test_a_forward_may_go_on_after_a_unit_that_failed():
    class Tolerant(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Block(), Block()
            self.a.output = lambda y: y / "not a number"

        def forward(self, x):
            with contextlib.suppress(TypeError):
                x = self.a(x)
            return self.b(x)

    models = copies(Tolerant(), 2)

    def work(comm):
        model = fully_shard(models[comm.rank], comm, wrap=lambda module: isinstance(module, Block))
        model(X).sum().backward()
        assert_gradients(model.b.parameters())
        assert all(p.grad is None for p in model.a.parameters())

    run_ranks(2, work)


def test_an_output_that_views_a_parameter_is_refused():
    def work(model, units):
        model.b.output = lambda y: model.b.inner.weight[:1]
        with pytest.raises(ShardingError, match=r"Unit b returned a view of one of its parameters, shape \(1, 8\)"):
            model(X)

    on_two_ranks(work)


class Opaque:
    """An output in which no tensors are found."""

    def __init__(self, value):
        self.value = value


@pytest.mark.filterwarnings("ignore:Unit b returned Opaque")
def test_a_unit_whose_output_hides_its_tensors_stays_gathered_until_backward_is_over():
    class Unwrap(nn.Module):
        def forward(self, opaque):
            return opaque.value

    def work(model, units):
        model.b.output = Opaque
        loss = model(X).sum()
        assert Keep.OUTPUT in units["b"].keep
        loss.backward()
        assert units["b"].keep == set()
        assert_gradients(model.b.parameters())

    on_two_ranks(work, last=Unwrap)


def test_shards_changed_between_forward_and_backward_are_refused():
    def work(model, units):
        loss = model(X).sum()
        with torch.no_grad():
            model.b.inner.weight.add_(1.0)
        with pytest.raises(ShardingError, match="Parameters of unit b were changed between"):
            loss.backward()

    on_two_ranks(work)


class AsOnCuda(torch.Tensor):
    """A tensor that takes the way of CUDA tensors, which index_put_ takes on CPU as well."""

    is_cuda = True


def test_the_way_of_an_embeddings_gradient_on_cuda_gives_the_same(monkeypatch):
    reference = nn.Embedding(6, 4, padding_idx=2)
    models = copies(reference, 1)
    tokens = torch.tensor([[1, 1, 5], [2, 0, 1]])
    weights = torch.linspace(-1, 1, 24).view(2, 3, 4)
    (reference(tokens) * weights).sum().backward()
    gradient_of = Lane.gradient_of

    def on_cuda(lane, place):
        view, empty = gradient_of(lane, place)
        return view.as_subclass(AsOnCuda), empty

    monkeypatch.setattr(Lane, "gradient_of", on_cuda)

    def work(comm):
        model = fully_shard(models[0], comm, wrap=None)
        (model(tokens) * weights).sum().backward()
        return model.weight.grad

    (gradient,) = run_ranks(1, work)
    torch.testing.assert_close(gradient.as_subclass(torch.Tensor), reference.weight.grad)
