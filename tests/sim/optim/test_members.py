"""What is looked up once about an optimizer's parameters: noticed when it changes, and kept by nothing else."""

import copy
import gc
import pickle
import weakref

import pytest
import torch

from fullshard import no_sync, step_in_backward
from fullshard.core.optim.guard import members_of
from fullshard.errors import ShardingError
from support.parity import alone
from support.tiny_lm import TinyLM, batches, lm_loss

TOKENS = batches(1, 2)[0]


def sharded():
    return alone(TinyLM(layers=2))


def train(model, optimizer):
    optimizer.zero_grad()
    lm_loss(model, TOKENS).backward()
    optimizer.step()


def test_a_group_without_parameters_may_be_added():
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer)
    optimizer.add_param_group({"params": []})
    train(model, optimizer)
    assert len(members_of(optimizer).groups) == 2


def test_a_parameter_that_moves_to_the_next_group_is_compared_there():
    first, *others = sharded().parameters()
    optimizer = torch.optim.SGD([{"params": [first, others[0]]}, {"params": others[1:]}], lr=0.1)
    before = members_of(optimizer).groups
    optimizer.param_groups[1]["params"].insert(0, optimizer.param_groups[0]["params"].pop())
    after = members_of(optimizer).groups
    assert all(one[0] != other[0] for one, other in zip(before, after, strict=True))


def test_after_remove_a_step_without_the_gradients_of_no_sync_is_refused():
    model = sharded()
    stepping = step_in_backward(model, lambda params: torch.optim.SGD(params, lr=0.1))
    lm_loss(model, TOKENS).backward()
    stepping.remove()
    with no_sync(model):
        lm_loss(model, TOKENS).backward()
    with pytest.raises(ShardingError, match="no_sync"):
        next(iter(stepping.optimizers.values())).step()


def test_a_model_whose_parameters_refer_to_their_optimizers_is_freed():
    model = sharded()
    step_in_backward(model, lambda params: torch.optim.SGD(params, lr=0.1))
    lm_loss(model, TOKENS).backward()
    params = [weakref.ref(param) for param in model.parameters()]
    del model
    gc.collect()
    assert [param() for param in params] == [None] * len(params)


def test_copies_and_pickles_of_an_optimizer_leave_it_out():
    class Whole(torch.optim.SGD):
        def __getstate__(self):
            return {key: value for key, value in vars(self).items() if key == "_fullshard_members"}

    model = sharded()
    optimizer = Whole(model.parameters(), lr=0.1)
    train(model, optimizer)
    state = optimizer.__getstate__()
    assert [*copy.deepcopy(state).values(), *pickle.loads(pickle.dumps(state)).values()] == [None, None]
