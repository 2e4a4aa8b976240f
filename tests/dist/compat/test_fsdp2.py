"""torch's FSDP2 and fullshard's names for it, side by side on two gloo processes: one pair for all names."""

from pathlib import Path

import pytest

from support.processes import run_processes

pytestmark = [pytest.mark.dist, pytest.mark.parity]

NAMES = (
    "bottom_up", "root_alone", "lists_of_modules", "gradient_sync", "gradient_sync_of_one_block", "last_backward",
    "prefetch_setters", "divide_factor", "reshard_setters", "keeping_after_forward", "unshard_and_reshard",
    "all_reduce_hook", "hints", "ignored_parameters", "frozen_parameters", "mixed_precision", "output_dtype",
    "forward_methods", "hybrid", "classes", "theirs_to_ours", "ours_to_theirs", "ours_to_ours",
    "ours_in_the_background", "a_checkpoint_is_loaded_into_the_parameters",
    "full_state_dicts_are_loaded", "full_tensors", "full_state_dicts", "full_states_by_hand", "full_states_by_getters",
)  # fmt: skip


@pytest.fixture(scope="module")
def outcomes():
    return run_processes(2, Path(__file__).with_name("fsdp2_main.py"), timeout_s=110)


@pytest.mark.parametrize("name", NAMES)
def test_ours_does_what_torchs_fsdp2_does(outcomes, name):
    assert not outcomes[name], outcomes[name]


def test_nothing_is_left_out(outcomes):
    assert set(outcomes) == set(NAMES)
