"""Every stage of the GPU command on the CPU, with tiny shapes: each line runs, and each case has its figures."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LACKING = {"doctor": {"link"}, "plan": {"planner"}}
STAGES = ("doctor", "kernels", "tests", "step", "memory", "headline", "switches", "overlap", "long", "plan")
ENGINES = {"fullshard", "fsdp2", "fsdp1"}


def dry(stage, folder):
    """The cases of a stage that ran in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--dry", "--stage", stage, "--out", str(folder)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    cases = json.loads((folder / f"{stage}.json").read_text())["cases"]
    statuses = {name: case["status"] for name, case in cases.items()}
    lacking = LACKING.get(stage, set())
    if stage == "speed":  # ways that are for GPUs, or that need a library
        lacking = {name for name, status in statuses.items() if status == "skipped" and not name.endswith(": plain")}
    assert statuses == {name: "skipped" if name in lacking else "done" for name in cases}, done.stdout
    return {name: case["figures"] for name, case in cases.items()}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_runs_dry(stage, tmp_path):
    figures = dry(stage, tmp_path)
    assert figures
    if stage == "tests":
        outcomes = [test["outcome"] for found in figures.values() for test in found["tests"].values()]
        assert len(outcomes) > 40
        assert set(outcomes) == {"skipped"}
    if stage == "kernels":
        assert all("error" not in way for found in figures.values() for way in found.get("ways", {}).values())
        assert all(found["operators"] > 100 for found in figures.values() if "operators" in found)
    if stage in ("step", "memory"):
        for name, found in figures.items():
            assert found["engines"].keys() == ENGINES, name
    if stage == "step":
        for found in figures.values():  # the engines train alike
            firsts = [losses[0] for losses in found["losses"].values()]
            assert max(firsts) - min(firsts) <= 1e-2 * max(firsts)
    if stage == "overlap":
        for found in figures.values():
            engines = found["links"]["100 Gbit/s"].values()
            assert all(engine["collectives"] > 5 and engine["asked_s"] > 0 for engine in engines)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_stage_speed_measures_ways_beside_fsdp2(tmp_path):
    measured = {name: found["engines"] for name, found in dry("speed", tmp_path).items() if found}
    assert sum("fsdp2" in engines for engines in measured.values()) >= 4
    for name, engines in measured.items():
        if "rank 0 of" in name:
            continue  # the other ranks' parts are whatever the memory held
        firsts = [engine["losses"][0] for engine in engines.values()]
        assert max(firsts) - min(firsts) <= 1e-2 * max(firsts)
