"""Searches among plans: settings that fit, the fewest recomputed blocks, and settings that need less."""

import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from fullshard.errors import ConfigError, ModelError, UserError
from fullshard.planner import Timing, hardware
from fullshard.program.config import load_run
from fullshard.program.train import search as room
from fullshard.program.train.run_plan import RunPlan, plan_prepared
from fullshard.program.train.search import (
    MOST_PLANS,
    Chooser,
    Need,
    RankPlan,
    Telling,
    fewest_blocks,
    find_remedies,
    plan_chosen,
)
from fullshard.program.train.setup import activation_offload
from fullshard.program.train.setup.devices import Choice
from fullshard.program.train.setup.prepare import prepare
from support.planned import plan_run, write_run

KEPT = {"no_shard": 80, "shard_grad_op": 40, "full_shard": 30}
"""Bytes that do not depend on the batch."""
BLOCKS = 6
STEPS = "training.gradient_accumulation_steps"
SECONDS = {"no_shard": 1.0, "shard_grad_op": 2.0, "full_shard": 3.0}


def device(memory_bytes):
    return replace(hardware("h100"), memory_bytes=memory_bytes, outside_bytes=0, workspace_bytes=0)


def of_formula(config, _data, world_size, gpu, *, roughly=None, around=True):
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
    parts = {"shards": KEPT[strategy], "optimizer_state": 0, "activations_and_temporaries": rows * (10 - recomputed)}
    timing = Timing(seconds, seconds - SECONDS[strategy], 0.0, SECONDS[strategy], 0.0, 0)
    peaks = {"backward": size}
    return RunPlan(
        world_size, 0, 1, size, parts, {}, peaks, **none, device=gpu, timing=timing, steps=1, step_tokens=1,
        blocks=BLOCKS, recomputed=recomputed,
    )  # fmt: skip


def first_of_formula(config, *_, gpu):
    return SimpleNamespace(nbytes=KEPT[config.sharding.strategy])


@pytest.fixture
def run_file(tmp_path):
    return write_run(tmp_path, training__per_device_train_batch_size=8, training__gradient_accumulation_steps=1)


@pytest.fixture
def search(run_file, monkeypatch):
    monkeypatch.setattr(room, "plan_prepared", of_formula)
    monkeypatch.setattr(room, "first_numbers", first_of_formula)

    def run(memory, *overrides, tell=lambda line: None):
        def load(more):
            return load_run(run_file, [*overrides, *more])

        return room.search(load, 2, device(memory), SimpleNamespace(tokenizer=None), Telling(tell))

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
    assert any(tried.overrides == ("training.gradient_checkpointing=true",) for tried in found if tried.plan)


@pytest.mark.parametrize("asked", [(), ("training.gradient_checkpointing=auto",)])
def test_the_fewest_recomputed_blocks_that_fit_are_tried(search, asked):
    """80 bytes of rows and 40 kept, 5 % more: with 110 there is room for 8 rows of 8 bytes."""
    found = search(110, "sharding.strategy=shard_grad_op", *asked)
    fewest = next(tried for tried in found if tried.overrides == ("training.gradient_checkpointing=2",))
    assert (fewest.why, fewest.plan.recomputed) == ("", 2)


def test_a_setting_of_the_run_file_is_kept(search):
    assert all("strategy" not in str(tried.overrides) for tried in search(1000, "sharding.strategy=full_shard"))


def test_what_its_first_numbers_refuse_is_not_planned(search):
    """80 bytes and 5 % more: 24 are missing, whatever the rows are."""
    told = []
    found = search(60, tell=told.append)
    (refused,) = [tried for tried in found if "sharding.strategy=no_shard" in tried.overrides]
    assert (refused.plan, refused.needed_bytes, refused.why) == (None, 84, "at least 24 B too large")
    assert "sharding.strategy=no_shard: at least 24 B too large; the best so far: " in "\n".join(told)
    assert found[0].plan.parts["shards"] < 60


def test_settings_that_keep_more_than_what_does_not_fit_begin_with_the_smallest_micro_batches(search):
    """Full shards do not fit with 8 rows; the other strategies are not planned with 8."""
    found = search(95, "training.gradient_checkpointing=false")
    others = [one.plan for one in found if "sharding.strategy=shard_grad_op" in one.overrides]
    assert sorted(plan.parts["activations_and_temporaries"] for plan in others if plan) == [10, 40]


