"""What decides a prompt travels with every form of a model; what its file keeps and refuses, and whose file counts."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from fullshard.core.testing import run_ranks
from fullshard.errors import ConfigError
from fullshard.program.cli import main as cli
from fullshard.program.config import (
    PROMPT_NAME,
    RunConfig,
    prompt_text,
    read_prompt,
    recorded_base,
    recorded_run,
    recorded_turns,
    run_of,
)
from fullshard.program.data import InputRow, read_inputs
from fullshard.program.launch.programs.predict import settings_notes
from fullshard.program.models import train_tokenizer
from fullshard.program.sharing.contents import contents_of
from fullshard.program.train.evaluation.predict import predict
from fullshard.program.train.evaluation.trained import find_trained, load_trained
from fullshard.program.train.reporting.card import CardSink
from fullshard.program.train.setup.prepare import source_spec
from fullshard.state.saving.export import ExportOptions, choose_checkpoint, export
from support.adapter_steps import GPT2, write_base
from support.interrupted_run import OFTEN, run
from support.tiny_run import WORDS, read_jsonl, write_rows

pytestmark = [
    pytest.mark.usefixtures("unmetered"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
]

PREFIX, SEPARATOR, LENGTH, NEW = "route: ", " => ", 9, 4
FORMS = ("merge", "adapter", "best", "shared")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    directory = tmp_path_factory.mktemp("base")
    texts = [*WORDS, *WORDS.values(), *map(str, range(40)), PREFIX + SEPARATOR]
    write_base(directory, GPT2, train_tokenizer(texts * 3, 120), scale=25)
    return directory


@pytest.fixture(scope="module")
def finished(base, tmp_path_factory, unmetered):
    """The output_dir of a run of a causal model with LoRA, and its training rows' format."""
    directory = tmp_path_factory.mktemp("finished")
    write_rows(directory / "many.csv", 30)  # enough rows of each label to be a label set
    changes = {
        "data__train_file": str(directory / "many.csv"),
        "data__max_train_samples": 30,
        "model": {"path": str(base), "adapter": {"type": "lora", "r": 4, "lora_alpha": 32}},
        "data__source_prefix": PREFIX,
        "data__separator": SEPARATOR,
        "data__max_source_length": LENGTH,
        "training__learning_rate": 1e-3,
        "evaluation__metric": "accuracy",
        "evaluation__max_new_tokens": NEW,
        "evaluation__min_new_tokens": NEW,
        "sharding__wrap": "auto",
    }
    run(directory, CardSink(directory / "out", print), ranks=2, **{**OFTEN, **changes})
    return directory / "out"


@pytest.fixture(scope="module")
def forms(finished, tmp_path_factory):
    """The run's model in each form, far from the run."""
    away = tmp_path_factory.mktemp("away")
    checkpoint = choose_checkpoint(finished)
    for form in ("merge", "adapter"):
        export(checkpoint, away / form, ExportOptions(lora=form))
    shutil.copytree(finished / "best", away / "best")
    for file in contents_of(finished, "ada/router").files:
        target = away / "shared" / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.content if isinstance(file.content, bytes) else file.content.read_bytes())
    return away


