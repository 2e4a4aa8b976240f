"""A request to stop is heeded in every phase of a run, and the same command ends it as if there had been none."""

import signal

import pytest

from fullshard.program.launch import Notice, launch, rank_command
from support.launched import launch_support
from support.tiny_run import QUICK, write_run_file

pytestmark = [pytest.mark.dist, pytest.mark.timeout(200)]

CHANGES = QUICK | {
    "training__per_device_train_batch_size": 1,
    "training__num_train_epochs": 1,
    "training__save_strategy": "steps",
    "training__save_steps": 2,
    "training__eval_strategy": "steps",
    "training__eval_steps": 3,
}
"""7 steps, with dropout; a checkpoint after every second one, an evaluation after every third."""


def stopped(directory, phase, how, **more):
    run_file = write_run_file(directory, **CHANGES)
    return launch_support("stopped_rank", [phase, str(how), str(run_file), "--no-plan"], **more)


def weights_when_finished(directory):
    """What the same command ends with."""
    command = rank_command("fullshard.program.launch.programs.train", [str(directory / "run.yaml"), "--no-plan"])
    assert launch(command, nproc=2) is None
    return (directory / "out" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    directory = tmp_path_factory.mktemp("undisturbed")
    write_run_file(directory, **CHANGES)
    return weights_when_finished(directory)


@pytest.mark.parametrize(
    ("phase", "how"),
    [
        pytest.param("generation", "SIGUSR1", marks=pytest.mark.slow),
        pytest.param("first step", "SIGINT", marks=pytest.mark.slow),
        pytest.param("evaluation", "SIGTERM", marks=pytest.mark.slow),
        pytest.param("saving", "SIGTERM", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_trains_saves_and_leaves(tmp_path, undisturbed, phase, how):
    stop = stopped(tmp_path, phase, how)
    assert (stop.exit_code, stop.stopped["stopped"]) == (75, True)
    assert stop.stopped["checkpoint"].endswith(f"step-{stop.stopped['step']:08d}")
    assert 1 <= stop.stopped["step"] <= 3
    assert weights_when_finished(tmp_path) == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "how"), [("tokenizing", "SIGUSR1"), ("loading", "SIGTERM")])
def test_a_run_that_does_not_train_yet_has_nothing_to_save(tmp_path, undisturbed, phase, how, capfd):
    with pytest.raises(KeyboardInterrupt):
        stopped(tmp_path, phase, how)
    assert "no step was being trained" in capfd.readouterr().err
    assert weights_when_finished(tmp_path) == undisturbed


@pytest.mark.slow
def test_a_file_that_appears_stops_the_run_in_any_phase(tmp_path, undisturbed, capfd):
    notice = Notice(tmp_path / "notice")
    with pytest.raises(KeyboardInterrupt):
        stopped(tmp_path, "loading", notice.file, notice=notice)
    assert f"{notice.file} is there: the run stops" in capfd.readouterr().err
    notice.file.unlink()
    stop = stopped(tmp_path, "evaluation", notice.file, notice=notice)
    assert (stop.exit_code, stop.stopped["step"]) == (75, 3)
    assert weights_when_finished(tmp_path) == undisturbed


@pytest.mark.slow
def test_a_step_that_does_not_end_in_the_time_of_the_notice_is_given_up(tmp_path, undisturbed):
    before = signal.getsignal(signal.SIGUSR1)
    stop = stopped(tmp_path, "hang", "SIGTERM", notice=Notice(grace_s=0.5))
    assert stop.exit_code == 75
    assert stop.stopped["step"] == 2
    assert "in the time of --grace" in stop.text()
    assert signal.getsignal(signal.SIGUSR1) is before
    assert weights_when_finished(tmp_path) == undisturbed
