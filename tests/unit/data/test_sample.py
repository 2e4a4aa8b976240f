"""A sample of rows is like the table, whatever the order of the rows, and the same wherever it is drawn."""

import random
from collections import Counter

import pytest

from fullshard.program.config import RunConfig
from fullshard.program.data import Sample, read_split, training_texts
from fullshard.program.data.examples import Example
from fullshard.program.data.streaming import index_to
from fullshard.program.train.setup.prepare import MOST_LABELS, prepare
from support.row_files import write_rows
from support.tiny_run import settings

LABELS = 77


def sorted_rows(each=40):
    """Rows sorted by label, as many tables are."""
    pairs = [(label, row) for label in range(LABELS) for row in range(each)]
    return [{"text": f"question {row} of {label}", "label": f"l{label}"} for label, row in pairs]


def examples(rows):
    return [Example(row["text"], (row["label"],), line) for line, row in enumerate(rows, start=1)]


def drawn(rows, count, seed=0):
    return [row for row, is_in in zip(rows, Sample(count, seed).drawn(examples(rows)), strict=True) if is_in]


def texts(rows):
    return Counter(row["text"] for row in rows)


def test_a_table_sorted_by_label_is_sampled_over_all_labels():
    rows = sorted_rows()
    found = drawn(rows, 1000)
    counts = Counter(row["label"] for row in found)
    assert (len(found), len(counts)) == (1000, LABELS)
    # Pearson's test against equal shares without replacement: 99.9 % of random samples are below 118.
    expected = 1000 / LABELS
    spread = sum((count - expected) ** 2 / expected for count in counts.values()) / (1 - 1000 / len(rows))
    assert spread < 118


@pytest.mark.parametrize("seed", [0, 42])
def test_the_order_of_rows_does_not_matter(seed):
    rows = sorted_rows(5) + sorted_rows(2)  # some rows twice
    shuffled = random.Random(1).sample(rows, len(rows))
    assert texts(drawn(shuffled, 50, seed)) == texts(drawn(rows, 50, seed))
    assert texts(drawn(rows, 50, seed)) != texts(drawn(rows, 50, seed + 1))


def test_a_frequent_row_is_drawn_as_often_as_its_share():
    same = [{"text": "thank you", "label": "thanks"}] * 5000
    for seed in range(5):
        found = drawn([*same, *sorted_rows(5000 // LABELS)], 1000, seed)
        assert 430 < texts(found)["thank you"] < 570


def test_rows_with_the_same_source_are_drawn_by_their_targets():
    rows = [{"text": "write a poem", "label": f"poem {row}"} for row in range(1000)]
    found = [row["label"] for row in drawn(rows, 100)]
    assert len(set(found)) == 100
    assert found != [row["label"] for row in rows[:100]]


def test_a_sample_holds_the_smaller_ones_and_at_most_all_rows():
    rows = sorted_rows(5)
    few, more = texts(drawn(rows, 20)), texts(drawn(rows, 21))
    assert len(more - few) == 1
    assert not few - more
    assert drawn(rows, 10**6) == rows
    assert drawn(rows, len(rows)) == rows


@pytest.mark.parametrize("fraction", [0.0, 0.3])
def test_every_format_and_streaming_draw_the_same_rows(tmp_path, fraction):
    rows = sorted_rows(3)
    found = []
    for suffix in (".jsonl", ".parquet", ".csv"):
        shuffled = random.Random(suffix).sample(rows, len(rows))
        spec = write_rows(tmp_path / f"rows{suffix}", shuffled, validation_fraction=fraction)
        table = read_split(spec, "train").examples
        found.append(sorted(one.source for one, is_in in zip(table, Sample(40, 3).drawn(table), strict=True) if is_in))
        found.append(sorted(one.source for one in training_texts(spec, Sample(40, 3))))
        entry = tmp_path / f"entry{suffix}"
        entry.mkdir()
        kept = index_to(entry, spec, Sample(40, 3), MOST_LABELS)
        labels = Counter(next(row["label"] for row in rows if row["text"] == source) for source in found[-1])
        assert (kept["rows"], kept["labels"]) == (40, labels)
        assert f"40 of {len(table):,} rows" in kept["notes"][-1]
        assert "data.max_train_samples" in kept["notes"][-1]
    assert found == [found[0]] * 6
    assert len(found[0]) == 40


@pytest.mark.parametrize("streaming", [False, True])
def test_a_run_draws_training_and_held_out_rows_of_each_set(tmp_path, streaming):
    """Run files in which the same rows come in another order have the same rows, and another seed has others."""
    rows = sorted_rows(2)

    def prepared(order, seed=3):
        folder = tmp_path / f"{order}{seed}"
        folder.mkdir()
        some = random.Random(order).sample(rows, len(rows)) if order else rows
        write_rows(folder / "rows.jsonl", some)
        one = {"train_file": str(folder / "rows.jsonl"), "validation_fraction": 0.5}
        unset = dict.fromkeys(("train_file", "validation_file", "source_column", "target_column"))
        changes = {f"data__{key}": value for key, value in unset.items()}
        changes |= {"data__sets": {"one": one, "two": {**one, "source_prefix": "two: "}}, "data__streaming": streaming}
        limits = {"data__max_train_samples": 30, "data__max_eval_samples": 20, "seed": seed}
        return prepare(RunConfig.model_validate(settings(folder, **changes | limits)))

    found = [prepared(0), prepared(1)]
    held_out = [sorted(one.source for one in each.held_out) for each in found]
    labels = [each.labels for each in found]
    assert held_out[0] == held_out[1]
    assert labels[0] == labels[1]
    assert [len(one.train_set) for one in found[0].sets] == [30, 30]
    assert [len(one.held_out) for one in found[0].sets] == [20, 20]
    assert len({one.target for one in found[0].held_out}) > 12  # the first 20 have 10
    assert prepared(0, seed=4).labels != labels[0]
