"""What csv wrote is read as csv reads it, and a table without quoting loses no row to a lone quote."""

import csv
import json
import random
from dataclasses import replace

import pandas
import pytest

from fullshard.errors import DataError
from fullshard.program.config import DataConfig
from fullshard.program.data import (
    SourceSpec,
    StreamedRows,
    TokenizeSpec,
    fingerprint,
    index_to,
    read_inputs,
    read_split,
    with_rows_of,
)
from fullshard.program.data.reading import split as split_module
from support.row_files import pairs, read

WORDS = ["so", "nice", "day", "card", "it's", "he", "said", "ok,", "5", "no", "über", "really"]


def by_pandas(path, delimiter, quoting):
    frame = pandas.read_csv(path, sep=delimiter, quoting=quoting, dtype=str, keep_default_na=False)
    return list(zip(frame["text"], frame["label"], strict=True))


def text(draw, marks, length=8):
    words = [draw.choice(marks) if draw.random() < 0.3 else draw.choice(WORDS) for _ in range(draw.randint(1, length))]
    return " ".join(words).strip() or "ok"


@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize("delimiter", ["\t", ",", ";"])
def test_a_table_without_quoting_gives_every_row(tmp_path, seed, delimiter):
    draw = random.Random(f"{seed} {delimiter}")
    lone = ['"so', '"', 'he"', '"hello"', '"yes" ', 'say "it" loud', "don't"]
    path = tmp_path / f"rows.{'tsv' if delimiter == chr(9) else 'csv'}"
    rows = [(text(draw, lone).replace(delimiter, ""), draw.choice("abc")) for _ in range(120)]
    path.write_text("".join(f"{one}{delimiter}{other}\n" for one, other in [("text", "label"), *rows]))
    table = read(path)
    assert pairs(table) == by_pandas(path, delimiter, csv.QUOTE_NONE) == rows
    assert [row.line for row in table.examples] == list(range(2, 122))
    assert any("data.quoting: none" in note for note in table.notes)
    assert pairs(read(path, quoting="none")) == rows


@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC])
@pytest.mark.parametrize("delimiter", ["\t", ",", ";"])
def test_a_table_that_csv_wrote_gives_its_cells(tmp_path, seed, quoting, delimiter):
    draw = random.Random(f"{seed} {quoting} {delimiter}")
    marks = ['"so', '"', '"hello"', "two\nlines", "a, b", "c; d", "tab\there", "one\n\nmore, or\nless", "plain"]
    path = tmp_path / f"rows.{'tsv' if delimiter == chr(9) else 'csv'}"
    rows = [(text(draw, marks), draw.choice(["a", "b", "c d"])) for _ in range(draw.choice([3, 12, 60]))]
    with path.open("w", newline="") as file:
        csv.writer(file, delimiter=delimiter, quoting=quoting).writerows([("text", "label"), *rows])
    table = read(path)
    assert pairs(table) == by_pandas(path, delimiter, csv.QUOTE_MINIMAL) == rows
    assert not any("quoting: none)" in note for note in table.notes)


def test_a_lone_quote_in_a_comma_file_is_named_where_it_may_be_a_cell_of_lines(tmp_path):
    """Three lines may be a text with commas; from four on they are rows."""
    path = tmp_path / "rows.csv"
    path.write_text('text,label\na,x\n"so good,x\nb,y\nhe",z\nc,x\n')
    table = read(path)
    assert pairs(table)[1] == ("so good,x\nb,y\nhe", "z")
    assert any("lines 3 to 5, " in note and "data.quoting: none" in note for note in table.notes)
    path.write_text('text,label\na,x\n"so good,x\nb,y\nb,y\nhe",z\nc,x\n')
    assert len(pairs(read(path))) == 6
    assert any("lines 3 to 6 " in note for note in read(path).notes)
    assert any("lines 3 to 6, " in note for note in read(path, quoting="csv").notes)


def test_a_column_alone_keeps_its_texts_of_lines_and_names_the_long_ones(tmp_path):
    path, lines = tmp_path / "rows.csv", "\n".join(f"line {i}" for i in range(12))
    path.write_text(f'text\n"two\nlines"\n"{lines}"\nlast\n')
    table = read_inputs(path, SourceSpec())
    assert [row.source for row in table.rows] == ["two\nlines", lines, "last"]
    assert any("lines 4 to 15, " in note for note in table.notes)
    path.write_text('text\n"never closed\nlast\n')
    assert [row.source for row in read_inputs(path, SourceSpec()).rows] == ['"never closed', "last"]


