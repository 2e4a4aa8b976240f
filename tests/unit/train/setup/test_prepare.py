"""What a run needs before its ranks: made once, found again, and made anew where anything it depends on has changed."""

import datetime
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from tokenizers import normalizers

from fullshard.core.testing import run_ranks
from fullshard.errors import ConfigError, DataError, ModelError
from fullshard.program.config import RunConfig
from fullshard.program.data import Example
from fullshard.program.launch.programs import evaluate as evaluate_program
from fullshard.program.launch.programs.evaluate import with_rows
from fullshard.program.models import hub
from fullshard.program.train.run.assemble import make_evaluation
from fullshard.program.train.setup import prepare as prepare_module
from fullshard.program.train.setup.prepare import prepare, prepare_tokenizer
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
    monkeypatch.setattr(prepare_module, "read_split", None)
    said.clear()
    again = prepare(config, said.append)
    assert said == []
    assert again.train_set.source_ids.tolist() == first.train_set.source_ids.tolist()
    assert again.train_set.source_stats == first.train_set.source_stats
    assert again.tokenizer.backend_tokenizer.to_str() == first.tokenizer.backend_tokenizer.to_str()
    for name in ("held_out", "labels", "notes", "causal", "model_directory"):
        assert getattr(again, name) == getattr(first, name)
    assert again.held_out_set.target_ids.tolist() == first.held_out_set.target_ids.tolist()


def test_what_it_says_of_rows_is_what_they_are(tmp_path):
    prepared = prepare(config_of(tmp_path))
    assert (prepared.causal, prepared.model_directory, prepared.sets[0].majority) == (False, None, LABELS[0])
    assert prepared.labels == dict(zip(LABELS, (9, 8, 8), strict=True))
    assert prepared.held_out[1] == Example("what is the 26", (LABELS[2],), 3)
    ids = prepared.train_set.source_ids[3].tolist()
    assert prepared.tokenizer.decode(ids, skip_special_tokens=True) == "where is my card 3"
    lines = [note for note in prepared.notes if note.startswith(("training", "held-out"))]
    assert [line.split(",")[0] for line in lines] == ["training: 25 rows", "held-out: 7 rows"]
    none = prepare(config_of(tmp_path, training__eval_strategy="no"))
    assert (none.held_out, none.held_out_set) == ([], None)


