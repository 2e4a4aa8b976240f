"""Ranks as threads leave the process as they found it, and shards are right where another library is in between."""

import threading

import pytest
import torch
from torch import nn
from transformers.initialization import guard_torch_init_functions

from fullshard import fully_shard, unsharded
from fullshard.core.testing import run_ranks


def test_two_ranks_that_build_transformers_models_at_once_leave_torchs_initialisers():
    before, linear = nn.init.normal_, dict(vars(nn.modules.linear))
    meeting = threading.Barrier(2, timeout=30)
    left_first = threading.Event()

    def work(comm):
        guard = guard_torch_init_functions()
        if comm.rank == 0:
            guard.__enter__()
        meeting.wait()
        if comm.rank == 1:
            guard.__enter__()  # takes rank 0's replacements for torch's functions
        meeting.wait()
        if comm.rank == 1:
            assert left_first.wait(30)
        guard.__exit__(None, None, None)
        left_first.set()

    run_ranks(2, work)
    assert nn.init.normal_ is before
    assert dict(vars(nn.modules.linear)) == linear


@pytest.mark.parity
def test_modules_initialise_themselves_while_transformers_replaces_the_initialisers():
    def initialised(model):
        torch.manual_seed(3)
        with guard_torch_init_functions():
            model.reset_parameters()
        return model

    def work(comm):
        model = initialised(fully_shard(nn.Linear(6, 5), comm))
        with unsharded(model):
            return model.weight.detach().clone(), model.bias.detach().clone()

    wanted = initialised(nn.Linear(6, 5))
    weight, bias = run_ranks(1, work)[0]
    assert torch.equal(weight, wanted.weight)
    assert torch.equal(bias, wanted.bias)
