"""``fullshard bench`` on CUDA devices: rates by events, from which a plan's time follows."""

import json
import subprocess
import sys

import pytest
import torch

from fullshard.planner import hardware, read_rates
from fullshard.program.config import load_run
from fullshard.program.train.run_plan import plan_prepared
from fullshard.program.train.setup.prepare import prepare
from support.processes import environment
from support.tiny_run import settings

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def test_rates_of_the_devices_at_hand_give_a_time(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    values = settings(tmp_path)
    values["nproc"] = None
    run_file, path = tmp_path / "run.yaml", tmp_path / "rates.json"
    run_file.write_text(json.dumps(values))  # JSON is YAML
    command = [sys.executable, "-m", "fullshard.cli.main", "bench", str(run_file), "--out", str(path)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    ranks = torch.cuda.device_count()
    rates = read_rates(path, ranks)
    assert rates.queues
    config = load_run(run_file, [])
    found = plan_prepared(config, prepare(config), ranks, hardware("h100"), rates=rates).timing
    assert 0 < found.optimizer_s < found.step_s
    assert found.issue_s > 0  # of so small a model the device waits for the CPU
