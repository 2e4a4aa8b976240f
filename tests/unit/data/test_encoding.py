"""The encoding of a table of rows for a trained model: given, the run's, or found as ``fullshard init`` finds it."""

import codecs
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fullshard.errors import DataError
from fullshard.program.data import SourceSpec, encoding_of_rows, read_inputs

ROWS = [f"{'Straße' if number % 2 else 'Weg'} {number}" for number in range(22)]


def table(path, codec):
    path.write_text("\n".join(["text;andere", *(f"{row};x" for row in ROWS), ""]), encoding=codec)
    return path


def sources(path, spec, given=None):
    encoding, notes = encoding_of_rows(path, spec, given)
    return [row.source for row in read_inputs(path, replace(spec, encoding=encoding)).rows], notes


@pytest.mark.parametrize("name", ["rows.csv", "rows.txt"])
def test_windows_1252_is_found_and_said(name, tmp_path):
    path = table(tmp_path / name, "windows-1252")
    found, notes = sources(path, SourceSpec(source_column="text"))
    expected = ["text;andere", *(f"{row};x" for row in ROWS)] if name.endswith("txt") else ROWS
    assert found == expected
    assert notes == ("not UTF-8: read as windows-1252 (--encoding), with lines such as 'Straße 1;x'",)


@pytest.mark.parametrize("given", [None, "utf-8"])
def test_the_runs_encoding_is_used_and_said_unless_another_is_given(given, tmp_path):
    path = table(tmp_path / "rows.csv", given or "mac-roman")
    found, notes = sources(path, SourceSpec(source_column="text", encoding="mac-roman"), given)
    assert found == ROWS
    assert notes == (() if given else ("the rows are read as mac-roman, the run's data.encoding (--encoding)",))


@pytest.mark.parametrize("codec", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"])
def test_utf_16_and_32_are_found_by_their_mark_or_zeros_and_said(codec, tmp_path):
    path = table(tmp_path / "rows.csv", codec)
    found, notes = sources(path, SourceSpec(source_column="text"))
    assert found == ROWS
    assert notes[0].startswith(f"read as {codec} (--encoding)")


def test_utf_8_and_parquet_need_no_word(tmp_path):
    assert sources(table(tmp_path / "rows.csv", "utf-8"), SourceSpec(source_column="text")) == (ROWS, ())
    pq.write_table(pa.table({"text": ROWS}), tmp_path / "rows.parquet")
    assert sources(tmp_path / "rows.parquet", SourceSpec()) == (ROWS, ())


def test_lines_of_another_encoding_among_utf_8_are_unusable_rows(tmp_path):
    (tmp_path / "rows.csv").write_bytes("text\nStraße\n".encode() + "Straße\n".encode("windows-1252"))
    rows = read_inputs(tmp_path / "rows.csv", SourceSpec()).rows
    assert [row.problem is None for row in rows] == [True, False]
    assert "or set data.encoding (of rows to predict or evaluate: --encoding)" in rows[1].problem
    assert encoding_of_rows(tmp_path / "rows.csv", SourceSpec(), None) == ("utf-8", ())


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("rows.csv", codecs.BOM_UTF8 + b"text\nStra\xdfe\nG\xe4ste\n", "line 2: byte 0xdf is not UTF-8"),
        ("rows.jsonl", b'{"te\n[]\n', "line 1: broken JSON"),
        ("rows.txt", b"\n \n", "line 1: it is empty"),
    ],
)
def test_a_table_without_a_usable_row_is_an_error(name, content, problem, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"{name}: none of its 2 rows can be used. The first is {problem}"):
        sources(tmp_path / name, SourceSpec())
