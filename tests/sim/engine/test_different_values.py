"""Ranks that hold different values are told apart, wherever the difference lies and however small it is."""

import random

import pytest
import torch
from torch import nn

from fullshard import ShardingStrategy, fully_shard
from fullshard.core.engine.extension.checksum import checksums
from fullshard.core.testing import run_ranks
from fullshard.errors import MismatchError
from support.parity import replicas, two_by_two

WIDTHS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float64: torch.int64, torch.int8: torch.int8}


def large_model():
    """Return tensors of a model of 100 MB, of sizes that rows and chunks of a checksum do not divide."""
    torch.manual_seed(0)
    shapes = [(32_101, 512), (3001, 1001), (1024,), (7,), (), (1,)]
    tensors = [torch.randn(shape) for shape in shapes]
    tensors += [torch.randn(2049, 513).bfloat16(), torch.randn(1500, 1000).double(), torch.ones(65_537).to(torch.int8)]
    # At an offset that is no multiple of eight bytes, not contiguous, and empty.
    return [*tensors, torch.randn(1_000_001)[1:], torch.randn(513, 1021).t(), torch.empty(0)]


def test_one_element_of_100_mb_counts_by_its_lowest_bit():
    tensors, drawn = large_model(), random.Random(0)
    assert sum(one.nbytes for one in tensors) > 90e6
    before = checksums(tensors)
    for place, tensor in enumerate(tensors):
        bits = tensor.view(WIDTHS.get(tensor.dtype, torch.int32))
        for _ in range(4 if tensor.numel() else 0):
            at = tuple(drawn.randrange(size) for size in tensor.shape)
            bits[at] ^= 1
            [found] = checksums([tensor])
            bits[at] ^= 1
            assert found != before[place], (tensor.shape, tensor.dtype, at)
    assert checksums(tensors) == before


def test_signs_places_and_payloads_count():
    weight = torch.randn(1000, 128)
    others = [weight.clone() for _ in range(5)]
    others[0][[3, 700]] = weight[[700, 3]]  # rows exchanged
    others[1][5] = -weight[5]  # 128 signs
    others[2][5, [0, 1]] = weight[5, [1, 0]]
    others[3][::2] *= -1
    others[4] = weight.t().contiguous().view(1000, 128)
    assert len({*checksums([weight, *others])}) == 6
    zeros = torch.zeros(64, 64)
    nan = torch.full((2,), float("nan"))
    other_nan = (nan.view(torch.int32) ^ 1).view(torch.float32)
    assert len({*checksums([zeros, -zeros, nan, other_nan])}) == 4


def test_equal_bits_are_equal_wherever_they_lie():
    values = torch.randn(300_001)
    moved = torch.cat([torch.zeros(3), values])[3:]
    strided = torch.stack([values, values], dim=1)[:, 0]
    assert len({*checksums([values, moved, strided, nn.Parameter(values.clone())])}) == 1
    assert checksums([torch.empty(5, device="meta"), torch.empty(0)]) == [0, 0]


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
def test_a_new_row_of_a_table_that_differs_is_refused(strategy):
    def model(rank):
        torch.manual_seed(0)
        one = nn.Sequential(nn.Embedding(32_101, 32), nn.Linear(32, 8))
        with torch.no_grad():
            one[0].weight[32_100, 17] += rank * 1e-6
        return one

    models = [model(0), model(1)]

    def work(comm):
        with pytest.raises(MismatchError, match=r"first in 0\.weight.*same seed"):
            fully_shard(models[comm.rank], comm, wrap=None, strategy=strategy)

    run_ranks(2, work)


def test_one_element_of_a_replica_that_differs_is_refused():
    _, models = replicas(lambda: nn.Sequential(nn.Embedding(32_101, 32), nn.Linear(32, 8)), 4)
    with torch.no_grad():
        models[3][0].weight.view(torch.int32)[32_100, 17] ^= 1  # not among 4096 evenly spaced elements

    def work(comm):
        with pytest.raises(MismatchError, match=r"first in 0\.weight"):
            fully_shard(models[comm.rank], two_by_two(comm), strategy=ShardingStrategy.HYBRID_SHARD)

    run_ranks(4, work)
