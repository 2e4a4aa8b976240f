"""A line for a model that was trained on conversations has the token ids of the held-out conversation it stands for."""

import csv
import json
from argparse import Namespace

import pytest
from transformers import AutoTokenizer

from fullshard.core.testing import run_ranks
from fullshard.errors import ConfigError
from fullshard.program.config import RunConfig
from fullshard.program.data import InputRow, SystemTurnCounts, tokenize
from fullshard.program.launch.programs import predict as program
from fullshard.program.launch.programs.evaluate import with_rows
from fullshard.program.models import build_model, is_causal
from fullshard.program.train.evaluation.chat import Talk
from fullshard.program.train.evaluation.predict import plain_rows
from fullshard.program.train.setup.prepare import prepare, tokenize_spec
from support.tiny_run import MODEL, settings

SYSTEM = "Answer with one word."
LINES = ["where is my card", "i lost it", "what is the rate", "where is it now"]
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 128}
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def talk(line, system=SYSTEM, role="system"):
    turns = [{"role": role, "content": system}] if system else []
    return {"messages": [*turns, {"role": "user", "content": line}, {"role": "assistant", "content": "card"}]}


def write_talks(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def config_of(directory, model, **changes):
    """A run over four conversations for training and one of them, with another order, held out."""
    write_talks(directory / "talks.jsonl", [talk(line) for line in LINES])
    write_talks(directory / "held_out.jsonl", [talk(line) for line in LINES[:2]])
    columns = {"data__source_column": None, "data__target_column": None, "data__max_source_length": 64}
    files = {"data__train_file": str(directory / "talks.jsonl")}
    files |= {"data__validation_file": str(directory / "held_out.jsonl"), "data__source_prefix": "route: "}
    return RunConfig.model_validate(settings(directory, model=model, **columns, **files, **changes))


def record(directory, **values):
    """The run's directory, with what its sink would record at the start."""
    directory.mkdir(exist_ok=True)
    (directory / "run.json").write_text(json.dumps({"config": {}, **values}))
    (directory / "summary.json").write_text("{}")
    return directory


@pytest.fixture(scope="module", params=["encoder-decoder", "causal with a template", "causal without"])
def run(request, tmp_path_factory):
    """A run's settings, its data, its model and its directory."""
    tmp_path = tmp_path_factory.mktemp("run")
    kind = MODEL if request.param == "encoder-decoder" else GPT2
    model = {"config": kind, "tokenizer": {"vocab_size": 120}}
    if request.param == "causal with a template":
        tokenizer = prepare(config_of(tmp_path, model)).tokenizer
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(tmp_path / "model")
        build_model(kind, tokenizer, seed=1).save_pretrained(tmp_path / "model")
        model = {"path": str(tmp_path / "model")}
    config = config_of(tmp_path, model)
    prepared = prepare(config)
    assert prepared.system_turns == {"": [{"role": "system", "content": SYSTEM}]}
    out = record(tmp_path / "out", conversations=True, system_turns=prepared.system_turns)
    prepared.tokenizer.save_pretrained(out)
    return config, prepared, build_model(kind, prepared.tokenizer, seed=1), out


def test_a_line_of_predict_has_the_ids_of_the_conversation(run):
    config, prepared, model, out = run
    tokenizer = AutoTokenizer.from_pretrained(out)
    options = Namespace(set=None, system=None)
    lines = [InputRow(line, 1) for line in LINES[:2]]
    rows, notes = program._as_read(lines, config, model, tokenizer, out, options)
    found = tokenize(
        [row.example for row in rows], tokenizer, tokenize_spec(config, tokenizer, causal=is_causal(model))
    )
    assert found.source_ids.tolist() == prepared.held_out_set.source_ids.tolist()
    assert [row.source for row in rows] == LINES[:2], "the input that is written is the line"
    (note,) = [note for note in notes if "user's turn" in note]
    assert f"after the system turn {SYSTEM!r}: that of the training rows" in note

    options.system = ""
    rows, (*_, note) = program._as_read(lines[:1], config, model, tokenizer, out, options)
    assert [turn["role"] for turn in rows[0].conversation.messages] == ["user"]
    assert note.endswith("without a system turn: --system is empty")


def test_a_line_of_chat_has_the_ids_of_the_conversation(run):
    config, prepared, model, out = run
    turns = plain_rows(out, None, None, chats=True).system_turns

    def work(comm):
        chat = Talk(model.eval(), prepared.tokenizer, config, comm, system_turns=turns)
        first = chat.answer(LINES[0])
        chat.reset()
        return first.prompt, chat.answer(LINES[1]).prompt

    expected = [prepared.tokenizer.decode(ids.tolist()) for ids in prepared.held_out_set.source_ids]
    assert list(run_ranks(1, work)[0]) == expected


def test_a_table_that_is_evaluated_has_the_ids_of_the_conversations(run, tmp_path):
    config, prepared, _, _ = run
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["text", "label"], *([line, "card"] for line in LINES[:2])])
    file = tmp_path / "rows.csv"
    measured = prepare(with_rows(config, file), rows_file=file)
    assert measured.held_out_set.source_ids.tolist() == prepared.held_out_set.source_ids.tolist()
    assert measured.held_out_set.target_ids.tolist() == prepared.held_out_set.target_ids.tolist()
    assert any(f"after the system turn {SYSTEM!r}" in note for note in measured.notes)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([talk(line, "") for line in LINES], []),
        ([*(talk("a") for _ in range(19)), talk("b", "")], [{"role": "system", "content": SYSTEM}]),
        ([*(talk("a") for _ in range(18)), talk("b", "")], None),
        ([talk("a", role="developer")], [{"role": "developer", "content": SYSTEM}]),
    ],
    ids=["none", "nearly all", "too few", "developer"],
)
def test_the_system_turn_that_training_saw_is_recorded(rows, expected, streaming, tmp_path):
    config = config_of(tmp_path, {"config": MODEL, "tokenizer": {"vocab_size": 100}}, data__streaming=streaming)
    write_talks(tmp_path / "talks.jsonl", rows)
    assert prepare(config).system_turns == {"": expected}


