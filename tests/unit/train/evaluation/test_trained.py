"""A trained model found, loaded over ranks, and put to use on new rows."""

import copy
import json
import warnings
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.utils import logging

from fullshard.core.testing import run_ranks
from fullshard.errors import ConfigError, DataError, ModelError
from fullshard.program.config import RunConfig
from fullshard.program.config.recorded import read_run, recorded_run, run_of
from fullshard.program.data import InputRow, SourceSpec, add_plain_template, read_inputs, read_split
from fullshard.program.metrics import Confusion
from fullshard.program.models import AdapterSpec, add_adapter, build_model, train_tokenizer
from fullshard.program.train.evaluation import predict as predict_module
from fullshard.program.train.evaluation.predict import predict
from fullshard.program.train.evaluation.results import (
    draw_evaluation,
    evaluation_values,
    require_no_run,
    write_evaluation,
)
from fullshard.program.train.evaluation.trained import find_trained, load_trained
from fullshard.program.train.reporting.reports import EvaluationReport, Prediction
from support.tiny_run import MODEL, read_jsonl, settings

GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "initializer_range": 0.5}
LINES = ["where is my card", "i lost it", "what is the rate of exchange today", "my card", "the rate is lost today"]
ROWS = [InputRow(line, number) for number, line in enumerate(LINES, start=1)]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([*LINES, "route: "], 60)


def save(model, tokenizer, directory):
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def written_by(directory, ranks, config=None, **evaluation):
    """What each rank got for ``ROWS``, in one list."""

    def work(comm):
        trained = find_trained(str(directory), config)
        model, its_tokenizer, notes = load_trained(trained, comm)
        settings_ = trained.config.evaluation.model_copy(update={"max_new_tokens": 6, **evaluation})
        changed = trained.config.model_copy(update={"evaluation": settings_})
        return [one.text for part in predict(model, its_tokenizer, ROWS, changed, comm) for one in part], notes

    return run_ranks(ranks, work)