def test_the_exact_plan_decides(search, monkeypatch):
    monkeypatch.setitem(KEPT, "no_shard", 1000)
    # 120 bytes and 5 % more: enough for shard_grad_op by the rough plan alone.
    best, *others = search(126, "training.gradient_checkpointing=false")
    assert best.overrides == ()
    fallen = next(tried for tried in others if tried.overrides == ("sharding.strategy=shard_grad_op",))
    assert fallen.why == "2 B too large"
    best, *_ = search(126)  # a run that chooses recomputes a block
    assert (best.overrides, best.plan.recomputed) == (("sharding.strategy=shard_grad_op",), 1)


def test_no_settings_are_planned_twice_and_the_run_files_own_come_first(run_file, monkeypatch):
    """With auto known to be true, true is the same; without shards, so is how frozen weights are kept."""
    planned, told = [], []

    def noted(config, *run, **how):
        if how.get("roughly") is not None:
            planned.append((config.sharding.strategy, config.sharding.frozen, config.training.fused_cross_entropy))
        plain = config.model_copy(
            update={"training": config.training.model_copy(update={"fused_cross_entropy": "auto"})}
        )
        chosen = (Choice("training.fused_cross_entropy", "true", ""),)
        return replace(of_formula(plain, *run, **how), chosen=chosen)

    monkeypatch.setattr(room, "plan_prepared", noted)
    monkeypatch.setattr(room, "first_numbers", first_of_formula)
    load = partial(load_run, run_file)
    config = load(["model.adapter.r=4", "training.gradient_checkpointing=false"])
    room.search(lambda more: load(["model.adapter.r=4", "training.gradient_checkpointing=false", *more]), 2,
               device(1000), SimpleNamespace(tokenizer=None), Telling(told.append))  # fmt: skip
    assert config.sharding.frozen == "shard"
    assert planned[0] == ("full_shard", "shard", "auto")
    assert len(planned) == len(set(planned)) == 5
    assert sum(strategy == "no_shard" for strategy, *_ in planned) == 1
    assert not any(fused is True for *_, fused in planned)
    assert told[0].startswith("candidate 1 of at most 10: planning as it is")
    assert told[1].endswith("the best so far")


def test_settings_that_compute_as_long_as_the_best_takes_are_left_out(search, monkeypatch):
    """The strategies wait for nothing, so that another one cannot be faster than the first that fits."""
    monkeypatch.setattr(f"{__name__}.SECONDS", dict.fromkeys(SECONDS, 0.0))
    assert [tried.overrides for tried in search(1000)] == [()]


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
    best, *others = room.search(load, 2, device(needed - 1))
    assert best.overrides == ("training.per_device_train_batch_size=2", "training.gradient_accumulation_steps=2")
    assert best.plan.needed_bytes < needed
    assert best.plan.steps == 2 * 4  # two epochs of 25 rows, 8 a step
    assert others[-1].overrides == ()


CHECKPOINTING = "training.gradient_checkpointing"


def searched(needs, blocks, limit):
    """The number that is found, and how many plans that took, if so many blocks need what a function says."""
    asked = []

    def missing(number):
        asked.append(number)
        return needs(number) - limit

    number = fewest_blocks(missing, blocks)
    assert number in asked
    return number, len(asked)


