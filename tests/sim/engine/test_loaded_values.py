"""A value that was loaded is never initialised again, whatever lies on the meta device beside it."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from fullshard import full_state_dict, fully_shard
from fullshard.core.engine import FirstValues
from fullshard.core.testing import run_ranks


def on_meta(*shape):
    return torch.empty(*shape, device="meta")


class Scaled(nn.Embedding):
    """As Gemma's: its class fills the table, and a buffer that is not saved."""

    def __init__(self):
        super().__init__(6, 4)
        self.register_buffer("scale", on_meta(()), persistent=False)

    def reset_parameters(self):
        super().reset_parameters()
        if hasattr(self, "scale"):
            self.scale.fill_(2.0)


class Half(nn.Module):
    """One parameter is loaded, the other one is missing."""

    def __init__(self):
        super().__init__()
        self.loaded, self.missing = nn.Parameter(torch.randn(5, 4)), nn.Parameter(on_meta(4))

    def reset_parameters(self):
        nn.init.orthogonal_(self.loaded)
        nn.init.uniform_(self.missing, 1.0, 2.0)


class FromLoaded(Half):
    """The missing one follows from the loaded one."""

    def reset_parameters(self):
        self.loaded.mul_(3.0)
        self.missing.copy_(self.loaded.norm(dim=0))


class ByData(Half):
    """Writes through views and ``data``, and puts other tensors in the place of the loaded one."""

    def reset_parameters(self):
        self.loaded.data[1:3].zero_()
        self.loaded.detach().view(-1)[::2] = 7.0
        self.loaded.data = torch.ones(5, 4)
        self.loaded = nn.Parameter(torch.ones(5, 4))
        self.missing.data.fill_(1.5)


class ByNumpy(Half):
    """Writes to memory that numpy shares."""

    def reset_parameters(self):
        self.loaded.detach().numpy()[...] = 7.0
        np.asarray(self.loaded.data)[0] = 7.0
        self.missing.fill_(1.5)


class Together(Half):
    """Writes several tensors by one operator, and by an argument ``out``."""

    def reset_parameters(self):
        torch._foreach_zero_([self.loaded, self.missing])
        torch._foreach_add_([self.missing, self.loaded], 1.5)
        torch.ones(5, 4, out=self.loaded)
        torch.max(torch.ones(5, 4, 2), 2, out=(self.loaded, torch.empty(5, 4, dtype=torch.int64)))


class Parent(nn.Module):
    """Fills its children."""

    def __init__(self):
        super().__init__()
        self.child, self.other = nn.Linear(4, 3), nn.Linear(3, 4, device="meta")
        self.missing = nn.Parameter(on_meta(2))
        self.register_buffer("counts", torch.arange(3))
        self.register_buffer("mean", on_meta(3))

    def reset_parameters(self):
        for child in (self.child, self.other):
            nn.init.constant_(child.weight, 1.25)
            nn.init.zeros_(child.bias)
        self.missing.fill_(1.5)
        self.counts.zero_()
        self.mean.fill_(1.0)


class Tied(nn.Module):
    """A loaded table is registered in a module that lacks another parameter."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(6, 4), nn.Linear(4, 6)
        self.head.weight, self.head.bias = self.table.weight, nn.Parameter(on_meta(6))


class Norm(nn.BatchNorm1d):
    """Loaded statistics beside a weight that is missing."""

    def __init__(self):
        super().__init__(4)
        self.running_mean.copy_(torch.randn(4))
        self.num_batches_tracked.fill_(9)
        self.weight = nn.Parameter(on_meta(4))


class Recurrent(nn.LSTM):
    """Its initializer fills all of its parameters, of which one is missing."""

    def __init__(self):
        super().__init__(4, 3)
        self.bias_ih_l0 = nn.Parameter(on_meta(12))


class Weights(nn.Module):
    """transformers' way: one function of the model for each module."""

    def __init__(self):
        super().__init__()
        self.table, self.half = Scaled(), Half()

    def _init_weights(self, module):
        for parameter in module.parameters():
            nn.init.trunc_normal_(parameter, 1.5, 0.1)
        for buffer in module.buffers():
            buffer.fill_(math.pi)


def spectral():
    """A parametrisation keeps two buffers beside a loaded weight."""
    return parametrizations.spectral_norm(nn.Linear(4, 5))


CASES = [Scaled, Half, FromLoaded, ByData, ByNumpy, Together, Parent, Tied, Norm, Recurrent, Weights, spectral]


def state(model):
    """All values on rank 0; the buffers on the others."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return (full_state_dict(model) or {}) | buffers


def values_of(named):
    return {name: one.detach().clone() for name, one in named if not one.is_meta}


def built(make, *, inside):
    torch.manual_seed(5)
    model = nn.ModuleDict({"inner": make(), "last": nn.Linear(2, 2)}) if inside else make()
    torch.manual_seed(6)  # a unit's values are drawn from the process's seed: not the loaded ones again
    return model


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in a unit"])
def test_what_was_loaded_stays_to_the_bit_and_what_was_missing_is_filled(make, inside):
    plain = built(make, inside=inside)
    named = [*plain.named_parameters(remove_duplicate=False), *plain.named_buffers()]
    loaded = values_of(named)

    def work(comm):
        model = copy.deepcopy(plain)  # threads share the random state
        units = {model["inner"], model["last"]} if inside else ()
        return state(fully_shard(model, comm, wrap=units.__contains__ if inside else None))

    full, second = run_ranks(2, work)
    assert full.keys() == {name for name, _ in named}
    for name, value in full.items():
        assert name not in second or torch.equal(value, second[name]), name
        assert torch.equal(value, loaded[name]) if name in loaded else value.isfinite().all(), name
    if make is FromLoaded:
        missing, beside = [value for name, value in full.items() if name.endswith(("missing", "loaded"))][::-1]
        torch.testing.assert_close(missing, beside.norm(dim=0))


class InMemory:
    """A source whose tables were put into the model too, as those that take new rows."""

    def __init__(self, values):
        self.values = values

    def open(self, model, wanted):
        return self

    def has(self, name):
        return name in self.values

    def read(self, name, start, out):
        out.copy_(self.values[name].reshape(-1)[start : start + out.numel()])


@pytest.mark.parametrize("make", [Scaled, Norm, Weights])
def test_memory_that_a_source_shares_with_the_model_is_read_as_it_was(make):
    plain = built(make, inside=False)

    def work(comm):
        model = copy.deepcopy(plain)
        named = dict(model.named_parameters())
        saved = {key: one for key, one in model.state_dict(keep_vars=True).items() if key not in named}
        values = {
            key: torch.full(one.shape, 0.5) if one.is_meta else one.detach() for key, one in (named | saved).items()
        }
        before = {key: value.clone() for key, value in values.items()}
        fully_shard(model, comm, wrap=None, weights=InMemory(values))
        return before, state(model)

    before, after = run_ranks(2, work)[0]
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(value.isfinite().all() for value in after.values())


def test_a_function_that_empties_modules_fills_only_what_is_missing():
    def initialize(module):
        module.to_empty(device="cpu", recurse=False)
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter, 1.5)

    plain = built(Half, inside=False)
    loaded = values_of(plain.named_parameters())

    def work(comm):
        return state(fully_shard(copy.deepcopy(plain), comm, wrap=None, first_values=FirstValues(initialize)))

    full = run_ranks(2, work)[0]
    assert torch.equal(full["loaded"], loaded["loaded"])
    assert torch.equal(full["missing"], torch.full((4,), 1.5))
