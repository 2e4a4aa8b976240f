"""EMA copies of an FSDP1 model: inside the wrapped module, as torch's own test has them, and by deepcopy."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fullshard.compat.torch_fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy
from fullshard.compat.torch_fsdp.wrap import ModuleWrapPolicy
from fullshard.core.testing import run_ranks
from fullshard.errors import ShardingError
from support.models import Block, TinyLM, batches, lm_loss
from support.parity import ROWS_PER_RANK, replicas, rows_for

SIZE = 2


class WithAverage(nn.Module):
    """Trains one model and evaluates with the average of its values."""

    def __init__(self):
        super().__init__()
        self.inner = TinyLM()
        average = get_ema_multi_avg_fn(0.5)
        self.ema = AveragedModel(copy.deepcopy(self.inner), multi_avg_fn=average, use_buffers=True)

    def forward(self, tokens):
        return self.inner(tokens) if self.training else self.ema(tokens)


def losses(model, rows, data, full_parameters):
    """Losses of the average after each step."""
    inner = model.module if isinstance(model, FSDP) else model
    optimizer, found = torch.optim.SGD(inner.parameters(), lr=0.02), []
    for tokens in data:
        model.train()
        lm_loss(model, rows(tokens)).backward()
        optimizer.step()
        optimizer.zero_grad()
        with full_parameters(model):
            inner.ema.update_parameters(inner.inner)
        model.eval()
        with torch.no_grad():
            found.append(lm_loss(model, data[0]).item())
    return found


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP])
def test_an_average_inside_the_wrapped_model_follows_it(strategy):
    reference, models = replicas(WithAverage, SIZE)
    data = batches(4, SIZE * ROWS_PER_RANK)

    def work(comm):
        policy = ModuleWrapPolicy({TinyLM, Block})
        model = FSDP(models[comm.rank], comm, auto_wrap_policy=policy, sharding_strategy=strategy)
        return losses(model, lambda tokens: rows_for(comm, tokens), data, FSDP.summon_full_params)

    plain = losses(reference, lambda tokens: tokens, data, lambda model: torch.no_grad())
    assert len({round(loss, 4) for loss in plain}) == len(plain)
    for found in run_ranks(SIZE, work):
        assert found == pytest.approx(plain, abs=1e-5)


def test_a_copy_of_a_wrapped_model_is_refused():
    def work(comm):
        model = FSDP(models[comm.rank], comm, auto_wrap_policy=ModuleWrapPolicy({Block}))
        with pytest.raises(ShardingError, match="copy"):
            copy.deepcopy(model)
        with pytest.raises(ShardingError, match="copy"):
            AveragedModel(model)

    _, models = replicas(TinyLM, SIZE)
    run_ranks(SIZE, work)
