"""Parquet files, and directories written by datasets."""

import datasets
import pyarrow as pa
import pytest
from pyarrow import parquet

from fullshard.errors import DataError
from fullshard.program.data import Example, SourceSpec, fingerprint, read_split
from fullshard.program.data.reading import arrow

COLUMNS = {"text": ["a", "b\nc", "d"], "label": [1, 0, 1], "more": [["x", "y"], ["z"], ["z", "z"]]}
FEATURES = datasets.Features(
    {
        "text": datasets.Value("string"),
        "label": datasets.ClassLabel(names=["no", "yes"]),
        "more": datasets.List(datasets.Value("string")),
    }
)


def make_dataset(**changes):
    return datasets.Dataset.from_dict({**COLUMNS, **changes}, features=FEATURES)


def refusal(split="train", **options):
    with pytest.raises(DataError) as caught:
        read_split(SourceSpec(**options), split)
    return str(caught.value)


def test_parquet_rows_are_numbered_and_keep_their_text(tmp_path):
    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.table({"text": ["a\nb", None, "c"], "label": [1, 2, 30], "other": [0.5, 1.0, 2.0]}), path)
    table = read_split(SourceSpec(train_file=path, max_bad_rows=1), "train")
    assert table.examples == [Example("a\nb", ("1",), 1), Example("c", ("30",), 3)]
    assert f"{path}:2: column 'text' is missing" in table.notes[2]
    assert "has no column 'x'" in refusal(train_file=path, source_column="x", target_column="label")


def test_parquet_of_datasets_has_the_names_of_its_classes(tmp_path):
    make_dataset().to_parquet(tmp_path / "rows.parquet")
    rows = read_split(SourceSpec(train_file=tmp_path / "rows.parquet"), "train").examples
    assert [row.target for row in rows] == ["yes", "no", "yes"]


def test_a_file_that_is_no_parquet_and_one_that_is_missing(tmp_path):
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 no PAR1")
    assert "cannot be read" in refusal(train_file=tmp_path / "rows.parquet")
    assert "cannot be read" in refusal(train_file=tmp_path / "no.parquet")


def test_a_saved_dataset_has_class_names_and_references(tmp_path):
    splits = {"train": make_dataset(), "validation": make_dataset(label=[0, -1, 0])}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    spec = SourceSpec(dataset_name=str(tmp_path / "saved"), max_bad_rows=1)
    assert read_split(spec, "train").examples == [
        Example("a", ("yes",), 1),
        Example("b\nc", ("no",), 2),
        Example("d", ("yes",), 3),
    ]
    assert [row.line for row in read_split(spec, "validation").examples] == [1, 3]
    lists = SourceSpec(dataset_name=str(tmp_path / "saved"), source_column="text", target_column="more")
    assert [row.references for row in read_split(lists, "train").examples] == [("x", "y"), ("z",), ("z",)]


def test_a_split_that_is_not_there_is_refused_with_those_that_are(tmp_path):
    make_dataset().save_to_disk(tmp_path / "saved")
    name = str(tmp_path / "saved")
    assert len(read_split(SourceSpec(dataset_name=name), "train").examples) == 3
    assert "has no split 'validation'. Its splits: 'train'." in refusal("validation", dataset_name=name)
    assert "set data.validation_split" in refusal("validation", dataset_name=name, validation_split=None)


def test_rows_of_a_dataset_can_be_held_out_by_hash(tmp_path):
    texts = [f"row {n}" for n in range(50)]
    dataset = datasets.Dataset.from_dict({"text": texts, "label": texts})
    dataset.save_to_disk(tmp_path / "saved")
    spec = SourceSpec(dataset_name=str(tmp_path / "saved"), validation_fraction=0.2)
    sides = [{row.source for row in read_split(spec, split).examples} for split in ("train", "validation")]
    assert sides[0] | sides[1] == set(texts)
    assert not sides[0] & sides[1]
    assert fingerprint(spec, "train") != fingerprint(spec, "validation")


def test_the_fingerprint_of_a_dataset_is_its_own(tmp_path):
    for place, data in [("a", make_dataset()), ("b", make_dataset()), ("c", make_dataset(text=["a", "b", "e"]))]:
        data.save_to_disk(tmp_path / place)
    prints = [fingerprint(SourceSpec(dataset_name=str(tmp_path / place)), "train") for place in "abc"]
    assert prints[0] == prints[1] != prints[2]


def test_what_is_no_dataset_says_what_was_tried(tmp_path):
    assert "was not written by datasets' save_to_disk" in refusal(dataset_name=str(tmp_path))
    assert f"there is no directory {tmp_path / 'no'}" in refusal(dataset_name=str(tmp_path / "no"))


def test_a_hub_dataset_that_cannot_be_reached_says_what_was_tried(monkeypatch, tmp_path):
    def load_dataset(*args, **options):
        raise ConnectionError(f"no way to {args} {options}")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.chdir(tmp_path)
    text = refusal(dataset_name="some/data", dataset_config_name="all", train_split="train[:5]")
    assert f"'some/data' is not a local directory ({tmp_path / 'some/data'})" in text
    assert "datasets.load_dataset('some/data', 'all', split='train[:5]') failed with ConnectionError: no way to" in text
    assert "the dataset elsewhere with save_to_disk" in text


def test_a_library_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(arrow.importlib, "import_module", lambda name: (_ for _ in ()).throw(ImportError(name)))
    assert "needs datasets. Install it: pip install datasets" in refusal(dataset_name="some/data")


def test_a_file_of_held_out_rows_comes_before_the_datasets_own(tmp_path):
    name = str(tmp_path / "saved")
    datasets.DatasetDict({"train": make_dataset(), "validation": make_dataset()}).save_to_disk(name)
    (tmp_path / "other.csv").write_text("text,label\nother,no\n")
    own = SourceSpec(dataset_name=name, source_column="text", target_column="label")
    other = SourceSpec(**{**vars(own), "validation_file": tmp_path / "other.csv"})
    assert read_split(other, "validation").examples == [Example("other", ("no",), 2)]
    assert read_split(other, "train") == read_split(own, "train")
    assert fingerprint(other, "train") == fingerprint(own, "train")
    assert fingerprint(other, "validation") != fingerprint(own, "validation")


def test_a_directory_has_no_configuration_to_choose(tmp_path):
    make_dataset().save_to_disk(tmp_path / "saved")
    assert "leave it out" in refusal(dataset_name=str(tmp_path / "saved"), dataset_config_name="x")
