"""Predictions in a file have the format of its suffix, and one record for each row."""

import csv
import io
import json
from pathlib import Path

import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fullshard.errors import ConfigError
from fullshard.program.data import SourceSpec, read_inputs
from fullshard.program.data.reading.csv_file import CsvFile
from fullshard.program.launch.programs.row_file import RecordColumns, RowWriter
from fullshard.program.launch.programs.row_formats import require_suffix
from fullshard.program.train.evaluation.predict import RowPrediction

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


# The columns of the rows


def predicted(path, suffix, spec=None):
    """The file that is written for a file of rows, where a prediction is its source in capitals."""
    table = read_inputs(path, spec or SourceSpec(source_column="text"))
    columns = RecordColumns.of(table, same_format=path.suffix == suffix)
    out = io.StringIO(newline="")
    writer = RowWriter(out, suffix, columns)
    for row in table.rows:
        text = row.source.upper() if row.problem is None else None
        writer.write([columns.record(row, RowPrediction(row.source, text, row.problem, cut="cut" in row.source))])
    writer.end()
    out.getvalue().encode()  # it can be written
    return out.getvalue(), columns


TABLE = [
    {"id": "007", "text": 'say "hi"; bye', "note": "a,b"},
    {"id": "2", "text": "line\nbreak\tcut", "note": ""},
    {"id": "3", "text": "", "note": "no text"},
]
MADE = [
    {"prediction": 'SAY "HI"; BYE', "problem": "", "truncated": ""},
    {"prediction": "LINE\nBREAK\tCUT", "problem": "", "truncated": "true"},
    {"prediction": "", "problem": "column 'text' is empty", "truncated": ""},
]


def write_cells(path, delimiter, rows=TABLE):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.mark.parametrize(
    ("name", "between", "suffix", "expected"),
    [
        ("rows.csv", ",", ".csv", ","),
        ("rows.csv", ";", ".csv", ";"),
        ("rows.csv", "\t", ".csv", "\t"),
        ("rows.csv", "|", ".csv", "|"),
        ("rows.tsv", "\t", ".tsv", "\t"),
        ("rows.csv", ";", ".tsv", "\t"),
        ("rows.tsv", "\t", ".csv", ","),
    ],
)
def test_cells_of_the_rows_come_first_with_their_delimiter(name, between, suffix, expected, tmp_path):
    text, _ = predicted(write_cells(tmp_path / name, between), suffix)
    assert text.partition("\n")[0] == expected.join(["id", "text", "note", "prediction", "problem", "truncated"])
    found = list(csv.DictReader(io.StringIO(text, newline=""), delimiter=expected))
    assert found == [{**row, **made} for row, made in zip(TABLE, MADE, strict=True)]


def test_a_table_without_quoting_is_written_without_and_reads_back(tmp_path):
    path, texts = tmp_path / "in.tsv", ['a 5" order', '"get the ticket', 'say "hi" now', "plain"]
    path.write_text("id\ttext\n" + "".join(f"{n}\t{text}\n" for n, text in enumerate(texts)))
    table = read_inputs(path, SourceSpec(source_column="text", quoting="none"))
    out = io.StringIO()
    writer = RowWriter(out, ".tsv", columns := RecordColumns.of(table, same_format=True))
    made = RowPrediction("", 'two\nlines\tand "quotes"')
    writer.write([columns.record(row, made) for row in table.rows])
    lines = [line.split("\t") for line in out.getvalue().splitlines()]
    assert [line[:2] for line in lines] == [["id", "text"], *([str(n), text] for n, text in enumerate(texts))]
    assert {line[2] for line in lines[1:]} == {'two lines and "quotes"'}


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ""])
def test_objects_keep_their_values_and_the_notation_of_numbers(suffix, tmp_path):
    lines = [
        '{"id": 12345678901234567890, "text": "one", "score": 1.50, "tags": ["a", {"b": null}], "ok": true}',
        '{"text": "two", "half": "\\ud83d", "id": 1e-7}',
        "{broken",
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines))
    text, _ = predicted(path, suffix)
    found = json.loads(text) if suffix == ".json" else [json.loads(line) for line in text.splitlines()]
    assert found[:2] == [
        {**json.loads(line), "prediction": made} for line, made in zip(lines, ["ONE", "TWO"], strict=False)
    ]
    assert (found[2]["prediction"], found[2].keys()) == (None, {"prediction", "problem"})
    assert '"id": 12345678901234567890' in text
    assert '"score": 1.50' in text


