"""What ``fullshard train`` refuses before it starts ranks: columns, empty files, another run in the directory."""

import subprocess
import sys

import pytest

from fullshard.errors import CheckpointError, DataError
from fullshard.program.cli import train
from fullshard.program.cli.main import make_parser
from fullshard.state.storage import DirectoryLock
from support.planned import write_run


@pytest.fixture
def begin(tmp_path, monkeypatch):
    """Starts a run up to its ranks; returns whether they would start."""
    started = []
    monkeypatch.setattr(train, "start_ranks", lambda *_, **__: started.append(True))
    run_file = write_run(tmp_path, training__eval_strategy="no")

    def begin(*overrides):
        train.run(make_parser().parse_args(["train", str(run_file), f"output_dir={tmp_path}/out", *overrides]))
        return bool(started)

    return begin


def table(path, text):
    path.write_text(text)
    return f"data.train_file={path}"


NAMED = ("data.source_column=question", "data.target_column=answer")


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl"])
def test_a_column_in_another_case(begin, tmp_path, name):
    text = "Question,answer\na,b\n" if name.endswith("csv") else '{"Question": "a", "answer": "b"}\n'
    with pytest.raises(DataError, match=r"no column 'question'. Did you mean 'Question'\?"):
        begin(table(tmp_path / name, text), *NAMED)


def test_a_column_that_only_later_rows_have_is_found(begin, tmp_path):
    rows = ['{"question": "a"}\n'] * 200 + ['{"question": "a", "answer": "b"}\n']
    assert begin(table(tmp_path / "rows.jsonl", "".join(rows)), *NAMED)


@pytest.mark.parametrize(("text", "problem"), [("", "empty"), ("question,answer\n", "no rows")])
@pytest.mark.parametrize("key", ["train_file", "validation_file"])
def test_a_file_without_rows(begin, tmp_path, text, problem, key):
    good = table(tmp_path / "good.csv", "question,answer\na,b\n")
    bad = table(tmp_path / "bad.csv", text).replace("train_file", key)
    with pytest.raises(DataError, match=problem):
        begin(good, bad, "data.validation_fraction=0", "training.eval_strategy=epoch", *NAMED)


def test_a_run_in_the_same_directory(begin, tmp_path):
    good = table(tmp_path / "good.csv", "question,answer\na,b\n")
    lock = DirectoryLock(tmp_path / "out" / "checkpoints")
    try:
        with pytest.raises(CheckpointError, match=r"Another run is writing to .*out/checkpoints \(process \d+"):
            begin(good, *NAMED)
    finally:
        lock.release()
    assert begin(good, *NAMED)


def test_looking_imports_no_torch():
    code = (
        "import sys, fullshard.program.cli.train, fullshard.program.data.reading.early\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'datasets')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
