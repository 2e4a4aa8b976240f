"""An optimizer made before sharding steps the shards after repoint()."""

import copy

import pytest
import torch
from torch import nn

from fullshard import fully_shard, unsharded
from fullshard.core.optim import Places, repoint
from fullshard.core.testing import run_ranks
from fullshard.errors import ConfigError
from support.models import TinyLM, batches, lm_loss
from support.parity import replicas

WORLD = 3


def groups_of(model):
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": decayed, "lr": 1e-2}, {"params": plain, "lr": 2e-2, "weight_decay": 0.0}]


def steps(model, optimizer, data):
    for tokens in data:
        lm_loss(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_an_optimizer_with_state_goes_on_as_if_nothing_had_been_sharded():
    plain, copies = replicas(TinyLM, WORLD)
    data = batches(6, WORLD)
    optimizer = torch.optim.AdamW(groups_of(plain))
    steps(plain, optimizer, data)

    def work(comm):
        model = copies[comm.rank]
        optimizer = torch.optim.AdamW(groups_of(model))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        steps(model, optimizer, data[:3])  # unsharded, with the joint batch
        places = Places(model)
        fully_shard(model, comm)
        repoint(optimizer, [places])
        repoint(optimizer, [places])  # what is a shard already stays
        assert [id(p) for g in optimizer.param_groups for p in g["params"]] == [
            id(p) for g in groups_of(model) for p in g["params"]
        ]
        assert [g["lr"] for g in schedule.optimizer.param_groups] == [1e-2, 2e-2]
        assert all(optimizer.state[p]["exp_avg"].shape == p.shape for p in optimizer.state)
        assert {float(s["step"]) for s in optimizer.state.values()} == {3.0}
        steps(model, optimizer, [tokens[comm.rank : comm.rank + 1] for tokens in data[3:]])
        with unsharded(model):
            return weights(model)

    for ours in run_ranks(WORLD, work):
        for name, value in weights(plain).items():
            torch.testing.assert_close(ours[name], value, atol=1e-5, rtol=0)


def test_an_optimizer_that_keeps_its_list_of_parameters_sees_the_shards():
    def work(comm):
        model = nn.Linear(6, 5)
        optimizer = torch.optim.LBFGS(model.parameters())
        places = Places(model)
        fully_shard(model, comm, wrap=None)
        repoint(optimizer, [places])
        assert [id(p) for p in optimizer._params] == [id(p) for p in model.parameters()]

    run_ranks(1, work)


def test_parameters_left_out_and_of_several_models_are_found():
    def work(comm):
        first, second = nn.Linear(6, 5), nn.Linear(5, 3)
        optimizer = torch.optim.SGD([*second.parameters(), *first.parameters()], lr=0.1)
        places = [Places(first), Places(second)]
        fully_shard(first, comm, wrap=None, ignored_params=[first.bias])
        fully_shard(second, comm, wrap=None)
        repoint(optimizer, places)
        assert [id(p) for p in optimizer.param_groups[0]["params"]] == [
            id(p) for p in (*second.parameters(), *first.parameters())
        ]

    run_ranks(1, work)


def test_a_parameter_that_is_not_the_models_is_named_and_nothing_changes():
    def work(comm):
        model, stranger = nn.Linear(6, 5), nn.Parameter(torch.zeros(7, 2))
        optimizer = torch.optim.SGD([{"params": list(model.parameters())}, {"params": [stranger]}], lr=0.1)
        before = [id(p) for g in optimizer.param_groups for p in g["params"]]
        places = Places(model)
        fully_shard(model, comm, wrap=None)
        with pytest.raises(ConfigError, match=r"1 parameters .* Linear: number 0 of group 1, shape \(7, 2\)\. Make"):
            repoint(optimizer, [places])
        assert [id(p) for g in optimizer.param_groups for p in g["params"]] == before

    run_ranks(1, work)


def test_state_that_is_not_by_element_is_refused_and_nothing_changes():
    def work(comm):
        model = nn.Linear(6, 5)
        optimizer = torch.optim.Adafactor(model.parameters())
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        before = copy.copy(optimizer.param_groups[0]["params"])
        places = Places(model)
        fully_shard(model, comm, wrap=None)
        with pytest.raises(ConfigError, match=r"'row_var' of weight has shape \(5, 1\) and the parameter \(5, 6\)"):
            repoint(optimizer, [places])
        assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], before, strict=True))

    run_ranks(1, work)


def test_parameters_that_were_on_the_meta_device_are_found():
    def work(comm):
        with torch.device("meta"):
            model = nn.Linear(6, 5)
        old = list(model.parameters())
        optimizer = torch.optim.SGD(old, lr=0.1)
        places = Places(model)
        fully_shard(model, comm, wrap=None)
        assert not any(p is q for p in old for q in model.parameters())
        repoint(optimizer, [places])
        assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]

    run_ranks(1, work)
