"""A failure crosses from a rank to its launcher, and reads well."""

import pytest

from fullshard.errors import DataError, InvariantError, RunStopped
from fullshard.program.launch import Failure


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
    assert Failure.read(tmp_path / "f.json") == failure
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
    read = Failure.read(tmp_path / "f.json")
    assert read == stop
    assert (read.text(), read.exit_code) == ("Stopped after step 3.", 75)
    assert read.as_dict() == {"stopped": True, "step": 3, "checkpoint": "out/c", "exit_code": 75}


def test_a_rank_that_wrote_nothing(tmp_path):
    assert Failure.read(tmp_path / "none.json") is None
