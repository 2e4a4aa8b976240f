"""The hooks of a unit's modules: when it is gathered and released, and which inputs and outputs they change."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from fullshard import MixedPrecision, fully_shard
from fullshard.engine.setup import wrap as wrapping
from fullshard.engine.step.unit import Keep
from fullshard.errors import ShardingError
from fullshard.testing import run_ranks
from support.optimizers import copies


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
    return {name for name, unit in units.items() if unit.shown}


def assert_gradients(params):
    """Every parameter of which this rank has rows has a gradient of them."""
    for param in params:
        assert (param.grad is not None) == (param.numel() > 0)
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


def test_a_forward_that_fails_leaves_no_unit_open_or_shown():
    def fail(_):
        raise ZeroDivisionError

    def work(model, units):
        model.b.output = fail
        with pytest.raises(ZeroDivisionError):
            model(X)
        assert shown(units) == set()
        assert all(unit.open_calls == 0 for unit in units.values())
        model.b.output = lambda y: y
        model(X).sum().backward()

    on_two_ranks(work)


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