def test_more_targets_than_labels_are_are_no_label_set(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_module, "MOST_LABELS", 2)
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
    assert sorted(line for line in said if "waiting for it" not in line) == [
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
    assert hub.reads_one_sequence(source, model_class) is causal


def test_causal_is_read_from_a_directory(tmp_path):
    assert prepare(config_of(tmp_path, **gpt2_directory(tmp_path))).causal


def test_a_configuration_of_wrong_types_is_an_error_in_words(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": "two"}))
    with pytest.raises(ModelError, match=r"(?s)config\.json cannot be read.*hidden_size"):
        hub.reads_one_sequence(tmp_path)


def test_a_template_that_writes_the_date_is_made_anew_each_day(tmp_path, monkeypatch):
    template = "{{ strftime_now('%d %B %Y') }}: {% for m in messages %}{{ m.content }} {% endfor %}"
    config, said = config_of(tmp_path, **gpt2_directory(tmp_path, template), data__max_source_length=40), []
    for day, is_new in ((1, True), (1, False), (2, True)):
        monkeypatch.setattr(prepare_module, "date", SimpleNamespace(today=lambda day=day: datetime.date(2031, 5, day)))
        said.clear()
        notes = prepare(config, said.append).notes
        assert bool(said) is is_new
        assert f"the tokenizer's chat template writes the date: 2031-05-0{day} in this run's prompts" in notes


def test_a_vocabulary_that_the_rows_cannot_fill_is_said(tmp_path):
    prepared = prepare(config_of(tmp_path, model__tokenizer={"vocab_size": 5000}))
    size = len(prepared.tokenizer)
    assert (
        f"the vocabulary has {size} pieces, not the 5,000 of model.tokenizer.vocab_size: the training rows have no more"
    ) in prepared.notes
    assert not any("the vocabulary has" in note for note in prepare(config_of(tmp_path)).notes)


def titled(path, titles):
    """WikiHow's file, with a headline of its own for each title."""
    path.write_text("headline,title,text\n" + "".join(f"{t} done,{t},{'a word ' * 9}\n" for t in titles))
    return str(path)


@pytest.mark.parametrize("kind_of_data", ["fraction", "wikihow"])
def test_rows_of_another_file_are_measured_by_the_labels_that_training_saw(tmp_path, kind_of_data):
    data = {"train_file": titled(tmp_path / "rows.csv", "abcdefghijkl"), "cache_dir": str(tmp_path / "cache")}
    if kind_of_data == "wikihow":
        data["format"] = "wikihow"
        (tmp_path / "all_train.txt").write_text("\n".join("abcdefgh") + "\n")
        (tmp_path / "all_val.txt").write_text("\n".join("ijkl") + "\n")
    else:
        data |= {"source_column": "title", "target_column": "headline", "validation_fraction": 0.4}
    config = RunConfig.model_validate(settings(tmp_path, data=data))
    seen, said = prepare(config), []
    assert 0 < len(seen.labels) < 12
    known = [label[0] for label in seen.labels][:2]  # letters that its tokenizer can write
    other = Path(titled(tmp_path / "other.csv", known))
    measured = prepare(with_rows(config, other), said.append, rows_file=other)
    assert measured.labels == seen.labels
    assert [row.references for row in measured.held_out] == [(f"{one} done",) for one in known]
    assert any(note.startswith("training: ") for note in seen.notes)
    assert any(note.startswith("held-out: 2 rows") for note in measured.notes)
    assert not any("training" in note or "rows.csv" in note for note in measured.notes)
    assert said == ["tokenizing 2 held-out rows"], "the training rows are those of the run, made before"


def test_evaluate_measures_the_file_that_it_is_given(tmp_path, monkeypatch):
    class FoundError(Exception):
        pass

    def stop(config, say, *, rows_file, rows_encoding):
        raise FoundError(rows_file, rows_encoding)

    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings(tmp_path)))
    monkeypatch.setattr(evaluate_program, "find_trained", lambda model, config, base: SimpleNamespace(config=config))
    monkeypatch.setattr(evaluate_program, "prepare", stop)
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "train.csv"
    for given, expected in (
        (["--data", "train.csv"], (file, "utf-8")),
        (["--data", "train.csv", "--encoding", "utf-16"], (file, "utf-16")),
        ([], (None, None)),
    ):
        with pytest.raises(FoundError) as found:
            evaluate_program._evaluate(evaluate_program.make_parser().parse_args(["run.yaml", *given]), is_first=False)
        assert found.value.args == expected


