"""Plans of models with parameters that gather themselves equal what ranks hold and send, on one pair of processes."""

import re
from functools import cache
from pathlib import Path

import pytest

from support.processes import run_processes
from support.torchao_folder import needs_torchao

pytestmark = pytest.mark.dist

SCRIPT = Path(__file__).with_name("extended_main.py")
OF_TORCHAO = ("float8", "nf4")
CASES = re.findall(r'^    "(\w+)": \(', SCRIPT.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def results():
    @cache
    def of(names):
        return run_processes(2, SCRIPT, "--only", names)

    return of


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=needs_torchao) if name.startswith(OF_TORCHAO) else name for name in CASES]
)
def test_a_plan_is_what_ranks_hold_and_send(results, case):
    of_torchao = case.startswith(OF_TORCHAO)
    found = results(",".join(name for name in CASES if name.startswith(OF_TORCHAO) is of_torchao))[case]
    for name in ("collectives", "account", "sent_bytes"):
        measured, planned = ({k: v for k, v in one.items() if k != "all_gather_object"} for one in found[name])
        assert planned == measured, name
    measured, planned = found["peak_bytes"]
    assert planned == pytest.approx(measured, rel=0.005)
