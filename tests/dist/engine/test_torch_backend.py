"""torch's own collectives, which groups of unknown backends are used by, on the group of two gloo processes."""

import re
from pathlib import Path

import pytest

from support.processes import run_processes

pytestmark = [pytest.mark.dist, pytest.mark.parity]

SCRIPT = Path(__file__).with_name("torch_backend_main.py")
CASES = re.findall(r"^@case\ndef (\w+)", SCRIPT.read_text(), re.MULTILINE)


@pytest.fixture(scope="module", params=[2, 3])
def results(request):
    return run_processes(request.param, SCRIPT)


@pytest.mark.parametrize("name", CASES)
def test_it_is_as_with_our_messages(results, name):
    assert not results[name], results[name]