@torch.no_grad()
def written_alone(model, tokenizer, prefix="", **options):
    texts = []
    for line in LINES:
        ids = tokenizer(prefix + line, return_tensors="pt").input_ids
        row = model.eval().generate(input_ids=ids, max_new_tokens=6, do_sample=False, **options)[0]
        row = row if model.config.is_encoder_decoder else row[ids.shape[1] :]
        texts.append(tokenizer.decode(row, skip_special_tokens=True).strip())
    return texts


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_plain_model_predicts_as_it_does_alone(ranks, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(predict_module, "CHUNK_BATCHES", 1)
    directory = save(build_model(GPT2, tokenizer, seed=3), tokenizer, tmp_path / "model")
    expected = written_alone(AutoModelForCausalLM.from_pretrained(directory), tokenizer)
    assert len(set(expected)) > 2
    for texts, _ in written_by(directory, ranks):
        assert texts == expected


def test_a_source_that_is_cut_says_so(tokenizer, tmp_path):
    directory = save(build_model(GPT2, tokenizer, seed=3), tokenizer, tmp_path / "model")

    def work(comm):
        trained = find_trained(str(directory))
        model, its_tokenizer, _ = load_trained(trained, comm)
        changed = trained.config.model_copy(
            update={"data": trained.config.data.model_copy(update={"max_source_length": 5, "max_target_length": 2})}
        )
        return [one.cut for part in predict(model, its_tokenizer, ROWS, changed, comm) for one in part]

    longer = [len(tokenizer(line).input_ids) > 5 for line in LINES]
    assert 0 < sum(longer) < len(LINES)
    assert run_ranks(2, work) == [longer] * 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_row_has_its_own_prediction_also_where_it_is_repeated_or_cannot_be_used(
    ranks, tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setattr(predict_module, "CHUNK_BATCHES", 1)
    directory = save(build_model(GPT2, tokenizer, seed=3), tokenizer, tmp_path / "model")
    expected = dict(zip(LINES, written_alone(AutoModelForCausalLM.from_pretrained(directory), tokenizer), strict=True))
    texts = [*([""] * 19), *LINES, "", *reversed(LINES), LINES[0], ""]  # a chunk of nothing usable among them
    rows = [InputRow(text, line, None if text else "it is empty") for line, text in enumerate(texts, start=1)]

    def work(comm):
        trained = find_trained(str(directory))
        model, its_tokenizer, _ = load_trained(trained, comm)
        settings_ = trained.config.evaluation.model_copy(update={"max_new_tokens": 6})
        changed = trained.config.model_copy(update={"evaluation": settings_})
        return [one.as_dict() for part in predict(model, its_tokenizer, rows, changed, comm) for one in part]

    unusable = {"input": "", "prediction": None, "problem": "it is empty"}
    for written in run_ranks(ranks, work):
        assert written == [{"input": text, "prediction": expected[text]} if text else unusable for text in texts]


def finished_run(directory, model, tokenizer, **changes):
    out = save(model, tokenizer, directory / "out")
    config = RunConfig.model_validate(settings(directory, **changes))
    (out / "summary.json").write_text(json.dumps({"config": config.as_plain()}))
    return out, config


def test_a_run_says_prefix_and_beams(tokenizer, tmp_path):
    changes = {"data__source_prefix": "route: ", "data__max_source_length": 40}
    out, _ = finished_run(tmp_path, build_model(MODEL, tokenizer, seed=3), tokenizer, **changes)
    for name in ("train.csv", "held_out.csv"):
        (tmp_path / name).unlink()  # the rows are not needed any more
    config = recorded_run(out)
    model = AutoModelForSeq2SeqLM.from_pretrained(out)
    ((texts, notes),) = written_by(out, 1, config, num_beams=2)
    assert texts == written_alone(model, tokenizer, "route: ", num_beams=2)
    assert texts != written_alone(model, tokenizer, num_beams=2)
    assert notes == ()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_adapter_of_conversations_keeps_their_template(tokenizer, tmp_path):
    base = save(build_model(GPT2, tokenizer, seed=3), tokenizer, tmp_path / "base")
    spec = AdapterSpec("lora", str(base))
    add_adapter(build_model(GPT2, tokenizer, seed=3), spec, seed=1).model.save_pretrained(tmp_path / "adapter")
    chatting = copy.deepcopy(tokenizer)
    add_plain_template(chatting)
    chatting.save_pretrained(tmp_path / "adapter")
    trained = find_trained(str(tmp_path / "adapter"))
    found = run_ranks(2, lambda comm: load_trained(trained, comm)[1].chat_template)
    assert found == [chatting.chat_template] * 2


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_loading_an_adapter_draws_and_warns_of_nothing(tokenizer, tmp_path, capfd):
    base = save(build_model(MODEL, tokenizer, seed=3), tokenizer, tmp_path / "base")
    add_adapter(build_model(MODEL, tokenizer, seed=3), AdapterSpec("lora", str(base)), seed=1).model.save_pretrained(
        tmp_path / "adapter"
    )
    capfd.readouterr()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        run_ranks(1, lambda comm: load_trained(find_trained(str(tmp_path / "adapter")), comm))
    assert capfd.readouterr().err == ""
    assert [str(one.message) for one in warned] == []
    assert logging.is_progress_bar_enabled()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_adapter_is_loaded_with_the_model_under_it(tokenizer, tmp_path):
    base = save(build_model(GPT2, tokenizer, seed=3), tokenizer, tmp_path / "base")
    plain = AutoModelForCausalLM.from_pretrained(base)
    expected = written_alone(plain, tokenizer)
    adapted = get_peft_model(plain, LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], fan_in_fan_out=True))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 2, generator=torch.Generator().manual_seed(1))
    adapted.save_pretrained(tmp_path / "adapter")
    whole = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
    with_adapter = written_alone(whole, tokenizer)
    assert with_adapter != expected
    for texts, notes in written_by(tmp_path / "adapter", 2):
        assert texts == with_adapter
        assert "is an adapter" in notes[0]


