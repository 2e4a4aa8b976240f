"""Nothing is read before it has arrived or after it was given back, nor changed while other ranks may still read it."""

import gc
from functools import partial

import pytest
import torch

from fullshard import (
    BackwardPrefetch,
    MixedPrecision,
    Prefetch,
    ShardingStrategy,
    clip_grad_norm_,
    full_tensors,
    fully_shard,
    no_all_reduce,
    no_sync,
    vocab_parallel_loss,
)
from fullshard.core.engine.setup import wrap
from fullshard.core.engine.step import unit
from fullshard.core.engine.step.lane import Lane, LaneState
from fullshard.core.engine.step.unit import finish_reduce
from fullshard.core.optim import step_in_backward
from fullshard.core.policy import CPUOffload
from fullshard.core.shards import rows_of
from fullshard.core.testing import run_ranks
from support import poison
from support.models import SkippingLM, TinyLM, batches, lm_loss, lm_with_frozen_parts, t5, two_forwards_loss
from support.parity import mesh_for, replicas, rows_for, size_for, weights_of
from support.poison import LateComm, MisuseError
from support.tiny_lm import HiddenLM

pytestmark = pytest.mark.parity


def small(cls=TinyLM, reentrant=None):
    return cls(reentrant, layers=3, width=12, hidden=20)


