"""Rows come out of a file exactly as they are in it, and every fault names its line."""

import csv
import gzip
import json
import shutil
from dataclasses import replace

import pytest

from fullshard.errors import DataError
from fullshard.program.data import Example, SourceSpec, fingerprint, read_split
from support.row_files import pairs, read, write

ADVICE = "Correct or remove them, or raise data.max_bad_rows (now 0) to skip them:"


def rows_of(path, **options):
    return read(path, **options).examples


def message(path, **options):
    with pytest.raises(DataError) as caught:
        read(path, **options)
    return str(caught.value)


def test_csv_keeps_quotes_commas_newlines_and_other_columns_out(tmp_path):
    path = write(
        tmp_path / "rows.csv",
        'id,text,label\n1,"a ""quoted"" word, and a comma",x\n2,"two\nlines",y\n\n3,"crlf\r\ninside\u2028sep",z\n',
    )
    assert rows_of(path) == [
        Example('a "quoted" word, and a comma', ("x",), 2),
        Example("two\nlines", ("y",), 3),
        Example("crlf\r\ninside\u2028sep", ("z",), 6),
    ]


def test_csv_with_windows_line_ends_and_byte_order_mark_and_no_line_end_at_the_end(tmp_path):
    path = write(tmp_path / "rows.CSV", b"\xef\xbb\xbftext,label\r\nhello,a\r\nworld,b")
    assert rows_of(path) == [Example("hello", ("a",), 2), Example("world", ("b",), 3)]


def test_csv_cell_longer_than_the_csv_modules_limit(tmp_path):
    limit = csv.field_size_limit()
    article = "word " * 40_000
    assert limit < len(article)
    path = write(tmp_path / "rows.csv", f"text,label\n{article},b\n")
    assert rows_of(path)[0].source == article
    assert csv.field_size_limit() == limit


@pytest.mark.parametrize("blanks", ["", " ", "\t "])
def test_blanks_around_names_do_not_count(tmp_path, blanks):
    path = write(tmp_path / "rows.csv", "id, text ,label\t\n1, a ,b\n")
    names = {"source": f"{blanks}text{blanks}", "target": f"label{blanks}"}
    assert rows_of(path, **names) == [Example(" a ", ("b",), 2)]
    assert rows_of(path, source=None, template=f"<{{{blanks}text}}>", target="label") == [Example("< a >", ("b",), 2)]
    assert read_split(SourceSpec(train_file=path), "train").examples == [Example(" a ", ("b",), 2)]


def test_a_json_key_keeps_its_blanks(tmp_path):
    path = write(tmp_path / "rows.jsonl", '{" text": "a", "label": "b"}\n')
    assert rows_of(path, source=" text") == [Example("a", ("b",), 1)]


def test_bad_csv_rows_are_counted_and_located(tmp_path):
    path = write(tmp_path / "rows.csv", 'text,label\n"two\nlines",ok\nonly one\na,b,c\n  ,x\na,\n')
    assert message(path).splitlines() == [
        f"{path}: 4 of 5 rows cannot be used. {ADVICE}",
        f"  {path}:4: the row has 1 cells, the header 2",
        f"  {path}:5: the row has 3 cells, the header 2",
        f"  {path}:6: column 'text' is empty",
        f"  {path}:7: column 'label' is empty",
    ]


def test_many_bad_rows_are_cut_short(tmp_path):
    path = write(tmp_path / "rows.csv", "text,label\n" + "a\n" * 9 + "a,b\n")
    text = message(path)
    assert "9 of 10 rows" in text
    assert text.splitlines()[-1] == "  ... and 4 more"
    assert len(text.splitlines()) == 7


