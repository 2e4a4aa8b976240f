"""A part that looks like the whole never gives out elements that it has not."""

import copy

import pytest
import torch
from torch import nn

from fullshard.errors import ShardingError
from fullshard.saving.shard_tensor import ShardTensor


def part():
    return ShardTensor.of((8, 4), 4, torch.arange(12.0))


@pytest.mark.parametrize(
    "use",
    [
        lambda shard: shard.norm(),
        lambda shard: shard.sum(),
        lambda shard: shard * 2,
        lambda shard: shard.clone(),
        lambda shard: shard.data,
        lambda shard: shard.detach(),
        lambda shard: shard[0],
        lambda shard: shard.numpy(),
        lambda shard: shard.tolist(),
        lambda shard: torch.equal(shard, torch.ones(8, 4)),
        lambda shard: torch.empty(8, 4).copy_(shard),
        copy.deepcopy,
    ],
    ids=lambda use: None,
)
def test_what_reads_elements_is_refused(use):
    with pytest.raises(ShardingError, match=r"one rank.s part of a tensor|pickling"):
        use(part())


def test_a_plain_model_does_not_load_parts():
    with pytest.raises(RuntimeError, match="one rank's part of a tensor"):
        nn.Linear(4, 8, bias=False).load_state_dict({"weight": part()})


def test_what_it_is_may_be_asked():
    shard = part()
    assert (shard.shape, shard.dtype, shard.device, shard.numel()) == ((8, 4), torch.float32, torch.device("cpu"), 32)
    assert "elements 4 to 16 of (8, 4)" in repr(shard)
