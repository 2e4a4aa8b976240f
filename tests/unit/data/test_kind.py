"""A file whose name says something else is read as what it is where that is plain, and otherwise told."""

import bz2
import gzip
import io
import json
import lzma
import sqlite3
import zipfile
from dataclasses import replace

import pandas
import pytest

from fullshard.errors import DataError
from fullshard.program.cli import main as cli
from fullshard.program.data import (
    SourceSpec,
    StreamedRows,
    TokenizeSpec,
    encoding_of_rows,
    index_to,
    read_inputs,
    read_split,
)
from fullshard.program.data.reading import kind
from fullshard.program.data.reading.json_file import parse_json
from fullshard.program.starter import look_at
from support.row_files import pairs, read, write

ROWS = [{"text": f"where is card {i}", "label": f"kind {i % 3}"} for i in range(12)]
FRAME = pandas.DataFrame(ROWS)
CSV = FRAME.to_csv(index=False).encode()
LINES = FRAME.to_json(orient="records", lines=True).encode()
LIST = json.dumps(ROWS).encode()
PRETTY = json.dumps(ROWS, indent=2).encode()
WRAPPED = json.dumps({"version": 1, "data": ROWS}, indent=2).encode()


def parquet():
    found = io.BytesIO()
    FRAME.to_parquet(found)
    return found.getvalue()


READ = {
    "gzip named .csv": ("rows.csv", gzip.compress(CSV)),
    "text named .csv.gz": ("rows.csv.gz", CSV),
    "gzip named .jsonl": ("rows.jsonl", gzip.compress(LINES)),
    "gzip of Parquet's name": ("rows.jsonl.gz", LINES),
    "list named .jsonl": ("rows.jsonl", LIST),
    "indented list named .jsonl": ("rows.jsonl", PRETTY),
    "object of a list named .jsonl": ("rows.jsonl", WRAPPED),
    "gzipped list named .jsonl.gz": ("rows.jsonl.gz", gzip.compress(PRETTY)),
    "lines named .json": ("rows.json", LINES),
    "lines named .csv": ("rows.csv", LINES),
    "list named .csv": ("rows.csv", LIST),
    "list named .tsv": ("rows.tsv", PRETTY),
    "commas named .tsv": ("rows.tsv", CSV),
    "tabs named .csv": ("rows.csv", FRAME.to_csv(index=False, sep="\t").encode()),
    "semicolons named .tsv": ("rows.tsv", FRAME.to_csv(index=False, sep=";").encode()),
    "Parquet named .csv": ("rows.csv", parquet()),
    "Parquet named .json": ("rows.json", parquet()),
    "CR in CSV": ("rows.csv", CSV.replace(b"\n", b"\r")),
    "CR in CSV with a mark": ("rows.csv", b"\xef\xbb\xbf" + CSV.replace(b"\n", b"\r")),
    "CR in TSV": ("rows.tsv", FRAME.to_csv(index=False, sep="\t").encode().replace(b"\n", b"\r")),
    "CR in JSON Lines": ("rows.jsonl", LINES.replace(b"\n", b"\r")),
    "CR in gzip": ("rows.csv.gz", gzip.compress(CSV.replace(b"\n", b"\r"))),
}


@pytest.mark.parametrize("what", READ)
def test_a_file_is_read_as_what_it_is_by_every_command(what, tmp_path, t5_like):
    path = write(tmp_path / READ[what][0], READ[what][1])
    right = [(row["text"], row["label"]) for row in ROWS]
    spec = SourceSpec(train_file=path, source_column="text", target_column="label")
    table = read_split(spec, "train")
    assert pairs(table) == right
    encoding, _ = encoding_of_rows(path, spec, None)
    assert [row.source for row in read_inputs(path, spec).rows] == [text for text, _ in right]
    assert (encoding, look_at(path).rows) == ("utf-8", 12)
    is_renamed = not any(word in what for word in ("gzip", "CR", ".gz", "tabs"))
    assert any("data.format" in note for note in table.notes) is (is_renamed or "gzipped list" in what)
    entry = tmp_path / "entry"
    entry.mkdir()
    if "list" in what:
        with pytest.raises(DataError, match=r"data\.streaming cannot read row by row"):
            index_to(entry, spec, None, 10)
        return
    kept = json.loads(json.dumps(index_to(entry, spec, None, 10)))
    how = TokenizeSpec(causal=False, max_source_length=9, max_target_length=9)
    streamed = StreamedRows(entry, kept, spec, t5_like, how).examples(range(kept["rows"]))
    assert [(row.source, row.target) for row in streamed] == right
    assert kept["in_place"] is not ("gzip named" in what or "CR" in what or "Parquet named" in what)


