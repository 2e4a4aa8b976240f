"""Plans equal what real ranks hold and send; all cases share one pair of processes."""

from pathlib import Path

import pytest

import fullshard
from fullshard.planner import highest, simulate
from fullshard.planner.plan import planned
from fullshard.program.config import load_run
from fullshard.program.train.run_plan import plan_prepared
from fullshard.program.train.setup.prepare import prepare
from support.planned import OPTIONS, RUNS, batch, build, make_model, plan_run
from support.processes import run_processes, selected

pytestmark = pytest.mark.dist

SLOW = {"accumulating", "adapter", "bias", "directory", "int8", "packed_bias", "shared_packed_rows"}


def each_of(cases):
    return [pytest.param(case, marks=pytest.mark.slow if case in SLOW else ()) for case in cases]


EACH_RUN = each_of(RUNS)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("planned")
    for name, write in RUNS.items():
        (directory / name).mkdir()
        write(directory / name)
    return directory


@pytest.fixture(scope="module")
def ranks(request, directory):
    only = ",".join(selected(request, "case"))
    return run_processes(2, Path(__file__).with_name("plan_main.py"), "--only", only, "--directory", str(directory))


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


@pytest.mark.parametrize("case", each_of(OPTIONS))
def test_a_plan_is_what_ranks_hold_and_send(case, ranks):
    assert_equal(fullshard.plan(make_model, batch, world_size=2, **OPTIONS[case]), ranks, case)


def test_where_messages_travel_a_reduce_is_under_way_while_the_next_unit_computes(ranks):
    each = (planned(simulate(build, rank, 2, reduces_behind=1, timed=False), rank, 2, timed=False) for rank in (0, 1))
    found = max(each, key=lambda plan: plan.peak_bytes)
    assert_equal(found, ranks, "sockets")
    on_one_machine = highest(build, [0, 1], 2, timed=False)
    assert found.account["gradients"] > on_one_machine.account["gradients"]


@pytest.mark.parametrize("case", EACH_RUN)
def test_a_run_files_plan_is_what_its_step_holds_and_sends(case, ranks, directory):
    assert_equal(plan_run(load_run(directory / case / "run.yaml", []), 2), ranks, case)


@pytest.fixture(scope="module")
def plans(directory):
    """The plans of a run file's ranks, made once."""
    made = {}

    def of(case):
        if case not in made:
            config = load_run(directory / case / "run.yaml", [])
            made[case] = [plan_prepared(config, prepare(config), 2, roughly=rank) for rank in range(2)]
        return made[case]

    return of


PAGE = 4096
"""What kernels of such small models allocate for themselves may be more than 2 % of a phase."""


@pytest.mark.parametrize("case", EACH_RUN)
def test_building_takes_what_is_planned(case, ranks, plans):
    for plan, rank in zip(plans(case), ranks, strict=True):
        assert plan.phase_peaks["before_first_step"] == pytest.approx(rank[case]["built_bytes"], abs=PAGE // 2)


@pytest.mark.parametrize("case", EACH_RUN)
def test_an_evaluation_takes_what_is_planned(case, ranks, plans):
    """Every rank is planned with the largest batch of all; also where units are gathered once."""
    for plan in plans(case):
        for way, peaks in (("evaluation", plan.phase_peaks), ("at_once", plan.gathering_once().phase_peaks)):
            found = [rank[case]["around"].get(way) for rank in ranks]
            phases = [peaks[phase] for phase in ("evaluation", "generation") if phase in peaks]
            assert bool(phases) == (found[0] is not None)
            if phases:
                assert max(phases) == pytest.approx(max(found), rel=0.02, abs=PAGE)


@pytest.mark.parametrize("case", EACH_RUN)
def test_saving_and_resuming_take_what_is_planned(case, ranks, plans):
    for plan, rank in zip(plans(case), ranks, strict=True):
        found = rank[case]["around"]
        assert plan.phase_peaks["saving"] == pytest.approx(found["saving"], rel=0.02, abs=PAGE)
        # The planned checkpoint is of another number of ranks: a block is copied while the next one is read.
        least, most = 0.98 * found["resuming"], 1.02 * found["resuming"] + 2 * found["block"] + PAGE
        assert least <= plan.phase_peaks["resuming"] <= most


@pytest.mark.parametrize("case", EACH_RUN)
def test_host_memory_has_the_copies_of_a_save_and_the_snapshots_for_restarts(case, ranks, plans):
    for plan, rank in zip(plans(case), ranks, strict=True):
        found = rank[case]["around"]
        # The random state is text of varying length.
        assert plan.host["snapshots"] == pytest.approx(found["snapshots"], abs=1000)
        if "checkpoint_copies" in plan.host:
            assert plan.host["checkpoint_copies"] == pytest.approx(found["checkpoint_copies"], rel=0.01)
