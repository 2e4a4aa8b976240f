"""The search for settings that fit: what it tries, what it leaves out, and that a step keeps its rows."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from fullshard.errors import ConfigError
from fullshard.planner import Timing, hardware
from fullshard.program.config import load_run
from fullshard.program.train import fit, plan
from fullshard.program.train.plan import RunPlan, plan_run
from support.planned import write_run

KEPT = {"no_shard": 80, "shard_grad_op": 40, "full_shard": 30}
"""Bytes that do not depend on the batch."""
BLOCKS = 6
STEPS = "training.gradient_accumulation_steps"
SECONDS = {"no_shard": 1.0, "shard_grad_op": 2.0, "full_shard": 3.0}


def device(memory_bytes):
    return replace(hardware("h100"), memory_bytes=memory_bytes, outside_bytes=0, workspace_bytes=0)


def of_formula(config, _data, world_size, gpu, *, roughly=None):
    """A plan of 10 bytes a row, a byte less with each recomputed block, which takes time; the exact one needs a byte
    more."""
    settings, strategy = config.training, config.sharding.strategy
    if settings.fused_cross_entropy is True:
        raise ConfigError("not with this model")
    rows, asked = settings.per_device_train_batch_size, settings.gradient_checkpointing
    recomputed = asked if type(asked) is int else BLOCKS * (asked is True)
    size = KEPT[strategy] + rows * (10 - recomputed) + (roughly is None)
    seconds = SECONDS[strategy] + recomputed / 12 + settings.gradient_accumulation_steps / 100
    none = {"account": {}, "sent_bytes": {}, "collectives": {}}
    parts = {"shards": KEPT[strategy], "optimizer_state": 0}
    timing = Timing(seconds, seconds, 0.0, 0.0, 0.0, 0)
    peaks = {"backward": size}
    return RunPlan(
        world_size, 0, 1, size, parts, {}, peaks, **none, device=gpu, timing=timing, steps=1, step_tokens=1,
        blocks=BLOCKS, recomputed=recomputed,
    )  # fmt: skip


@pytest.fixture
def run_file(tmp_path):
    return write_run(tmp_path, training__per_device_train_batch_size=8, training__gradient_accumulation_steps=1)


@pytest.fixture
def search(run_file, monkeypatch):
    monkeypatch.setattr(plan, "plan_prepared", of_formula)
    monkeypatch.setattr(fit, "prepare_plan", lambda config: SimpleNamespace())

    def run(memory, *overrides):
        return fit.search(lambda more: load_run(run_file, [*overrides, *more]), 2, device(memory))

    return run


def test_the_fastest_that_fits_comes_first_and_slower_ones_of_a_strategy_are_not_tried(search):
    found = search(1000)
    assert [tried.overrides for tried in found] == [
        ("sharding.strategy=no_shard",),
        ("sharding.strategy=shard_grad_op",),
        (),
    ]
    assert not any(tried.why for tried in found)


def test_rows_of_a_micro_batch_become_fewer_and_micro_batches_more(search):
    best, *_ = search(70, "sharding.strategy=full_shard", "training.gradient_checkpointing=false")
    assert best.overrides == ("training.per_device_train_batch_size=2", "training.gradient_accumulation_steps=4")
    assert not best.why


def test_a_slower_setting_of_a_rank_is_tried_where_rows_had_to_become_fewer(search):
    found = search(75, "sharding.strategy=shard_grad_op")
    seconds = [tried.step_s for tried in found if not tried.why]
    assert seconds == sorted(seconds)
    assert found[0].overrides == ("training.per_device_train_batch_size=2", f"{STEPS}=4")
    assert any(tried.overrides[:1] == ("training.gradient_checkpointing=true",) for tried in found if not tried.why)


@pytest.mark.parametrize("asked", [(), ("training.gradient_checkpointing=auto",)])
def test_the_fewest_recomputed_blocks_that_fit_are_tried(search, asked):
    """80 bytes of rows and 40 kept, 5 % more: with 110 there is room for 8 rows of 8 bytes."""
    found = search(110, "sharding.strategy=shard_grad_op", *asked)
    fewest = next(tried for tried in found if tried.overrides == ("training.gradient_checkpointing=2",))
    assert (fewest.why, fewest.plan.recomputed) == ("", 2)


def test_a_setting_of_the_run_file_is_kept(search):
    assert all("strategy" not in str(tried.overrides) for tried in search(1000, "sharding.strategy=full_shard"))


def test_a_strategy_that_keeps_too_much_is_tried_once(search):
    found = search(60)
    assert sum("sharding.strategy=no_shard" in tried.overrides for tried in found) == 1
    assert found[0].plan.parts["shards"] < 60


def test_the_exact_plan_decides(search, monkeypatch):
    monkeypatch.setitem(KEPT, "no_shard", 1000)
    best, *others = search(126)  # 120 bytes and 5 % more: enough for shard_grad_op by the rough plan alone
    assert best.overrides == ()
    fallen = next(tried for tried in others if tried.overrides == ("sharding.strategy=shard_grad_op",))
    assert fallen.why == "2 B too large"


def test_nothing_fits(search):
    found = search(20)
    assert all(tried.why for tried in found)
    assert "too large" in found[0].why


def test_what_cannot_be_planned_falls_with_its_reason(search):
    found = search(75, "sharding.strategy=shard_grad_op")
    assert any(tried.why == "not with this model" and tried.plan is None for tried in found)


@pytest.mark.slow
def test_a_real_run_finds_micro_batches_that_fit(tmp_path):
    fixed = {"sharding": {"strategy": "full_shard"}, "training__gradient_checkpointing": False}
    run_file = write_run(
        tmp_path, **fixed, training__fused_cross_entropy=False, training__gradient_accumulation_steps=1
    )
    load = partial(load_run, run_file)
    needed = plan_run(load([]), 2, device(1 << 40)).needed_bytes
    best, *others = fit.search(load, 2, device(needed - 1))
    assert best.overrides == ("training.per_device_train_batch_size=2", "training.gradient_accumulation_steps=2")
    assert best.plan.needed_bytes < needed
    assert best.plan.steps == 2 * 4  # two epochs of 25 rows, 8 a step
    assert others[-1].overrides == ()
