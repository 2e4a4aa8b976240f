"""The program on CUDA devices: a tiny run from its command line to a model that loads."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from support.tiny_run import settings

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_uses_every_device_and_its_model_loads(precision, tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    values = settings(tmp_path, training__precision=precision)
    values["nproc"] = None
    run_file = tmp_path / "run.yaml"
    run_file.write_text(json.dumps(values))  # JSON is YAML
    command = [sys.executable, "-m", "fullshard.cli.main", "train", str(run_file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["device"] == "cuda"
    assert summary["world_size"] == torch.cuda.device_count()
    AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
