"""The file with what decides a prompt: what it keeps, what it refuses, and whose file counts."""

import json
import re
from pathlib import Path

import pytest

from fullshard.errors import ConfigError
from fullshard.program.config import (
    PROMPT_NAME,
    RunConfig,
    prompt_text,
    read_prompt,
    recorded_run,
    recorded_turns,
    run_of,
)
from fullshard.program.config.recorded import recorded_base
from fullshard.program.data import read_inputs
from fullshard.program.train.setup.prepare import source_spec

NO_EVAL = {"eval_strategy": "no"}


ARTICLE = "One.\n\n, Two.\n,Three"


@pytest.mark.parametrize("of_a_set", [False, True])
def test_the_cleaning_of_articles_travels(tmp_path, of_a_set):
    for name in ("wikihowAll.csv", "rows.csv"):
        (tmp_path / name).write_text("headline,title,text\n")
    articles = {"train_file": str(tmp_path / "wikihowAll.csv"), "format": "wikihow"}
    rows = {"train_file": str(tmp_path / "rows.csv"), "format": "csv"}
    data = {"sets": {"articles": articles, "rows": rows}} if of_a_set else articles
    config = RunConfig.model_validate({"output_dir": "out", "model": {"path": "m"}, "data": data, "training": NO_EVAL})
    (tmp_path / PROMPT_NAME).write_text(prompt_text(config, None, conversations=False))
    asked = tmp_path / "new.jsonl"
    asked.write_text(json.dumps({"text": ARTICLE}) + "\n")
    found = recorded_run(tmp_path)

    def source(name):
        return read_inputs(asked, source_spec(found.of_set(name).data)).rows[0].source

    # The authors' process.py: re.sub(r"[.]+[\n]+[,]", ".\n", text)
    assert source("articles" if of_a_set else None) == re.sub(r"[.]+[\n]+[,]", ".\n", ARTICLE)
    if of_a_set:
        assert source("rows") == ARTICLE


def test_the_format_of_the_runs_files_does_not_travel(tmp_path):
    """A model trained on JSON Lines is evaluated on CSV files too."""
    data = {"train_file": "train.txt", "format": "jsonl"}
    config = RunConfig.model_validate({"output_dir": "out", "model": {"path": "m"}, "data": data, "training": NO_EVAL})
    assert json.loads(prompt_text(config, None, conversations=False))["data"]["format"] == "auto"


def written(directory, **changes):
    """A prompt file of version 1."""
    (directory / PROMPT_NAME).write_text(json.dumps({"fullshard_prompt": 1} | changes))
    return directory


@pytest.mark.parametrize(
    ("changes", "field", "expected"),
    [
        ({"data": ["x"]}, "data", "dictionary"),
        ({"model": "x"}, "model", "dictionary"),
        ({"evaluation": 1}, "evaluation", "dictionary"),
        ({"data": {"sets": ["a"]}}, "data.sets", "dictionary"),
        ({"data": {"sets": {"a": "b"}}}, "data.sets.a", "dictionary"),
        ({"data": {"encoding": "xyz"}}, "data.encoding", "unknown encoding: xyz"),
        ({"conversations": "yes"}, "conversations", "boolean"),
        ({"conversations": True, "system_turns": {}}, "system_turns", "name of each set"),
        ({"conversations": True, "system_turns": []}, "system_turns", "dictionary"),
        ({"conversations": True, "system_turns": {"": [1]}}, "system_turns..0", "dictionary"),
        ({"conversations": True, "system_turns": {"": [{"role": "system"}]}}, "system_turns..0.content", "required"),
        ({"labels": ["a"]}, "labels", "dictionary"),
        ({"labels": {"a": "many"}}, "labels.a", "integer"),
        ({"labels": {"a": True}}, "labels.a", "integer"),
        ({"labels": {"a": -1}}, "labels.a", "greater than 0"),
    ],
)
def test_a_part_of_another_type_is_an_error_of_the_settings(tmp_path, changes, field, expected):
    directory = written(tmp_path, **changes)
    for use in (read_prompt, recorded_run, lambda path: recorded_turns(path, None)):
        with pytest.raises(ConfigError) as error:
            use(directory)
        for part in (str(directory / PROMPT_NAME), field, expected, "remove the file"):
            assert part in str(error.value)


def test_json_too_deep_to_read_is_an_error_of_the_settings(tmp_path):
    (tmp_path / PROMPT_NAME).write_text("[" * 200_000)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompt(tmp_path)


def test_a_set_brings_nothing_but_how_it_is_asked(tmp_path):
    one = {"source_column": "text", "validation_file": "/etc/passwd", "dataset_name": "mallory/rows", "weight": 2}
    found = recorded_run(written(tmp_path, data={"sets": {"a": one}})).data.sets["a"]
    assert found.model_dump(exclude_none=True) == {"source_column": "text", "train_file": Path("-")}


def test_a_models_own_file_counts_and_not_the_run_around_it(tmp_path):
    around = {"output_dir": "x", "model": {"path": "m"}, "data": {"train_file": "r.csv", "source_prefix": "theirs: "}}
    run = {"config": around | {"training": NO_EVAL}, "conversations": True, "system_turns": None, "base": {"name": "b"}}
    (tmp_path / "run.json").write_text(json.dumps(run))
    places = {name: tmp_path / name for name in ("modelA", "best", "last", "older")}
    for name, directory in places.items():
        directory.mkdir()
        if name != "older":
            written(directory, data={"source_prefix": "own: "})
    found = {name: recorded_run(directory).data.source_prefix for name, directory in places.items()}
    assert found == {"modelA": "own: ", "best": "theirs: ", "last": "theirs: ", "older": "theirs: "}
    assert recorded_turns(run_of(places["modelA"]), None) is None
    assert recorded_base(places["modelA"]) is None


@pytest.mark.parametrize(
    ("labels", "published"),
    [
        ({"lost": 18, "found": 2}, True),
        ({"lost": 17, "found": 2}, False),  # 19 rows for 2 labels
        ({"lost": 100, "My card ends in 4711": 1}, False),
        ({"lost": 50, "x" * 100: 50}, True),
        ({"lost": 50, "x" * 101: 50}, False),
        ({f"the answer of person {number}": 1 for number in range(1000)}, False),
        ({}, False),
        (None, False),
    ],
)
def test_targets_are_written_only_if_they_are_a_label_set(labels, published):
    values = {"output_dir": "out", "model": {"path": "m"}, "data": {"train_file": "r.csv"}, "training": NO_EVAL}
    config = RunConfig.model_validate(values | {"evaluation": {"metric": "accuracy"}})
    text = prompt_text(config, None, labels, conversations=False)
    assert json.loads(text).get("labels") == (labels if published else None)
    if not published:
        assert not any(label in text for label in labels or ())
    measured_otherwise = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"metric": "f1"})})
    assert "labels" not in json.loads(prompt_text(measured_otherwise, None, labels, conversations=False))
