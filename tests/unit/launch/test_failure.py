"""A failure crosses from a rank to its launcher, and reads well."""

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, get_error_handler

from fullshard.errors import DataError, InvariantError, RunStopped
from fullshard.program.launch import Failure
from fullshard.program.launch.failure import is_forgotten


def failure_of(error, rank=None):
    try:
        raise error
    except type(error) as caught:
        return Failure.of(caught, rank)


def test_a_user_error_is_its_message(tmp_path):
    failure = failure_of(DataError("train.csv:3 is broken"), rank=1)
    assert failure.text() == "DataError: train.csv:3 is broken"
    assert failure.exit_code == 3
    failure.write(tmp_path / "f.json")
    assert Failure.read(tmp_path / "f.json", 0) == failure
    assert failure.as_dict() == {
        "error": {"kind": "DataError", "message": "train.csv:3 is broken", "rank": 1, "exit_code": 3}
    }


@pytest.mark.parametrize(("error", "code"), [(KeyError("x"), 1), (InvariantError("impossible"), 70)])
def test_anything_else_comes_with_rank_and_traceback(error, code):
    failure = failure_of(error, rank=2)
    assert failure.exit_code == code
    lines = failure.text().splitlines()
    assert lines[0] == "Rank 2 failed first:"
    assert lines[1] == "Traceback (most recent call last):"
    assert "raise error" in failure.text()
    assert type(error).__name__ in lines[-1]


def test_a_run_that_was_stopped_is_no_failure(tmp_path):
    stop = failure_of(RunStopped("Stopped after step 3.", step=3, checkpoint="out/c"), rank=0)
    stop.write(tmp_path / "f.json")
    read = Failure.read(tmp_path / "f.json", 0)
    assert read == stop
    assert (read.text(), read.exit_code) == ("Stopped after step 3.", 75)
    assert read.as_dict() == {"stopped": True, "step": 3, "checkpoint": "out/c", "exit_code": 75}


def test_a_rank_that_wrote_nothing(tmp_path):
    assert Failure.read(tmp_path / "none.json", 0) is None


def test_torchs_summary_shows_what_a_rank_wrote(tmp_path, monkeypatch):
    """The format of torch.distributed.elastic.multiprocessing.errors.record."""
    (tmp_path / "f.json").touch()
    assert Failure.read(tmp_path / "f.json", 0) is None  # torch's own writer is not atomic
    failure_of(DataError("train.csv:3 is broken"), rank=1).write(tmp_path / "f.json")
    found = ProcessFailure(local_rank=1, pid=7, exitcode=3, error_file=str(tmp_path / "f.json"))
    shown = str(ChildFailedError("train", {1: found}))
    assert "DataError: train.csv:3 is broken" in shown
    assert "To enable traceback" not in shown
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "g.json"))
    get_error_handler().record_exception(ValueError("the cause"))
    read = Failure.read(tmp_path / "g.json", 4)
    assert (read.rank, read.kind, read.message, read.exit_code) == (4, "ValueError", "the cause", 1)


AGENT = {"TORCHELASTIC_USE_AGENT_STORE": "False"}
"""A variable that torch's agent alone sets."""


@pytest.mark.parametrize(
    ("variables", "forgotten"),
    [
        ({"TORCHELASTIC_ERROR_FILE": ""}, True),  # nobody reads one
        ({"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_MAX_RESTARTS": "1"} | AGENT, False),
        ({"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "1"}, False),  # fullshard's launcher
        ({"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "1"} | AGENT, True),
    ],
)
def test_a_rank_prints_what_its_launcher_will_not(monkeypatch, variables, forgotten):
    for name in ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"TORCHELASTIC_ERROR_FILE": "f.json"} | variables).items():
        monkeypatch.setenv(name, value)
    assert is_forgotten() is forgotten
