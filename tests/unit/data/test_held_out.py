"""Held-out rows of a table with labels: each class keeps its share, whatever the order of the rows."""

import json
import random
from collections import Counter
from math import floor

import pytest

from fullshard.program.config import RunConfig
from fullshard.program.config.recorded import SUMMARY_NAME, read_run
from fullshard.program.data import SourceSpec, read_split, training_texts
from fullshard.program.train.setup.resume import deciding_settings
from support.tiny_run import settings

SIZES = {"a": 380, "b": 401, "c": 133, "d": 60, "e": 21, "f": 5, "once": 1}


def written(path, sizes, order=0, copies=1):
    rows = [
        {"text": f"{label} {row // copies}", "label": label} for label, size in sizes.items() for row in range(size)
    ]
    random.Random(order).shuffle(rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def held_out(path, fraction=0.1, **options):
    return read_split(SourceSpec(train_file=path, validation_fraction=fraction, **options), "validation").examples


def largest_remainders(sizes, fraction):
    """The seats of Hamilton's method."""
    seats = {label: floor(size * fraction) for label, size in sizes.items()}
    left = round(sum(sizes.values()) * fraction) - sum(seats.values())
    for label in sorted(sizes, key=lambda one: seats[one] - sizes[one] * fraction)[:left]:
        seats[label] += 1
    return {label: count for label, count in seats.items() if count}


@pytest.mark.parametrize("fraction", [0.1, 0.37])
def test_classes_keep_their_shares_by_largest_remainders(tmp_path, fraction):
    path = written(tmp_path / "rows.jsonl", SIZES)
    found = Counter(row.target for row in held_out(path, fraction))
    assert found == largest_remainders(SIZES, fraction)
    table = read_split(SourceSpec(train_file=path, validation_fraction=fraction), "train")
    assert Counter(row.target for row in table.examples) == Counter(SIZES) - found
    assert "each of 7 targets or labels keeps its share (data.held_out_by)" in table.notes[-1]


def test_the_order_of_rows_and_streaming_do_not_matter(tmp_path):
    first, second = (written(tmp_path / f"rows{order}.jsonl", SIZES, order) for order in (0, 1))
    assert {row.source for row in held_out(first)} == {row.source for row in held_out(second)}
    spec = SourceSpec(train_file=first, validation_fraction=0.1)
    assert list(training_texts(spec, None)) == read_split(spec, "train").examples


def test_rows_with_one_source_stay_together(tmp_path):
    path = written(tmp_path / "rows.jsonl", {"a": 300, "b": 200}, copies=5)
    found = held_out(path)
    assert set(Counter(row.source for row in found).values()) == {5}
    assert all(
        abs(Counter(row.target for row in found)[label] - size / 10) <= 5 for label, size in (("a", 300), ("b", 200))
    )


def test_both_kinds_of_labels_are_held_out(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"p{i}", "completion": f"c{i}", "label": i > 1} for i in range(12)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert {row.desirable for row in held_out(path, preferences="labels")} == {True, False}


def test_rows_without_classes_are_held_out_as_before(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"t {i}", "label": f"l {i}"}) + "\n" for i in range(300)))
    assert held_out(path) == held_out(path, held_out_by="source")


def test_runs_of_earlier_versions_keep_their_rows(tmp_path):
    """They held rows out by the source alone: they are refused on resuming by classes, and evaluated as they were."""
    path, out = written(tmp_path / "rows.jsonl", {"a": 20, "b": 20}), tmp_path / "out"
    data = {"data__train_file": path, "data__validation_file": None, "data__validation_fraction": 0.1}
    config = RunConfig.model_validate(
        settings(tmp_path, **data, data__source_column="text", data__target_column="label")
    )
    now = deciding_settings(config, 1)["data.validation_fraction"]
    assert now == "0.1 (data.held_out_by: classes)"
    by_source = config.model_copy(update={"data": config.data.model_copy(update={"held_out_by": "source"})})
    assert deciding_settings(by_source, 1)["data.validation_fraction"] == 0.1  # as in their checkpoints
    plain = config.model_dump(mode="json", by_alias=True)
    del plain["data"]["held_out_by"]
    out.mkdir(exist_ok=True)
    (out / SUMMARY_NAME).write_text(json.dumps({"config": plain}))
    assert read_run(out).data.held_out_by == "source"
