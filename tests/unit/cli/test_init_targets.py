"""``fullshard init`` asks where a name speaks against being the target, and tells what a run leaves out."""

import builtins
import json
import sys

import pytest

from fullshard.errors import DataError
from fullshard.program.cli import main as cli
from fullshard.program.config import load_run
from fullshard.program.data import SourceSpec, read_split
from fullshard.program.starter import machine as machines


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.setattr(machines, "is_cached", lambda name: False)
    monkeypatch.chdir(tmp_path)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def sentence(what, i):
    return f"this is {what} number {i}, which is long enough to be a text"


TABLES = {
    # columns with their texts, the answers to the two questions
    "preference": (("prompt", "chosen", "rejected"), ("prompt", "chosen")),
    "preference of short texts": (("prompt", "response_chosen", "response_rejected"), ("prompt", "response_chosen")),
    "annotations": (("text", "summary.suggestion", "summary.response"), ("text", "summary.response")),
    "suggestion last": (("text", "response", "suggestion"), ("text", "response")),
    "distractors": (("stem", "correct_one", "distractor1", "distractor2"), ("stem", "correct_one")),
    "draft": (("brief", "final", "draft"), ("brief", "final")),
    "answer before its question": (("reply", "prompt"), ("prompt", "reply")),
}


@pytest.mark.parametrize("what", TABLES)
def test_a_target_that_is_not_clear_is_asked_for_and_not_guessed(what, tmp_path, monkeypatch, refused):
    columns, answers = TABLES[what]
    text = (lambda name, i: f"{name[:3]} {i}") if "short" in what else sentence
    write(tmp_path / "train.jsonl", [{name: text(name, i) for name in columns} for i in range(40)])
    said = refused(3, "init", "train.jsonl", "--yes")
    assert all(repr(name) in said for name in columns)
    assert not (tmp_path / "run.yaml").exists()
    given, asked = iter(["", answers[0], "", answers[1], "new"]), []
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(builtins, "input", lambda text: asked.append(text) or next(given))
    assert cli.main(["init", "train.jsonl"]) == 0
    assert not any("[" in question for question in asked[:4])
    config = load_run("run.yaml")
    assert (config.data.source_column, config.data.target_column) == answers
    assert cli.main(["config", "check", "run.yaml"]) == 0


def test_squad_is_asked_about_with_the_texts_of_its_answers(tmp_path, monkeypatch, refused):
    write(
        tmp_path / "train.jsonl",
        [
            {
                "id": f"{i:x}",
                "title": "Cards",
                "context": sentence("a context", i) * 5,
                "question": sentence("a question", i),
                "answers": {"text": [f"answer {i}", "an answer"], "answer_start": [3, 4]},
            }
            for i in range(40)
        ],
    )
    assert "'answers.text'" in refused(3, "init", "train.jsonl", "--yes")
    given = iter(["question", "answers.text", "new"])
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(builtins, "input", lambda text: next(given))
    assert cli.main(["init", "train.jsonl"]) == 0
    config = load_run("run.yaml")
    spec = SourceSpec(
        train_file=config.data.train_file,
        source_column=config.data.source_column,
        target_column=config.data.target_column,
    )
    assert read_split(spec, "train").examples[3].references == ("answer 3", "an answer")


@pytest.mark.parametrize(
    ("columns", "pair"),
    [
        (("context", "reply"), ("context", "reply")),
        (("question", "context", "answer"), None),
        (("prompt", "response", "rejected"), ("prompt", "response")),
        (("complaint", "our_reply"), ("complaint", "our_reply")),
        (("text", "label", "label_suggestion"), ("text", "label")),
    ],
)
def test_a_clear_target_is_still_a_default(columns, pair, tmp_path):
    write(tmp_path / "train.jsonl", [{name: sentence(name, i) for name in columns} for i in range(40)])
    assert cli.main(["init", "train.jsonl", "--yes"]) == 0
    config = load_run("run.yaml")
    assert pair in (None, (config.data.source_column, config.data.target_column))


def test_two_answers_alone_are_not_a_pair_for_training(tmp_path):
    write(tmp_path / "train.jsonl", [{"chosen": sentence("a", i), "rejected": sentence("b", i)} for i in range(4)])
    with pytest.raises(DataError, match="which columns are source and target"):
        read_split(SourceSpec(train_file=tmp_path / "train.jsonl"), "train")


@pytest.mark.parametrize(
    ("name", "row", "left"),
    [
        ("history", {"instruction": "say {}", "input": "", "output": "is {}", "history": [["a", "b"]]}, "'history'"),
        ("system", {"instruction": "say {}", "output": "is {}", "system": "be kind"}, "'system'"),
        ("both", {"prompt": "say {}", "completion": "is {}", "system": "x", "history": []}, "'system' and 'history'"),
        ("label", {"text": "say {}", "label": "is {}", "Context": "at home"}, "'Context'"),
    ],
)
def test_known_columns_that_are_left_out_are_told(name, row, left, tmp_path, done):
    rows = [{key: cell.format(i) if isinstance(cell, str) else cell for key, cell in row.items()} for i in range(40)]
    write(tmp_path / "train.jsonl", rows)
    assert f"{left} {'are' if ' and ' in left else 'is'} not used" in done("init", "train.jsonl", "--yes")
    notes = read_split(SourceSpec(train_file=tmp_path / "train.jsonl"), "train").notes
    assert any(f"{left} " in note and "not used" in note for note in notes)
    assert "# not used: " in (tmp_path / "run.yaml").read_text()


def test_columns_of_conversations_that_are_left_out_are_told(tmp_path, done):
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    rows = [{"messages": turns, "system": "be kind", "system_prompt": "be kind", "history": []} for _ in range(30)]
    write(tmp_path / "train.jsonl", rows)
    assert "'system_prompt' and 'history' are not used" in done("init", "train.jsonl", "--yes")


@pytest.mark.parametrize(
    ("first", "told"),
    [
        (("where is my card?", "card_arrival"), True),
        (("1", "0.5"), True),
        (("where is my card", "kind 1"), True),
        (("text", "label"), False),
        (("Question", "Answer"), False),
    ],
)
def test_a_header_that_looks_like_a_row_is_told(first, told, tmp_path, done):
    rows = "".join(f"{sentence('a', i)},kind {i % 3}\n".replace(", which", " which") for i in range(40))
    (tmp_path / "train.csv").write_text(f"{first[0]},{first[1]}\n{rows}")
    assert ("the header looks like a row" in done("init", "train.csv", "--yes")) is told
    notes = read_split(SourceSpec(train_file=tmp_path / "train.csv"), "train").notes
    assert any("looks like a row" in note for note in notes) is (told and first[1] != "kind 1")
