"""Collectives in host memory, for ranks that share a GPU, on real processes with the CPU in place of the GPU."""

from pathlib import Path

import pytest

from support.behaviours import BEHAVIOURS
from support.processes import run_processes

pytestmark = [pytest.mark.dist, pytest.mark.parity]

SCRIPT = Path(__file__).with_name("staged_main.py")
OTHERS = ("collectives", "optimizers", "saving")
FEW = (
    "collectives",
    "b12_double_forward_one_backward_with_checkpointing_and_nested_units",
    "b19_unused_on_one_rank_only",
    "b26_fp16_inf_on_one_rank_skips_the_step_on_all",
    "b36_exception_then_recovery",
    "b40_order_mismatch_is_detected_not_hung",
)


def assert_none_failed(outcomes, name):
    for rank, text in enumerate(outcomes[name]):
        assert not text, f"rank {rank}:\n{text}"


@pytest.fixture(scope="module")
def a_few():
    return run_processes(2, SCRIPT, "--only", ",".join(FEW), timeout_s=110)


@pytest.fixture(scope="module", params=[2, 4])
def everything(request):
    return run_processes(request.param, SCRIPT, timeout_s=280)


@pytest.mark.parametrize("name", FEW)
def test_it_holds_over_host_memory(a_few, name):
    assert_none_failed(a_few, name)


@pytest.mark.slow
@pytest.mark.timeout(300)  # the first one starts the ranks and waits for all
@pytest.mark.parametrize("name", [*OTHERS, *BEHAVIOURS])
def test_all_of_it_holds_on_two_and_four_ranks(everything, name):
    assert_none_failed(everything, name)
