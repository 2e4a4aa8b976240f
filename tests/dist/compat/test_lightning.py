"""Lightning's FSDP strategies on fullshard's engine equal Lightning's DDP, in one pair of processes that runs both."""

import re
from pathlib import Path

import pytest

from support.processes import run_processes

pytestmark = [pytest.mark.dist, pytest.mark.parity]

SCRIPT = Path(__file__).with_name("lightning_main.py")
CASES = re.findall(r"^@case\ndef (\w+)", SCRIPT.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    pytest.importorskip("lightning")
    return run_processes(2, SCRIPT, "--directory", str(tmp_path_factory.mktemp("lightning")))


@pytest.mark.parametrize("name", CASES)
def test_it_is_as_ddp(results, name):
    assert not results[name], results[name]
