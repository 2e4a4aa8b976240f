"""The delimiter of a CSV is found where header and rows agree outside quotes; a comma file stays one."""

import pytest

from fullshard.errors import DataError
from support.row_files import read, write


def table(tmp_path, text, **options):
    names = {"source_column": "source", "target_column": "target"}
    return read(write(tmp_path / "rows.csv", text), **{names.get(name, name): one for name, one in options.items()})


def pairs(tmp_path, text, **options):
    return [(row.source, row.target, row.line) for row in table(tmp_path, text, **options).examples]


@pytest.mark.parametrize(("delimiter", "named"), [(";", "';'"), ("\t", "a tab"), ("|", "'|'")])
def test_another_delimiter_is_found_and_named_with_lines_as_ever(tmp_path, delimiter, named):
    text = '\ufeff\r\nid;text;label\r\n1;"a ""b"";\r\n; c""";x\r\n\r\n2;1,5 Euro, netto;"y; z"\r\n'.replace(
        ";", delimiter
    )
    cell = 'a "b";\r\n; c"'.replace(";", delimiter)
    assert pairs(tmp_path, text) == [(cell, "x", 3), ("1,5 Euro, netto", f"y{delimiter} z", 6)]
    separated = f"cells are separated by {named}, as its header and first rows show (data.delimiter)."
    assert table(tmp_path, text).notes == tuple(
        f"{tmp_path / 'rows.csv'}: {note}" for note in (separated, "not used: 'id'.")
    )


@pytest.mark.parametrize(
    "text",
    [
        'id,text,label\n1,"a; b; c",x\n',
        'text,label,"note; or ""none"""\n"a",x,"b; c"\n"d",y,"e; ""f"""\nonly one\n',
        'text,label,"of\ntwo ""lines; ""\nor three"\na,x,"b; c\n;"\nonly one\n',
        "text,label;\na,x;\n",
        "text,label\na;b,x;y\n",
    ],
    ids=["text", "quoted header and a broken row", "lines", "both fit", "rows only"],
)
def test_a_comma_file_stays_one_and_says_nothing(tmp_path, text):
    options = {"max_bad_rows": 1, "target_column": "label;" if "label;" in text else "label"}
    read, plain = table(tmp_path, text, **options), table(tmp_path, text, **options, delimiter=",")
    assert (read.examples, read.notes) == (plain.examples, plain.notes)


def test_a_file_of_one_column_keeps_its_cells(tmp_path):
    text = "text\na; b\nc; d; e\n"
    assert [row.source for row in table(tmp_path, text, target_column="text").examples] == ["a; b", "c; d; e"]
    text = "a; b\nc\nd; e\n"  # a semicolon in the header alone does not cut the rows
    options = {"source_column": "a; b", "target_column": "a; b"}
    assert [row.source for row in table(tmp_path, text, **options).examples] == ["c", "d; e"]


def test_rows_that_disagree_are_not_guessed_and_the_error_names_the_option(tmp_path):
    text = "text;label\na;x\nb\n"
    with pytest.raises(DataError, match=r"no column 'text'.*'text;label'. If ';' separates its cells, set data.delim"):
        table(tmp_path, text)
    assert pairs(tmp_path, text, delimiter=";", max_bad_rows=1) == [("a", "x", 2)]


def test_a_broken_row_after_the_first_twenty_is_a_broken_row(tmp_path):
    text = "text;label\n" + "a;x\n" * 20 + "b\n"
    assert "1 of 21 rows were skipped" in table(tmp_path, text, max_bad_rows=1).notes[-1]


def test_two_that_fit_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"separated by ';' \(2 columns\) or '\|' \(3 columns\): set data.delimiter"):
        table(tmp_path, "text|x;label|y\na|b;c|d\n")


def test_a_given_delimiter_is_no_news(tmp_path):
    assert table(tmp_path, "text~label\na~x\n", delimiter="~").notes == ()
    with pytest.raises(DataError, match="no column 'text'"):
        table(tmp_path, "text,label\na,x\n", delimiter=";")


def test_a_file_with_every_cell_quoted_is_read(tmp_path):
    assert pairs(tmp_path, '"text";"label"\n"a; b";"x, y"\n"c";"z"\n') == [("a; b", "x, y", 2), ("c", "z", 3)]


@pytest.mark.parametrize("first", ["sep=;", "SEP=;", '"sep=;"', "\ufeffsep=;"])
def test_the_line_that_excel_writes_names_the_delimiter_and_is_no_header(tmp_path, first):
    text = f"{first}\r\ntext;label,or none\r\n1,5 Euro;x,y\r\n"
    assert pairs(tmp_path, text, target_column="label,or none") == [("1,5 Euro", "x,y", 3)]
    assert pairs(tmp_path, f"{first}\ntext#label\na;b#x\n", delimiter="#") == [("a;b", "x", 3)]
    assert pairs(tmp_path, "text,label\nsep=;,x\n") == [("sep=;", "x", 2)]
