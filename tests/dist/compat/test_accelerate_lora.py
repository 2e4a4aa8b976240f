"""The program of examples/accelerate_lora, under ``fullshard launch`` with its configuration file."""

import os
import re
import subprocess
import sys

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForSeq2SeqLM

from support.processes import SOURCE, run_ranks
from support.script_folders import write_lora

pytestmark = pytest.mark.dist
OUR_IMPORT = "from fullshard.compat.accelerate import"
DATA = ("--train", "train.jsonl", "--held-out", "held_out.jsonl", "--model", "t5-base")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    write_lora(folder)
    return folder


def launched(folder, *options, **changes):
    """What the program prints on rank 0; ``changes`` are to the file's ``fsdp_config``."""
    file = yaml.safe_load((folder / "fsdp_config.yaml").read_text())
    file["fsdp_config"] |= changes
    config = folder / "changed.yaml"
    config.write_text(yaml.safe_dump(file))
    done = subprocess.run(
        [sys.executable, "-m", "fullshard", "launch", "--config_file", str(config), "train.py", *DATA, *options],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(SOURCE), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(text):
    return [float(loss) for loss in re.findall(r"epoch \d: loss ([\d.]+)", text)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # of peft's
def test_lora_with_cpu_offload_trains_and_peft_loads_the_adapter(folder):
    out = launched(folder, "--output", "adapter", "--epochs", "2", "--lr", "0.03")
    first, second = losses(out)
    assert second < first
    assert len(re.findall(r"accuracy \d+\.\d\d%", out)) == 2
    assert out.count("FullyShardedDataParallel(") > 5
    base = AutoModelForSeq2SeqLM.from_pretrained(folder / "t5-base")
    adapter = PeftModel.from_pretrained(base, folder / "adapter")
    trained = {name: value for name, value in adapter.named_parameters() if "lora_B" in name}
    assert trained
    assert all(value.abs().max() > 0 for value in trained.values())


@pytest.mark.slow
def test_the_whole_model_trains_as_under_accelerates_own_ddp(folder):
    ours = losses(launched(folder, "--full", "--output", "whole", fsdp_offload_params=False))
    text = (folder / "train.py").read_text()
    assert OUR_IMPORT in text
    (folder / "theirs.py").write_text(text.replace(OUR_IMPORT, "from accelerate import"))
    os.environ["ACCELERATE_USE_CPU"] = "true"
    try:
        theirs = run_ranks(2, folder / "theirs.py", *DATA, "--full", "--output", "theirs", cwd=folder)[0][0]
    finally:
        del os.environ["ACCELERATE_USE_CPU"]
    assert losses(theirs) == pytest.approx(ours, abs=1e-4)
    models = [AutoModelForSeq2SeqLM.from_pretrained(folder / name).state_dict() for name in ("whole", "theirs")]
    for name, value in models[0].items():
        torch.testing.assert_close(value, models[1][name], rtol=1e-4, atol=1e-5)
