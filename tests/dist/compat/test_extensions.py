"""Parameters that gather themselves, under torch's FSDP2 and fullshard's names, on one pair of processes."""

import re
from functools import cache
from pathlib import Path

import pytest

from support.processes import run_processes
from support.torchao_folder import needs_torchao

pytestmark = [pytest.mark.dist, pytest.mark.parity]

SCRIPT = Path(__file__).with_name("fsdp2_extensions_main.py")
CASES = re.findall(r'^    "(\w+)": ', SCRIPT.read_text(), re.MULTILINE)
OF_TORCHAO = [name for name in CASES if "torchao" in name]


@pytest.fixture(scope="module")
def results():
    @cache
    def of(names):
        return run_processes(2, SCRIPT, "--only", names, timeout_s=110)

    return of


@pytest.mark.parametrize("name", [name for name in CASES if name not in OF_TORCHAO])
def test_losses_are_torchs_to_the_bit_and_no_more_is_sent(results, name):
    found = results(",".join(name for name in CASES if name not in OF_TORCHAO))
    assert not found[name], found[name]


@needs_torchao
@pytest.mark.parametrize("name", OF_TORCHAO)
def test_so_are_those_of_torchaos_float8_weights(results, name):
    found = results(",".join(OF_TORCHAO))
    assert not found[name], found[name]
