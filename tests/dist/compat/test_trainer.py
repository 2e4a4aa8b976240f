"""fullshard's Trainer does what Hugging Face's does under DDP, on two gloo processes."""

import re
from pathlib import Path

import pytest

from support.processes import run_processes

pytestmark = [pytest.mark.dist, pytest.mark.parity, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).with_name("trainer_main.py")
FOUND = re.findall(r"^@both_versions\ndef (\w+)", SCRIPT.read_text(), re.MULTILINE)
NAMES = [*(f"{name}_v{version}" for name in FOUND for version in (1, 2)), "two_at_once", "one_import"]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run_processes(2, SCRIPT, "--directory", str(tmp_path_factory.mktemp("trainer")), timeout_s=280)


@pytest.mark.parametrize("name", NAMES)
def test_as_transformers(results, name):
    assert not results[name], results[name]


def test_nothing_is_left_out(results):
    assert set(results) == set(NAMES)
