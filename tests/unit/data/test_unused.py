"""Columns that are not used are named, and asked about where they may say which rows are good."""

import json

import pytest

from fullshard.program.data import SourceSpec, read_split

TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def note_of(tmp_path, rows, suffix="jsonl", **options):
    path = tmp_path / f"rows.{suffix}"
    if suffix == "parquet":
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.Table.from_pylist(rows), path)
    elif suffix == "csv":
        lines = [list(rows[0]), *([str(cell) for cell in row.values()] for row in rows)]
        path.write_text("".join(",".join(line) + "\n" for line in lines))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    notes = [one for one in read_split(SourceSpec(train_file=path, **options), "train").notes if "not used: " in one]
    return notes[0].partition("not used: ")[2] if notes else None


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize(
    ("name", "values", "asked"),
    [
        ("label", ["good", "bad"], True),
        ("feedback", ["very nice", "not so"], True),
        ("isCorrect", ["x", "y"], True),
        ("flag", [True, False], True),
        ("verified", ["yes", "no"], True),
        ("difficulty", [1, 3], True),
        ("turn_count", [1, 3], False),
        ("url", ["http://a", "http://b"], False),
        ("year_seen", [1999, 2001], False),
    ],
)
def test_columns_are_named_and_those_that_judge_have_a_question_mark(tmp_path, name, values, asked, suffix):
    rows = [{"prompt": f"p{i}", "response": f"r{i}", name: values[i % 2]} for i in range(8)]
    said = note_of(tmp_path, rows, suffix)
    assert said.startswith(f"{name!r}{'?' * asked}.")
    assert ("data.label_column" in said) is asked


def test_rows_of_every_kind_name_them(tmp_path):
    assert note_of(tmp_path, [{"messages": TURNS, "label": False, "id": "x"}] * 2).startswith("'label'?, 'id'. ")
    pair = {"prompt": "p", "chosen": "c", "rejected": "r", "score": 7}
    assert note_of(tmp_path, [pair], preferences="pairs").startswith("'score'?. ")
    kto = {"prompt": "p", "completion": "c", "label": True, "lang": "en"}
    assert note_of(tmp_path, [kto, {**kto, "label": False}], preferences="labels") == "'lang'."
    assert note_of(tmp_path, [{"text": "a", "url": "b"}], text_column="text") == "'url'."
    assert note_of(tmp_path, [{"text": "a", "label": "b", "w": 1.0}], weight_column="w") is None
