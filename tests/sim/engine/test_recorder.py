"""The record of a step tells what the engine did, in the order it was done in, and changes nothing."""

from collections import Counter
from functools import cache
from itertools import pairwise

import pytest
import torch

from fullshard import MixedPrecision, ShardingStrategy, fully_shard, no_sync
from fullshard.core.engine import record, units
from fullshard.core.engine.setup import wrap
from fullshard.core.shards import rows_of
from fullshard.core.testing import run_ranks
from support.models import KINDS, batches
from support.parity import on_ranks, replicas

LAWFUL = ["lm", "lm_two_forwards", "lm_frozen_parts", "lm_checkpoint_reentrant", "t5"]


@cache
def recorded(kind, *, steps=2, ranks=2, **options):
    """Of each rank the record of the last step and the collectives of that step."""
    make, loss_of = KINDS[kind]

    def work(comm, model):
        for tokens in batches(steps, 2):
            before = len(comm.entries)
            with record(model) as trace:
                loss_of(model, tokens).backward()
        return trace, Counter(comm.names[before:]), units(model)

    return on_ranks(ranks, make, work, recorded=True, **options)


@pytest.mark.parametrize("kind", LAWFUL)
def test_each_unit_is_gathered_before_it_computes(kind):
    for trace, _, table in recorded(kind):
        names = {row.unit for row in table.rows if row.parameters}
        gathers = {name: [e for e in trace.events if (e.unit, e.kind) == (name, "gather")] for name in names}
        for event in trace.events:
            if event.kind == "forward":
                assert any(gather.end_s <= event.start_s for gather in gathers[event.unit]), event
        assert all(gathers.values())


@pytest.mark.parametrize("kind", LAWFUL)
def test_each_trainable_unit_is_reduced_once_after_its_backward_began(kind):
    for trace, collectives, table in recorded(kind):
        reduces = [event for event in trace.events if event.kind == "reduce"]
        trainable = {row.unit for row in table.rows if row.trainable}
        # Reentrant checkpoints make two forwards of a block two backwards, but here is one forward only.
        assert Counter(event.unit for event in reduces) == Counter(trainable)
        assert len(reduces) <= collectives["reduce_scatter"]
        for event in reduces:
            begun = [e.start_s for e in trace.events if (e.unit, e.kind) == (event.unit, "backward")]
            assert not begun or min(begun) <= event.start_s


@pytest.mark.parametrize("kind", LAWFUL)
def test_events_lie_within_the_record_and_where_they_belong(kind):
    for trace, _, _ in recorded(kind):
        for event in trace.events:
            assert 0 <= event.start_s <= event.end_s <= trace.seconds
        starts = [event.start_s for event in trace.events]
        assert starts == sorted(starts)
        for name in {event.unit for event in trace.events} - {"(root)"}:
            busy = [e for e in trace.events if e.unit == name and e.kind in ("forward", "gather_wait")]
            assert all(one.end_s <= two.start_s for one, two in pairwise(busy)), "computing and waiting overlap"
        for wait in (event for event in trace.events if event.kind == "reduce_wait"):
            around = [e for e in trace.events if (e.unit, e.kind) == (wait.unit, "reduce")]
            assert any(e.start_s <= wait.start_s and wait.end_s <= e.end_s for e in around), "a stall of no transfer"


def test_every_unit_has_its_forward_its_backward_and_the_gathers_that_were_issued():
    for trace, collectives, table in recorded("lm"):
        names = sorted(row.unit for row in table.rows)
        for kind in ("forward", "backward"):
            assert sorted(event.unit for event in trace.events if event.kind == kind) == names
        lanes = {row.unit: row.lanes for row in table.rows}
        issued = sum(lanes[event.unit] for event in trace.events if event.kind == "gather")
        assert issued == collectives["all_gather"]


def test_samples_are_the_engines_own_account():
    make, loss_of = KINDS["lm"]

    def work(comm, model):
        with record(model) as trace:
            loss_of(model, batches(1, 2)[0]).backward()
        return trace.samples, units(model), [p.grad for p in model.parameters() if p.grad is not None]

    for samples, table, gradients in on_ranks(2, make, work):
        gathered = sorted((row.gathered_bytes for row in table.rows[1:]), reverse=True)
        assert samples[0].gathered == samples[-1].gathered == samples[-1].gradient_buffers == 0
        assert max(s.gathered for s in samples) == table.rows[0].gathered_bytes + sum(gathered[:2])
        assert max(s.gradient_buffers for s in samples) > 0
        assert (samples[0].gradients, samples[-1].gradients) == (0, sum(g.nbytes for g in gradients))
        assert all(sample.allocated is None for sample in samples)


@pytest.mark.parametrize(
    "options",
    [{}, {"strategy": ShardingStrategy.SHARD_GRAD_OP}, {"mp_policy": MixedPrecision(param="bf16", reduce="bf16")}],
    ids=["full", "grad_op", "bf16"],
)
def test_recording_changes_no_number(options):
    make, loss_of = KINDS["t5"]
    _, models = replicas(make, 4)

    def train(comm, model, *, recording):
        model = fully_shard(model, comm, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for tokens in batches(3, 2):
            if recording:
                with record(model):
                    loss_of(model, tokens).backward()
            else:
                loss_of(model, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [rows_of(param).clone() for param in model.parameters()]

    plain = run_ranks(2, lambda comm: train(comm, models[comm.rank], recording=False))
    traced = run_ranks(2, lambda comm: train(comm, models[2 + comm.rank], recording=True))
    for one, two in zip(plain, traced, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_a_unit_that_is_not_sharded_is_never_gathered():
    for trace, _, _ in recorded("lm", strategy=ShardingStrategy.NO_SHARD):
        assert {event.kind for event in trace.events} == {"forward", "backward", "reduce", "reduce_wait"}


def test_no_sync_records_no_reduce():
    make, loss_of = KINDS["lm"]

    def work(comm, model):
        with record(model) as trace, no_sync(model):
            loss_of(model, batches(1, 2)[0]).backward()
        return {event.kind for event in trace.events}

    assert on_ranks(2, make, work) == [{"gather", "gather_wait", "forward", "backward"}] * 2


def test_waits_for_tokens_that_travel_are_recorded(monkeypatch):
    monkeypatch.setattr(wrap, "LARGE_NUMEL", 1000)
    make, loss_of = KINDS["lm"]

    def work(comm, model):
        with record(model) as trace:
            loss_of(model, batches(1, 2)[0]).backward()
        return [event.unit for event in trace.events if event.kind == "exchange_wait"]

    # counts, ids and rows of the lookup; then the gradients of the rows
    assert on_ranks(2, make, work, tables="home") == [["(root)"] * 4] * 2


def test_after_the_record_nothing_is_told():
    make, loss_of = KINDS["lm"]

    def work(comm, model):
        with record(model) as trace:
            loss_of(model, batches(1, 2)[0])
        before = (trace.events, trace.samples, len(trace._spans))
        loss_of(model, batches(1, 2)[0]).backward()
        return before == (trace.events, trace.samples, len(trace._spans))

    assert on_ranks(2, make, work) == [True, True]
