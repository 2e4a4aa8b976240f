"""``gradient_checkpointing: auto``: the fewest blocks with which a plan fits."""

import math
from dataclasses import replace
from functools import partial

import pytest

from fullshard.errors import ModelError, UserError
from fullshard.planner import hardware
from fullshard.program.config import load_run
from fullshard.program.train import fit
from fullshard.program.train.fit import MOST_PLANS, fewest_blocks, plan_chosen
from fullshard.program.train.plan import plan_prepared, prepare_plan
from fullshard.program.train.setup import activation_offload
from support.planned import write_run

BLOCKS = "training.gradient_checkpointing"


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


# Of a run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Settings of a model of two and two blocks by overrides, its data, and a plan."""
    training = {"eval_strategy": "no", "per_device_train_batch_size": 4, "fused_cross_entropy": False}
    load = partial(load_run, write_run(tmp_path_factory.mktemp("run"), training=training))
    data = prepare_plan(load())
    return load, data, plan_prepared(load(), data, 1, roughly=0)


@pytest.fixture
def chosen(run, monkeypatch):
    """Chooses where so many of 24 blocks need what a function says; returns how many the plan and settings have."""
    load, data, real = run

    def chosen(needs, *overrides, limit=None, **how):
        def planned(config, *_, **__):
            asked = config.training.gradient_checkpointing
            number = asked if type(asked) is int else 24 * (asked is True)
            peaks = {"before_first_step": 10**9, "backward": needs(number)}
            return replace(real, blocks=24, recomputed=number, host={}, phase_peaks=peaks, device=how.get("device"))

        monkeypatch.setattr(fit, "plan_prepared", planned)
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
    assert chosen(lambda number: 1000, f"{BLOCKS}=2", limit=1) == (2, 2)


def test_a_real_plan_recomputes_the_fewest_blocks_that_fit(run):
    """The deepest of the four blocks frees nothing: its activations are freed before others are recomputed."""
    load, data, plain = run
    three = plan_prepared(load([f"{BLOCKS}=3"]), data, 1, roughly=0)
    assert plain.needed_bytes > three.needed_bytes
    plan, config = plan_chosen(three.needed_bytes, load(), data, 1, roughly=0)
    assert (plan.recomputed, plan.blocks, config.training.gradient_checkpointing) == (3, 4, 3)
    assert replace(plan, chosen=()) == replace(three, chosen=())
    assert "recomputed in backward: 3 of 4 blocks" in str(plan)


def test_more_blocks_than_there_are_is_refused_with_the_numbers(run):
    load, data, _ = run
    with pytest.raises(ModelError, match=r"gradient_checkpointing: 40 blocks .* has 4"):
        plan_prepared(load([f"{BLOCKS}=40"]), data, 1, roughly=0)
    with pytest.raises(UserError, match="gradient_checkpointing"):
        load([f"{BLOCKS}=-1"])


def test_on_a_gpu_offloaded_activations_are_the_hosts(run, monkeypatch):
    """At the peak all but two blocks' are there. What is recomputed saves only its inputs."""
    monkeypatch.setattr(activation_offload, "LEAST_BYTES", 0)
    load, data, _ = run

    def planned(offload, recomputed, device):
        more = [f"training.activation_offload={offload}", f"{BLOCKS}={recomputed}"]
        return plan_prepared(load(more), data, 1, device, roughly=0)

    gpu = hardware("h100")
    kept, offloaded, both = planned("false", 0, gpu), planned("true", 0, gpu), planned("true", 4, gpu)
    assert 0 < kept.peak_bytes - offloaded.peak_bytes <= offloaded.host["offloaded"]
    assert "offloaded" not in kept.host
    assert both.host["offloaded"] < offloaded.host["offloaded"] / 10
    assert planned("true", 0, None).as_dict() == planned("false", 0, None).as_dict()
