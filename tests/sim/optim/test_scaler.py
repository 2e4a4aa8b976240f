"""Loss scaling over shards: one decision to skip for all ranks, and otherwise the run of torch's own scaler."""

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fullshard import MixedPrecision, ShardingStrategy, clip_grad_norm_, fully_shard
from fullshard.core.optim import ShardedGradScaler
from fullshard.core.shards import rows_of
from fullshard.core.testing import RecordingComm, run_ranks
from fullshard.errors import ConfigError
from support.models import TinyLM, batches, lm_loss
from support.parity import ROWS_PER_RANK, alone, on_ranks, optimizer_for, replicas, size_for, two_by_two, weights_of

FP16 = MixedPrecision(param="float16", reduce="float32")


def tables(count):
    """Equal tables of 8 rows; of a group of two ranks, the first holds the rows 0 to 3."""
    torch.manual_seed(0)
    table = nn.Embedding(8, 4)
    return [copy.deepcopy(table) for _ in range(count)]


def table_loss(model, row, factor):
    """Its gradient is ``factor / 4`` in the row, a float16 before it is reduced."""
    return (model(torch.tensor([row])) * factor).float().mean()


def step(scaler, optimizer, loss):
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize(
    ("strategy", "fused"),
    [
        (ShardingStrategy.FULL_SHARD, False),
        (ShardingStrategy.FULL_SHARD, True),
        (ShardingStrategy.NO_SHARD, False),
        (ShardingStrategy.HYBRID_SHARD, True),
    ],
)
def test_fp16_inf_on_one_rank_skips_the_step_on_all(strategy, fused):
    size = size_for(strategy)
    models = tables(size)

    def work(comm):
        mesh = ledger = RecordingComm(comm)
        if strategy.needs_two_axes:
            replicate, shard = two_by_two(comm)
            mesh = (replicate, ledger := RecordingComm(shard))
        model = fully_shard(models[comm.rank], mesh, wrap=None, strategy=strategy, mp_policy=FP16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        scaler = ShardedGradScaler("cpu", init_scale=2.0**16)
        found = []
        for factor in (100.0, 1.0, 1.0):  # 100 / 4 * 2**16 is no float16
            before = model.weight.detach().clone()
            loss = table_loss(model, row=0, factor=factor if comm.rank == size - 1 else 1.0)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            found.append((not rows_of(model.weight.grad).isfinite().all().item(), scaler.get_scale()))
            ledger.entries.clear()
            scaler.step(optimizer)
            scaler.update()
            whole = strategy is ShardingStrategy.NO_SHARD  # then every rank has seen all gradients
            assert ledger.names == ([] if whole else ["all_reduce"])
            # AdamW's weight decay changes every row
            assert torch.equal(before, model.weight) == (factor == 100.0)
        assert model.weight.isfinite().all()
        return found

    runs = run_ranks(size, work)
    assert [scale for _, scale in runs[0]] == [2.0**16, 2.0**15, 2.0**15]
    for rank, run in enumerate(runs):
        holds_row = strategy is ShardingStrategy.NO_SHARD or rank % 2 == 0
        assert run == [(holds_row, 2.0**16), (False, 2.0**15), (False, 2.0**15)]


@pytest.mark.parity
def test_ten_steps_equal_torchs_scaler_on_the_unsharded_model():
    size = 3
    reference, models = replicas(TinyLM, size)
    data = batches(10, size * ROWS_PER_RANK)
    settings = {"init_scale": 2.0**10, "growth_interval": 3}

    def train(model, scaler, clip, rows):
        optimizer, scales = optimizer_for(model), []
        for number, tokens in enumerate(data):
            optimizer.zero_grad()
            loss = lm_loss(model, tokens[rows])
            scaler.scale(loss * (math.inf if number == 2 else 1.0)).backward()
            scaler.unscale_(optimizer)
            clip(model)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales

    plain = train(
        reference,
        torch.amp.GradScaler("cpu", **settings),
        lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        slice(None),
    )
    assert len(set(plain)) == 3  # it shrank once and grew twice

    def work(comm):
        model = fully_shard(models[comm.rank], comm)
        rows = slice(comm.rank * ROWS_PER_RANK, (comm.rank + 1) * ROWS_PER_RANK)
        scaler = ShardedGradScaler("cpu", **settings)
        assert train(model, scaler, lambda model: clip_grad_norm_(model, 1.0), rows) == plain
        for name, param in weights_of(model).items():
            torch.testing.assert_close(param, reference.get_parameter(name).detach(), atol=1e-5, rtol=0)

    run_ranks(size, work)


def test_fp16_compute_trains():
    tokens = batches(1, 2 * ROWS_PER_RANK)[0]

    def work(comm, model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scaler = ShardedGradScaler("cpu", init_scale=2.0**24)  # far too much: it must find its way down
        losses = []
        for _ in range(20):
            loss = lm_loss(model, tokens)
            losses.append(loss.item())
            step(scaler, optimizer, loss)
        assert scaler.get_scale() < 2.0**24
        assert losses[1] == losses[0]
        assert losses[-1] < losses[0] / 2

    on_ranks(2, TinyLM, work, mp_policy=FP16)


@pytest.mark.parametrize("fused", [False, True])
def test_a_rank_without_rows_takes_part(fused):
    models = [nn.Linear(1, 1, bias=False) for _ in range(3)]
    for model in models:
        nn.init.ones_(model.weight)

    def work(comm):  # one row: two ranks hold nothing
        ledger = RecordingComm(comm)
        model = fully_shard(models[comm.rank], ledger, wrap=None)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        scaler = ShardedGradScaler("cpu", init_scale=8.0)
        scales, calls = [], []
        for value in (1.0, math.inf, 1.0):
            loss = model(torch.full((1, 1), value)).sum()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            ledger.entries.clear()
            scaler.step(optimizer)
            scaler.update()
            calls.append(ledger.names)
            scales.append(scaler.get_scale())
        assert calls == [["all_reduce"]] * 3
        assert scales == [8.0, 4.0, 4.0]
        return rows_of(model.weight)

    weights = torch.cat(run_ranks(3, work))
    assert weights.shape == (1, 1)
    assert 0.5 < weights.item() < 0.9  # two steps of 0.1


def test_no_gradient_anywhere_is_a_step_without_inf():
    models = tables(2)

    def work(comm):
        model = fully_shard(models[comm.rank], comm, wrap=None)
        scaler = ShardedGradScaler("cpu", init_scale=8.0, growth_interval=1)
        scaler.scale(torch.ones(()))
        scaler.step(torch.optim.SGD(model.parameters(), lr=1.0))
        scaler.update()
        return scaler.get_scale()

    assert run_ranks(2, work) == [16.0, 16.0]


def test_one_of_two_optimizers_skips_on_all_ranks_and_the_scale_shrinks():
    def work(comm, model):
        optimizers = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
        scaler = ShardedGradScaler("cpu", init_scale=8.0)
        scaler.scale(model(torch.ones(1, 4)).sum()).backward()
        assert model[1].weight.nbytes
        if comm.rank == 1:
            rows_of(model[1].weight.grad)[0, 0] = math.nan
        before = [p.detach().clone() for p in model.parameters()]
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 4.0
        return [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]

    changed = on_ranks(
        2, lambda: nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 12, bias=False)), work, wrap=None
    )
    assert any(first for first, _ in changed)
    assert not any(second for _, second in changed)


