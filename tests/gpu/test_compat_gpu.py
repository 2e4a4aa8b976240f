"""The example programs on CUDA devices, under ``fullshard launch``: a rank a device."""

import re
import subprocess
import sys

import pytest
import torch

from support.processes import environment
from support.script_folders import write_lora, write_seq2seq

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
DATA = ("--train", "train.jsonl", "--held-out", "held_out.jsonl", "--model", "t5-base")


def launched(folder, *arguments):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    done = subprocess.run(
        [sys.executable, "-m", "fullshard", "launch", "--nproc_per_node", "gpu", *arguments],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_seq2seq_program_trains_and_saves_in_bfloat16(tmp_path):
    write_seq2seq(tmp_path)
    out = launched(tmp_path, "train_fsdp.py", "--precision", "bf16")
    assert "saved to best.pt" in out


@pytest.mark.parametrize("options", [[], ["--full"]], ids=["lora", "full"])
@pytest.mark.parametrize("offload", ["true", "false"])
def test_the_lora_program_trains_with_and_without_offload(options, offload, tmp_path):
    write_lora(tmp_path)
    file = tmp_path / "fsdp_config.yaml"
    text = file.read_text().replace("fsdp_offload_params: true", f"fsdp_offload_params: {offload}")
    file.write_text(text.replace("num_processes: 2", f"num_processes: {torch.cuda.device_count()}"))
    out = launched(tmp_path, "--config_file", str(file), "train.py", *DATA, *options)
    assert re.search(r"epoch 1: loss [\d.]+, accuracy", out)
