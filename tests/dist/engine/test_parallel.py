"""Models that tensor parallelism has divided: trained, saved and refused on one group of four processes."""

import re
from functools import cache
from pathlib import Path

import pytest

from support.processes import run_processes

pytestmark = [pytest.mark.dist, pytest.mark.parity]

SCRIPT = Path(__file__).with_name("parallel_main.py")
CASES = re.findall(r'^    "(\w+)": ', SCRIPT.read_text().partition("\nCASES = ")[2], re.MULTILINE)
QUICK = ["t5_as_2_x_2", "sequence_as_1_x_4", "norms_count_each_element_once", "checkpoints_have_full_parameters"]
QUICK += ["tied_tables_are_one_or_refused", "what_is_not_there_is_refused_by_name"]


@cache
def results(names):
    return run_processes(4, SCRIPT, "--only", names, timeout_s=150)


@pytest.mark.parametrize("name", QUICK)
def test_divided_models_train_as_unsharded_ones(name):
    found = results(",".join(QUICK))
    assert not found[name], found[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in QUICK])
def test_so_they_do_in_other_ways_and_are_saved(name):
    found = results(",".join(name for name in CASES if name not in QUICK))
    assert not found[name], found[name]
