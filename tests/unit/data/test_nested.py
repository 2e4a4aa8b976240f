"""Names with dots reach into cells as datasets' ``flatten`` does, in every format, and JSON text is what it says."""

import json
from dataclasses import replace

import datasets
import pytest

from fullshard.errors import DataError
from fullshard.program.data import (
    SourceSpec,
    StreamedRows,
    TokenizeSpec,
    fingerprint,
    index_to,
    read_inputs,
    read_split,
)
from fullshard.program.data.reading import conversations, split
from support.row_files import FORMATS, pairs, write_rows

ROWS = [{"id": str(i), "translation": {"en": f"the card {i}", "de": f"die Karte, {i}"}} for i in range(6)]
NAMES = {"source_column": "translation.en", "target_column": "translation.de"}


def flat():
    """The pairs as ``datasets`` names them."""
    rows = datasets.Dataset.from_list(ROWS).flatten()
    return list(zip(rows["translation.en"], rows["translation.de"], strict=True))


@pytest.mark.parametrize("name", FORMATS)
def test_columns_and_templates_reach_in(name, tmp_path):
    spec = write_rows(tmp_path / name, ROWS, **NAMES)
    assert pairs(read_split(spec, "train")) == flat()
    spec = replace(spec, source_column=None, template="{id}: {translation.en}")
    assert pairs(read_split(spec, "train")) == [(f"{i}: {en}", de) for i, (en, de) in enumerate(flat())]


@pytest.mark.parametrize("name", FORMATS)
def test_a_table_without_the_columns_names_those_inside(name, tmp_path):
    rows = [{"translation": row["translation"]} for row in ROWS]
    with pytest.raises(DataError, match=r"'translation\.en', 'translation\.de'"):
        read_split(write_rows(tmp_path / name, rows), "train")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "rows.csv"])
def test_streamed_and_predicted_rows_are_the_same(name, tmp_path, t5_like):
    spec = write_rows(tmp_path / name, ROWS, **NAMES, validation_fraction=0.4)
    entry = tmp_path / "entry"
    entry.mkdir()
    kept = json.loads(json.dumps(index_to(entry, spec, None, 10)))
    how = TokenizeSpec(causal=False, max_source_length=9, max_target_length=9)
    streamed = StreamedRows(entry, kept, spec, t5_like, how).examples(range(kept["rows"]))
    first = read_split(spec, "train").examples
    assert [(row.source, row.target) for row in streamed] == [(row.source, row.target) for row in first]
    assert 0 < len(first) < len(ROWS)
    assert [row.source for row in read_inputs(spec.train_file, spec).rows] == [en for en, _ in flat()]


def test_a_column_of_that_name_goes_before_what_is_inside(tmp_path):
    rows = [{"a": {"b": "inside"}, "a.b": "itself", "c": {"d.e": {"f": "deep"}}}]
    spec = write_rows(tmp_path / "rows.jsonl", rows, source_column="a.b", target_column="c.d.e.f")
    assert pairs(read_split(spec, "train")) == [("itself", "deep")]


def test_lists_give_the_values_of_their_objects_and_numbers_keep_their_text(tmp_path):
    row = {
        "q": {"text": "who?"},
        "answers": {"text": ["Ada", "Ada L."]},
        "more": [{"t": "x"}, {"t": "y"}],
        "n": {"v": 1},
    }
    text = json.dumps(row).replace('"v": 1', '"v": 1.50')
    (tmp_path / "rows.jsonl").write_text(f"{text}\n")
    spec = {"train_file": tmp_path / "rows.jsonl", "template": "{q.text} {more.t} {n.v}"}
    found = read_split(SourceSpec(**spec, target_column="answers.text"), "train").examples[0]
    assert (found.source, found.references) == ("who? x y 1.50", ("Ada", "Ada L."))


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        ({"fr": "x"}, "column 'translation' has no 'en', but 'fr'"),
        ("plain", "column 'translation' holds a str, and no object with 'en'"),
        (None, "column 'translation.en' is missing"),
        ({"en": None}, "column 'translation.en' is missing"),
        ({"en": {"a": "x"}}, "column 'translation.en' holds a dict, not text: name what is inside of it"),
    ],
)
def test_a_row_without_the_name_is_unusable_with_its_reason(cell, reason, tmp_path):
    spec = write_rows(tmp_path / "rows.jsonl", [*ROWS, {"id": "7", "translation": cell}], **NAMES)
    with pytest.raises(DataError) as caught:
        read_split(spec, "train")
    assert f"rows.jsonl:7: {reason}" in str(caught.value)
    assert "1 of 7 rows" in str(caught.value)


@pytest.mark.parametrize("kind", ["parquet", "dataset"])
def test_classes_inside_of_objects_have_their_names(kind, tmp_path):
    label = {"label": datasets.ClassLabel(names=["no", "yes"]), "all": [datasets.ClassLabel(names=["a", "b"])]}
    features = datasets.Features({"text": datasets.Value("string"), "about": label})
    rows = datasets.Dataset.from_list([{"text": "x", "about": {"label": 1, "all": [1, 0]}}], features=features)
    if kind == "parquet":
        rows.to_parquet(tmp_path / "rows.parquet")
        spec = {"train_file": tmp_path / "rows.parquet"}
    else:
        rows.save_to_disk(tmp_path / "rows")
        spec = {"dataset_name": str(tmp_path / "rows")}
    for name, references in (("about.label", ("yes",)), ("about.all", ("b", "a"))):
        found = read_split(SourceSpec(**spec, source_column="text", target_column=name), "train").examples
        assert found[0].references == references


TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("column", ["messages", "conversations", "data.turns"])
def test_conversations_as_json_text_are_conversations(name, column, tmp_path):
    turns = TALK if column == "messages" else [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
    text = json.dumps(turns)
    rows = [{"id": "1", **({"data": {"turns": text}} if "." in column else {column: text})}] * 3
    named = {"source_column": column} if "." in column else {}
    spec = write_rows(tmp_path / name, rows, **named)
    rows = read_split(spec, "train").examples
    assert [list(row.conversation.messages) for row in rows] == [TALK] * 3
    if spec.train_file:
        asked = read_inputs(spec.train_file, SourceSpec(**named)).rows[0]
        assert list(asked.conversation.messages) == TALK[:1]


def test_text_with_a_target_of_its_own_stays_text_though_it_is_json(tmp_path):
    path, names = tmp_path / "rows.jsonl", {"source_column": "talk", "target_column": "summary"}
    spec = write_rows(path, [{"talk": json.dumps(TALK), "summary": "a greeting"}], **names)
    row = read_split(spec, "train").examples[0]
    assert (row.conversation, row.source) == (None, json.dumps(TALK))
    assert read_inputs(path, SourceSpec(**names)).rows[0].source == json.dumps(TALK)
    spec = write_rows(path, [{"prompt": json.dumps(TALK[:1]), "completion": "hello"}])
    assert read_split(spec, "train").examples[0].conversation is None
    assert read_inputs(path, SourceSpec()).rows[0].conversation is None


def test_a_prompt_and_its_completion_as_json_text_are_one_conversation(tmp_path):
    rows = [{"prompt": json.dumps(TALK[:1]), "completion": json.dumps(TALK[1:])}]
    row = read_split(write_rows(tmp_path / "rows.jsonl", rows), "train").examples[0]
    assert list(row.conversation.messages) == TALK


@pytest.mark.parametrize("text", ["[not json", "[1, 2]", "[]", '["a"]', "{}"])
def test_other_text_is_text(text, tmp_path):
    named = {"source_column": "conversation", "target_column": "label"}
    spec = write_rows(tmp_path / "rows.jsonl", [{"conversation": text, "label": "x"}], **named)
    assert pairs(read_split(spec, "train")) == [(text, "x")]


def without_turns_of_text(monkeypatch):
    """Read JSON text as text, as the version before did."""
    find = conversations.find_conversations

    def only_lists(*given, **options):
        return find(*given, **options | {"from_text": False})

    monkeypatch.setattr(split, "find_conversations", only_lists)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", ["turns of text", "prompt and completion of text", "turns", "text"])
def test_the_fingerprint_changes_where_json_text_became_turns(name, kind, tmp_path, monkeypatch):
    rows = {
        "turns of text": {"messages": json.dumps(TALK), "target": "x"},
        "prompt and completion of text": {"prompt": json.dumps(TALK[:1]), "completion": json.dumps(TALK[1:])},
        "turns": {"messages": TALK},
        "text": {"prompt": "hi", "completion": json.dumps(TALK)},
    }
    if kind == "turns" and name.endswith("csv"):
        pytest.skip("cells of CSV are text")
    spec = write_rows(tmp_path / name, [rows[kind]] * 2)
    now = fingerprint(spec, "train")
    assert now == fingerprint(spec, "train")
    without_turns_of_text(monkeypatch)
    assert (now != fingerprint(spec, "train")) is kind.endswith("of text")


@pytest.mark.parametrize("name", [name for name in FORMATS if name.startswith("rows")])
def test_a_lone_prompt_of_json_text_is_turns_for_a_model_trained_on_them(name, tmp_path):
    prompts = [json.dumps(TALK[:1]), json.dumps([*TALK, TALK[0]]), "hi", "[1, 2]", json.dumps([{"role": "x"}]), " "]
    made = [{"id": str(n), "prompt": text} for n, text in enumerate(prompts)]
    path = write_rows(tmp_path / name, made).train_file
    rows = read_inputs(path, SourceSpec(), asks_turns=True).rows
    found = [None if row.conversation is None else list(row.conversation.messages) for row in rows]
    assert found == [TALK[:1], [*TALK, TALK[0]], None, None, None, None]
    assert [(row.source, row.problem) for row in rows[2:4]] == [("hi", None), ("[1, 2]", None)]
    assert "unknown role 'x'" in rows[4].problem
    assert rows[5].problem == "column 'prompt' is empty"
    assert rows[2].cells["prompt"] == "hi"
    plain = read_inputs(path, SourceSpec(source_column="prompt", target_column="id"), asks_turns=True).rows
    assert plain[0].source == prompts[0]
    assert read_inputs(path, SourceSpec()).rows[0].source == prompts[0]
