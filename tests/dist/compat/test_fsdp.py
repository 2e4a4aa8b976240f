"""torch's FSDP1 and FSDP2 and fullshard's names for them, side by side on gloo processes: one group for each script."""

import re
from functools import cache
from pathlib import Path

import pytest

from support.processes import run_processes

pytestmark = [pytest.mark.dist, pytest.mark.parity]

CASE = r"^@case\ndef (\w+)"
SCRIPTS = {  # ranks, and how the script lists its cases; those of fsdp2 are in tables
    "fsdp1": (2, CASE),
    "fsdp1_groups": (4, CASE),
    "fsdp1_state": (2, r"^    (\w+),$(?=[^()]*^\)\n\n\ndef main)"),
    "fsdp2": (2, ""),
}
FSDP2 = (
    "bottom_up", "root_alone", "lists_of_modules", "gradient_sync", "gradient_sync_of_one_block", "last_backward",
    "prefetch_setters", "divide_factor", "reshard_setters", "keeping_after_forward", "unshard_and_reshard",
    "all_reduce_hook", "hints", "ignored_parameters", "frozen_parameters", "mixed_precision", "output_dtype",
    "forward_methods", "hybrid", "classes", "inside_of_replicate", "around_replicate",
    "theirs_to_ours", "ours_to_theirs", "ours_to_ours",
    "ours_in_the_background", "a_step_right_after_a_save_in_the_background",
    "a_checkpoint_is_loaded_into_the_parameters", "within_torchs_ddp",
    "full_state_dicts_are_loaded", "full_tensors", "full_state_dicts", "full_states_by_hand", "full_states_by_getters",
)  # fmt: skip


def path_of(script):
    return Path(__file__).with_name(f"{script}_main.py")


CASES = [
    (script, name)
    for script, (_, pattern) in SCRIPTS.items()
    for name in (FSDP2 if script == "fsdp2" else re.findall(pattern, path_of(script).read_text(), re.MULTILINE))
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    @cache
    def of(script):
        return run_processes(
            SCRIPTS[script][0], path_of(script), "--directory", str(tmp_path_factory.mktemp(script)), timeout_s=110
        )

    return of


@pytest.mark.parametrize(("script", "name"), CASES)
def test_it_behaves_as_torchs(results, script, name):
    assert not results(script)[name], results(script)[name]


@pytest.mark.parametrize("script", SCRIPTS)
def test_nothing_is_left_out(results, script):
    assert set(results(script)) == {name for of, name in CASES if of == script}
