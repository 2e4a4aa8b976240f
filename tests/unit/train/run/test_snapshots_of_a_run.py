"""A run that dies anywhere continues from its snapshot in memory in the next attempt, and ends as if undisturbed."""

import pytest

from fullshard.errors import ConfigError
from fullshard.resilience import snapshots
from support.interrupted_run import OFTEN, STEPS, assert_same, run, run_until_killed

pytestmark = pytest.mark.usefixtures("unmetered")


@pytest.fixture(autouse=True)
def keep(tmp_path, monkeypatch):
    """The launcher's directory in the first attempt; a snapshot follows every step."""
    monkeypatch.setattr(snapshots, "FIRST_GAP", 1)
    monkeypatch.setattr(snapshots, "_interval", lambda *_: 1)
    monkeypatch.setenv("FULLSHARD_KEEP_DIR", str(tmp_path / "keep"))
    monkeypatch.setenv("FULLSHARD_ATTEMPT", "0")
    return tmp_path / "keep"


def killed_and_again(directory, place, monkeypatch, **changes):
    run_until_killed(directory, place, **changes)
    monkeypatch.setenv("FULLSHARD_ATTEMPT", "1")
    return run(directory, **changes)


@pytest.mark.parametrize("save", ["no", "epoch"])
@pytest.mark.parametrize(
    "place", [("step", 4), ("step", 6), ("evaluating", 4), ("evaluation", 4), ("evaluating", STEPS), ("step", STEPS)]
)
def test_killed_anywhere_it_ends_the_same_to_the_bit(place, save, tmp_path, uninterrupted, monkeypatch):
    memory = killed_and_again(tmp_path, place, monkeypatch, training__save_strategy=save, **OFTEN)
    # Killed while it evaluates, a run has what it saved before, on disk or in memory.
    assert memory.begun[0].resumed_step == place[1] - (place[0] == "step")
    assert_same(tmp_path, uninterrupted)


@pytest.mark.parametrize("resume", ["never", "previous"])
def test_what_resume_says_is_for_the_first_attempt(resume, tmp_path, uninterrupted, monkeypatch):
    memory = killed_and_again(tmp_path, ("step", 6), monkeypatch, resume=resume, **OFTEN)
    assert memory.begun[0].resumed_step == 5
    assert any(note.startswith("resuming after step 5 from the snapshot in memory") for note in memory.begun[0].notes)
    assert_same(tmp_path, uninterrupted)


def test_an_attempt_that_ends_after_the_run_has_ends_it_once_more(tmp_path, uninterrupted, monkeypatch):
    run(tmp_path, **OFTEN)
    monkeypatch.setenv("FULLSHARD_ATTEMPT", "1")
    memory = run(tmp_path, **OFTEN)
    assert memory.begun[0].resumed_step == STEPS
    assert not memory.steps
    assert_same(tmp_path, uninterrupted)


def test_a_run_file_that_was_changed_meanwhile_is_an_error(tmp_path, monkeypatch):
    changes = {**OFTEN, "training__save_strategy": "no"}
    run_until_killed(tmp_path, ("step", 4), **changes)
    monkeypatch.setenv("FULLSHARD_ATTEMPT", "1")
    with pytest.raises(ConfigError, match=r"settings have changed meanwhile:\n  training.learning_rate: 0.5"):
        run(tmp_path, training__learning_rate=0.5, **changes)
