"""The program on CUDA devices: a tiny run from its command line to a model that loads."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from support.planned import write_quantised_run
from support.processes import environment
from support.tiny_run import settings

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


RUNS = {
    "fp32": {},
    "bf16": {"training__precision": "bf16"},
    "fp16": {"training__precision": "fp16", "training__allow_fp16": True},
    "packed": {"training__precision": "bf16", "training__packing": True, "training__fused_cross_entropy": True},
    "compiled": {"training__torch_compile": True},
}


@pytest.mark.parametrize("changes", RUNS.values(), ids=RUNS)
def test_a_run_uses_every_device_and_its_model_loads(changes, tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    values = settings(tmp_path, **changes)
    values["nproc"] = None
    run_file = tmp_path / "run.yaml"
    run_file.write_text(json.dumps(values))  # JSON is YAML
    command = [sys.executable, "-m", "fullshard", "train", str(run_file)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["device"] == "cuda"
    assert summary["world_size"] == torch.cuda.device_count()
    assert json.loads((tmp_path / "out" / "trace.json").read_text())["device"] == "cuda"
    AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")


def test_quantised_weights_under_an_adapter_train_on_every_device(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")
    path = write_quantised_run(tmp_path)
    command = [sys.executable, "-m", "fullshard"]
    precision = ["nproc=null", "training.precision=bf16"]
    done = subprocess.run(
        [*command, "train", str(path), *precision], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["device"] == "cuda"
    merged = [*command, "export", str(tmp_path / "out"), "--merge", "-o", str(tmp_path / "merged")]
    done = subprocess.run(merged, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "merged")
