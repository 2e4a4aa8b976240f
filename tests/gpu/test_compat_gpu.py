"""Other people's programs on CUDA devices, under ``fullshard launch``: a rank a device."""

import os
import re
import subprocess
import sys

import pytest
import torch

from support.processes import SOURCE
from support.script_folders import write_guide, write_tutorial

pytestmark = pytest.mark.gpu


def launched(folder, *arguments):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    done = subprocess.run(
        [sys.executable, "-m", "fullshard.cli.main", "launch", "--nproc_per_node", "gpu", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_torch_tutorial_runs_to_its_end_in_bfloat16(tmp_path):
    write_tutorial(tmp_path)
    out = launched(tmp_path, "T5_training.py")
    assert len(re.findall(r"--> saving as model name T5-model--", out)) >= 1


@pytest.mark.parametrize("options", [[], ["--full"]], ids=["lora", "full"])
@pytest.mark.parametrize("offload", ["true", "false"])
def test_the_peft_guide_trains_with_and_without_offload(options, offload, tmp_path):
    write_guide(tmp_path)
    file = tmp_path / "fsdp_config.yaml"
    text = file.read_text().replace("fsdp_offload_params: true", f"fsdp_offload_params: {offload}")
    file.write_text(text.replace("num_processes: 2", f"num_processes: {torch.cuda.device_count()}"))
    out = launched(tmp_path, "--config_file", str(file), "train.py", *options)
    assert re.search(r"epoch 0: loss [\d.]+, accuracy", out)
