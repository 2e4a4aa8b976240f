"""Ranks that a script spawns itself, each with a seed of its own, train from rank 0's values."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.processes import SOURCE

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(120)]


def test_a_spawned_script_whose_ranks_draw_their_own_seed_equals_the_unsharded_run(tmp_path):
    script = Path(__file__).with_name("spawned_main.py")
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, script, tmp_path / "out.json"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    differences = json.loads((tmp_path / "out.json").read_text())
    assert len(differences) == 8
    assert max(differences.values()) <= 1e-5, differences
    assert done.stderr.count("Ranks hold different values, first in conv1.weight") == 1, done.stderr
