"""What is looked up once about an optimizer's parameters: noticed when it changes, and kept by nothing else."""

import copy
import gc
import pickle
import weakref

import pytest
import torch

from fullshard import fully_shard, no_sync, step_in_backward
from fullshard.core.optim.guard import members_of
from fullshard.core.testing import run_ranks
from fullshard.errors import ShardingError
from support.tiny_lm import TinyLM, batches, lm_loss

TOKENS = batches(1, 2)[0]


def sharded(comm):
    return fully_shard(TinyLM(layers=2), comm)


def train(model, optimizer):
    optimizer.zero_grad()
    lm_loss(model, TOKENS).backward()
    optimizer.step()


def test_a_group_without_parameters_may_be_added():
    def work(comm):
        model = sharded(comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train(model, optimizer)
        optimizer.add_param_group({"params": []})
        train(model, optimizer)
        return len(members_of(optimizer).groups)

    assert run_ranks(1, work) == [2]


def test_a_parameter_that_moves_to_the_next_group_is_compared_there():
    def work(comm):
        first, *others = sharded(comm).parameters()
        optimizer = torch.optim.SGD([{"params": [first, others[0]]}, {"params": others[1:]}], lr=0.1)
        before = members_of(optimizer).groups
        optimizer.param_groups[1]["params"].insert(0, optimizer.param_groups[0]["params"].pop())
        return before, members_of(optimizer).groups

    ((before, after),) = run_ranks(1, work)
    assert all(one[0] != other[0] for one, other in zip(before, after, strict=True))


def test_after_remove_a_step_without_the_gradients_of_no_sync_is_refused():
    def work(comm):
        model = sharded(comm)
        stepping = step_in_backward(model, lambda params: torch.optim.SGD(params, lr=0.1))
        lm_loss(model, TOKENS).backward()
        stepping.remove()
        with no_sync(model):
            lm_loss(model, TOKENS).backward()
        with pytest.raises(ShardingError, match="no_sync"):
            next(iter(stepping.optimizers.values())).step()

    run_ranks(1, work)


def test_a_model_whose_parameters_refer_to_their_optimizers_is_freed():
    def work(comm):
        model = sharded(comm)
        step_in_backward(model, lambda params: torch.optim.SGD(params, lr=0.1))
        lm_loss(model, TOKENS).backward()
        return [weakref.ref(param) for param in model.parameters()]

    (params,) = run_ranks(1, work)
    gc.collect()
    assert [param() for param in params] == [None] * len(params)


def test_copies_and_pickles_of_an_optimizer_leave_it_out():
    class Whole(torch.optim.SGD):
        def __getstate__(self):
            return {key: value for key, value in vars(self).items() if key == "_fullshard_members"}

    def work(comm):
        model = sharded(comm)
        optimizer = Whole(model.parameters(), lr=0.1)
        train(model, optimizer)
        state = optimizer.__getstate__()
        return [*copy.deepcopy(state).values(), *pickle.loads(pickle.dumps(state)).values()]

    assert run_ranks(1, work) == [[None, None]]