def test_a_directory_without_a_model_is_said_to_be_one(tmp_path):
    with pytest.raises(ModelError, match="has no model"):
        find_trained(str(tmp_path))


def test_a_run_that_has_not_finished_has_its_best_model_named(tmp_path):
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=rf"has not finished .* Pass its best model so far: {tmp_path}/best"):
        find_trained(str(tmp_path))


def test_settings_of_a_finished_run_follow_it_to_another_place(tokenizer, tmp_path):
    out, config = finished_run(tmp_path, build_model(MODEL, tokenizer, seed=3), tokenizer)
    moved = out.rename(tmp_path / "moved")
    run = read_run(moved, ["evaluation.num_beams=3"])
    assert run.output_dir == moved
    assert run.evaluation == config.evaluation.model_copy(update={"num_beams": 3})
    assert run.data == config.data
    with pytest.raises(ConfigError, match="num_beans"):
        read_run(moved, ["evaluation.num_beans=3"])
    with pytest.raises(ConfigError, match=r"no summary\.json"):
        read_run(tmp_path)
    assert recorded_run(tmp_path) is None


def test_a_runs_best_model_has_the_settings_of_the_run_around_it(tokenizer, tmp_path, monkeypatch):
    out, config = finished_run(tmp_path, build_model(MODEL, tokenizer, seed=3), tokenizer)
    best = save(build_model(MODEL, tokenizer, seed=4), tokenizer, out / "best")
    assert run_of(best) is None, "there is no run.json"
    (out / "run.json").write_text((out / "summary.json").read_text())
    assert run_of(out) == out
    monkeypatch.chdir(best)
    for directory in (best, Path()):
        assert run_of(directory) == out.resolve()
        assert recorded_run(directory).data.max_source_length == config.data.max_source_length == 12
    (out / "run.json").write_text('{"lap": 3}')
    assert recorded_run(best) is None, "another program's file"


# Rows without targets


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "text", "options"),
    [
        ("rows.txt", "one\n two \r\nthree", {}),
        ("rows.csv", "text\none\n two \nthree\n", {}),
        ("rows.csv", "id,text\n1,one\n2, two \n3,three\n", {}),
        ("rows.csv", "id,question\n1,one\n2, two \n3,three\n", {"source_column": "question", "target_column": "gone"}),
        ("rows.jsonl", '{"a": "one"}\n{"a": " two "}\n{"a": "three"}\n', {"template": "{a}", "target_column": "gone"}),
        ("rows.csv", "question,context\none,\n two ,\nthree,\n", {}),
        ("rows.csv", "id,sentence\n1,one\n2, two \n3,three\n", {"format": "phrasebank"}),
        ("rows.csv", "id;text\n1;one\n2; two \n3;three\n", {}),
        ("rows.csv", "id~text\n1~one\n2~ two \n3~three\n", {"delimiter": "~"}),
        ("rows.csv", "id,text\n1,one\n2, two \n3,three\n", {"delimiter": ";"}),
        ("rows.jsonl", '{"text": "one"}\n{"text": " two "}\n{"text": "three"}\n', {"delimiter": ";"}),
    ],
    ids=[
        *("lines", "only column", "known column", "given column", "template", "known columns", "phrasebank"),
        *("semicolons", "the run's delimiter", "not the run's delimiter", "no delimiter"),
    ],
)
def test_only_the_source_of_a_row_is_read(name, text, options, tmp_path):
    table = read_inputs(write(tmp_path / name, text), SourceSpec(train_file=tmp_path / "gone.csv", **options))
    assert [(row.source, row.problem) for row in table.rows] == [("one", None), (" two ", None), ("three", None)]