REFUSED = [
    ("rows.csv", "text,category\na,b\n", " has no column 'label'. Its columns: 'text', 'category'."),
    ("rows.csv", "text,label, text\na,b,c\n", " has 2 columns named 'text': rename all but one."),
    ("rows.csv", '"text,label\na,b\n', ":1: the header cannot be read:"),
    ("rows.csv", "text,label\n", " has a header but no rows: at least one row is needed."),
    ("rows.csv", "", " is empty (0 bytes): at least one row is needed."),
    ("rows.csv", "\n \n", " is empty (3 bytes): at least one row is needed."),
    ("rows.jsonl", "\ufeff", " is empty (3 bytes): at least one row is needed."),
    ("rows.jsonl", '{"a": "1"}\n{"b": "2"}\n', " has no column 'text'. Its columns: 'a', 'b'."),
    ("rows.jsonl", "text,label\n", ": 1 of 1 rows cannot be used"),
    ("rows.jsonl", "text,label\n", ":1: broken JSON"),
    ("rows.jsonl", '{"text": "\\ud83d", "label": "b"}\n', ":1: column 'text': \\ud83d is half of a character"),
    ("rows.jsonl", '{"text": "a", "label": []}\n', ":1: column 'label' is empty"),
    ("rows.jsonl", '{"text": "a", "label": ["a", null]}\n', ":1: column 'label' holds a list with nothing"),
    ("rows.jsonl", '{"text": "a", "label": [["a"]]}\n', ":1: column 'label' holds a list with a list, not text"),
    ("rows.jsonl", '{"text": "a", "label": {"a": 1}}\n', ":1: column 'label' holds a dict, not text"),
    ("rows.jsonl", '{"text": "a", "label": NaN}\n', ":1: column 'label' holds nan, not text"),
    ("rows.json", "{", " is not valid JSON"),
    ("rows.json", "[" * 100_000, " is not valid JSON: it is nested too deeply"),
    ("rows.json", '{"a": [1, 2], "b": [1]}', " is neither a list of objects"),
    ("rows.json", "[]", " has no rows: at least one is needed."),
]


@pytest.mark.parametrize(("name", "content", "rule"), REFUSED, ids=[rule for _, _, rule in REFUSED])
def test_what_cannot_be_used_is_refused_with_its_place_and_the_rule(tmp_path, name, content, rule):
    path = write(tmp_path / name, content)
    assert f"{path}{rule}" in message(path)


@pytest.mark.parametrize("tail", ['"never closed,b\nc,d\n', '"closed"then more,b\n'])
def test_broken_quoting_ends_the_run_at_the_line_it_starts_on_whatever_the_limit(tmp_path, tail):
    path = write(tmp_path / "rows.csv", "text,label\na,b\n" + tail)
    text = message(path, quoting="csv", max_bad_rows=99)
    assert f"{path}:3: the CSV is malformed from here on" in text
    assert "data.quoting: none" in text


def test_missing_file_and_unknown_format(tmp_path):
    assert message(tmp_path / "no.csv").startswith(f"{tmp_path / 'no.csv'} cannot be read: No such file")
    kinds = "must end in .csv, .tsv, .jsonl, .json, .parquet, .txt, .md (or that and .gz)"
    assert f"{kinds}; got '.xlsx'. Set data.format." in message(write(tmp_path / "rows.xlsx", "x"))
    assert f"{kinds}; got no suffix" in message(write(tmp_path / "rows", "x"))


def test_jsonl(tmp_path):
    path = write(
        tmp_path / "rows.jsonl",
        b'\xef\xbb\xbf{"text": "a\\nb \xe2\x80\xa8", "label": "x", "id": 1}\r\n\n{"label": "y", "text": "\\u00e9"}\n',
    )
    assert rows_of(path) == [Example("a\nb \u2028", ("x",), 1), Example("\u00e9", ("y",), 3)]


def test_a_json_number_is_its_text_as_in_csv(tmp_path):
    path = write(tmp_path / "rows.jsonl", '{"text": 1.50, "label": -3}\n{"text": "a", "label": 1e5}\n')
    assert rows_of(path) == [Example("1.50", ("-3",), 1), Example("a", ("1e5",), 2)]


