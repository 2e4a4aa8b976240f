"""The moving average of shards equals that of the unsharded model; applying it is undone, also after errors."""

import math

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fullshard import ShardingStrategy, fully_shard, unsharded
from fullshard.core.optim.average import ExponentialMovingAverage
from fullshard.core.testing import run_ranks
from fullshard.errors import CheckpointError, ConfigError, ShardingError
from support.optimizers import LAYOUTS, batches, loss_of, of_rank, whole, zoo
from support.parity import alone

DECAY = 0.8


def trained(model, data, averaged, comm=None):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in data:
        optimizer.zero_grad()
        loss_of(model, batch if comm is None else of_rank(batch, comm.rank)).backward()
        optimizer.step()
        averaged.update() if comm is not None else averaged.update_parameters(model)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_averages_are_those_of_the_unsharded_model(layout):
    data, reference, models = batches(6, 3), zoo(), [zoo() for _ in range(3)]
    averaged = AveragedModel(reference, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    trained(reference, data, averaged)

    def work(comm):
        model = fully_shard(models[comm.rank], comm, **LAYOUTS[layout])
        average = ExponentialMovingAverage(model, DECAY)
        trained(model, data, average, comm)
        assert {name: value.shape for name, value in average.averages.items()} == {
            name: param.shape for name, param in model.named_parameters()
        }
        with average.applied():
            return whole(model)

    ours = run_ranks(3, work)[0]
    for name, value in averaged.module.named_parameters():
        torch.testing.assert_close(ours[name], value.detach(), atol=2e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
def test_the_model_computes_with_what_is_applied_and_then_with_its_own(strategy):
    """Also where gathered weights are kept from one pass to the next."""
    models, data = [zoo() for _ in range(2)], batches(4, 2)

    def work(comm):
        model = fully_shard(models[comm.rank], comm, wrap=None, strategy=strategy)
        for unit in model.modules():
            if hasattr(unit, "set_reshard_after_backward"):
                unit.set_reshard_after_backward(False)
        average = ExponentialMovingAverage(model, DECAY)
        trained(model, data, average, comm)
        inputs = data[0][0]
        mine = model(inputs)
        with average.applied():
            averaged, weights = model(inputs), whole(model)
            loss_of(model, of_rank(data[0], comm.rank)).backward()
        again = model(inputs)
        plain = zoo()
        plain.load_state_dict(weights)
        torch.testing.assert_close(averaged, plain(inputs), atol=1e-5, rtol=0)
        assert torch.equal(mine, again)
        assert not torch.equal(mine, averaged)

    run_ranks(2, work)


def test_weights_are_back_also_where_the_block_raises():
    model = alone(zoo(), wrap=None)
    average = ExponentialMovingAverage(model, DECAY)
    with torch.no_grad():
        model.scale.add_(1)
    before = whole(model)
    with pytest.raises(ZeroDivisionError), average.applied():
        math.floor(1 / (model.scale - 1).item())
    assert all(torch.equal(value, before[name]) for name, value in whole(model).items())
    with average.applied():  # and can be applied again
        assert model.scale == 1


def test_narrow_shards_have_averages_in_float32():
    model = alone(zoo().bfloat16(), wrap=None)
    average = ExponentialMovingAverage(model, 0.999)
    average.update()
    for _ in range(50):
        with torch.no_grad():
            model.scale.fill_(3.0)
        average.update()
    assert average.averages["scale"].dtype == torch.float32
    torch.testing.assert_close(average.averages["scale"], torch.tensor(3 - 2 * 0.999**50))  # in bfloat16 it stays at 1
    before = model.scale.clone()
    with average.applied():
        assert model.scale.dtype == torch.bfloat16
    assert torch.equal(model.scale, before)


def test_frozen_parameters_have_no_average():
    model = zoo()
    model.norm.requires_grad_(False)
    average = ExponentialMovingAverage(alone(model, wrap=None), DECAY)
    assert "norm.weight" not in average.averages
    assert "scale" in average.averages


def test_state_goes_on_where_it_was():
    model = alone(zoo(), wrap=None)
    first, second = ExponentialMovingAverage(model, DECAY), ExponentialMovingAverage(model, DECAY)
    first.update()
    with torch.no_grad():
        model.scale.add_(1)
    first.update()
    second.load_state_dict(first.state_dict())
    with torch.no_grad():
        model.scale.add_(1)
    first.update()
    second.update()
    assert second.updates == 3
    assert second.averages["scale"] == first.averages["scale"] != model.scale
    state = first.state_dict()
    state["averages"]["scale"] = torch.zeros(2)
    with pytest.raises(CheckpointError, match=r"scale has shape \(\) here and \(2,\) in the state"):
        second.load_state_dict(state)


def test_averages_follow_a_model_that_was_cast():
    model = alone(zoo(), wrap=None)
    average = ExponentialMovingAverage(model, DECAY)
    average.update()
    model.double()
    with torch.no_grad():
        model.scale.add_(1)
    average.update()
    assert average.averages["scale"].dtype == torch.float64
    torch.testing.assert_close(average.averages["scale"].item(), 1.2)
    with average.applied():
        torch.testing.assert_close(model.scale.item(), 1.2)


def test_what_cannot_be_is_refused():
    model = alone(zoo(), wrap=None)
    average = ExponentialMovingAverage(model, DECAY)
    with pytest.raises(ConfigError, match="below 1; got 1"):
        ExponentialMovingAverage(model, 1)
    with pytest.raises(ConfigError, match="no sharded trainable"):
        ExponentialMovingAverage(zoo(), DECAY)
    with average.applied():
        with pytest.raises(ShardingError, match="average the averages"):
            average.update()
        with pytest.raises(ShardingError, match="Enter it once"), average.applied():
            pass
    with unsharded(model), pytest.raises(ShardingError, match="outside of unsharded"), average.applied():
        pass
