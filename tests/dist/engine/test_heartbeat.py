"""A rank that is stopped is named with its stack and given up; one that is slow is named, and waited for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.processes import SOURCE

pytestmark = [pytest.mark.dist, pytest.mark.slow]

SCRIPT = Path(__file__).with_name("heartbeat_main.py")


def ranks(directory, case, backend):
    env = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), str(directory), case, backend]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert (directory / "0.json").exists(), done.stderr
    return [json.loads(file.read_text()) for file in sorted(directory.glob("*.json"))]


@pytest.mark.parametrize("backend", ["gloo", "process"])
def test_a_stopped_rank_is_named_with_its_stack_within_ten_seconds_and_then_given_up(tmp_path, backend):
    (waiting,) = ranks(tmp_path, "stopped", backend)
    named = [(at, text) for at, text in waiting["log"] if "is_stopped_here" in text]
    print("named after", round(named[0][0] - waiting["began"], 1), "s:", named[0][1])
    assert named[0][0] - waiting["began"] < 10
    at, error, transient = waiting["error"]
    print("given up after", round(at - waiting["began"], 1), "s:", error)
    assert "on this machine) is stopped" in error
    assert "is_stopped_here" in error
    assert transient
    assert 10 < at - waiting["began"] < 18


@pytest.mark.parametrize(
    ("case", "backend"), [("napping", "gloo"), ("napping", "process"), ("busy", "gloo"), ("elsewhere", "process")]
)
def test_a_slow_rank_is_waited_for(tmp_path, case, backend):
    waiting, slow = ranks(tmp_path, case, backend)
    print(waiting["log"])
    assert (waiting["error"], slow["error"]) == (None, None)
    assert (waiting["sum"], slow["sum"]) == (2.0, 2.0)
    if case != "napping":
        assert any(f"is_{case}" in text for _, text in waiting["log"])