def test_bad_jsonl_rows_are_counted_and_located(tmp_path):
    path = write(
        tmp_path / "rows.jsonl",
        '{"text": "a", "label": "b"}\n{"text": "a",\n[1]\n{"text": "a"}\n{"text": true, "label": "b"}\n',
    )
    assert message(path).splitlines() == [
        f"{path}: 4 of 5 rows cannot be used. {ADVICE}",
        f"  {path}:2: broken JSON: Expecting property name enclosed in double quotes at column 14",
        f"  {path}:3: the line is a JSON list, not an object",
        f"  {path}:4: column 'label' is missing",
        f"  {path}:5: column 'text' holds a bool, not text",
    ]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.tsv", 'text\tlabel\na, b\tx\n"tab\there\nand ""line"""\ty\n'),
        ("rows.json", json.dumps([{"text": "a, b", "label": "x"}, {"text": 'tab\there\nand "line"', "label": "y"}])),
        (
            "rows.json",
            json.dumps(
                {"v": 1, "data": [{"text": "a, b", "label": "x"}, {"text": 'tab\there\nand "line"', "label": "y"}]}
            ),
        ),
        ("rows.json", json.dumps({"text": ["a, b", 'tab\there\nand "line"'], "label": ["x", "y"]})),
        ("rows.json", json.dumps({"text": {"0": "a, b", "1": 'tab\there\nand "line"'}, "label": {"0": "x", "1": "y"}})),
    ],
    ids=["tsv", "list", "one-list", "columns", "pandas"],
)
def test_every_format_gives_the_same_rows(tmp_path, name, content):
    table = read(write(tmp_path / name, content))
    assert pairs(table) == [("a, b", "x"), ('tab\there\nand "line"', "y")]
    assert [row.line for row in table.examples] == ([2, 3] if name.endswith("tsv") else [1, 2])


def test_gzipped_files_are_read_by_the_suffix_inside(tmp_path):
    csv_path = write(tmp_path / "rows.csv.gz", gzip.compress(b"text,label\na,b\n"))
    jsonl_path = write(tmp_path / "rows.jsonl.gz", gzip.compress(b'{"text": "a", "label": "b"}\n'))
    assert rows_of(csv_path) == [Example("a", ("b",), 2)]
    assert rows_of(jsonl_path) == [Example("a", ("b",), 1)]
    assert "cannot be read" in message(write(tmp_path / "cut.csv.gz", csv_path.read_bytes()[:-4]))


def test_a_given_format_goes_before_the_suffix(tmp_path):
    path = write(tmp_path / "rows.dat", "text\tlabel\na\tb\n")
    assert rows_of(path, format="tsv") == [Example("a", ("b",), 2)]


def test_json_lines_of_format_json_are_told_so(tmp_path):
    lines = write(tmp_path / "lines.json", '{"text": "a", "label": "b"}\n{"text": "c", "label": "d"}\n')
    assert "set data.format: jsonl" in message(lines, format="json")
    assert len(rows_of(lines, format="jsonl")) == 2


def test_bad_items_of_a_json_list_are_counted(tmp_path):
    path = write(tmp_path / "rows.json", b'[{"text": "a", "label": "b"}, 3, {"text": "caf\xe9", "label": "c"}]')
    text = message(path)
    assert "2 of 3 rows cannot be used" in text
    assert f"{path}:2: the item is a JSON Number, not an object" in text
    assert f"{path}:3: byte 0xe9 is not UTF-8" in text


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl"])
def test_bytes_that_are_no_text_make_one_row_bad_and_leave_the_others(tmp_path, name):
    if name.endswith("csv"):
        content = b'text,label\na,b\n"caf\xe9\nau lait",c\nd,e\n'
    else:
        content = b'\n{"text": "a", "label": "b"}\n{"text": "caf\xe9", "label": "c"}\n{"text": "d", "label": "e"}\n'
    path = write(tmp_path / name, content)
    table = read(path, max_bad_rows=1)
    assert pairs(table) == [("a", "b"), ("d", "e")]
    assert table.examples[1].line == (5 if name.endswith("csv") else 4)
    assert table.notes[0].splitlines() == [
        f"{path}: 1 of 3 rows were skipped (data.max_bad_rows: 1):",
        f"  {path}:3: byte 0xe9 is not UTF-8: save the file as UTF-8, or set data.encoding (of rows to "
        "predict or evaluate: --encoding) to its encoding",
    ]
    assert "now 0) to skip them" in message(path)
    assert len(rows_of(path, encoding="iso-8859-1")) == 3


def test_other_encodings_and_their_byte_order_marks(tmp_path):
    path = write(tmp_path / "rows.csv", "text,label\ncafé,b\n".encode("utf-16"))
    assert rows_of(path, encoding="utf-16") == [Example("café", ("b",), 2)]
    assert "is not an encoding of Python" in message(path, encoding="utf-99")
    assert "the header cannot be read: byte 0xff is not UTF-8" in message(path)
    assert "cannot be decoded as utf-16" in message(
        write(tmp_path / "cut.csv", path.read_bytes() + b"a"), encoding="utf-16"
    )


def test_bad_rows_up_to_the_limit_are_skipped_and_shown_one_more_ends_it(tmp_path):
    path = write(
        tmp_path / "rows.jsonl", '{"text": "a", "label": "b"}\n{"text": ""}\n{broken\n{"text": "c", "label": null}\n'
    )
    table = read(path, max_bad_rows=3)
    assert table.examples == [Example("a", ("b",), 1)]
    assert [f":{line}:" in table.notes[0] for line in (1, 2, 3, 4)] == [False, True, True, True]
    assert "3 of 4 rows cannot be used" in message(path, max_bad_rows=2)
    assert "max_bad_rows (now 2)" in message(path, max_bad_rows=2)
    path = write(tmp_path / "rows.csv", "text,label\na\nb\n")
    assert "has 2 rows, none of which can be used" in message(path, max_bad_rows=9)


def test_lists_are_joined_in_the_source_and_are_references_in_the_target(tmp_path):
    path = write(
        tmp_path / "rows.jsonl",
        '{"text": ["One.", "", "Two\\nlines."], "label": ["x", " ", "y", "x"]}\n{"text": "a", "label": ["only"]}\n',
    )
    assert rows_of(path) == [Example("One. Two\nlines.", ("x", "y"), 1), Example("a", ("only",), 2)]
    assert rows_of(path, target_lists="join")[0].references == ("x y x",)


def spec_with_rows(tmp_path, count=400, **options):
    path = write(tmp_path / "rows.csv", "text,label\n" + "".join(f"row {n},{n % 3}\n" for n in range(count)))
    return SourceSpec(train_file=path, **options)


def test_held_out_rows_are_the_same_in_every_run_and_are_not_trained_on(tmp_path):
    spec = spec_with_rows(tmp_path, validation_fraction=0.1, held_out_by="source")
    train, held_out = read_split(spec, "train"), read_split(spec, "validation")
    assert [row.line for row in held_out.examples][:4] == [6, 11, 53, 55]
    assert sorted(row.line for row in train.examples + held_out.examples) == list(range(2, 402))
    assert len(held_out.examples) == pytest.approx(40, abs=15)
    assert f"{len(held_out.examples)} of 400 rows are held out" in held_out.notes[-1]
    fewer = read_split(replace(spec, validation_fraction=0.05), "validation").examples
    assert {row.line for row in fewer} < {row.line for row in held_out.examples}


def test_a_fraction_that_leaves_one_side_empty_is_refused(tmp_path):
    spec = spec_with_rows(tmp_path, count=3, validation_fraction=0.001)
    with pytest.raises(DataError, match="leaves 3 rows for training and 0 held out"):
        read_split(spec, "train")


def test_validation_rows_come_from_their_own_file(tmp_path):
    spec = spec_with_rows(tmp_path, count=3)
    with pytest.raises(DataError, match=r"no rows for validation: set data.validation_file"):
        read_split(spec, "validation")
    other = write(tmp_path / "other.jsonl", '{"text": "a", "label": "b"}\n')
    assert read_split(replace(spec, validation_file=other), "validation").examples == [Example("a", ("b",), 1)]


def test_the_fingerprint_is_of_the_bytes_and_the_options_not_of_the_place(tmp_path):
    spec = spec_with_rows(tmp_path, count=3)
    here = fingerprint(spec, "train")
    (tmp_path / "copy").mkdir()
    copied = replace(spec, train_file=tmp_path / "copy" / "other.csv")
    shutil.copy(spec.train_file, copied.train_file)
    assert fingerprint(copied, "train") == here
    changed = {
        fingerprint(replace(spec, **{name: value}), "train")
        for name, value in [
            ("format", "tsv"),
            ("encoding", "latin-1"),
            ("quoting", "none"),
            ("delimiter", ";"),
            ("source_column", "text"),
            ("target_column", "text"),
            ("target_lists", "join"),
            ("template", "{text}"),
            ("max_bad_rows", 1),
            ("validation_fraction", 0.5),
        ]
    } | {here, fingerprint(replace(spec, validation_fraction=0.5), "validation")}
    assert len(changed) == 12
    copied.train_file.write_bytes(spec.train_file.read_bytes().replace(b"row 2", b"row 3"))
    assert fingerprint(copied, "train") != here
    with pytest.raises(DataError, match="cannot be read"):
        fingerprint(replace(spec, train_file=tmp_path / "no.csv"), "train")