@pytest.mark.parametrize(
    ("name", "content", "options", "expected"),
    [
        (
            "rows.txt",
            b"\xef\xbb\xbfone\n\n  \nbad \xff\nfive\n\n",
            {},
            [
                ("one", 1, None),
                ("", 2, "it is empty"),
                ("  ", 3, "it is empty"),
                ("", 4, "byte 0xff is not UTF-8"),
                ("five", 5, None),
                ("", 6, "it is empty"),
            ],
        ),
        (
            "rows.csv",
            b'id,text\n1,one\n2,\n3\n4," "\n5,five\n',
            {},
            [
                ("one", 2, None),
                ("", 3, "column 'text' is empty"),
                ("", 4, "the row has 1 cells, the header 2"),
                ("", 5, "column 'text' is empty"),
                ("five", 6, None),
            ],
        ),
        (
            "rows.jsonl",
            b'{"text": "one"}\n{"text": null}\n{"te\n[]\n{"text": "five"}\n',
            {"source_column": "text"},
            [
                ("one", 1, None),
                ("", 2, "column 'text' is missing"),
                ("", 3, "broken JSON"),
                ("", 4, "the line is a JSON list"),
                ("five", 5, None),
            ],
        ),
        ("rows.csv", b"a,b\n,two\n,\n", {"template": "{a}{b}"}, [("two", 2, None), ("", 3, "'a' and 'b' is empty")]),
    ],
    ids=["lines", "cells", "objects", "template"],
)
def test_rows_that_cannot_be_used_keep_their_place(name, content, options, expected, tmp_path):
    """However few ``max_bad_rows`` training would allow."""
    path = tmp_path / name
    path.write_bytes(content)
    rows = read_inputs(path, SourceSpec(**options)).rows
    assert [(row.source.strip("\n"), row.line) for row in rows] == [(source, line) for source, line, _ in expected]
    for row, (_, _, problem) in zip(rows, expected, strict=True):
        assert (row.problem is None) == (problem is None)
        assert problem is None or problem in row.problem


def test_wikihow_articles_are_mended_as_for_training(tmp_path):
    path = write(tmp_path / "new.csv", 'text,title\n"One.\n\n, Two.\n,Three",t\n')
    table = read_inputs(path, SourceSpec(format="wikihow"))
    assert [row.source for row in table.rows] == ["One.\n Two.\nThree"]


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ('{"question": "q", "context": "c", "answer": "a"}\n', {}),
        ('{"instruction": "i", "input": "n", "output": "o"}\n{"instruction": "i", "output": "o"}\n', {}),
        ('{"instruction": "i", "input": "n", "response": "o"}\n', {}),
        ('{"question": "q", "context": "c", "mine": "a"}\n', {"target_column": "mine"}),
    ],
    ids=["context", "input", "no shape of both", "own target"],
)
def test_columns_that_training_joins_are_joined(text, options, tmp_path):
    path = write(tmp_path / "rows.jsonl", text)
    learned = read_split(SourceSpec(train_file=path, **options), "train").examples
    table = read_inputs(path, SourceSpec(**options))
    assert [row.source for row in table.rows] == [row.source for row in learned]
    assert "chosen by name" in table.notes[0]
    without = path.read_text()
    for target in ("answer", "output"):  # rows to predict for need have none
        without = without.replace(f', "{target}": "{target[0]}"', "")
    table = read_inputs(write(path, without), SourceSpec(**options))
    assert [row.source for row in table.rows] == [row.source for row in learned]


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("rows.csv", "a,b,c\n1,2,3\n", "Its columns: 'a', 'b', 'c'"),
        ("rows.csv", "text,question\n1,2\n", "which column is the source"),
        ("rows.txt", "", "is empty"),
        ("rows.xml", "<a/>", "must end in"),
    ],
)
def test_rows_that_cannot_be_told_are_an_error(name, text, problem, tmp_path):
    with pytest.raises(DataError, match=problem):
        read_inputs(write(tmp_path / name, text), SourceSpec())


# What an evaluation leaves


def report(labels):
    confusion = Confusion(tuple(f"label {number}" for number in range(labels)), ((0, 0, 3), (0, labels, 1), (1, 0, 2)))
    return EvaluationReport(
        step=0,
        epoch=0.0,
        loss=0.5,
        metric="accuracy",
        value=0.5,
        baseline=0.25,
        baseline_name="always 'a'",
        metrics={"accuracy": 0.5, "perplexity": 1.65},
        baselines={"accuracy": 0.25},
        confusion=confusion,
        predictions=(Prediction("[in]", "out", ("ref", "other")),),
        seconds=1.0,
    )


