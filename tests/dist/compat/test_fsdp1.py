"""``FullyShardedDataParallel`` does what torch's does, name by name, in one pair of processes that runs both."""

import re
from pathlib import Path

import pytest

from support.processes import run_processes

pytestmark = [pytest.mark.dist]

SCRIPT = Path(__file__).with_name("fsdp1_main.py")
CASES = re.findall(r"^@case\ndef (\w+)", SCRIPT.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def results():
    return run_processes(2, SCRIPT)


@pytest.mark.parametrize("name", CASES)
def test_it_behaves_as_torchs(results, name):
    assert not results[name], results[name]
