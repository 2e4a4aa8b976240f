"""A QLoRA script for Accelerate with its import changed, on two ranks, against the script itself on one process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import T5Config, T5ForConditionalGeneration

from support.processes import SOURCE

pytestmark = [pytest.mark.dist, pytest.mark.parity]

SCRIPT = Path(__file__).with_name("qlora_script.py")
SIZES = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}


def losses(folder, *command):
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", done.stdout)]


@pytest.mark.slow
def test_four_bit_layers_and_lora_train_as_under_accelerate(tmp_path):
    torch.manual_seed(0)
    config = T5Config(vocab_size=60, **SIZES, dropout_rate=0.0, decoder_start_token_id=0)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "model")
    text = SCRIPT.read_text()
    swapped = text.replace("from accelerate import", "from fullshard.compat.accelerate import")
    assert swapped != text
    (tmp_path / "theirs.py").write_text(text)
    (tmp_path / "ours.py").write_text(swapped)
    theirs = losses(tmp_path, "theirs.py", "model", "theirs")
    launched = ("-m", "fullshard", "launch", "--num_processes", "2", "ours.py", "model", "ours")
    ours = losses(tmp_path, *launched)
    assert len(theirs) == 4
    assert ours == pytest.approx(theirs, abs=1e-5)
    adapters = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs")]
    assert adapters[0].keys() == adapters[1].keys()
    for name, value in adapters[1].items():
        assert (adapters[0][name] - value).abs().max() <= 1e-5, name