def alone(directory, base, texts):
    """Texts by transformers and peft alone, asked as the training rows were."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base)
    if (directory / "adapter_config.json").exists():
        model = PeftModel.from_pretrained(model, directory)
    else:
        model = AutoModelForCausalLM.from_pretrained(directory)
    between = tokenizer(SEPARATOR, add_special_tokens=False).input_ids
    written = []
    for text in texts:
        ids = tokenizer(PREFIX + text).input_ids
        end = [ids.pop()] if ids[-1] == tokenizer.eos_token_id else []
        ids = torch.tensor([[*ids[: LENGTH - len(between) - len(end)], *between, *end]])
        with torch.no_grad():
            how = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
            row = model.eval().generate(input_ids=ids, **how)[0]
        written.append(tokenizer.decode(row[ids.shape[1] :], skip_special_tokens=True).strip())
    return written


@pytest.mark.parametrize("form", FORMS)
def test_a_model_away_from_its_run_is_asked_as_in_training(finished, forms, base, form):
    directory = forms / form
    assert run_of(directory) == directory
    before, after = recorded_run(finished).as_plain(), recorded_run(directory).as_plain()
    for section, names in {
        "data": ("source_prefix", "separator", "max_source_length", "max_target_length", "source_column", "encoding"),
        "evaluation": ("max_new_tokens", "num_beams", "metric"),
    }.items():
        assert {name: after[section][name] for name in names} == {name: before[section][name] for name in names}
    assert PROMPT_NAME in settings_notes(directory)[0]

    rows = read_jsonl(finished / "predictions.jsonl")
    texts = [row["input"] for row in rows]
    expected = alone(directory, base, texts)
    assert len(set(expected)) > 1
    assert [row["prediction"] for row in rows] == expected

    def work(comm):
        trained = find_trained(str(directory), recorded_run(directory))
        model, tokenizer, _ = load_trained(trained, comm)
        inputs = [InputRow(text, line) for line, text in enumerate(texts, start=1)]
        return [one.text for part in predict(model, tokenizer, inputs, trained.config, comm) for one in part]

    assert run_ranks(2, work)[0] == expected


def test_nothing_of_the_machine_or_the_data_travels(finished, forms):
    text = (forms / "shared" / PROMPT_NAME).read_text()
    for private in (str(finished), "many.csv", "held_out.csv", "cache", "output_dir"):
        assert private not in text
    values = json.loads(text)
    assert set(values["labels"]) == {row["references"][0] for row in read_jsonl(finished / "predictions.jsonl")}


def test_evaluate_measures_a_model_without_its_run(finished, forms, capfd):
    file = finished.parent / "held_out.csv"
    expected = json.loads((finished / "summary.json").read_text())
    arguments = ["evaluate", str(forms / "merge"), "--data", str(file), "--json", "nproc=1"]
    assert cli.main(arguments) == 0
    measured = json.loads(capfd.readouterr().out)
    assert measured["value"] == expected["value"]
    assert measured["baseline"] == expected["baseline"]
    assert Path(forms / "merge" / "evaluation" / "predictions.jsonl").exists()


def test_a_model_without_its_run_has_no_rows_of_its_own(forms, capfd):
    assert cli.main(["evaluate", str(forms / "merge")]) != 0
    assert "--data FILE" in capfd.readouterr().err


def test_a_run_of_an_earlier_version_is_shared_with_its_prompt(finished, forms, tmp_path):
    older = shutil.copytree(finished, tmp_path / "older")
    (older / PROMPT_NAME).unlink()
    (file,) = (file for file in contents_of(older, "ada/router").files if file.name == PROMPT_NAME)
    values, written = json.loads(file.content), json.loads((forms / "shared" / PROMPT_NAME).read_text())
    del written["labels"]  # not recorded then
    assert values == written


def test_system_turns_travel(forms, tmp_path):
    directory = shutil.copytree(forms / "adapter", tmp_path / "chat")
    assert recorded_turns(directory, None) is None
    values = json.loads((directory / PROMPT_NAME).read_text())
    turns = [{"role": "system", "content": "Be brief."}]
    values |= {"conversations": True, "system_turns": {"": turns}}
    (directory / PROMPT_NAME).write_text(json.dumps(values))
    assert list(recorded_turns(run_of(directory), None).system) == turns


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "cannot be read"),
        ('{"fullshard_prompt": 2}', "version 2 and this fullshard reads 1"),
        ('{"fullshard_prompt": 1, "data": {"max_source_length": -1}}', "invalid"),
    ],
)
def test_a_file_that_cannot_be_used_is_an_error(forms, tmp_path, content, problem):
    directory = shutil.copytree(forms / "adapter", tmp_path / "model")
    (directory / PROMPT_NAME).write_text(content)
    with pytest.raises(ConfigError, match=problem):
        recorded_run(directory)


def test_only_known_settings_are_read(forms, tmp_path):
    directory = shutil.copytree(forms / "adapter", tmp_path / "model")
    values = json.loads((directory / PROMPT_NAME).read_text())
    values["training"]["push_to_hub"] = {"repo": "mallory/all"}
    values["data"]["train_file"] = "/etc/passwd"
    (directory / PROMPT_NAME).write_text(json.dumps(values))
    found = recorded_run(directory)
    assert found.training.push_to_hub is None
    assert str(found.data.train_file) == "-"


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
