"""Ranks, launchers and machines that die at random moments: every run ends, with the bits of the undisturbed one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(1200)]


def test_a_short_form_of_the_benchmark(tmp_path):
    counts = {"kill": 10, "machine": 1, "term": 2, "stop": 1, "server": 2}
    out = tmp_path / "faults.json"
    asked = [text for kind, count in counts.items() for text in (f"--{kind}s", str(count))]
    subprocess.run(
        [sys.executable, "benchmarks/faults.py", *asked, "--minutes", "15", "--out", str(out)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        check=True,
        timeout=1100,
    )
    record = json.loads(out.read_text())
    found = record["summary"]
    assert found["faults"] == counts, record
    wrong = ("runs_not_ended", "weights_differ", "samples_lost_or_doubled", "torn_checkpoints")
    assert not any(found[name] for name in wrong), record
