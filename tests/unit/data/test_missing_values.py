"""Targets that are what tables write for missing values: counted and named like empty cells, or kept if asked."""

import json

import pytest

from fullshard.errors import DataError
from fullshard.program.data import SourceSpec, read_split

# pandas.io.parsers' STR_NA_VALUES without the empty text.
OF_PANDAS = "-1.#IND 1.#QNAN 1.#IND -1.#QNAN #N/A N/A n/a NA <NA> #NA NULL null NaN -NaN nan -nan None"


def test_every_text_that_pandas_reads_as_missing_is_unusable(tmp_path):
    path = tmp_path / "rows.csv"
    texts = [*OF_PANDAS.split(), "#N/A N/A", "none", "NaT"]
    path.write_text("text,label\n" + "".join(f"a{i},{text}\n" for i, text in enumerate([*texts, "", "name", "nano"])))
    with pytest.raises(DataError, match=rf"{len(texts) + 1} of {len(texts) + 3} rows cannot be used"):
        read_split(SourceSpec(train_file=path), "train")
    table = read_split(SourceSpec(train_file=path, max_bad_rows=len(texts) + 1), "train")
    assert [row.target for row in table.examples] == ["name", "nano"]
    assert "the target is '-1.#IND'" in "\n".join(table.notes)
    kept = read_split(SourceSpec(train_file=path, max_bad_rows=1, missing_values="text"), "train").examples
    assert [row.target for row in kept] == [*texts, "name", "nano"]


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "NaN"}]}, None),
        ({"prompt": "q", "chosen": "yes", "rejected": "None"}, "pairs"),
        ({"prompt": "q", "completion": "null", "label": True}, "labels"),
    ],
)
def test_answers_and_completions_are_targets_too(tmp_path, row, kind):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=r"data\.missing_values"):
        read_split(SourceSpec(train_file=path, preferences=kind), "train")
    assert read_split(SourceSpec(train_file=path, preferences=kind, missing_values="text"), "train").examples


def test_plain_text_may_say_none(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "None"}\n{"text": "one"}\n')
    rows = read_split(SourceSpec(train_file=path, text_column="text"), "train").examples
    assert [row.source for row in rows] == ["None", "one"]
