"""The end of a rank program."""

import argparse
import os

import pytest

from fullshard.program.launch.failure import Failure
from fullshard.program.launch.programs import predict, rank
from fullshard.program.launch.programs.row_file import RowWriter
from fullshard.program.train.evaluation.predict import RowPrediction


class Ended(BaseException):
    """In place of the end of the process."""


def test_a_rank_whose_output_nothing_reads_ends_without_a_report(monkeypatch, tmp_path, capsys):
    reader, writer = os.pipe()
    os.close(reader)  # the writer stays open: closing it would flush what nothing reads

    def end(code):
        raise Ended(code)

    def work(options, *, is_first):
        out = os.fdopen(writer, "w", closefd=False)
        with predict._writing():
            RowWriter(out, ".jsonl").write([RowPrediction("a", "b").as_dict()])

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "failure"))
    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(rank, "end_with_launcher", lambda: None)
    with pytest.raises(Ended, match="141"):
        rank.run_as_rank(argparse.ArgumentParser(), [], work)
    assert not (tmp_path / "failure").exists()
    assert capsys.readouterr() == ("", "")


def test_a_rank_that_fails_tells_the_launcher_and_the_other_ranks_before_it_ends(monkeypatch, tmp_path):
    told = []

    def end(code):
        assert Failure.read(tmp_path / "failure", 0).message == "no rows left"
        assert [str(error) for error in told] == ["no rows left"]
        raise Ended(code)

    def work(options, *, is_first):
        raise ValueError("no rows left")

    monkeypatch.setenv("RANK", "0")  # others turn transformers' bars and messages off, also for the tests after this
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "failure"))
    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(rank, "announce_failure", told.append)
    monkeypatch.setattr(rank, "end_with_launcher", lambda: None)
    with pytest.raises(Ended, match="1"):
        rank.run_as_rank(argparse.ArgumentParser(), [], work)
