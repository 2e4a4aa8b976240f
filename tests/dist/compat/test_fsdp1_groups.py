"""FSDP1's wrappers on process groups and with strategies of their own train and save as torch's, on 4 processes."""

import re
from pathlib import Path

import pytest

from support.processes import run_processes

pytestmark = [pytest.mark.dist, pytest.mark.parity]

SCRIPT = Path(__file__).with_name("fsdp1_groups_main.py")
CASES = re.findall(r"^@case\ndef (\w+)", SCRIPT.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def results():
    return run_processes(4, SCRIPT, timeout_s=110)


@pytest.mark.parametrize("name", CASES)
def test_it_behaves_as_torchs(results, name):
    assert not results[name], results[name]
