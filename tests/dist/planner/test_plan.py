"""Plans equal what real ranks hold and send; all cases share one pair of processes."""

from pathlib import Path

import pytest

import fullshard
from fullshard.config import load_run
from fullshard.planner import Rates
from fullshard.planner.plan import highest
from fullshard.train.plan import plan_run
from support.planned import OPTIONS, RUNS, batch, build, make_model
from support.processes import run_processes

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("planned")
    for name, write in RUNS.items():
        (directory / name).mkdir()
        write(directory / name)
    return directory


@pytest.fixture(scope="module")
def ranks(directory):
    return run_processes(2, Path(__file__).with_name("plan_main.py"), "--directory", str(directory))


def assert_equal(plan, ranks, case):
    """Whole numbers are exact; memory may lack what no operator returns, such as the workspace of bf16 products."""
    for number, rank in enumerate(ranks):
        # Where tokens travel to rows that one rank has, ranks send differently much.
        for name in ("collectives", "account", *(["sent_bytes"] if number == plan.rank else [])):
            assert dict(getattr(plan, name)) == {k: v for k, v in rank[case][name].items() if k != "all_gather_object"}
    peak = max(rank[case]["peak_bytes"] for rank in ranks)
    assert plan.peak_bytes == pytest.approx(peak, rel=0.01)
    assert plan.fits(plan.needed_bytes)
    assert plan.needed_bytes >= peak


@pytest.mark.parametrize("case", OPTIONS)
def test_a_plan_is_what_ranks_hold_and_send(case, ranks):
    assert_equal(fullshard.plan(make_model, batch, world_size=2, **OPTIONS[case]), ranks, case)


def test_where_messages_travel_a_reduce_is_under_way_while_the_next_unit_computes(ranks):
    apart = Rates(2, 0.0, {}, {}, travels=True)
    plans = {
        how: highest(build, [0, 1], 2, None, rates, timed=False)
        for how, rates in (("on one machine", None), ("sockets", apart))
    }
    assert_equal(plans["sockets"], ranks, "sockets")
    assert plans["sockets"].account["gradients"] > plans["on one machine"].account["gradients"]


@pytest.mark.parametrize("case", RUNS)
def test_a_run_files_plan_is_what_its_step_holds_and_sends(case, ranks, directory):
    assert_equal(plan_run(load_run(directory / case / "run.yaml", []), 2), ranks, case)
