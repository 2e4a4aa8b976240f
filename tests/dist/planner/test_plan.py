"""Plans equal what real ranks hold and send; all cases share one pair of processes."""

from pathlib import Path

import pytest

import fullshard
from fullshard.config import load_run
from fullshard.train.plan import plan_run
from support.planned import OPTIONS, RUNS, batch, make_model
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
    # Ranks send differently much where tokens travel to rows that one of them has.
    for number, names in (
        (0, ("collectives", "account")),
        (1, ("collectives", "account")),
        (plan.rank, ("sent_bytes",)),
    ):
        found = ranks[number][case]
        for name in names:
            assert dict(getattr(plan, name)) == {k: v for k, v in found[name].items() if k != "all_gather_object"}
    peak = max(rank[case]["peak_bytes"] for rank in ranks)
    assert plan.peak_bytes == pytest.approx(peak, rel=0.01)
    assert plan.fits(plan.needed_bytes)
    assert plan.needed_bytes >= peak


@pytest.mark.parametrize("case", OPTIONS)
def test_a_plan_is_what_ranks_hold_and_send(case, ranks):
    assert_equal(fullshard.plan(make_model, batch, world_size=2, **OPTIONS[case]), ranks, case)


@pytest.mark.parametrize("case", RUNS)
def test_a_run_files_plan_is_what_its_step_holds_and_sends(case, ranks, directory):
    assert_equal(plan_run(load_run(directory / case / "run.yaml", []), 2), ranks, case)
