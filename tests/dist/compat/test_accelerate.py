"""Accelerate's object over fullshard: each name does what the accelerate library's does, on two gloo processes."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from support.models import TinyLM
from support.processes import run_processes

pytestmark = [pytest.mark.dist, pytest.mark.parity, pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).with_name("accelerate_main.py")
TEXT = SCRIPT.read_text()
NAMES = [
    *re.findall(r"^@check\ndef (\w+)", TEXT, re.MULTILINE),
    *re.findall(r'^seq2seq\("(\w+)"', TEXT, re.MULTILINE),
    *re.findall(r'^    "(\w+)": ', TEXT[TEXT.index("QUESTIONS = {") : TEXT.index("CHECKS.update")], re.MULTILINE),
    *("main_process_first", "local_main_process_first"),
    *(f"{kind}_v{v}{off}" for v in (1, 2) for kind in ("t5", "lora") for off in ("", "_offload")),
    *(f"{name}_v{v}" for v in (1, 2) for name in ("bart",)),
    "end_training",
    "alone",
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("accelerate")


@pytest.fixture(scope="module")
def results(directory):
    return run_processes(2, SCRIPT, "--directory", str(directory), timeout_s=280)


@pytest.mark.parametrize("name", NAMES)
def test_as_accelerate(results, name):
    assert not results[name], results[name]


def test_nothing_is_left_out(results):
    assert set(results) == set(NAMES)


@pytest.mark.usefixtures("results")
def test_a_sharded_state_is_what_accelerate_asks_torch_for(directory):
    """Under its names, in its directories; a run of the same steps wrote the same into one file each."""
    plain = TinyLM()
    optimizer = torch.optim.AdamW(plain.parameters())
    model = {"model": get_model_state_dict(plain)}
    state = {"optimizer": get_optimizer_state_dict(plain, optimizer)}
    for name in [name for name in state["optimizer"]["state"] if name.startswith("unused.")]:
        del state["optimizer"]["state"][name]  # never had a gradient
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(model, checkpoint_id=directory / "sharded_1" / "pytorch_model_fsdp_0")
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(state, checkpoint_id=directory / "sharded_1" / "optimizer_0")
    weights = torch.load(directory / "full_1" / "pytorch_model_fsdp.bin")
    moments = torch.load(directory / "full_1" / "optimizer.bin")["state"]
    assert all(torch.equal(value, weights[name]) for name, value in model["model"].items())
    assert moments.keys() == state["optimizer"]["state"].keys()
    for name, of_param in state["optimizer"]["state"].items():
        assert all(torch.equal(value, moments[name][key]) for key, value in of_param.items())
