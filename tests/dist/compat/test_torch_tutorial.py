"""The torch tutorial's program and our version of it run to their ends on two gloo ranks."""

import re

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, T5ForConditionalGeneration

from support.processes import run_ranks
from support.script_folders import write_tutorial

pytestmark = pytest.mark.dist
TORCHS = {
    "from fullshard.compat.torch_fsdp import (\n checkpoint_wrapper,\n CheckpointImpl,\n "
    "apply_activation_checkpointing_wrapper)": "",
    "fullshard.compat.torch_fsdp": "torch.distributed.fsdp",
}
"""What makes the script torch's own again; one of its imports left torch long ago."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tutorial")
    write_tutorial(folder)
    return folder


@pytest.fixture(scope="module")
def tutorial(folder):
    """What rank 0 of the tutorial's script prints."""
    outputs = run_ranks(2, folder / "T5_training.py", "--epochs", "2", cwd=folder)
    return outputs[0][0]


def losses(text):
    return [float(value) for value in re.findall(r"Loss:\s+([\d.]+)", text)]


def test_the_tutorials_script_says_what_the_tutorial_says(tutorial):
    assert re.search(r"Size of train dataset: +\(\d+, 2\)", tutorial)
    assert tutorial.count("--> entering save model state") == 2
    assert tutorial.count("-->>>> New Val Loss Record") == 2
    assert re.search(
        r"--> saving as model name T5-model--20\d\d-\d\d-\d\d-\d\d:\d\d:\d\d_[AP]M--2-[\d.]+\.pt", tutorial
    )
    train, held_out = losses(tutorial)[::2], losses(tutorial)[1::2]
    assert train[1] < train[0]
    assert held_out[1] < held_out[0]


def test_its_best_model_is_one_that_an_unsharded_t5_loads(tutorial, folder):
    saved = sorted(folder.glob("T5-model--*--2-*.pt"))
    assert len(saved) == 1
    model = T5ForConditionalGeneration.from_pretrained(folder / "t5-base")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(torch.load(saved[0]))
    assert all(not torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parity
def test_it_trains_as_on_torchs_own_fsdp(tutorial, folder):
    text = (folder / "T5_training.py").read_text()
    for ours, theirs in TORCHS.items():
        assert ours in text
        text = text.replace(ours, theirs)
    (folder / "with_torch.py").write_text(text)
    # Torch's own cannot save on the CPU; --save-model turns that off.
    theirs = run_ranks(2, folder / "with_torch.py", "--epochs", "2", "--save-model", cwd=folder)[0][0]
    assert losses(theirs) == losses(tutorial)


def test_our_version_trains_and_saves_for_from_pretrained(folder):
    out = run_ranks(2, folder / "train_t5.py", "--rows", "12", cwd=folder)[0][0]
    first, second = re.findall(r"epoch \d: loss ([\d.]+), held-out loss ([\d.]+)", out)
    assert float(second[0]) < float(first[0])
    (saved,) = folder.glob(f"T5-model-*-2-{second[1]}")
    assert AutoModelForSeq2SeqLM.from_pretrained(saved).num_parameters() > 0