@pytest.mark.parametrize(("labels", "shown"), [(2, "·"), (13, "most frequent of 3 mistakes")])
def test_an_evaluation_is_shown_and_written(labels, shown, tmp_path):
    done = report(labels)
    values = evaluation_values(done, model="m", data="[d].csv", rows=6, world_size=2)
    console = Console(width=100, record=True)
    draw_evaluation(console, done, values, tmp_path)
    text = console.export_text()
    assert "m on 6 rows of [d].csv" in text
    assert "50.00%   25.00%"[:6] in text
    assert "1.650" in text
    assert shown in text
    assert "(other)" in text
    write_evaluation(done, values, tmp_path / "new")
    assert read_jsonl(tmp_path / "new" / "predictions.jsonl") == [
        {"input": "[in]", "prediction": "out", "references": ["ref", "other"]}
    ]
    saved = json.loads((tmp_path / "new" / "evaluation.json").read_text())
    assert saved == values
    assert saved["confusion"]["cells"] == [[0, 0, 3], [0, labels, 1], [1, 0, 2]]
    assert not {"kind", "step", "epoch", "predictions", "words"} & saved.keys()


def test_an_evaluation_says_how_words_of_other_scripts_are_counted(tmp_path):
    done = replace(report(2), words={"rougeL": "words of any script"})
    values = evaluation_values(done, model="m", data="d.csv", rows=6, world_size=2)
    assert values["words"] == {"rougeL": "words of any script"}
    console = Console(width=100, record=True)
    draw_evaluation(console, done, values, tmp_path)
    assert "rougeL: words of any script" in console.export_text()
    assert EvaluationReport.from_values(asdict(done)) == done


def test_a_runs_own_predictions_are_not_replaced(tmp_path):
    require_no_run(tmp_path)
    write(tmp_path / "summary.json", "{}")
    with pytest.raises(ConfigError, match="Set --output"):
        require_no_run(tmp_path)


def test_an_evaluation_comes_back_from_a_checkpoint_as_it_was():
    one = report(2)
    values = json.loads(
        json.dumps(
            {
                **one.__dict__,
                "confusion": one.confusion.__dict__,
                "predictions": [prediction.__dict__ for prediction in one.predictions],
            }
        )
    )
    assert EvaluationReport.from_values(values) == one


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_prompt_adapter_of_a_causal_model_takes_one_row_at_a_time(tokenizer, tmp_path):
    base = save(build_model(GPT2, tokenizer, seed=3), tokenizer, tmp_path / "base")
    spec = AdapterSpec(type="prompt", base=str(base), num_virtual_tokens=3)
    add_adapter(AutoModelForCausalLM.from_pretrained(base), spec, seed=1).model.save_pretrained(tmp_path / "adapter")

    def work(comm, batch_size):
        trained = find_trained(str(tmp_path / "adapter"))
        model, its_tokenizer, _ = load_trained(trained, comm)
        training = trained.config.training.model_copy(update={"per_device_eval_batch_size": batch_size})
        changed = trained.config.model_copy(update={"training": training})
        return list(predict(model, its_tokenizer, ROWS[:2], changed, comm))

    with pytest.raises(ConfigError, match="--batch-size 1"):
        run_ranks(1, lambda comm: work(comm, 2))
    assert len(run_ranks(1, lambda comm: work(comm, 1))[0][0]) == 2


def test_ways_of_the_training_are_not_needed(tmp_path, tokenizer):
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(
        AutoConfig.for_model(**MODEL, vocab_size=len(tokenizer), decoder_start_token_id=0)
    )
    directory = save(model, tokenizer, tmp_path / "model")
    speed = {"speed": {"ways": ["flex", "liger"]}}
    config = RunConfig.model_validate(settings(tmp_path, model={"path": str(directory)}) | speed)
    assert written_by(directory, 1, config) == written_by(directory, 1)
