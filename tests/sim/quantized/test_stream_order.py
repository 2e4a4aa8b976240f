"""On CUDA's streams codes, scales and gradients of a quantised model would be read in order, on the host too."""

import copy

import pytest
import torch

from fullshard import ShardingStrategy, TransformerBlocks, clip_grad_norm_, fully_shard
from fullshard.core.engine.step.lane import Lane
from fullshard.core.testing import run_ranks
from support import quantized
from support.models import batches, seq2seq_loss
from support.parity import size_for
from support.quantized import NF4, t5
from support.streams import StreamChecker, install


@pytest.fixture(autouse=True)
def _checked_device(monkeypatch):
    install(monkeypatch)


@pytest.mark.parametrize(
    ("strategy", "frozen", "offloaded"),
    [
        (ShardingStrategy.FULL_SHARD, "shard", False),
        (ShardingStrategy.FULL_SHARD, "replicate", True),
        (ShardingStrategy.HYBRID_SHARD, "shard", True),
        (ShardingStrategy.HYBRID_SHARD, "replicate", False),
    ],
)
def test_training_is_ordered(strategy, frozen, offloaded, monkeypatch):
    # The CPU takes itself for a device, and copies reduced gradients to the host.
    monkeypatch.setattr(Lane, "offloaded", offloaded)
    size = size_for(strategy)
    plain = quantized.reference(quantized.saved(t5)[0], NF4)
    copies = [copy.deepcopy(plain) for _ in range(size)]

    def rank(comm):
        with StreamChecker(comm.rank) as checker:
            options = {"strategy": strategy, "frozen": frozen, "wrap": TransformerBlocks({"T5Block"})}
            model = fully_shard(copies[comm.rank], checker.mesh(strategy, comm), **options)
            checker.names_from(model)
            optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
            for tokens in batches(2, 2):
                seq2seq_loss(model, tokens).backward()
                clip_grad_norm_(model, 1.0)
                optimizer.step()
                optimizer.zero_grad()
        assert checker.operations > 100
        return checker.violations

    assert not [violation for found in run_ranks(size, rank) for violation in found]
