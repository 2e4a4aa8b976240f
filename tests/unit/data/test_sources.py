"""Rows come out of a file exactly as they are in it, and every fault names its line."""

import csv

import pytest

from fullshard.data.sources import Example, read_rows
from fullshard.errors import DataError


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def message(path, source="text", target="label"):
    with pytest.raises(DataError) as caught:
        read_rows(path, source, target)
    return str(caught.value)


def test_csv_keeps_quotes_commas_newlines_and_other_columns_out(tmp_path):
    path = write(
        tmp_path / "rows.csv",
        'id,text,label\n1,"a ""quoted"" word, and a comma",x\n2,"two\nlines",y\n\n3,"crlf\r\ninside\u2028sep",z\n',
    )
    assert read_rows(path, "text", "label") == [
        Example('a "quoted" word, and a comma', "x", 2),
        Example("two\nlines", "y", 3),
        Example("crlf\r\ninside\u2028sep", "z", 6),
    ]


def test_csv_with_windows_line_ends_and_byte_order_mark(tmp_path):
    path = write(tmp_path / "rows.CSV", b"\xef\xbb\xbftext,label\r\nhello,a\r\nworld,b\r\n")
    assert [(row.source, row.target) for row in read_rows(path, "text", "label")] == [("hello", "a"), ("world", "b")]


def test_csv_without_a_final_newline(tmp_path):
    assert read_rows(write(tmp_path / "rows.csv", "text,label\na,b"), "text", "label") == [Example("a", "b", 2)]


def test_csv_cell_longer_than_the_csv_modules_limit(tmp_path):
    limit = csv.field_size_limit()
    article = "word " * 40_000
    path = write(tmp_path / "rows.csv", f"text,label\n{article},b\n")
    assert read_rows(path, "text", "label")[0].source == article
    assert csv.field_size_limit() == limit


def test_missing_column_lists_the_columns(tmp_path):
    path = write(tmp_path / "rows.csv", "text,category\na,b\n")
    assert message(path) == f"{path} has no column 'label'. Its columns: 'text', 'category'."


def test_column_that_is_there_twice(tmp_path):
    path = write(tmp_path / "rows.csv", "text,label,text\na,b,c\n")
    assert message(path) == f"{path} has 2 columns named 'text': rename all but one."


def test_bad_csv_rows_are_counted_and_located(tmp_path):
    path = write(tmp_path / "rows.csv", 'text,label\n"two\nlines",ok\nonly one\na,b,c\n  ,x\na,\n')
    assert message(path).splitlines() == [
        f"{path}: 4 of 5 rows cannot be used. Mend or remove them:",
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


@pytest.mark.parametrize("tail", ['"never closed,b\nc,d\n', '"closed"then more,b\n'])
def test_broken_quoting_names_the_line_it_starts_on(tmp_path, tail):
    path = write(tmp_path / "rows.csv", "text,label\na,b\n" + tail)
    assert f"{path}:3: the CSV is malformed from here on" in message(path)


def test_broken_header(tmp_path):
    path = write(tmp_path / "rows.csv", '"text,label\na,b\n')
    assert message(path).startswith(f"{path}:1: the header cannot be read:")


@pytest.mark.parametrize(("content", "size"), [(b"", 0), (b"\n \n", 3), (b"\xef\xbb\xbf", 3)])
@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_empty_file(tmp_path, content, size, suffix):
    path = write(tmp_path / f"rows{suffix}", content)
    assert message(path) == f"{path} is empty ({size} bytes): at least one row is needed."


def test_header_without_rows(tmp_path):
    path = write(tmp_path / "rows.csv", "text,label\n")
    assert message(path) == f"{path} has a header but no rows: at least one row below the header is needed."


def test_missing_file_and_unknown_format(tmp_path):
    assert message(tmp_path / "no.csv").startswith(f"{tmp_path / 'no.csv'} cannot be read: No such file")
    assert "must end in .csv or .jsonl; got '.xlsx'" in message(write(tmp_path / "rows.xlsx", "x"))
    assert "must end in .csv or .jsonl; got no suffix" in message(write(tmp_path / "rows", "x"))


def test_file_that_is_not_utf8_names_the_line(tmp_path):
    path = write(tmp_path / "rows.csv", b"text,label\na,b\ncaf\xe9,c\n")
    assert message(path) == f"{path}:3: byte 0xe9 is not UTF-8. Save the file as UTF-8."


def test_jsonl(tmp_path):
    path = write(
        tmp_path / "rows.jsonl",
        b'\xef\xbb\xbf{"text": "a\\nb \xe2\x80\xa8", "label": "x", "id": 1}\r\n\n{"label": "y", "text": "\\u00e9"}\n',
    )
    assert read_rows(path, "text", "label") == [Example("a\nb \u2028", "x", 1), Example("\u00e9", "y", 3)]


def test_a_json_number_is_its_text_as_in_csv(tmp_path):
    path = write(tmp_path / "rows.jsonl", '{"text": 1.50, "label": -3}\n{"text": "a", "label": 1e5}\n')
    assert read_rows(path, "text", "label") == [Example("1.50", "-3", 1), Example("a", "1e5", 2)]


def test_bad_jsonl_rows_are_counted_and_located(tmp_path):
    path = write(
        tmp_path / "rows.jsonl",
        '{"text": "a", "label": "b"}\n{"text": "a",\n[1]\n{"text": "a"}\n{"text": true, "label": "b"}\n',
    )
    assert message(path).splitlines() == [
        f"{path}: 4 of 5 rows cannot be used. Mend or remove them:",
        f"  {path}:2: broken JSON: Expecting property name enclosed in double quotes at column 14",
        f"  {path}:3: the line holds a JSON list, not an object",
        f"  {path}:4: column 'label' is missing",
        f"  {path}:5: column 'text' holds a bool, not text",
    ]


def test_jsonl_missing_column_lists_all_keys(tmp_path):
    path = write(tmp_path / "rows.jsonl", '{"a": "1"}\n{"b": "2"}\n')
    assert message(path) == f"{path} has no column 'text'. Its columns: 'a', 'b'."


def test_jsonl_without_one_readable_row_says_so(tmp_path):
    path = write(tmp_path / "rows.jsonl", "text,label\n")
    assert "1 of 1 rows cannot be used" in message(path)
    assert "broken JSON" in message(path)