def test_quotes_in_the_header_enclose_cells(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text('"text","label"\n"so good","x\ny","z"\n')
    with pytest.raises(DataError, match="3 cells, the header 2"):
        read(path)


def test_long_cells_and_quotes_inside_texts_say_nothing(tmp_path):
    path, long = tmp_path / "rows.csv", "word, " * 40_000
    path.write_text(f'text,label\n"{long}",x\nan "inner" quote,y\n5" wide,z\n')
    assert pairs(read(path)) == [(long, "x"), ('an "inner" quote', "y"), ('5" wide', "z")]
    assert not any("quote" in note for note in read(path).notes)


def test_a_delimiter_hidden_by_lone_quotes_is_found(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("text;label\n" + "".join(f'"open {i};x\n' if i % 2 else f"plain, {i};y\n" for i in range(41)))
    assert len(pairs(read(path))) == 41


@pytest.fixture
def lone(tmp_path):
    path = tmp_path / "rows.tsv"
    rows = "".join(f'"so {i}\tx\nb {i}\ty\nreally "\tx\n' if i % 3 else f"a {i}\ty\n" for i in range(30))
    path.write_text(f"text\tlabel\n{rows}")
    return path


def test_streaming_reads_the_same_rows_without_a_second_look(lone, tmp_path, t5_like, monkeypatch):
    spec = SourceSpec(train_file=lone, source_column="text", target_column="label", validation_fraction=0.2)
    entry = tmp_path / "entry"
    entry.mkdir()
    kept = json.loads(json.dumps(index_to(entry, spec, None, 10)))
    assert (kept["quoting"], kept["in_place"]) == ("none", True)
    name = "fullshard.program.data.reading.csv_file.look_at_quotes"
    monkeypatch.setattr(name, lambda *given: pytest.fail("a second look"))
    how = TokenizeSpec(causal=False, max_source_length=9, max_target_length=9)
    rows = StreamedRows(entry, kept, spec, t5_like, how)
    found = [(row.source, row.target) for row in rows.examples(range(kept["rows"]))]
    monkeypatch.undo()
    assert found == pairs(read_split(spec, "train"))
    assert len(found) + len(read_split(spec, "validation").examples) == 70


def test_rows_to_predict_or_evaluate_are_read_with_the_rule_of_the_run(lone, tmp_path):
    spec = SourceSpec(train_file=lone, source_column="text", target_column="label")
    assert len(read_inputs(lone, spec).rows) == len(read_split(spec, "train").examples) == 70
    assert with_rows_of(tmp_path / "more.tsv", replace(spec, quoting="csv"), "utf-8").quoting == "csv"
    assert len(read_inputs(lone, replace(spec, quoting="csv")).rows) == 30
    # A file of another format has quotes of its own.
    assert with_rows_of(tmp_path / "more.csv", replace(spec, quoting="none"), "utf-8").quoting == "auto"


def test_the_fingerprint_changes_with_the_rows_alone(lone, tmp_path, monkeypatch):
    """A run of a version without the option resumes if its rows are the same, and not if they are others now."""
    plain = tmp_path / "plain.tsv"
    plain.write_text('text\tlabel\n"a ""b"""\tx\n')
    spec = SourceSpec(train_file=plain)
    assert fingerprint(spec, "train") == fingerprint(replace(spec, quoting="csv"), "train")
    spec = SourceSpec(train_file=lone)
    assert fingerprint(spec, "train") == fingerprint(replace(spec, quoting="none"), "train")
    assert fingerprint(spec, "train") != fingerprint(replace(spec, quoting="csv"), "train")
    monkeypatch.setattr(split_module, "open_split", lambda *given: None)
    monkeypatch.setattr(split_module, "_mark_of_turns", lambda *given: [])
    assert fingerprint(spec, "train") == fingerprint(replace(spec, quoting="csv"), "train")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"train_file": "a.jsonl"}, "CSV and TSV"),
        ({"train_file": "a.csv", "format": "wikihow"}, "format is wikihow"),
        ({"dataset_name": "a/b"}, "need train_file"),
        ({"train_file": "a.csv", "quoting": "all"}, "'auto', 'none' or 'csv'"),
        ({"sets": {"one": {"train_file": "a.jsonl", "quoting": "none"}}}, "CSV and TSV"),
    ],
)
def test_the_option_is_for_tables_that_may_have_quoting(options, problem):
    with pytest.raises(ValueError, match=problem):
        DataConfig.model_validate({"quoting": "none", **options} if "sets" not in options else options)
    DataConfig.model_validate({"sets": {"one": {"train_file": "a.tsv.gz", "quoting": "none"}}})
