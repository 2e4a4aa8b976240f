"""The programs of examples/fsdp_seq2seq on two gloo ranks: with torch's FSDP, with ours, and with our own functions."""

import re

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from support.processes import run_ranks
from support.script_folders import write_seq2seq

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seq2seq")
    write_seq2seq(folder)
    return folder


def trained(folder, engine, *options):
    """What rank 0 printed, and the state dict of the best epoch."""
    saved = folder / f"{engine}.pt"
    command = ["--engine", engine, "--output", str(saved), *options]
    return run_ranks(2, folder / "train_fsdp.py", *command, cwd=folder)[0][0], torch.load(saved)


def losses(text):
    return [float(value) for value in re.findall(r"loss ([\d.]+)", text)]


@pytest.fixture(scope="module")
def ours(folder):
    return trained(folder, "fullshard")


def test_the_losses_fall_and_the_best_model_is_one_that_an_unsharded_t5_loads(ours, folder):
    out, state = ours
    first, first_held_out, second, second_held_out = losses(out)
    assert second < first
    assert second_held_out < first_held_out
    assert out.count("saved to") == 2
    assert out.count("FullyShardedDataParallel(") == 5
    model = AutoModelForSeq2SeqLM.from_pretrained(folder / "t5-base")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    assert all(not torch.equal(value, before[name]) for name, value in model.state_dict().items())


def assert_same_training(ours, theirs):
    assert losses(ours[0]) == pytest.approx(losses(theirs[0]), abs=1e-5)
    assert ours[1].keys() == theirs[1].keys()
    for name, value in ours[1].items():
        torch.testing.assert_close(value, theirs[1][name], atol=1e-5, rtol=0, msg=name)


@pytest.mark.parity
def test_it_trains_as_with_torchs_own_fsdp(ours, folder):
    assert_same_training(ours, trained(folder, "torch"))


@pytest.mark.slow
@pytest.mark.parity
def test_with_the_other_choice_of_every_option_it_trains_as_with_torchs_own(folder):
    options = ["--strategy", "SHARD_GRAD_OP", "--prefetch", "BACKWARD_POST", "--wrap", "manual"]
    options += ["--checkpoint-activations", "--rows", "16", "--gamma", "0.5"]
    assert_same_training(trained(folder, "fullshard", *options), trained(folder, "torch", *options))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "bf16-reduce", "fp16"])
def test_it_trains_in_16_bits(precision, folder):
    out, _ = trained(folder, "fullshard", "--precision", precision, "--rows", "16")
    first, _, second, _ = losses(out)
    assert second < first


def test_the_native_program_trains_and_saves_for_from_pretrained(folder):
    out = run_ranks(2, folder / "train_native.py", "--rows", "12", cwd=folder)[0][0]
    first, first_held_out, second, second_held_out = losses(out)
    assert second < first
    assert second_held_out < first_held_out
    assert AutoModelForSeq2SeqLM.from_pretrained(folder / "best").num_parameters() > 0