def zipped():
    found = io.BytesIO()
    with zipfile.ZipFile(found, "w") as archive:
        archive.writestr("rows.csv", CSV)
    return found.getvalue()


def database(path):
    with sqlite3.connect(path) as base:
        FRAME.to_sql("rows", base)
    return path.read_bytes()


NAMED = {
    "zip archive or an Excel workbook": zipped(),
    "bzip2": bz2.compress(CSV),
    "compressed with xz": lzma.compress(CSV),
    "zstandard": b"\x28\xb5\x2f\xfd\x04\x00",
    r"Excel workbook \(\.xls\)": b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1",
    "a PDF": b"%PDF-1.7\n%\xe2\xe3",
    "a web page": b"<!DOCTYPE html>\n<html><body>Sign in</body></html>\n",
    "git lfs pull": b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
}


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl", "rows.json", "rows.tsv", "rows.txt", "rows.parquet"])
@pytest.mark.parametrize("what", NAMED)
def test_what_is_no_table_is_named(what, name, tmp_path, monkeypatch, capsys):
    path = write(tmp_path / name, NAMED[what])
    spec, is_text = SourceSpec(train_file=path), name.endswith("txt")
    if is_text and what == "a web page":
        assert len(read_inputs(path, spec).rows) == 2
        return
    with pytest.raises(DataError, match=what):
        read_inputs(path, spec) if is_text else read_split(spec, "train")
    if name.endswith("parquet"):
        return
    with pytest.raises(DataError, match=what):
        encoding_of_rows(path, SourceSpec(), None)
    if not is_text:
        monkeypatch.chdir(tmp_path)
        assert cli.main(["init", name, "--yes"]) == 3
        assert "rows" in capsys.readouterr().err


def test_a_database_is_named(tmp_path):
    path = write(tmp_path / "rows.csv", database(tmp_path / "base"))
    with pytest.raises(DataError, match="an SQLite database"):
        read_split(SourceSpec(train_file=path), "train")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_csv_that_is_named_as_json_is_told(name, tmp_path):
    path = write(tmp_path / name, CSV)
    with pytest.raises(DataError, match=r"look like those of a CSV file: 'text,label'.*data\.format: csv"):
        read_split(SourceSpec(train_file=path), "train")
    assert len(read_split(SourceSpec(train_file=path, format="csv"), "train").examples) == 12


@pytest.mark.parametrize(
    ("name", "content", "columns"),
    [
        ("rows.csv", "[text],[label]\na,x\nb,y\n", ("[text]", "[label]")),
        ("rows.csv", "{text},label\na,x\nb,y\n", ("{text}", "label")),
        ("rows.csv", 'text,label\n{"a": 1},x\nb,y\n', ("text", "label")),
        ("rows.csv", 'text,label\n"one\r\rtwo",x\nb,y\n', ("text", "label")),
    ],
)
def test_a_csv_with_marks_of_others_stays_one(name, content, columns, tmp_path):
    table = read(write(tmp_path / name, content), *columns)
    assert [row.target for row in table.examples] == ["x", "y"]