def test_objects_become_cells_of_all_keys(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "one", "n": 1.50, "tags": ["é", null]}\n{"text": "two", "more": false}\n')
    text, _ = predicted(path, ".csv")
    assert list(csv.reader(io.StringIO(text))) == [
        ["text", "n", "tags", "more", "prediction", "problem", "truncated"],
        ["one", "1.50", '["é", null]', "", "ONE", "", ""],
        ["two", "", "", "false", "TWO", "", ""],
    ]


def test_columns_of_parquet_that_the_source_does_not_need_are_there(tmp_path):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([{"id": 5, "text": "one", "vector": [0.5, 1.0]}]), path)
    text, _ = predicted(path, ".jsonl")
    assert json.loads(text) == {"id": 5, "text": "one", "vector": [0.5, 1.0], "prediction": "ONE"}


def test_conversations_keep_their_turns(tmp_path):
    row = {"id": 1, "messages": [{"role": "user", "content": "hi", "weight": 1}]}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    text, _ = predicted(path, ".jsonl", SourceSpec())
    assert json.loads(text) == {**row, "prediction": "USER: HI"}


def test_names_that_the_rows_have_already_stay_theirs(tmp_path):
    rows = [{"text": "one", "prediction": "old", "problem_2": "x", "problem": "y"}]
    path = write_cells(tmp_path / "rows.csv", ",", rows)
    text, columns = predicted(path, ".csv")
    (found,) = csv.DictReader(io.StringIO(text))
    assert found == {**rows[0], "prediction_2": "ONE", "problem_3": "", "truncated": ""}
    assert [note.count("'prediction_2'") + note.count("'problem_3'") for note in columns.notes] == [1, 1]
    assert predicted(path, ".txt")[0] == "ONE\n"


def test_two_columns_of_one_name_keep_their_cells_and_broken_rows_what_they_have(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_bytes(b"id,text,id\n1,one,2\n3\n4,caf\xe9,5\n")
    text, _ = predicted(path, ".csv")
    assert list(csv.reader(io.StringIO(text)))[:3] == [
        ["id", "text", "id_2", "prediction", "problem", "truncated"],
        ["1", "one", "2", "ONE", "", ""],
        ["3", "", "", "", "the row has 1 cells, the header 3", ""],
    ]
    assert list(csv.reader(io.StringIO(text)))[3][:3] == ["4", "caf\\udce9", "5"]


def test_lines_of_text_have_one_column(tmp_path):
    path = tmp_path / "rows.txt"
    path.write_text("one\n\n")
    text, _ = predicted(path, ".csv")
    assert text == "input,prediction,problem,truncated\none,ONE,,\n,,it is empty,\n"


@pytest.mark.parametrize(("suffix", "delimiter"), [(".csv", ","), (".tsv", "\t")])
def test_lone_carriage_returns_inside_cells_read_back(suffix, delimiter, tmp_path):
    rows = [{"note": "one\rtwo", "text": "three\r"}, {"note": "x\r\ny", "text": "\r"}, {"note": "z", "text": "t"}]
    out = io.StringIO(newline="")
    writer = RowWriter(out, suffix, RecordColumns(("note", "text")))
    writer.write([{**row, "prediction": "p\rq"} for row in rows])
    writer.end()
    path = tmp_path / f"out{suffix}"
    path.write_bytes(out.getvalue().encode())
    frame = pandas.read_csv(path, sep=delimiter, dtype=str, keep_default_na=False)
    assert list(zip(frame["note"], frame["text"], frame["prediction"], strict=True)) == [
        (row["note"], row["text"], "p\rq") for row in rows
    ]
    again = CsvFile(path, "utf-8", delimiter)
    assert [(row.cells["text"], row.problem) for row in again.rows(())] == [(row["text"], None) for row in rows]
    assert "\r\n" not in out.getvalue().replace("x\r\ny", "")


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_nan_and_infinity_are_null_in_json_and_stay_in_cells(suffix, tmp_path):
    path = tmp_path / "rows.parquet"
    numbers = [float("nan"), float("inf"), -float("inf"), 1.5]
    pq.write_table(pa.table({"text": list("abcd"), "score": numbers, "list": [[one, 2.0] for one in numbers]}), path)
    text, _ = predicted(path, suffix)

    def refuse(word):
        raise ValueError(word)  # RFC 8259 has no such words

    values = [text] if suffix == ".json" else text.splitlines()
    found = [json.loads(one, parse_constant=refuse) for one in values]
    found = found[0] if suffix == ".json" else found
    assert [row["score"] for row in found] == [None, None, None, 1.5]
    assert [row["list"] for row in found] == [[None, 2.0]] * 3 + [[1.5, 2.0]]
    cells, _ = predicted(path, ".csv")
    assert [row["score"] for row in csv.DictReader(io.StringIO(cells))] == ["NaN", "Infinity", "-Infinity", "1.5"]
