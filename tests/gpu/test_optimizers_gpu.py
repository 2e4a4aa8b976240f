"""Optimizers on CUDA devices: the unsharded run's steps, and no step that waits for the device."""

from pathlib import Path

import pytest
import torch

from support.processes import first_gpu, run_processes

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]  # the first test of a module starts the ranks

NAMES = ("AdamW", "Adafactor", "TorchAdafactor", "Muon", "AdamW8bit", "AdamWBF16")
PLACES = ("one unit", "a unit each", "offloaded")


def run(size, gpus):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return run_processes(size, Path(__file__).with_name("optimizers_main_gpu.py"), timeout_s=280, gpus=gpus)


@pytest.fixture(scope="module")
def ranks():
    return run(torch.cuda.device_count(), None)


@pytest.fixture(scope="module")
def two_on_a_gpu():
    return run(2, first_gpu())


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", NAMES)
def test_twenty_steps_equal_the_unsharded_run(ranks, name, place):
    for rank in ranks:
        assert rank[f"{name}, {place}"]["error"] <= 1e-4, rank


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", NAMES)
def test_twenty_steps_of_ranks_that_share_a_gpu_equal_the_unsharded_run(two_on_a_gpu, name, place):
    for rank in two_on_a_gpu:
        assert rank[f"{name}, {place}"]["error"] <= 1e-4, rank


@pytest.mark.parametrize("name", NAMES)
def test_a_step_does_not_wait_for_the_device(ranks, name):
    for rank in ranks:
        assert not rank[f"{name}, one unit"]["waited"], rank
