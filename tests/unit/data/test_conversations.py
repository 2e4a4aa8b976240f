"""Rows of turns are recognised in every format, and a malformed one is an unusable row with its reason."""

import json
from dataclasses import replace

import pytest

from fullshard.errors import DataError
from fullshard.program.data import SourceSpec, answers_as_rows, read_inputs, read_split
from support.row_files import write_rows

OPENAI = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "2"},
]
SHAREGPT = [
    {"from": {"user": "human", "assistant": "gpt"}.get(turn["role"], "system"), "value": turn["content"]}
    for turn in OPENAI
]
HISTORY = "system: Be short.\nuser: one\nassistant: 1\nuser: two"


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet", "directory"])
@pytest.mark.parametrize(
    "row",
    [
        {"id": 7, "messages": OPENAI},
        {"conversations": SHAREGPT, "source": "web"},
        {"Conversations": SHAREGPT[1:], "system": "Be short."},
        {"prompt": OPENAI[:2], "completion": OPENAI[2:]},
    ],
    ids=["messages", "conversations", "system", "completion"],
)
def test_recognised_in_every_format(tmp_path, name, row):
    table = read_split(write_rows(tmp_path / name, [row, row]), "train")
    example = table.examples[1]
    assert example.conversation is not None
    assert [(turn["role"], turn["content"]) for turn in example.conversation.messages] == [
        (turn["role"], turn["content"]) for turn in OPENAI
    ]
    assert (example.conversation.answers, example.source, example.references) == ((2, 4), HISTORY, ("2",))
    assert "2 conversations of 5.0 turns on average, loss on every assistant turn" in table.notes[0]


def test_a_prompt_is_not_learned_and_a_column_may_be_named(tmp_path):
    spec = write_rows(tmp_path / "a.jsonl", [{"prompt": OPENAI[:4], "completion": OPENAI[4:]}])
    assert read_split(spec, "train").examples[0].conversation.answers == (4,)
    spec = replace(
        write_rows(tmp_path / "b.jsonl", [{"chat": OPENAI, "more": 1}]), source_column="chat", train_on="last"
    )
    table = read_split(spec, "train")
    assert table.examples[0].conversation.answers == (4,)
    assert "loss on the last assistant turn" in table.notes[0]


def test_text_columns_are_tables_as_before(tmp_path):
    alpaca = {"instruction": "Add.", "input": "1 2", "output": "3", "text": "..."}
    assert read_split(write_rows(tmp_path / "a.jsonl", [alpaca]), "train").examples[0].source == "Add.\n\n1 2"
    spec = write_rows(tmp_path / "b.jsonl", [{"prompt": "a", "completion": "b"}])
    example = read_split(spec, "train").examples[0]
    assert (example.source, example.references, example.conversation) == ("a", ("b",), None)
    with pytest.raises(DataError, match="train_on: last applies to conversations, and its rows are none"):
        read_split(replace(spec, train_on="last"), "train")


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ("text", "column 'messages' holds a str, not a list of turns"),
        (None, "column 'messages' is missing"),
        ([], "column 'messages' has no turns"),
        ([3], "column 'messages', turn 1 is a Number, not an object with role and content"),
        ([{"text": "a"}], "turn 1 has neither role nor from, but 'text'"),
        ([{"role": "narrator", "content": "a"}], "turn 1 has the unknown role 'narrator'; known are assistant, gpt"),
        ([{"role": "user"}], r"turn 1 \(user\) has no content"),
        ([{"role": "user", "content": " "}], r"turn 1 \(user\) is empty"),
        ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], "holds a part of type 'image', not text"),
        ([{"role": "user", "content": "\ud83d"}], "is half of a character"),
        (OPENAI[:2], "column 'messages' has no turn of the assistant that answers another turn"),
        (OPENAI[2:3], "no turn of the assistant that answers another turn"),
    ],
)
def test_a_malformed_row_is_unusable_with_its_reason(tmp_path, turns, reason):
    spec = write_rows(tmp_path / "rows.jsonl", [{"messages": OPENAI}, {"messages": turns}])
    with pytest.raises(DataError, match=f"rows.jsonl:2: .*{reason}"):
        read_split(spec, "train")
    table = read_split(replace(spec, max_bad_rows=1), "train")
    assert len(table.examples) == 1
    assert "1 of 2 rows were skipped" in table.notes[1]


