"""A rank is lost in the middle of a run: all start again by themselves, and the run ends as if nothing had happened."""

import re

import pytest

from fullshard.program.launch import attempts
from support.launched import launch_support
from support.processes import SOURCE, run_ranks
from support.tiny_run import QUICK, read_jsonl, write_run_file

pytestmark = [pytest.mark.dist, pytest.mark.timeout(200)]

CHANGES = QUICK | {
    "training__per_device_train_batch_size": 1,
    "training__num_train_epochs": 2,
    "training__save_strategy": "steps",
    "training__save_steps": 2,
}
"""14 steps, with dropout; a checkpoint after every second one."""


def run(directory, kind, **more):
    """Train in ``directory`` with a fault of a kind in rank 1's third step; return how it ended and its files."""
    directory.mkdir()
    arguments = [kind, str(write_run_file(directory, **CHANGES)), "resume=never", "--no-plan"]
    return launch_support("faulty_rank", arguments, **more), directory / "out"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    directory = tmp_path_factory.mktemp("undisturbed")
    program = SOURCE / "fullshard" / "program" / "launch" / "programs" / "train.py"
    run_ranks(2, program, str(write_run_file(directory, **CHANGES)), "--no-plan")
    return directory / "out"


def steps(out):
    names = ("step", "loss", "grad_norm")
    return [[line[name] for name in names] for line in read_jsonl(out / "metrics.jsonl") if line["kind"] == "step"]


@pytest.mark.parametrize(
    "kind", ["kill_once", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("crash_once", "lose_once"))]
)
def test_the_weights_are_the_undisturbed_runs_to_the_bit(tmp_path, undisturbed, kind, capfd):
    """The run file asks for a new run; after the loss that would throw the checkpoint away."""
    failure, out = run(tmp_path / "run", kind, max_restarts=3)
    assert failure is None
    err = capfd.readouterr().err
    assert re.search(r", after step 2; restart 1 of 3 now, from step [012] or later\n", err)
    assert steps(out) == steps(undisturbed)
    assert (out / "model.safetensors").read_bytes() == (undisturbed / "model.safetensors").read_bytes()
    assert (out / "predictions.jsonl").read_bytes() == (undisturbed / "predictions.jsonl").read_bytes()


@pytest.mark.slow
def test_a_step_that_fails_twice_ends_the_run_with_its_first_cause(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(attempts, "FIRST_PAUSE_S", 0.01)
    failure, out = run(tmp_path / "run", "kill", max_restarts=3)
    assert (failure.rank, failure.exit_code) == (1, 137)
    err = capfd.readouterr().err
    assert err.count("restart 1 of 3") == 1
    assert "restart 2" not in err
    assert "after step 2, as in the attempt before: the ranks are not started again" in err
    assert not (out / "summary.json").exists()


@pytest.mark.slow
def test_an_error_in_the_code_is_not_tried_again(tmp_path, capfd):
    failure, _ = run(tmp_path / "run", "raise", max_restarts=3)
    assert failure.text().endswith("RuntimeError: the fault of rank 1")
    assert "restart" not in capfd.readouterr().err
