"""``evaluate`` and ``predict``: what the command line hands to the ranks."""

import io
import json
import sys
from pathlib import Path

import pytest

from fullshard.program.cli import common, main as cli, predict
from fullshard.program.launch.streams import UnreadOutputError
from support.tiny_run import write_run_file


@pytest.fixture
def started(monkeypatch):
    """The rank programs' arguments and numbers of ranks, and what a file of rows held meanwhile."""
    calls = []

    def launch(command, *, nproc, saves, **_):
        assert not saves
        held = Path(command[4]).read_text() if command[2].endswith("predict") else None
        calls.append((command[2:], nproc, held))

    for module in (common, predict):
        monkeypatch.setattr(module, "launch", launch)
    return calls


def test_evaluate_starts_as_many_ranks_as_the_run(started, tmp_path, capsys):
    run_file = str(write_run_file(tmp_path))
    data = tmp_path / "held_out.csv"
    arguments = [run_file, "nproc=3", "--model=m", f"--data={data}", "--encoding=utf-16", "--output=o", "--json"]
    assert cli.main(["evaluate", *arguments]) == 0
    assert started == [(["fullshard.program.launch.programs.evaluate", *arguments], 3, None)]
    assert capsys.readouterr().err.startswith("fullshard: starting 3 ranks; ")


def test_evaluate_says_what_is_not_there(started, tmp_path, capsys, refused):
    assert cli.main(["evaluate", str(tmp_path), "--json"]) == 2
    captured = capsys.readouterr()
    assert "no summary.json" in captured.err
    assert json.loads(captured.out)["error"]["exit_code"] == 2
    assert "there is no file gone.csv" in refused(2, "evaluate", write_run_file(tmp_path), "--data", "gone.csv")
    assert "--encoding is that of the --data FILE" in refused(
        2, "evaluate", str(write_run_file(tmp_path)), "--encoding", "utf-16"
    )
    assert "'utf-9' is not an encoding of Python" in refused(2, "predict", "m", "--encoding", "utf-9")
    assert started == []


@pytest.mark.parametrize("name", ["runs/nope", "./nope", "/gone/nope", "a/b/c", "nope/"])
def test_a_model_that_is_no_path_here_is_said_at_once(started, name, tmp_path, monkeypatch, refused):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    error = refused(4, "predict", name, "rows.csv")
    assert f"There is no {Path(name)}: give" in error
    assert ("Directories in runs: mine." in error) == (name == "runs/nope")
    assert cli.main(["evaluate", str(write_run_file(tmp_path)), "--model", name]) == 4
    assert started == []


def test_predict_into_a_pipe_that_is_closed_ends_silently_with_141(monkeypatch, tmp_path, capsys):
    def launch(command, *, nproc, saves, **_):
        raise UnreadOutputError

    monkeypatch.setattr(predict, "launch", launch)
    file = tmp_path / "rows.csv"
    file.write_text("text\none\n")
    assert cli.main(["predict", "m", str(file)]) == 141
    assert capsys.readouterr() == ("", "")


def test_predict_hands_over_what_was_given(started, tmp_path):
    file = tmp_path / "rows.csv"
    file.write_text("text\none\n")
    options = [
        "--encoding",
        "windows-1252",
        "--system=",
        "--num-beams",
        "4",
        "--batch-size",
        "2",
        "--prefix",
        "-a: ",
        "--nproc",
        "2",
        "-o",
        str(tmp_path / "o"),
    ]
    # A text that looks like an option is given with "=".
    options[options.index("--prefix") : options.index("--nproc")] = ["--prefix=-a: "]
    assert cli.main(["predict", "m", str(file), *options]) == 0
    ((arguments, nproc, held),) = started
    assert arguments[:3] == ["fullshard.program.launch.programs.predict", "m", str(file)]
    given = ["--batch-size=2", "--encoding=windows-1252", "--num-beams=4", f"--output={tmp_path / 'o'}"]
    assert sorted(arguments[3:]) == [*given, "--prefix=-a: ", "--system="]
    assert (nproc, held) == (2, "text\none\n")


@pytest.mark.parametrize("name", [[], ["-"]])
def test_predict_reads_lines_from_standard_input(name, started, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("eins\n\nzwölf\n".encode())))
    assert cli.main(["predict", "m", *name]) == 0
    ((arguments, nproc, held),) = started
    assert arguments[2].endswith(".txt")
    assert not Path(arguments[2]).exists()
    assert (nproc, held) == (1, "eins\n\nzwölf\n")


def test_predict_does_not_write_over_its_rows(started, tmp_path, refused):
    file = tmp_path / "rows.csv"
    file.write_text("text\none\n")
    assert "would replace" in refused(2, "predict", "m", file, "-o", file)
    assert cli.main(["predict", "m", str(tmp_path / "gone.csv")]) == 3
    assert started == []


def test_ranks_of_torchrun_cannot_share_standard_input(monkeypatch, refused):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert "name a FILE" in refused(2, "predict", "m")
