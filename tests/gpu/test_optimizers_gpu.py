"""Optimizers on CUDA devices: the unsharded run's steps, and no step that waits for the device."""

from pathlib import Path

import pytest
import torch

from support.processes import run_processes

pytestmark = pytest.mark.gpu

NAMES = ("LaneOptimizer", "Adafactor", "TorchAdafactor", "Muon", "AdamW8bit", "AdamWBF16")
PLACES = ("one unit", "a unit each", "offloaded")


@pytest.fixture(scope="module")
def ranks():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return run_processes(torch.cuda.device_count(), Path(__file__).with_name("optimizers_main_gpu.py"))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", NAMES)
def test_twenty_steps_equal_the_unsharded_run(ranks, name, place):
    for rank in ranks:
        assert rank[f"{name}, {place}"]["error"] <= 1e-4, rank


@pytest.mark.parametrize("name", NAMES)
def test_a_step_does_not_wait_for_the_device(ranks, name):
    for rank in ranks:
        assert not rank[f"{name}, one unit"]["waited"], rank
