"""Parameters that gather themselves, under torch's FSDP2 and fullshard's names, on one pair of processes."""

import re
from functools import cache
from pathlib import Path

import pytest

from support.processes import run_processes, selected
from support.torchao_folder import needs_torchao

pytestmark = [pytest.mark.dist, pytest.mark.parity]

SCRIPT = Path(__file__).with_name("fsdp2_extensions_main.py")
CASES = re.findall(r'^    "(\w+)": ', SCRIPT.read_text(), re.MULTILINE)
QUICK = {"scale_and_int8", "bf16_computed_in_bf16", "torchaos_float8_scaled_ahead", "torchaos_nf4_frozen"}


def cases(*, of_torchao):
    names = [name for name in CASES if ("torchao" in name) is of_torchao]
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]


@pytest.fixture(scope="module")
def results(request):
    @cache
    def of(of_torchao):
        only = [name for name in selected(request) if ("torchao" in name) is of_torchao]
        return run_processes(2, SCRIPT, "--only", ",".join(only), timeout_s=110)

    return of


@pytest.mark.parametrize("name", cases(of_torchao=False))
def test_losses_are_torchs_to_the_bit_and_no_more_is_sent(results, name):
    found = results(False)[name]
    assert not found, found


@needs_torchao
@pytest.mark.parametrize("name", cases(of_torchao=True))
def test_so_are_those_of_torchaos_float8_weights(results, name):
    found = results(True)[name]
    assert not found, found
