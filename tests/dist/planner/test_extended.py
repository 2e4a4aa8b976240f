"""Plans of models with parameters that gather themselves equal what ranks hold and send, on one pair of processes."""

import re
from functools import cache
from pathlib import Path

import pytest

from support.processes import run_processes, selected
from support.torchao_folder import needs_torchao

pytestmark = pytest.mark.dist

SCRIPT = Path(__file__).with_name("extended_main.py")
OF_TORCHAO = ("float8", "nf4")
CASES = re.findall(r'^    "(\w+)": \(', SCRIPT.read_text(), re.MULTILINE)


SLOW = {"int8_beside_frozen", "codes_replicated", "float8_in_bf16", "float8_replicated"}


def _param(name):
    slow = [pytest.mark.slow] if name in SLOW else []
    return pytest.param(name, marks=[*slow, *([needs_torchao] if name.startswith(OF_TORCHAO) else [])])


@pytest.fixture(scope="module")
def results(request):
    @cache
    def of(of_torchao):
        only = [name for name in selected(request, "case") if name.startswith(OF_TORCHAO) is of_torchao]
        return run_processes(2, SCRIPT, "--only", ",".join(only))

    return of


@pytest.mark.parametrize("case", [_param(name) for name in CASES])
def test_a_plan_is_what_ranks_hold_and_send(results, case):
    found = results(case.startswith(OF_TORCHAO))[case]
    for name in ("collectives", "account", "sent_bytes"):
        measured, planned = ({k: v for k, v in one.items() if k != "all_gather_object"} for one in found[name])
        assert planned == measured, name
    measured, planned = found["peak_bytes"]
    assert planned == pytest.approx(measured, rel=0.005)