def run(model, comm):
    """Three steps with much in between; returns all that came of them on this rank."""
    seen, optimizer = [], torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step, tokens in enumerate(batches(3, 2 * comm.size, length=7)):
        mine = rows_for(comm, tokens)
        model.cut = ((), (1,), (0, 2))[(step + comm.rank) % 3]
        kept = lm_loss(model, mine.flip(0))  # a forward without backward
        if isinstance(model, SkippingLM):
            kept = kept.detach()  # ranks that skip blocks differently must not keep its graph too
        if step:
            with (no_sync, no_all_reduce)[step - 1](model):
                lm_loss(model, mine).backward()
        two_forwards_loss(model, mine).backward()
        seen.append(kept.item() + lm_loss(model, mine).item())
        seen += [value.clone() for _, some in full_tensors(model) for value in some.values() if value is not None]
        seen.append(clip_grad_norm_(model, 1.0))
        seen += [rows_of(p.grad).clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return seen, weights_of(model)


def run_in_backward(model, comm):
    step_in_backward(model, partial(torch.optim.AdamW, lr=1e-2))
    for tokens in batches(3, 2 * comm.size, length=7):
        lm_loss(model, rows_for(comm, tokens)).backward()
    return [], weights_of(model)


def run_loss_at_home(model, comm):
    optimizer, seen = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for tokens in batches(3, 2 * comm.size, length=7):
        mine = rows_for(comm, tokens)
        with no_sync(model):
            vocab_parallel_loss(model(mine[:, :-1]), model.head, mine[:, 1:]).backward()
        loss = vocab_parallel_loss(model(mine[:, :-1]), model.head, mine[:, 1:])
        loss.backward()
        seen += [loss.item(), clip_grad_norm_(model, 1.0)]
        optimizer.step()
        optimizer.zero_grad()
    return seen, weights_of(model)


def train(make, *, late, body=run, **options):
    strategy = options.get("strategy", ShardingStrategy.FULL_SHARD)
    size = size_for(strategy)
    _, models = replicas(make, size)

    def work(comm):
        comm = LateComm(comm) if late else comm
        return body(fully_shard(models[comm.rank], mesh_for(strategy, comm), **options), comm)

    return run_ranks(size, work)


def assert_bits(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


def assert_finite(runs):
    for seen, mine in runs:
        for value in (*seen, *mine.values()):
            assert torch.as_tensor(value).isfinite().all(), "not finite"


AT_HOME = {"table": True, "tables": "home"}
CASES = {
    **{one.name: {"strategy": one} for one in ShardingStrategy if one is not ShardingStrategy.SHARD_GRAD_OP},
    "gathered after reduces": {"prefetch": BackwardPrefetch.BACKWARD_POST},
    "one in flight": {"prefetch": Prefetch(max_in_flight=1)},
    "three ahead": {"prefetch": Prefetch(ahead=3)},
    "uneven ranks of two axes": {"make": lambda: small(SkippingLM), "strategy": ShardingStrategy.HYBRID_SHARD},
    "checkpoint": {"make": lambda: small(reentrant=False)},
    "reentrant checkpoint": {"make": lambda: small(reentrant=True)},
    "frozen parts": {"make": lm_with_frozen_parts},
    "one unit": {"wrap": None},
    "offload": {"offload_policy": CPUOffload(pin_memory=False)},
    "bf16": {"mp_policy": MixedPrecision(param="bf16", reduce="bf16", reduce_sum="fp32")},
    "table": {"table": True},
    "table at home": AT_HOME,
    "table at home, on two axes": {**AT_HOME, "strategy": ShardingStrategy.HYBRID_SHARD},
    "table and loss at home": {
        "table": True,
        "tables": "home",
        "make": lambda: small(HiddenLM),
        "body": run_loss_at_home,
    },
    "step in backward": {"body": run_in_backward},
}


@pytest.mark.parametrize("case", CASES)
def test_late_collectives_give_the_same_bits_and_the_same_replicas(case, monkeypatch):
    options = {"make": small, **CASES[case]}
    if options.pop("table", False):
        monkeypatch.setattr(wrap, "LARGE_NUMEL", 500)
    poison.dropped.clear()
    plain, late = train(late=False, **options), train(late=True, **options)
    assert [name for name in poison.dropped if name.startswith("reduce-scatter")] == []  # each was settled
    assert_finite(late)
    for (seen, mine), (seen_late, mine_late) in zip(plain, late, strict=True):
        assert_bits(seen, seen_late)
        assert_bits(mine.values(), mine_late.values())
        assert_bits(mine.values(), plain[0][1].values())


# Broken on purpose: the poison shows each of these


def keep_unwritten(lane):
    lane.written.clear()
    return lane.gradient if lane.gradient is not None else lane.device.empty(lane.numel, lane.dtypes.reduce)


def drop_early(pending, divide):
    pending.lane.drop_gradient()
    pending.sent.given[0].zero_()
    return finish_reduce(pending, divide)


FORGOTTEN = []


def settle_without_waiting(unit):
    for lane in unit.lanes:
        FORGOTTEN.append(lane.unsettled)  # alive, but not waited for
        lane.unsettled = None


def finish_without_waiting(unit):
    for lane in unit.lanes:
        if lane.state is LaneState.GATHERING:
            lane.finish_gather()


@pytest.mark.filterwarnings("ignore:module forward hook")  # hooks that clean up fail as well
@pytest.mark.parametrize(
    ("where", "name", "broken"),
    [
        (Lane, "complete_gradient", keep_unwritten),
        (unit.Unit, "settle", settle_without_waiting),
        (unit.Unit, "_await_gather", finish_without_waiting),
        (unit, "finish_reduce", drop_early),
    ],
    ids=["unwritten gradients", "released unsettled", "gather not awaited", "gradient changed"],
)
def test_the_poison_works(where, name, broken, monkeypatch):
    monkeypatch.setattr(where, name, broken)
    with pytest.raises((MisuseError, AssertionError), match=r"settled|finite"):
        assert_finite(train(lambda: small(SkippingLM), late=True))


def test_nothing_given_to_a_collective_is_let_go_of_before_others_have_read_it():
    _, models = replicas(t5, 2)
    poison.dropped.clear()

    def work(comm):
        model = fully_shard(models[comm.rank], LateComm(comm)).eval()
        model.generate(batches(1, 2)[0][[comm.rank]], max_new_tokens=2 + comm.rank, do_sample=False)
        weight = next(model.parameters())
        return weight.norm(), weight.mean(0), weight.full_tensor()

    for norm, mean, full in run_ranks(2, work):
        torch.testing.assert_close(norm, full.norm())
        torch.testing.assert_close(mean, full.mean(0))
    gc.collect()
    # Those of units are settled when the unit is gathered again; the last ones end with the model.
    assert [name for name in poison.dropped if " of unit " not in name] == []
