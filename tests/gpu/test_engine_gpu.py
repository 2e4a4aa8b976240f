"""The engine on CUDA devices: as many ranks as there are, of which one is enough; and two ranks on the first one."""

import json
from pathlib import Path

import pytest
import torch

from support.processes import first_gpu, run_processes

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]  # the first test of a module starts the ranks


@pytest.fixture(scope="module", params=["a GPU each", "2 ranks on a GPU"])
def ranks(request):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    size, gpus = (torch.cuda.device_count(), None) if request.param == "a GPU each" else (2, first_gpu())
    return run_processes(size, Path(__file__).with_name("rank_main_gpu.py"), timeout_s=280, gpus=gpus)


def test_a_sharded_run_equals_the_unsharded_run(ranks):
    for rank in ranks:
        assert rank["parity"]["worst_loss"] <= 1e-5, json.dumps(rank["parity"])
        assert rank["parity"]["worst_weight"] <= 1e-5, json.dumps(rank["parity"])


def test_bf16_trains(ranks):
    for rank in ranks:
        first, last = rank["bf16"]["losses"][0], rank["bf16"]["losses"][-1]
        assert last < first


def test_every_strategy_equals_the_unsharded_run(ranks):
    for rank in ranks:
        assert max(rank["strategies"].values()) <= 1e-5, rank["strategies"]


def test_offloaded_shards_and_gradients_live_in_pinned_memory(ranks):
    for rank in ranks:
        assert rank["offload"]["gap"] <= 1e-5, rank["offload"]
        assert rank["offload"]["devices"] == ["cpu"]
        assert rank["offload"]["pinned"]


def test_an_inf_on_one_rank_skips_the_step_on_all(ranks):
    for rank in ranks:
        assert rank["fp16"]["scales"] == [256.0] + [128.0] * 5
        assert rank["fp16"]["losses"][-1] < rank["fp16"]["losses"][0]


def test_bf16_messages_are_added_in_fp32(ranks):
    for rank in ranks:
        assert rank["wide_sum"]["gap"] <= 2**-8


def test_parameters_that_gather_themselves_are_computed_with_as_rounded(ranks):
    for rank in ranks:
        assert rank["extensions"]["gap"] <= 1e-4, rank["extensions"]


def test_a_tensor_parallel_model_trains_as_the_unsharded_one(ranks):
    """Not run on a GPU yet."""
    for rank in ranks:
        assert rank["divided"]["equal"]


def test_embedding_gradients_are_deterministic(ranks):
    for rank in ranks:
        assert rank["embedding"]["same"]


def test_peak_memory_is_bounded(ranks):
    for rank in ranks:
        figures = rank["memory"]
        # gradients' shards, two units, two units' gradients, and what the allocator rounds up
        assert figures["above_start"] <= figures["shards"] + 4 * figures["unit"] + (4 << 20), figures


def test_offloaded_activations_leave_the_device_and_change_no_bit(ranks):
    """Not run on a GPU yet. Two of eight blocks at a time keep theirs."""
    for rank in ranks:
        kept, offloaded = rank["activations"]["kept"], rank["activations"]["offloaded"]
        assert offloaded["losses"] == kept["losses"]
        assert offloaded["above"] < 0.6 * kept["above"], rank["activations"]


def test_a_parameter_that_is_never_used_does_not_make_steps_wait(ranks):
    """The first steps find it and make the ranks' group in host memory."""
    for rank in ranks:
        assert rank["unused"] == {"kept": True}


def test_a_recorded_step_has_its_events_in_order(ranks):
    for rank in ranks:
        figures = rank["trace"]
        assert figures["gathered_in_time"], figures
        assert figures["within"], figures
        assert figures["forwards"] > 2, figures
        assert figures["allocated"] > 0, figures


def test_what_is_saved_comes_back_to_the_bit(ranks):
    for rank in ranks:
        assert all(rank["saving"].values()), rank["saving"]
        assert {"pretrained", "checkpoint", "background", "on_a_stream_of_its_own"} <= rank["saving"].keys()
