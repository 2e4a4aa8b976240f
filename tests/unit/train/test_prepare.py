"""What a run needs before its ranks: made once, found again, and made anew where anything it depends on has changed."""

import json
import shutil

import pytest

from fullshard.comm import run_ranks
from fullshard.config import RunConfig
from fullshard.data import Example
from fullshard.errors import DataError, ModelError
from fullshard.models import kind
from fullshard.train import prepare as module
from fullshard.train.prepare import prepare, prepare_tokenizer
from support.tiny_run import LABELS, settings, write_rows


def config_of(directory, **changes):
    return RunConfig.model_validate(settings(directory, **{"data__cache_dir": str(directory / "cache")} | changes))


def gpt2_directory(directory, template=None):
    """A causal model's directory: its configuration and a tokenizer, no weights."""
    tokenizer = prepare_tokenizer(config_of(directory))
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory / "gpt2")
    (directory / "gpt2" / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    return {"model": {"path": str(directory / "gpt2")}}


def test_it_finds_again_what_it_made_without_reading_a_row(tmp_path, monkeypatch):
    config, said, told = config_of(tmp_path, data__max_target_length=2), [], []  # the last call truncates
    first = prepare(config, said.append, lambda *where: told.append(where))
    assert said == ["training a tokenizer on 25 rows", "tokenizing 25 training rows", "tokenizing 7 held-out rows"]
    assert told == [
        (f"{which} rows", *done) for which, n in (("training", 25), ("held-out", 7)) for done in ((0, n), (n, n))
    ]
    monkeypatch.setattr(module, "read_split", None)
    said.clear()
    again = prepare(config, said.append)
    assert said == []
    assert again.train_set.source_ids.tolist() == first.train_set.source_ids.tolist()
    assert again.train_set.source_stats == first.train_set.source_stats
    assert again.tokenizer.backend_tokenizer.to_str() == first.tokenizer.backend_tokenizer.to_str()
    for name in ("held_out", "labels", "majority", "notes", "causal", "model_directory"):
        assert getattr(again, name) == getattr(first, name)
    assert again.held_out_set.target_ids.tolist() == first.held_out_set.target_ids.tolist()


def test_what_it_says_of_rows_is_what_they_are(tmp_path):
    prepared = prepare(config_of(tmp_path))
    assert (prepared.causal, prepared.model_directory, prepared.majority) == (False, None, LABELS[0])
    assert prepared.labels == dict(zip(LABELS, (9, 8, 8), strict=True))
    assert prepared.held_out[1] == Example("what is the 26", (LABELS[2],), 3)
    ids = prepared.train_set.source_ids[3].tolist()
    assert prepared.tokenizer.decode(ids, skip_special_tokens=True) == "where is my card 3"
    lines = [note for note in prepared.notes if note.startswith(("training", "held-out"))]
    assert [line.split(",")[0] for line in lines] == ["training: 25 rows", "held-out: 7 rows"]
    none = prepare(config_of(tmp_path, training__eval_strategy="no"))
    assert (none.held_out, none.held_out_set) == ([], None)


def test_more_targets_than_labels_are_are_no_label_set(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOST_LABELS", 2)
    assert prepare(config_of(tmp_path)).labels is None


def test_what_is_cut_is_said(tmp_path):
    notes = prepare(config_of(tmp_path, data__max_source_length=3)).notes
    assert any("training sources were cut to 3 tokens (data.max_source_length)" in note for note in notes)


@pytest.mark.parametrize(
    "change",
    [
        {"data__max_source_length": 11},
        {"data__max_target_length": 7},
        {"data__source_prefix": "label: "},
        {"data__max_train_samples": 24},
        {"data__target_column": "text"},
        {"model__tokenizer": {"vocab_size": 61}},
    ],
)
def test_anything_that_changes_ids_makes_them_anew(tmp_path, change):
    prepare(config_of(tmp_path))
    said = []
    prepare(config_of(tmp_path, **change), said.append)
    assert any(line.startswith("tokenizing") and "training rows" in line for line in said)


def test_other_content_of_a_file_or_a_tokenizer_makes_them_anew(tmp_path):
    said, changes = [], gpt2_directory(tmp_path)
    prepare(config_of(tmp_path, **changes))
    (tmp_path / "gpt2" / "added").write_text("nothing of the tokenizer's")
    prepare(config_of(tmp_path, **changes), said.append)
    assert said == []
    prepare(
        config_of(tmp_path, **gpt2_directory(tmp_path, "{% for m in messages %}{{ m.content }} {% endfor %}")),
        said.append,
    )
    assert said == ["tokenizing 25 training rows", "tokenizing 7 held-out rows"]
    config = config_of(tmp_path)
    prepare(config)
    said.clear()
    write_rows(tmp_path / "train.csv", 25, start=1)
    prepare(config, said.append)
    assert said == ["training a tokenizer on 25 rows", "tokenizing 25 training rows", "tokenizing 7 held-out rows"]


def test_ranks_that_prepare_at_once_work_once_and_get_the_same(tmp_path):
    config, said = config_of(tmp_path), []
    found = run_ranks(3, lambda comm: prepare(config, said.append))
    assert sorted(line for line in said if not line.startswith("waiting")) == [
        "tokenizing 25 training rows",
        "tokenizing 7 held-out rows",
        "training a tokenizer on 25 rows",
    ]
    assert len({str(each.train_set.source_ids.tolist()) for each in found}) == 1


def test_a_damaged_entry_is_made_anew(tmp_path):
    config = config_of(tmp_path)
    first = prepare(config).train_set.source_ids.tolist()
    for path in (tmp_path / "cache").glob("*/source.ids"):
        path.write_bytes(path.read_bytes()[:-4])
    said = []
    assert prepare(config, said.append).train_set.source_ids.tolist() == first
    assert said == ["tokenizing 25 training rows", "tokenizing 7 held-out rows"]
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("a file in the way")
    with pytest.raises(DataError, match=r"cannot be used: .*Set data.cache_dir"):
        prepare(config)


def test_a_missing_prefix_is_pointed_out(tmp_path):
    changes = gpt2_directory(tmp_path)
    tasks = {"summarization": {"prefix": "summarize: "}, "other": {"num_beams": 4}}
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps({"model_type": "t5", "task_specific_params": tasks}))
    notes = prepare(config_of(tmp_path, **changes)).notes
    assert any("was trained with a prefix for each task (summarization: 'summarize: ')" in note for note in notes)
    for given in ({"data__source_prefix": "summarize: "}, {"data__template": "{text}", "data__source_column": None}):
        notes = prepare(config_of(tmp_path, **changes | given)).notes
        assert not any("prefix for each task" in note for note in notes)


@pytest.mark.parametrize(
    ("source", "model_class", "causal"),
    [
        ({"model_type": "t5"}, "auto", False),
        ({"model_type": "gpt2"}, "auto", True),
        ({"model_type": "bart"}, "causal", True),
        ({"model_type": "gpt2"}, "seq2seq", False),
    ],
)
def test_causal_is_what_the_configuration_says(source, model_class, causal):
    assert kind.reads_one_sequence(source, model_class) is causal


def test_causal_is_read_from_a_directory(tmp_path):
    assert prepare(config_of(tmp_path, **gpt2_directory(tmp_path))).causal


def test_a_configuration_of_wrong_types_is_an_error_in_words(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": "two"}))
    with pytest.raises(ModelError, match=r"(?s)config\.json cannot be read.*hidden_size"):
        kind.reads_one_sequence(tmp_path)
