"""The weights of rows are positive numbers of a column: read, checked with their lines, and kept with the token ids."""

import dataclasses

import pytest

from fullshard.errors import DataError
from fullshard.program.data import (
    Example,
    SourceSpec,
    TokenizeSpec,
    answers_as_rows,
    cached,
    chained,
    fingerprint,
    open_tokens,
    read_split,
    tokenize_to,
)
from support.row_files import write


def spec_of(path, **options):
    return SourceSpec(train_file=path, weight_column="w", **options)


def test_weights_are_read_from_every_kind_of_number(tmp_path):
    csv = write(tmp_path / "rows.csv", "text,w,label\na,2,x\nb, 0.5 ,y\nc,1e1,z\n")
    lines = write(
        tmp_path / "rows.jsonl", '{"text": "a", "label": "x", "w": 2}\n{"text": "b", "label": "y", "w": "0.5"}\n'
    )
    assert [row.weight for row in read_split(spec_of(csv), "train").examples] == [2.0, 0.5, 10.0]
    assert [row.weight for row in read_split(spec_of(lines), "train").examples] == [2.0, 0.5]


def test_the_column_of_weights_is_never_source_or_target(tmp_path):
    path = write(tmp_path / "rows.csv", "w,left,right\n2,a,x\n3,b,y\n")
    assert [(row.source, row.target) for row in read_split(spec_of(path), "train").examples] == [("a", "x"), ("b", "y")]


@pytest.mark.parametrize("cell", ["-1", "0", "nan", "inf", "", "heavy", "-0.0"])
def test_a_weight_that_is_no_positive_number_is_an_unusable_row(tmp_path, cell):
    path = write(tmp_path / "rows.csv", f"text,label,w\na,x,1\nb,y,{cell}\n")
    with pytest.raises(DataError, match=r"rows.csv:3: column 'w' holds .*; a weight is a positive number"):
        read_split(spec_of(path), "train")
    table = read_split(spec_of(path, max_bad_rows=1), "train")
    assert [row.source for row in table.examples] == ["a"]


@pytest.mark.parametrize("cell", ["null", "true", "[1]"])
def test_json_that_is_no_number_is_an_unusable_row(tmp_path, cell):
    path = write(tmp_path / "rows.jsonl", f'{{"text": "a", "label": "x", "w": {cell}}}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl:1: column 'w'"):
        read_split(spec_of(path), "train")


def test_a_missing_column_is_an_error_and_held_out_rows_need_none(tmp_path):
    path = write(tmp_path / "rows.csv", "text,label\na,x\nb,y\n")
    with pytest.raises(
        DataError, match=r"has 0 columns 'w' \(data.weight_column\); one is needed. Its columns: 'text'"
    ):
        read_split(spec_of(path), "train")
    held_out = read_split(SourceSpec(train_file=path, validation_file=path, weight_column="w"), "validation")
    assert [row.weight for row in held_out.examples] == [1.0, 1.0]


def test_the_cache_keeps_them_and_knows_the_column(tmp_path, t5_like):
    path = write(tmp_path / "rows.csv", "text,label,w,v\na,x,2,1\nb,y,0.5,1\n")
    examples = read_split(spec_of(path), "train").examples
    build = lambda entry: tokenize_to(entry, examples, t5_like, TokenizeSpec(9, 9))  # noqa: E731
    entry, stats = cached(tmp_path / "cache", "key", build)
    weighted = open_tokens(entry, stats)
    assert weighted.weights.tolist() == [2.0, 0.5]
    plain = dataclasses.replace(weighted, weights=None)
    assert chained([plain, weighted]).weights.tolist() == [1.0, 1.0, 2.0, 0.5]
    assert chained([plain, plain]).weights is None
    keys = {fingerprint(dataclasses.replace(spec_of(path), weight_column=name), "train") for name in (None, "w", "v")}
    assert len(keys) == 3


def test_each_answer_of_a_conversation_has_its_weight(tmp_path):
    turns = '[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, '
    turns += '{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]'
    path = write(tmp_path / "rows.jsonl", f'{{"messages": {turns}, "w": 3}}\n')
    examples = read_split(spec_of(path), "train").examples
    assert [row.weight for row in answers_as_rows(examples)] == [3.0, 3.0]
    assert Example("a", ("b",), 1).weight == 1.0
