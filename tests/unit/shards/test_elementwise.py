"""Functions computed on the rows of each rank."""

import copy

import pytest
import torch
from torch import nn

from fullshard import fully_shard
from fullshard.core.shards import rows_of
from fullshard.core.testing import run_ranks
from fullshard.errors import ShardingError


def test_two_models_on_groups_of_the_same_ranks_are_in_one_operation():
    students, teachers = ([copy.deepcopy(model) for _ in range(2)] for model in (nn.Linear(4, 5), nn.Linear(4, 5)))

    def work(comm):
        student, teacher = (
            fully_shard(one[comm.rank], comm.split([[0, 1]]), wrap=None) for one in (students, teachers)
        )
        with torch.no_grad():
            for one, other in zip(student.parameters(), teacher.parameters(), strict=True):
                middle = (rows_of(one) + rows_of(other)) / 2
                assert torch.equal(one.lerp_(other, 0.5), middle)
                assert not torch.equal(one, other)

    run_ranks(2, work)


def test_lists_beside_full_tensors_take_the_rows_of_this_rank():
    models = [copy.deepcopy(one) for one in [nn.Linear(4, 5, bias=False)] for _ in range(2)]
    full = torch.arange(20.0).view(5, 4)

    def work(comm):
        weight = fully_shard(models[comm.rank], comm, wrap=None).weight
        rows = full[weight.row_split.first :][: weight.shape[0]]
        with torch.no_grad():
            (added,) = torch._foreach_add([weight], [full])
            assert torch.equal(rows_of(added), rows_of(weight) + rows)
            torch._foreach_mul_([weight], 0.0)
            torch._foreach_add_([weight], [full], alpha=2.0)
            assert torch.equal(weight.full_tensor(), 2 * full)
            with pytest.raises(ShardingError, match="_foreach_add_, writing to a full tensor,"):
                torch._foreach_add_([full.clone()], [weight])

    run_ranks(2, work)