@pytest.mark.parametrize("curve", [lambda n: 1000 - 7 * n, lambda n: 1000 / (1 + n), lambda n: 1000 - n**2 / 17])
@pytest.mark.parametrize("blocks", [1, 24, 126])
def test_the_fewest_blocks_that_fit_are_found_in_few_plans(curve, blocks):
    for limit in (curve(0), curve(1), curve(blocks // 2), curve(blocks) + 1, curve(blocks)):
        number, plans = searched(curve, blocks, limit)
        assert number == next(n for n in range(blocks + 1) if curve(n) <= limit)
        assert plans <= MOST_PLANS


def test_along_a_line_four_plans_are_enough():
    assert searched(lambda n: 1000 - 7 * n, 126, 700) == (43, 4)


def test_what_never_fits_recomputes_only_what_helps():
    assert searched(lambda n: max(100 - n, 50), 80, 40)[0] == 50
    assert searched(lambda n: 100, 80, 40)[0] == 0  # an evaluation is the largest


def test_without_a_plan_for_all_blocks_none_is_recomputed():
    assert fewest_blocks(lambda n: math.inf if n else 5, 24) == 0


# What the plans of ranks choose

TRAINING = {"blocks": "training.gradient_checkpointing", "adding": "training.accumulate"}


def rank_plan(size, *, free, snapshots=0, unplanned=(), once=None, number=0):
    """A rank that needs ``size`` bytes in a step, of six blocks; ``once``: in evaluations that gather once."""
    none = {"account": {}, "sent_bytes": {}, "collectives": {}}
    at_once = {} if once is None else {"generation": once}
    plan = RunPlan(2, 0, 1, size, {}, {}, {"backward": size, "generation": 1}, **none, blocks=6, recomputed=number,
                   host={"snapshots": snapshots}, unplanned=unplanned, at_once=at_once)  # fmt: skip
    return RankPlan(plan, free)


@pytest.fixture
def choose(run_file):
    """What two ranks choose that need 100 bytes, ten less with each recomputed block, and 60 more unsharded."""

    def choose(free, *, before=None, snapshots=0, strategy="full_shard", fails=(), times=2, **more):
        overrides = [f"{TRAINING[name]}={value}" for name, value in more.items()]
        config = load_run(run_file, [f"{STEPS}={times}", f"sharding.strategy={strategy}", *overrides])

        def make(chosen):
            values = {one.setting: one.value for one in chosen}
            if values.get(TRAINING["adding"]) in fails or values.get(TRAINING["blocks"]) in fails:
                return [RankPlan("not possible", free), rank_plan(1, free=free)]
            asked = values.get(TRAINING["blocks"], "false")
            number = {"true": 6, "false": 0}.get(asked) if asked in ("true", "false") else int(asked)
            size = 100 - 10 * number + 60 * (values.get(TRAINING["adding"]) == "unsharded")
            return [rank_plan(size, free=free, snapshots=snapshots, number=number), rank_plan(size, free=free)]

        found = Chooser(config, 2, make, lambda plan: plan.peak_bytes, 1.0, lambda name: (before or {}).get(name),
                        snapshots=snapshots > 0).choose()  # fmt: skip
        return {one.setting: one for one in found}

    return choose


HERE = "machine: here"


@pytest.mark.parametrize(
    ("free", "how", "blocks", "adding"),
    [
        ({HERE: 1000}, {}, "false", "unsharded"),
        ({HERE: 200}, {}, "false", "sharded"),  # what fits to the byte
        ({HERE: 199}, {}, "1", "sharded"),
        ({HERE: 161}, {}, "2", "sharded"),
        ({HERE: 80}, {}, "true", "sharded"),
        ({HERE: 10}, {}, "true", "sharded"),  # does not fit, and needs least
        ({}, {}, "false", "sharded"),  # the system does not say what is free
        ({HERE: 199}, {"blocks": "false"}, None, "sharded"),
        ({HERE: 1000}, {"adding": "sharded"}, "false", None),
        ({HERE: 1000}, {"times": 1}, "false", None),
        ({HERE: 1000}, {"strategy": "no_shard"}, "false", "sharded"),  # would send no less
        ({HERE: 1000}, {"fails": ["unsharded"]}, "false", "sharded"),
        ({HERE: 161}, {"fails": ["true"]}, "false", "sharded"),  # the model does not support it
        ({HERE: 356}, {}, "false", "unsharded"),  # nine tenths are 320.4
        ({HERE: 355}, {}, "false", "sharded"),
        ({HERE: 355}, {"before": {TRAINING["adding"]: "unsharded"}}, "false", "unsharded"),
        ({HERE: 1000}, {"before": {TRAINING["adding"]: "sharded"}}, "false", "sharded"),
        ({HERE: 1000}, {"before": {TRAINING["blocks"]: 3}}, "3", "unsharded"),
        ({HERE: 100}, {"before": {TRAINING["blocks"]: 3}}, "5", "sharded"),  # it does not fit any more
        ({HERE: 1000}, {"before": {TRAINING["blocks"]: True}}, "true", "unsharded"),
        ({HERE: 1000, "control group: x": 199}, {}, "1", "sharded"),
        ({HERE: 356}, {"snapshots": 20}, "false", "sharded"),
    ],
)
def test_the_plans_of_ranks_choose(choose, free, how, blocks, adding):
    found = choose(free, **how)
    values = [None if (one := found.get(setting)) is None else one.value for setting in TRAINING.values()]
    assert values == [blocks, adding]


def test_a_choice_says_the_numbers_behind_it(choose):
    found = choose({HERE: 161})
    assert "2 of 6 blocks: a rank needs 100 B without, 80 B with it, and may take 80 B" in str(
        found[TRAINING["blocks"]]
    )
    assert (
        "unsharded needs 280 B, more than 90% of the 161 B that are free in its machine"
        in found[TRAINING["adding"]].why
    )
    assert choose({HERE: 1000}, before={TRAINING["blocks"]: 3})[TRAINING["blocks"]].why.endswith(
        "as at this run's start"
    )


def test_a_run_with_room_takes_one_plan_of_each_rank(run_file):
    made = []

    def make(chosen):
        made.append([one.override for one in chosen])
        return [rank_plan(160, free={HERE: 1000})] * 2

    chosen = Chooser(load_run(run_file, [f"{STEPS}=2"]), 2, make, lambda plan: plan.peak_bytes, 1.0).choose()
    assert [one.value for one in chosen] == ["false", "unsharded"]
    assert made == [["training.accumulate=unsharded"]]


def test_ranks_count_where_they_are(run_file):
    chooser = Chooser(load_run(run_file), 3, lambda chosen: [], lambda plan: plan.peak_bytes, 1.0)
    ranks = [rank_plan(10, free={"machine: a": 20, "control group: b": 10}), rank_plan(10, free={"machine: a": 20})]
    assert chooser.shortage(ranks) is None
    assert chooser.shortage([*ranks, rank_plan(10, free={"machine: c": 9})]) == ("machine: c", 10, 9)
    assert chooser.shortage([*ranks, rank_plan(10, free={"machine: a": 30})]) == ("machine: a", 30, 20)
    kept = [rank_plan(10, free={"machine: a": 10}, snapshots=3)]
    assert chooser.shortage(kept) is None
    assert chooser.shortage(kept, snapshots=True) == ("machine: a", 13, 10)


@pytest.mark.parametrize(
    ("size", "once", "free", "gathers"),
    [(10, 18, 20, True), (10, 19, 20, False), (19, 19, 19, True), (10, None, 20, False)],
)
def test_evaluations_gather_once_in_nine_tenths_or_where_steps_need_as_much(run_file, size, once, free, gathers):
    chooser = Chooser(load_run(run_file), 1, lambda chosen: [], lambda plan: max(plan.phase_peaks.values()), 1.0)
    (found,) = chooser.gathering_once([rank_plan(size, free={HERE: free}, once=once)])
    assert found.plan.gathers_once is gathers
    assert found.plan.phase_peaks["generation"] == (once if gathers else 1)


# Of a planned_run


@pytest.fixture(scope="module")
def planned_run(tmp_path_factory):
    """Settings of a model of two and two blocks by overrides, its data, and a plan."""
    training = {"eval_strategy": "no", "per_device_train_batch_size": 4, "fused_cross_entropy": False}
    load = partial(load_run, write_run(tmp_path_factory.mktemp("run"), training=training))
    data = prepare(load())
    return load, data, plan_prepared(load(), data, 1, roughly=0)


@pytest.fixture
def chosen(planned_run, monkeypatch):
    """Chooses where so many of 24 blocks need what a function says; returns how many the plan and settings have."""
    load, data, real = planned_run

    def chosen(needs, *overrides, limit=None, **how):
        def planned(config, *_, **__):
            asked = config.training.gradient_checkpointing
            number = asked if type(asked) is int else 24 * (asked is True)
            peaks = {"before_first_step": 10**9, "backward": needs(number)}
            return replace(real, blocks=24, recomputed=number, host={}, phase_peaks=peaks, device=how.get("device"))

        monkeypatch.setattr(room, "plan_prepared", planned)
        plan, config = plan_chosen(limit, load(overrides), data, 1, **how)
        return plan.recomputed, config.training.gradient_checkpointing

    return chosen


def test_tensors_get_nine_tenths_of_what_a_gpu_has_left(chosen):
    sheet = hardware("h100")

    def needs(number):
        return 9 * (1000 - number)

    for left, fewest in ((9970, 3), (9969, 4), (10000, False), (9760, True), (5000, True)):
        device = replace(sheet, memory_bytes=left + sheet.outside_bytes)
        assert chosen(needs, device=device, limit=device.memory_bytes) == (24 if fewest is True else fewest, fewest)


def test_without_a_limit_and_with_a_number_of_the_user_nothing_is_chosen(chosen):
    assert chosen(lambda number: 1000) == (0, "auto")
    assert chosen(lambda number: 1000, f"{CHECKPOINTING}=2", limit=1) == (2, 2)


def test_a_real_plan_recomputes_the_fewest_blocks_that_fit(planned_run):
    """The deepest of the four blocks frees nothing: its activations are freed before others are recomputed."""
    load, data, plain = planned_run
    three = plan_prepared(load([f"{CHECKPOINTING}=3"]), data, 1, roughly=0)
    assert plain.needed_bytes > three.needed_bytes
    plan, config = plan_chosen(three.needed_bytes, load(), data, 1, roughly=0)
    assert (plan.recomputed, plan.blocks, config.training.gradient_checkpointing) == (3, 4, 3)
    assert replace(plan, chosen=()) == replace(three, chosen=())
    assert str(plan).count("3 of 4 blocks") == 1  # as a choice; without one the plan says it itself
    assert "recomputed in backward: 3 of 4 blocks" in str(three)


def test_more_blocks_than_there_are_is_refused_with_the_numbers(planned_run):
    load, data, _ = planned_run
    with pytest.raises(ModelError, match=r"gradient_checkpointing: 40 blocks .* has 4"):
        plan_prepared(load([f"{CHECKPOINTING}=40"]), data, 1, roughly=0)
    with pytest.raises(UserError, match="gradient_checkpointing"):
        load([f"{CHECKPOINTING}=-1"])


def test_on_a_gpu_offloaded_activations_are_the_hosts(planned_run, monkeypatch):
    """At the peak all but two blocks' are there. What is recomputed saves only its inputs."""
    monkeypatch.setattr(activation_offload, "LEAST_BYTES", 0)
    load, data, _ = planned_run

    def planned(offload, recomputed, device):
        more = [f"training.activation_offload={offload}", f"{CHECKPOINTING}={recomputed}"]
        return plan_prepared(load(more), data, 1, device, roughly=0)

    gpu = hardware("h100")
    kept, offloaded, both = planned("false", 0, gpu), planned("true", 0, gpu), planned("true", 4, gpu)
    assert 0 < kept.peak_bytes - offloaded.peak_bytes <= offloaded.host["offloaded"]
    assert "offloaded" not in kept.host
    assert both.host["offloaded"] < offloaded.host["offloaded"] / 10
    assert planned("true", 0, None).as_dict() == planned("false", 0, None).as_dict()


FUSED, CHECKPOINTED, HALF = (
    "training.fused_cross_entropy=true",
    "training.gradient_checkpointing=true",
    "training.per_device_train_batch_size=2 training.gradient_accumulation_steps=4",
)


@pytest.fixture
def found(tmp_path, monkeypatch):
    """Returns what is named if plans need what a function of the settings says."""
    path = write_run(tmp_path)

    def found(limit, needs, *overrides):
        def planned(config, *_, **__):
            return SimpleNamespace(needs=needs(config.training), unplanned=(), blocks=24)

        monkeypatch.setattr(room, "plan_prepared", planned)
        need = Need(
            load=lambda more: load_run(path, [*overrides, *more]),
            data=None,
            world_size=2,
            rank=0,
            bytes_of=lambda plan: plan.needs,
            before=needs(load_run(path, overrides).training),
            limit=limit,
        )
        return [(" ".join(one.overrides), one.saved_bytes, one.fits) for one in find_remedies(need)]

    return found


def saving(**saved):
    return lambda training: 100 - sum(size for name, size in saved.items() if getattr(training, name) is True)


def test_what_fits_comes_first_the_cheapest_first(found):
    first, second, third = found(80, saving(fused_cross_entropy=15, gradient_checkpointing=20))
    assert first == (CHECKPOINTED, 20, True)
    assert second[0].startswith(f"{FUSED} {CHECKPOINTED}")
    assert second[1:] == third[1:] == (35, True)


def test_the_fewest_blocks_with_which_it_fits_are_named(found):
    def needs(training):
        asked = training.gradient_checkpointing
        return 1000 - 10 * (asked if type(asked) is int else 24 * (asked is True))

    assert found(930, needs)[0] == ("training.gradient_checkpointing=7", 70, True)
    assert found(930, needs, "training.gradient_checkpointing=5")[0] == ("training.gradient_checkpointing=7", 20, True)


def test_if_nothing_fits_what_saves_most_is_named(found):
    named = found(10, saving(fused_cross_entropy=15, gradient_checkpointing=20))
    assert [one[1:] for one in named] == [(35, False)] * 3


def test_a_step_keeps_its_rows(found):
    named = found(90, lambda training: 25 * training.per_device_train_batch_size)
    assert named[0] == (HALF, 50, True)


def test_what_the_run_has_already_is_not_named(found):
    named = found(60, saving(gradient_checkpointing=30), CHECKPOINTED, "training.eval_strategy=no")
    assert named == []


def test_settings_that_cannot_be_planned_are_left_out(found):
    def needs(training):
        if training.fused_cross_entropy is True:
            raise ModelError("not planned")
        return 50

    assert FUSED not in " ".join(overrides for overrides, *_ in found(60, needs))