def test_a_models_type_is_told_without_a_network(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mt5"}))
    assert hub.known_kind(str(tmp_path)) == hub.known_kind({"model_type": "mt5"}) == "mt5"
    (tmp_path / "config.json").write_text("[]")
    assert hub.known_kind(str(tmp_path)) is None
    assert hub.known_kind("nobody/has-this") is None


@pytest.mark.parametrize("allowed", [0, 9])
def test_all_unusable_rows_are_listed_in_the_output_directory(tmp_path, allowed):
    """Also where the tokens are found in the cache, and the message shows five of them."""
    rows = "".join(f"a{n},\n" for n in range(8)) + "a,b\n" * 4
    (tmp_path / "rows.csv").write_text(f"text,label\n{rows}")
    data = {"train_file": str(tmp_path / "rows.csv"), "max_bad_rows": allowed, "cache_dir": str(tmp_path / "cache")}
    values = settings(tmp_path, data=data)
    values["training"] = {**values.get("training", {}), "eval_strategy": "no"}
    for place in ("first", "second"):
        out = tmp_path / place
        config = RunConfig.model_validate({**values, "output_dir": str(out)})
        said = f"All 8 unusable rows, one a line: {out / 'unusable_rows_train.txt'}"
        if allowed:
            assert said in prepare(config).notes
        else:
            with pytest.raises(DataError) as caught:
                prepare(config)
            assert str(caught.value).splitlines()[-2:] == ["  ... and 3 more", said]
        lines = (out / "unusable_rows_train.txt").read_text().splitlines()
        assert lines == [f"{tmp_path / 'rows.csv'}:{n}: column 'label' is empty" for n in range(2, 10)]
        assert len(list(out.iterdir())) == 1


def test_unusable_rows_of_one_file_are_listed_once(tmp_path):
    rows = "".join(f"a{n},\n" for n in range(8)) + "".join(f"a{n},b\n" for n in range(40))
    (tmp_path / "rows.csv").write_text(f"text,label\n{rows}")
    data = {"train_file": str(tmp_path / "rows.csv"), "validation_fraction": 0.3, "max_bad_rows": 9}
    found = prepare(RunConfig.model_validate(settings(tmp_path, data=data | {"cache_dir": str(tmp_path / "cache")})))
    assert [note.partition(": ")[0] for note in found.notes].count("All 8 unusable rows, one a line") == 1
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["unusable_rows_train.txt"]


def test_unusable_rows_of_a_file_to_measure_on_are_listed_apart(tmp_path):
    for name, count in (("rows", 8), ("other", 7)):
        (tmp_path / f"{name}.csv").write_text("text,label\n" + "".join(f"a{n},\n" for n in range(count)) + "a,b\n" * 4)
    data = {name: str(tmp_path / "rows.csv") for name in ("train_file", "validation_file")}
    data |= {"max_bad_rows": 9, "cache_dir": str(tmp_path / "cache")}
    config = RunConfig.model_validate(settings(tmp_path, data=data))
    prepare(config)
    prepare(config, rows_file=tmp_path / "other.csv")
    out = tmp_path / "out"
    assert len((out / "unusable_rows_validation.txt").read_text().splitlines()) == 8, "the run's own"
    assert len((out / "unusable_rows_of_other.txt").read_text().splitlines()) == 7


def write_talks(directory, count):
    """Conversations of three answers each."""
    path = directory / "talks.jsonl"
    with path.open("w") as file:
        for number in range(count):
            turns = [
                {"role": role, "content": f"{role} {number} {place}"}
                for place in range(3)
                for role in ("user", "assistant")
            ]
            file.write(json.dumps({"messages": turns}) + "\n")
    return {"train_file": str(path), "validation_fraction": 0.3, "cache_dir": str(directory / "cache")}


@pytest.mark.parametrize("causal", [False, True])
def test_an_evaluation_writes_as_many_tokens_as_the_longest_target_has_unless_set(tmp_path, causal):
    changes = (gpt2_directory(tmp_path) if causal else {}) | {"data__max_target_length": 64, "evaluation": {}}
    config = config_of(tmp_path, **changes)
    with (tmp_path / "held_out.csv").open("a") as file:
        file.write("a longer one,exchange_rate and lost_card\n")
    prepared = prepare(config)
    rows = [row for name in ("train", "held_out") for row in (tmp_path / f"{name}.csv").read_text().splitlines()[1:]]
    ids = prepared.tokenizer([row.rpartition(",")[2] for row in rows], add_special_tokens=False)["input_ids"]
    longest = max(map(len, ids)) + 1  # and the end
    assert longest < 64
    assert prepared.settled(config).evaluation.max_new_tokens == longest
    assert make_evaluation(config, prepared).generation.max_new_tokens == longest
    for set_by_user in (3, 60):
        chosen = config_of(tmp_path, **changes | {"evaluation": {"max_new_tokens": set_by_user}})
        assert make_evaluation(chosen, prepared).generation.max_new_tokens == set_by_user
    at_least = config_of(tmp_path, **changes | {"evaluation": {"min_new_tokens": 50}})
    assert make_evaluation(at_least, prepared).generation.max_new_tokens == 50


def test_streamed_rows_may_have_targets_longer_than_the_sample(tmp_path):
    config = config_of(tmp_path, data__streaming=True, data__max_target_length=64, evaluation={})
    prepared = prepare(config)
    estimated = replace(prepared, train_set=replace(prepared.train_set, estimated=True))
    assert estimated.settled(config).evaluation.max_new_tokens is None
    assert make_evaluation(config, estimated).generation.max_new_tokens == 64


def test_an_encoder_decoder_learns_each_answer_and_is_measured_on_the_last(tmp_path):
    data = write_talks(tmp_path, 20)
    prepared = prepare(config_of(tmp_path, data=data))
    last = prepare(config_of(tmp_path, data=data | {"train_on": "last"}))
    held_out = len(prepared.held_out)
    assert 0 < held_out < 20
    assert (len(prepared.train_set), len(last.train_set)) == (3 * (20 - held_out), 20 - held_out)
    assert prepared.train_set.spans is None
    assert all(row.target.endswith(" 2") and row.source.count("\n") == 4 for row in prepared.held_out)
    assert len({row.source.split("\n")[0] for row in prepared.held_out}) == held_out


def test_a_causal_model_reads_conversations_in_a_template(tmp_path):
    data, model = write_talks(tmp_path, 20), gpt2_directory(tmp_path)
    config = config_of(tmp_path, data=data, **model)
    prepared = prepare(config)
    assert prepared.tokenizer.chat_template is not None
    assert prepared.separator is None
    assert prepared.train_set.spans.lengths.tolist() == [6] * len(prepared.train_set)
    assert len(prepared.train_set) + len(prepared.held_out) == 20
    assert any("This template is saved with the model" in note for note in prepared.notes)
    assert any("one training row as the model sees it" in note for note in prepared.notes)
    assert prepare(config).notes == prepared.notes
    own = prepare(
        config_of(tmp_path, data=data, **gpt2_directory(tmp_path, "{% for m in messages %}{{ m.content }}{% endfor %}"))
    )
    assert own.tokenizer.chat_template == "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ConfigError, match="chat_template: false leaves out the template, but the rows are conv"):
        prepare(config_of(tmp_path, data=data | {"chat_template": False}, **model))


@pytest.mark.parametrize("streaming", [False, True])
def test_targets_that_the_tokenizer_cannot_write_are_said_and_measured_as_it_writes_them(tmp_path, streaming):
    config = config_of(tmp_path)
    tokenizer = prepare_tokenizer(config)
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("²", "2")
    tokenizer.save_pretrained(tmp_path / "t5")
    (tmp_path / "t5" / "config.json").write_text(json.dumps({"model_type": "t5"}))
    rows = "text,label\n" + "".join(f"row {i},{'m²' if i % 4 else 'm'}\n" for i in range(40))
    (tmp_path / "symbols.csv").write_text(rows)
    (tmp_path / "held.csv").write_text("text,label\na,m²\nb,m\n")
    files = {"train_file": str(tmp_path / "symbols.csv"), "validation_file": str(tmp_path / "held.csv")}
    data = {"cache_dir": str(tmp_path / "cache"), "streaming": streaming, **files}
    found = prepare(config_of(tmp_path, model={"path": str(tmp_path / "t5")}, data=data))
    assert [row.references for row in found.held_out] == [("m2",), ("m",)]
    assert (found.labels, found.sets[0].majority) == ({"m2": 30, "m": 10}, "m2")
    notes = "\n".join(found.notes)
    assert "30 of 40 training targets are not the same" in notes
    assert "1 of 2 held-out targets are not the same" in notes
    assert "'m²' becomes 'm2'" in notes
