"""Metadata and ranks of an optimizer's parameters, sharded or not."""

import pytest
import torch
from torch import nn

from fullshard.core.layout import ShardMeta, plan_unit
from fullshard.core.optim.shards import as_rows, comm_of, is_split, meta_of, require_same_parameters
from fullshard.core.testing import run_ranks
from fullshard.errors import ConfigError


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4)])
def test_an_unsharded_parameter_is_all_here(shape):
    param = nn.Parameter(torch.ones(shape))
    meta = meta_of(param)
    assert (meta.global_shape, meta.local_shape, list(meta.owners)) == (shape, shape, [0])
    assert comm_of(param).size == 1
    assert not is_split(param)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_pieces_as_rows_add_up_to_the_matrix(ranks):
    shape = (2, 2, 30_000)
    lane = plan_unit((shape,), ranks).lanes[0]
    whole = torch.arange(120_000.0)
    total = torch.zeros(4, 30_000)
    for rank in range(ranks):
        meta = ShardMeta("p", (), shape, lane, lane.placements[0], rank)
        start, stop = meta.element_range
        rows, first = as_rows(meta, whole[start:stop].view(meta.local_shape))
        total[first : first + len(rows)] += rows
    assert torch.equal(total, whole.view(4, 30_000))


def test_ranks_with_other_parameters_are_all_told():
    def param(name):
        one = nn.Parameter(torch.zeros(0))
        lane = plan_unit(((4, 4),), 2).lanes[0]
        one.shard_meta = ShardMeta(name, (), (4, 4), lane, lane.placements[0], 0)
        return one

    def work(comm):
        require_same_parameters(comm, [param("a")], "Muon")
        with pytest.raises(
            ConfigError, match=r"\(rank 0: 1, rank 1: 2\), and number 1 is none on rank 0 and b on rank 1"
        ):
            require_same_parameters(comm, [param(name) for name in "ab"[: comm.rank + 1]], "Muon")

    run_ranks(2, work)