def test_line_breaks_inside_cells_of_a_file_of_macs_stay(tmp_path):
    path = write(tmp_path / "rows.csv", 'text,label\r"two\nlines",x\rb,y\rc,z\r')
    spec = SourceSpec(train_file=path, source_column="text", target_column="label")
    assert [row.source for row in read_split(spec, "train").examples] == ["two\nlines", "b", "c"]
    (tmp_path / "rows.txt").write_bytes(b"first\rsecond\rthird\r")
    assert [row.source for row in read_inputs(tmp_path / "rows.txt", spec).rows] == ["first", "second", "third"]
    (tmp_path / "rows.txt").write_bytes(b"10 %\r20 %\ndone\nso\n")
    assert [row.source for row in read_inputs(tmp_path / "rows.txt", spec).rows] == ["10 %\r20 %", "done", "so"]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.jsonl.gz"])
@pytest.mark.parametrize("first", ["# made on 3 May, 2024, by hand", '"text": "a", "label": "b"}', '{"text": "a, b'])
def test_a_bad_first_line_does_not_make_json_lines_another_kind(first, name, tmp_path):
    text = first.encode() + b"\n" + LINES
    path = write(tmp_path / name, gzip.compress(text) if name.endswith("gz") else text)
    spec = SourceSpec(train_file=path, source_column="text", target_column="label", max_bad_rows=1)
    table = read_split(spec, "train")
    assert pairs(table) == [(row["text"], row["label"]) for row in ROWS]
    with pytest.raises(DataError, match=r":1: broken JSON"):
        read_split(replace(spec, max_bad_rows=0), "train")


TEXTS = ["Hello, world", "Yes, it is", "No, never", "So, what now", "Well, once, then again"]


@pytest.mark.parametrize(
    ("header", "texts", "wanted"),
    [
        ("text, as it was said", TEXTS, None),
        ("text, as it was said", TEXTS[:4], "text, as it was said"),
        ("text, as it was said", TEXTS[:2], None),
        ("said; or written", ["a; b", "c", "d; e; f"], None),
        ("said; written | sung", ["a; b | c", "d"], None),
    ],
)
def test_commas_in_the_texts_of_one_column_are_no_delimiter(header, texts, wanted, tmp_path):
    path = tmp_path / "rows.tsv"
    path.write_text("\n".join([header, *texts]) + "\n")
    table = read_inputs(path, SourceSpec(source_column=wanted))
    assert [row.source for row in table.rows] == texts
    assert not any("data.format" in note for note in table.notes)


def test_a_wanted_column_shows_that_few_rows_are_cells(tmp_path):
    path = tmp_path / "rows.tsv"
    path.write_text("text,label\na,x\n")
    assert read_inputs(path, SourceSpec(source_column="text")).rows[0].source == "a"
    path.write_text("sep=;\ntext;label\na;x\n")
    assert read_inputs(path, SourceSpec(source_column="text")).rows[0].source == "a"


@pytest.mark.parametrize("header", ["[text],[label]", "{text},label", '[{"a": 1}],label', "[1],label"])
def test_a_large_csv_that_begins_like_json_is_not_read_to_tell(header, tmp_path, monkeypatch):
    path, parsed = tmp_path / "rows.csv", []
    path.write_text(header + "\n" + "some words of a text,x\n" * 20_000)

    def counted(text):
        parsed.append(len(text))
        return parse_json(text)

    monkeypatch.setattr(kind, "parse_json", counted)
    assert kind.kind_of(path, "csv", "utf-8") == "csv"
    assert sum(parsed) < path.stat().st_size / 3


@pytest.mark.parametrize("cut", range(65_500, 65_560))
def test_a_large_json_file_is_known_by_its_beginning_wherever_that_ends(cut, tmp_path):
    path = tmp_path / "rows.csv"
    rows = [{"text": "x" * (cut - 30), "é\u2028\n": '\n\\"ä', "n": [1.5e-7, True, None, {}]}, *ROWS]
    for value in (rows, {"version": 1, "data": rows}):
        path.write_text(json.dumps(value, indent=1))
        assert kind.kind_of(path, "csv", "utf-8") == "json"
    path.write_text(json.dumps([1, *rows], indent=1))
    assert kind.kind_of(path, "csv", "utf-8") == "csv"
