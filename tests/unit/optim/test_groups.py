"""Groups with and without weight decay: by shape, name or predicate, the same on every rank and around sharding."""

import copy

import pytest
import torch
from torch import nn

from fullshard import fully_shard, step_in_backward
from fullshard.core.optim.groups import decay_groups
from fullshard.core.optim.muon import muon_groups
from fullshard.core.shards import rows_of
from fullshard.core.testing import run_ranks
from fullshard.errors import ConfigError
from support.optimizers import copies, zoo


class Model(nn.Module):
    """A tied head, a norm, a frozen matrix, a number."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.norm = nn.LayerNorm(6)
        self.proj = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6, bias=False).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight


def names_of(groups, model):
    names = {id(param): name for name, param in model.named_parameters()}
    return [([names[id(param)] for param in group["params"]], group["weight_decay"]) for group in groups]


BY_SHAPE = [(["embed.weight", "proj.weight"], 0.1), (["scale", "norm.weight", "norm.bias", "proj.bias"], 0.0)]
CHOICES = {
    "by shape": (None, BY_SHAPE),
    "by pattern": (["*.bias", "no?m.weight"], [(["scale", "embed.weight", "proj.weight"], 0.1),
                                              (["norm.weight", "norm.bias", "proj.bias"], 0.0)]),
    "by a tied name": (["head.weight"], [(["scale", "norm.weight", "norm.bias", "proj.weight", "proj.bias"], 0.1),
                                         (["embed.weight"], 0.0)]),
    "by a frozen name": ("frozen.weight", [(["scale", "embed.weight", "norm.weight", "norm.bias", "proj.weight",
                                             "proj.bias"], 0.1)]),
    "by predicate": (lambda name, param: "norm" in name and isinstance(param, nn.Parameter),
                     [(["scale", "embed.weight", "proj.weight", "proj.bias"], 0.1),
                      (["norm.weight", "norm.bias"], 0.0)]),
}  # fmt: skip


@pytest.mark.parametrize("choice", CHOICES)
def test_groups_are_the_same_on_every_rank_before_and_after_sharding(choice):
    no_decay, expected = CHOICES[choice]
    models = [Model()]
    models += [copy.deepcopy(models[0]) for _ in range(3)]

    def work(comm):
        model = models[comm.rank]
        before = decay_groups(model, 0.1, no_decay=no_decay)
        assert names_of(before, model) == expected
        fully_shard(model, comm, wrap=None)
        after = decay_groups(model, 0.1, no_decay=no_decay)
        assert names_of(after, model) == expected
        for old, new in zip(before, after, strict=True):
            assert all(a is b for a, b in zip(old["params"], new["params"], strict=True))
        return sum(rows_of(param).numel() == 0 for param in model.parameters())

    assert sum(run_ranks(4, work)) > 4  # ranks that hold no rows of a parameter have it in its group


def test_names_are_without_wrappers():
    model = nn.ModuleDict({"_orig_mod": nn.ModuleDict({"norm": nn.LayerNorm(4)}), "out": nn.Linear(4, 4)})
    groups = decay_groups(model, 0.1, no_decay=["norm.weight"])
    assert names_of(groups, model)[1] == (["_orig_mod.norm.weight"], 0.0)


def test_a_pattern_that_fits_nothing_is_told_with_the_nearest_names():
    with pytest.raises(ConfigError, match=r"'proj.wieght' matches none of the model's 8 parameter names.*proj.weight"):
        decay_groups(Model(), 0.1, no_decay=["*.bias", "proj.wieght"])


def test_a_word_inside_names_is_answered_by_the_pattern_that_fits():
    with pytest.raises(ConfigError, match=r"'proj' matches none .*; '\*proj\*' would match"):
        decay_groups(Model(), 0.1, no_decay=["proj"])


def test_a_function_that_looks_at_a_ranks_rows_is_told_on_every_rank():
    models = copies(zoo(), 2)

    def work(comm):
        model = fully_shard(models[comm.rank], comm)
        with pytest.raises(ConfigError, match=r"different results for .* on rank 0 and on rank 1"):
            decay_groups(model, 0.1, no_decay=lambda name, param: rows_of(param).numel() < 100)
        return len(decay_groups(model, 0.1, no_decay=lambda name, param: param.ndim < 2))

    assert run_ranks(2, work) == [2, 2]


def test_senseless_requests_are_refused():
    with pytest.raises(ConfigError, match="at least 0; got -1"):
        decay_groups(Model(), -1)
    with pytest.raises(ConfigError, match="no trainable parameters"):
        decay_groups(Model().requires_grad_(False), 0.1)


@pytest.mark.parametrize("make", [lambda it: decay_groups(it, 0.1), muon_groups, lambda it: step_in_backward(it, None)])
def test_parameters_in_place_of_the_model_are_told(make):
    with pytest.raises(
        ConfigError, match=r"takes the model itself, .*; got a generator\. .* not model\.parameters\(\)"
    ):
        make(Model().parameters())