def test_tools_parts_weights_and_turns_after_the_last_answer(tmp_path):
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2.5}}}]
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "1 + "}, {"type": "text", "text": "2.5"}], "name": None},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "3.5", "tool_call_id": "x"},
        {"role": "assistant", "content": "so 3.5", "weight": 0},
        {"role": "user", "content": "thanks"},
    ]
    row = {"messages": turns, "tools": json.dumps([{"name": "add"}])}
    table = read_split(write_rows(tmp_path / "rows.jsonl", [row]), "train")
    found = table.examples[0].conversation
    assert found.messages == (
        {"role": "user", "content": "1 + 2.5"},
        {"role": "assistant", "content": "", "tool_calls": calls},
    )
    assert (found.answers, found.tools, found.left_out) == ((1,), ({"name": "add"},), 3)
    assert table.examples[0].source == 'tools: [{"name": "add"}]\nuser: 1 + 2.5'
    assert json.loads(table.examples[0].target) == calls
    assert "; 3 turns after a last answer are left out" in table.notes[0]


def test_a_key_of_a_format_that_a_turn_does_not_use_is_its_own(tmp_path):
    asked = {"role": "user", "content": "one", "value": "high", "from": None}
    both = {"role": "assistant", "content": "1", "from": "gpt", "value": "one"}
    found = read_split(write_rows(tmp_path / "rows.jsonl", [{"messages": [asked, both]}]), "train").examples[0]
    assert found.conversation.messages == (
        {"role": "user", "content": "one", "value": "high"},
        {"role": "assistant", "content": "1"},
    )


def test_three_answers_are_three_rows_of_an_encoder_decoder(tmp_path):
    turns = [*OPENAI, {"role": "user", "content": "three"}, {"role": "assistant", "content": "3"}]
    table = read_split(write_rows(tmp_path / "rows.jsonl", [{"messages": turns}]), "train")
    rows = answers_as_rows(table.examples)
    assert [(row.source.splitlines()[-1], row.target) for row in rows] == [
        ("user: one", "1"),
        ("user: two", "2"),
        ("user: three", "3"),
    ]
    assert rows[1].source == HISTORY


def test_conversations_that_begin_alike_are_held_out_together(tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": str(n // 2)}, {"role": "assistant", "content": str(n)}] * (1 + n % 2)}
        for n in range(40)
    ]
    spec = replace(write_rows(tmp_path / "rows.jsonl", rows), validation_fraction=0.3)
    sides = {split: read_split(spec, split) for split in ("train", "validation")}
    first = {name: {one.conversation.messages[0]["content"] for one in table.examples} for name, table in sides.items()}
    assert first["train"] | first["validation"] == {str(n) for n in range(20)}
    assert not first["train"] & first["validation"]
    assert all(first.values())
    assert "the hash of the turns before the first answer decides" in sides["train"].notes[-1]


def test_rows_to_predict_for_lose_the_answer_at_the_end(tmp_path):
    write_rows(tmp_path / "rows.jsonl", [{"messages": OPENAI}, {"messages": OPENAI[:4]}, {"messages": OPENAI[2:3]}])
    rows = read_inputs(tmp_path / "rows.jsonl", SourceSpec()).rows
    assert [row.source for row in rows] == [HISTORY, HISTORY, ""]
    assert rows[0].conversation == rows[1].conversation
    assert rows[2].problem == "column 'messages' has no turn to answer"
    write_rows(tmp_path / "prompts.jsonl", [{"prompt": OPENAI[:2]}])
    named = SourceSpec(source_column="prompt")
    for spec in (SourceSpec(), named):
        assert read_inputs(tmp_path / "prompts.jsonl", spec).rows[0].source == "system: Be short.\nuser: one"
