"""FinancialPhraseBank in the forms it is shipped in."""

import pytest

from fullshard.errors import DataError
from fullshard.program.data import Example, SourceSpec, read_split

TEXT = "Sales rose @ 5 % in Jyväskylä .@positive\r\nIt is flat .@neutral\r\n\r\nProfit fell .@negative\r\n"
ROWS = [
    Example("Sales rose @ 5 % in Jyväskylä .", ("positive",), 1),
    Example("It is flat .", ("neutral",), 2),
    Example("Profit fell .", ("negative",), 4),
]


def read(directory, content, name="Sentences_AllAgree.txt", **options):
    path = directory / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_split(SourceSpec(train_file=path, format="phrasebank", **options), "train")


@pytest.mark.parametrize("encoding", ["iso-8859-1", "utf-8-sig", "utf-8"])
def test_the_authors_lines_in_each_encoding(tmp_path, encoding):
    table = read(tmp_path, TEXT.encode(encoding))
    assert table.examples == ROWS
    assert any("ISO-8859-1" in note for note in table.notes) == (encoding == "iso-8859-1")


def test_json_lines_with_names_and_with_numbers(tmp_path):
    lines = '{"sentence": "a", "label": 2}\n{"sentence": "b", "label": "neutral"}\n{"sentence": "c", "label": "0"}\n'
    examples = read(tmp_path, lines, "train.jsonl").examples
    assert [(row.source, row.target) for row in examples] == [("a", "positive"), ("b", "neutral"), ("c", "negative")]


def test_lines_without_a_label_are_bad_rows(tmp_path):
    content = "no label\nfine .@neutral\nodd .@happy\n@neutral\nempty .@\n"
    with pytest.raises(DataError) as caught:
        read(tmp_path, content)
    text = str(caught.value)
    assert "4 of 5 rows cannot be used" in text
    assert "txt:1: the line has no @ between sentence and label" in text
    assert "txt:3: the label is 'happy', not one of negative, neutral, positive" in text
    assert "txt:4: column 'sentence' is empty" in text
    assert len(read(tmp_path, content, max_bad_rows=4).examples) == 1


def test_labels_of_json_lines_are_checked_too(tmp_path):
    with pytest.raises(DataError, match="the label is '3', not one of"):
        read(tmp_path, '{"sentence": "a", "label": 3}\n', "train.jsonl")


def test_an_empty_file_and_other_columns(tmp_path):
    with pytest.raises(DataError, match="is empty"):
        read(tmp_path, b"\xef\xbb\xbf\n")
    with pytest.raises(DataError, match=r"has no column 'text'. Its columns: 'sentence', 'label'"):
        read(tmp_path, TEXT, source_column="text")


def test_a_text_file_without_the_format_is_refused(tmp_path):
    path = tmp_path / "Sentences_AllAgree.txt"
    path.write_text(TEXT)
    spec = SourceSpec(train_file=path)
    with pytest.raises(DataError, match=r"data.format: phrasebank"):
        read_split(spec, "train")