def test_the_state_goes_on_where_it_was_saved():
    models = tables(2)

    def work(comm):
        model = fully_shard(models[comm.rank], comm, wrap=None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = ShardedGradScaler("cpu", init_scale=8.0, growth_interval=3)
        for _ in range(2):
            step(scaler, optimizer, table_loss(model, row=0, factor=1.0))
        loaded = ShardedGradScaler("cpu")
        loaded.load_state_dict(scaler.state_dict())
        assert loaded.state_dict() == scaler.state_dict()
        for other in (loaded, pickle.loads(pickle.dumps(scaler))):
            step(other, optimizer, table_loss(model, row=0, factor=1.0))
            assert other.get_scale() == 16.0  # the third step without an inf

    run_ranks(2, work)


def test_float16_shards_are_refused_on_every_rank():
    def work(comm, model):  # the second rank holds no rows
        scaler = ShardedGradScaler("cpu")
        scaler.scale(model(torch.ones(1, 1, dtype=torch.float16)).sum()).backward()
        with pytest.raises(ConfigError, match="1 parameters of the optimizer are float16"):
            scaler.unscale_(torch.optim.SGD(model.parameters(), lr=0.1))

    on_ranks(2, lambda: nn.Linear(1, 1, bias=False).half(), work, wrap=None)


def test_an_optimizer_of_an_unsharded_model_is_refused():
    model = nn.Linear(2, 2)
    scaler = ShardedGradScaler("cpu")
    scaler.scale(F.mse_loss(model(torch.ones(1, 2)), torch.ones(1, 2))).backward()
    with pytest.raises(ConfigError, match="no sharded parameters"):
        scaler.step(torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_disabled_scaler_only_steps():
    models = tables(1)

    model = alone(models[0], wrap=None)
    scaler = ShardedGradScaler("cpu", enabled=False)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(table_loss(model, row=0, factor=1.0)).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    torch.testing.assert_close(before[0] - model.weight[0], torch.full((4,), 0.1 / 4))
