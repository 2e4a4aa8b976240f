"""Ranks that die and are started again continue from the snapshot in memory, and the run ends as undisturbed."""

import contextlib
import json
import time

import pytest

from support.attempts import Attempts
from support.tiny_run import QUICK, read_jsonl, write_run_file

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(400)]

CHANGES = QUICK | {
    "training__per_device_train_batch_size": 1,
    "training__num_train_epochs": 4,
    "training__save_strategy": "no",
}
"""28 steps with two ranks, with dropout, and no checkpoint on disk."""

LORA = {"type": "lora", "r": 2, "lora_alpha": 4}


def attempts(directory, size, each=None, **changes):
    directory.mkdir()
    write_run_file(directory, **(CHANGES | changes), nproc=each or size)
    command = ["-m", "fullshard.program.launch.programs.train", str(directory / "run.yaml"), "--no-plan"]
    (directory / "keep").mkdir(mode=0o700)
    return Attempts(command, directory / "keep", size=size, each=each)


def wait_for_steps(directory, steps, run):
    """Return when the newest attempt has taken some steps."""
    start, metrics = directory / "out" / "run.json", directory / "out" / "metrics.jsonl"
    while all(process.poll() is None for process in run.ranks):
        with contextlib.suppress(FileNotFoundError, ValueError):
            if start.stat().st_mtime > run.started:
                until = json.loads(start.read_text())["resumed_step"] + steps
                if any(record["kind"] == "step" and record["step"] >= until for record in read_jsonl(metrics)):
                    return
        time.sleep(0.005)  # between looks at a file of another process
    pytest.fail(f"ended before {steps} steps: {run.finish()} {run.said}")


def facts(out):
    names = ("kind", "step", "loss", "grad_norm", "tokens", "value", "is_best")
    return [
        [one.get(name) for name in names] for one in read_jsonl(out / "metrics.jsonl") if one["kind"] != "checkpoint"
    ]


def assert_same(out, reference):
    assert facts(out) == facts(reference)
    weights = sorted(path.name for path in reference.glob("*.safetensors"))
    assert weights
    for name in weights:
        assert (out / name).read_bytes() == (reference / name).read_bytes()
    assert (out / "predictions.jsonl").read_text() == (reference / "predictions.jsonl").read_text()


def calm_and_killed(directory, size, each=None, **changes):
    """Run undisturbed, and with two deaths; both directories of results."""
    calm = attempts(directory / "calm", size, each, **changes)
    calm.start()
    assert calm.finish() == [0] * size, calm.said
    killed = attempts(directory / "killed", size, each, **changes)
    for number, steps in enumerate((3, 6)):
        killed.start()
        wait_for_steps(directory / "killed", steps, killed)
        killed.kill(number % size)
    killed.start()
    assert killed.finish() == [0] * size, killed.said
    assert "from the snapshot in memory" in killed.said[-1][0]
    out = directory / "killed" / "out"
    assert json.loads((out / "run.json").read_text())["resumed_step"] >= 1
    return out, directory / "calm" / "out"


@pytest.mark.parametrize("size", [1, 3])
def test_killed_runs_continue_from_memory_and_end_the_same_to_the_bit(tmp_path, size):
    assert_same(*calm_and_killed(tmp_path, size))


def test_so_do_two_ranks_from_scratch_from_files_and_with_an_adapter(tmp_path):
    out, calm = calm_and_killed(tmp_path, 2)
    assert_same(out, calm)
    (tmp_path / "full").mkdir()
    assert_same(*calm_and_killed(tmp_path / "full", 2, model={"path": str(calm)}))
    (tmp_path / "lora").mkdir()
    assert_same(*calm_and_killed(tmp_path / "lora", 2, model={"path": str(calm), "adapter": LORA}))


def test_so_do_two_machines_of_which_neither_sees_the_others_snapshots(tmp_path):
    assert_same(*calm_and_killed(tmp_path, 2, each=1))


def test_so_do_replicas_of_two_machines(tmp_path):
    assert_same(*calm_and_killed(tmp_path, 4, each=2, sharding__strategy="hybrid_shard"))


@pytest.mark.parametrize(("size", "each"), [(2, None), (4, 2)])
def test_so_do_ranks_that_share_rows(tmp_path, size, each):
    """Four ranks are two groups, on a machine each."""
    assert_same(*calm_and_killed(tmp_path, size, each, sharding__sequence_parallel=2))
