"""Predictions in a file have the format of its suffix, and one record for each row."""

import csv
import io
import json
from pathlib import Path

import pytest

from fullshard.errors import ConfigError
from fullshard.launch.programs.row_file import RowWriter, require_suffix

ROWS = [
    {"input": 'a, "b"\tc', "prediction": "zwei\nZeilen"},
    {"input": "", "prediction": None, "problem": "it is empty"},
    {"input": "lang", "prediction": "", "truncated": True},
]


def written(suffix, *chunks):
    out = io.StringIO()
    writer = RowWriter(out, suffix)
    for chunk in chunks:
        writer.write(chunk)
    writer.end()
    return out.getvalue()


@pytest.mark.parametrize("suffix", ["", ".jsonl", ".JSONL"])
def test_json_lines_also_without_a_suffix(suffix):
    assert [json.loads(line) for line in written(suffix, ROWS[:2], ROWS[2:]).splitlines()] == ROWS


def test_a_json_list_in_chunks_and_without_rows():
    assert json.loads(written(".json", ROWS[:1], [], ROWS[1:])) == ROWS
    assert json.loads(written(".json")) == []


@pytest.mark.parametrize(("suffix", "delimiter"), [(".csv", ","), (".tsv", "\t")])
def test_cells_have_one_header_and_a_row_each(suffix, delimiter):
    text = written(suffix, ROWS[:1], ROWS[1:])
    found = list(csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter))
    empty = {"input": "", "prediction": "", "problem": "", "truncated": ""}
    texts = [{**row, "prediction": row["prediction"] or "", "truncated": row.get("truncated", False)} for row in ROWS]
    expected = [{**empty, **row, "truncated": "true" if row["truncated"] else ""} for row in texts]
    assert found == expected


def test_text_has_a_line_for_each_row_whatever_is_in_it():
    assert written(".txt", ROWS).split("\n") == ["zwei Zeilen", "", "", ""]


def test_a_suffix_that_is_not_written_is_refused():
    for name in ("o", "o.csv", "o.TXT"):
        require_suffix(Path(name))
    with pytest.raises(ConfigError, match=r"-o o.parquet: predictions are written as .jsonl, .json, .* got .parquet"):
        require_suffix(Path("o.parquet"))
