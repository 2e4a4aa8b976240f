"""The file with what decides a prompt: what it keeps, what it refuses, and whose file counts."""

import json
import re

import pytest

from fullshard.config import PROMPT_NAME, RunConfig, prompt_text, recorded_run
from fullshard.data import read_inputs
from fullshard.train.setup.set_rows import source_spec

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
