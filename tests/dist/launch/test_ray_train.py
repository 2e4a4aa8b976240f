"""deploy/ray_train.py on a local Ray: its losses are those of the unsharded run, and it resumes when started again."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from support.processes import SOURCE

pytest.importorskip("ray", reason='needs Ray: pip install "ray[train]" in an environment of your own')

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(500)]

PROGRAM = Path(__file__).parents[3] / "deploy" / "ray_train.py"


def losses_under_ray(folder, steps):
    """What rank 0 printed: losses by step."""
    home = folder / "home"  # Ray writes a token there
    home.mkdir(exist_ok=True)
    env = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "HOME": str(home)}
    env |= {"RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_V2_ENABLED": "1"}
    command = [sys.executable, str(PROGRAM), "--storage", str(folder / "storage"), "--steps", str(steps)]
    ended = subprocess.run(command, env=env, text=True, capture_output=True, timeout=230, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = re.findall(r"step (\d+): loss ([\d.]+)", ended.stdout + ended.stderr)
    return {int(step): float(loss) for step, loss in found}


def losses_alone(steps):
    """Losses of the same run on one process, unsharded."""
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    model = T5ForConditionalGeneration(T5Config(**shape, dropout_rate=0.0, decoder_start_token_id=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = {}
    for step in range(1, steps + 1):
        ids = torch.randint(2, 64, (8, 8), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.item()
    return losses


def test_ranks_that_ray_started_train_as_unsharded_and_resume(tmp_path):
    alone = losses_alone(4)
    assert losses_under_ray(tmp_path, 2) == pytest.approx({step: alone[step] for step in (1, 2)}, abs=1e-5)
    assert losses_under_ray(tmp_path, 4) == pytest.approx({step: alone[step] for step in (3, 4)}, abs=1e-5)