def test_the_memory_of_counting_system_turns_is_bounded(monkeypatch):
    monkeypatch.setattr("fullshard.program.data.reading.conversations._MOST_SYSTEM_TURNS", 2)
    counts = SystemTurnCounts()
    for number in range(5):
        counts.add(InputRow("a", 1).after([{"role": "system", "content": str(number)}]).example)
    assert len(counts._counts) == 2
    assert counts.common is None


@pytest.mark.parametrize(
    ("recorded", "text"),
    [
        ({}, "without a system turn: the run's version of fullshard did not record one"),
        ({"system_turns": {"": None}}, "without a system turn: those of the training rows differ"),
        ({"system_turns": {"": []}}, "without a system turn: the training rows have none"),
    ],
)
def test_without_a_common_system_turn_there_is_none_and_it_is_said(recorded, text, tmp_path):
    out = record(tmp_path, conversations=True, **recorded)
    found = plain_rows(out, None, None, chats=False)
    assert list(found.system_turns) == []
    assert text in found.notes[0]
    given = plain_rows(out, None, "Be short.", chats=False)
    assert given.system_turns == [{"role": "system", "content": "Be short."}]
    assert given.notes == (
        "plain text is read as the user's turn of a conversation, after the system turn 'Be short.': given by --system",
    )


def test_text_for_a_run_on_a_table_stays_plain(tmp_path):
    out = record(tmp_path / "out", conversations=False, system_turns={})
    assert plain_rows(out, None, None, chats=True).system_turns is None
    assert plain_rows(None, None, "x", chats=True).system_turns == [{"role": "system", "content": "x"}]
    with pytest.raises(ConfigError, match="--system gives a turn of a conversation, but this model reads no turns"):
        plain_rows(out, None, "x", chats=False)
    mixed = record(tmp_path / "mixed", conversations=True, system_turns={"talks": []})
    assert plain_rows(mixed, "tables", None, chats=False).system_turns is None
    assert plain_rows(mixed, "talks", None, chats=False).system_turns == ()


def test_a_system_turn_for_rows_with_their_own_turns_is_refused():
    rows = [InputRow("a", 1).after(())]
    with pytest.raises(ConfigError, match="are conversations with their own turns"):
        program._require_plain(rows, Namespace(file="talks.jsonl", system="x"))
