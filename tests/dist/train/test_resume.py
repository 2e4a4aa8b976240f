"""Real runs of two processes that are stopped, interrupted or killed, and go on by the same command."""

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from fullshard.state.storage import DirectoryLock
from support.processes import FULLSHARD, apart, free_port
from support.tiny_run import QUICK, read_jsonl, write_run_file

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(400)]

CHANGES = QUICK | {
    "training__per_device_train_batch_size": 1,
    "training__num_train_epochs": 4,
    "training__save_strategy": "steps",
    "training__save_steps": 5,
}
"""28 steps, with dropout."""


def start(directory, *arguments, **variables):
    command = [*FULLSHARD, "train", str(directory / "run.yaml"), *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=apart(**variables), **pipes)


def wait_for_step(run, lines):
    """Return when the run says that it has taken a step; ``lines`` is where it speaks."""
    for line in lines:
        if line.startswith("step "):
            return
    pytest.fail(f"ended with {run.wait()} before a step: {run.communicate()}")


def wait_for_metrics(directory, step, run):
    """Return when the metrics of a run that started anew have a step."""
    path = directory / "out" / "metrics.jsonl"
    while run.poll() is None:
        with contextlib.suppress(FileNotFoundError, ValueError):
            if any(record["kind"] == "step" and record["step"] >= step for record in read_jsonl(path)):
                return
        time.sleep(0.01)
    pytest.fail(f"ended with {run.returncode} before step {step}: {run.communicate()}")


def steps_on_disk(directory):
    return [int(path.name.removeprefix("step-")) for path in sorted((directory / "out" / "checkpoints").glob("step-*"))]


def ranks_of(launcher):
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    return [int(child) for child in children]


def finish(run):
    out, err = run.communicate(timeout=100)
    assert run.returncode == 0, err
    return out, err


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    directory = tmp_path_factory.mktemp("uninterrupted")
    write_run_file(directory, **CHANGES)
    finish(start(directory))
    return directory / "out"


def assert_same(out, reference):
    names = ("kind", "step", "loss", "grad_norm", "tokens", "value", "is_best")
    ours, theirs = (
        [
            [record.get(name) for name in names]
            for record in read_jsonl(path / "metrics.jsonl")
            if record["kind"] != "checkpoint"
        ]
        for path in (out, reference)
    )
    assert ours == theirs
    assert (out / "model.safetensors").read_bytes() == (reference / "model.safetensors").read_bytes()
    assert (out / "predictions.jsonl").read_text() == (reference / "predictions.jsonl").read_text()


def test_sigterm_saves_and_the_same_command_goes_on_to_the_bit(tmp_path, uninterrupted):
    write_run_file(tmp_path, **CHANGES)
    run = start(tmp_path, "--json")
    wait_for_metrics(tmp_path, 2, run)
    run.send_signal(signal.SIGTERM)
    out, err = run.communicate(timeout=100)
    assert run.returncode == 75, err
    stopped = json.loads(out)
    assert (stopped["stopped"], stopped["exit_code"]) == (True, 75)
    assert stopped["checkpoint"] == str(tmp_path / "out" / "checkpoints" / f"step-{stopped['step']:08d}")
    assert stopped["step"] == steps_on_disk(tmp_path)[-1] >= 3
    assert err.count("stopping after this step") == 1
    assert "no checkpoint" not in err
    assert (
        f"Stopped after step {stopped['step']} of 28, saved in {stopped['checkpoint']}. The same command resumes" in err
    )
    assert "Traceback" not in err
    out, err = finish(start(tmp_path, "--json"))
    assert f"resuming after step {stopped['step']} from" in err
    assert json.loads(out)["steps"] == 28
    assert_same(tmp_path / "out", uninterrupted)


def test_killed_refused_interrupted_and_stopped_by_one_rank_it_still_ends_the_same(tmp_path, uninterrupted):
    write_run_file(tmp_path, **CHANGES)
    # All processes are killed.
    run = start(tmp_path)
    wait_for_metrics(tmp_path, 7, run)
    for pid in [*ranks_of(run), run.pid]:
        os.kill(pid, signal.SIGKILL)
    run.communicate()
    killed_at = steps_on_disk(tmp_path)[-1]
    assert killed_at >= 5
    assert killed_at % 5 == 0
    # While another one has the directory, a run is refused.
    metrics = (tmp_path / "out" / "metrics.jsonl").read_bytes()
    lock = DirectoryLock(tmp_path / "out" / "checkpoints")
    run = start(tmp_path)
    _, err = run.communicate(timeout=100)
    assert run.returncode == 9
    assert "Another run is writing to" in err
    assert (tmp_path / "out" / "metrics.jsonl").read_bytes() == metrics
    lock.release()
    # It is told twice to end.
    run = start(tmp_path)
    wait_for_step(run, run.stdout)
    run.send_signal(signal.SIGINT)
    run.send_signal(signal.SIGINT)
    started = time.monotonic()
    _, err = run.communicate(timeout=100)
    assert time.monotonic() - started < 5
    assert run.returncode in (75, 130), err  # 75: it had left before the second signal came, or both were one
    # Ranks that torchrun started: one is told.
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [start(tmp_path, "--json", RANK=str(rank), LOCAL_RANK=str(rank), **common) for rank in range(2)]
    wait_for_step(ranks[0], ranks[0].stderr)
    ranks[1].send_signal(signal.SIGTERM)
    outputs = [rank.communicate(timeout=100) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [75, 75]
    assert json.loads(outputs[0][0])["stopped"]
    assert outputs[1] == ("", "")
    finish(start(tmp_path))
    assert_same(tmp_path / "out", uninterrupted)
