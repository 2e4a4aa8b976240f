"""A streamed set gives the ids, weights and batches of the set that is tokenized first, from any kind of file."""

import csv
import gzip
import json
import os
import threading
from collections import Counter
from itertools import compress

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from fullshard.errors import DataError
from fullshard.program.data import Sample, SourceSpec, chained, read_split, streaming, tokenize, training_texts
from fullshard.program.data.batching.collate import CollateSpec
from fullshard.program.data.batching.stream import EpochPlan, read_ahead, steps
from fullshard.program.data.reading.csv_file import CsvFile
from fullshard.program.data.streaming import (
    ROWS_NAME,
    StreamedRows,
    TargetCounts,
    index_to,
    lengths_to,
    open_stream,
    sample_lengths,
)
from fullshard.program.data.tokenizing.tokenize import TokenizeSpec
from fullshard.program.train.setup.prepare import MOST_LABELS

WORDS = ["a", "b", "c", "d", "e", "label"]
T5 = TokenizeSpec(max_source_length=6, max_target_length=3, source_prefix="prefix: ")


def table(count=23):
    """Rows of which every fifth cannot be used; texts have line breaks, quotes and letters of two bytes."""
    texts = [
        " ".join(WORDS[: 1 + row % 6]) + ["", "\n b", ' "c", d', " é ü", "\r\n e"][row % 5] for row in range(count)
    ]
    return [
        {"text": "" if row % 5 == 4 else text, "label": WORDS[row % 6], "weight": [1, 0.5, 2.25][row % 3]}
        for row, text in enumerate(texts)
    ]


def write_csv(path, rows=None, bom=b"", encoding="utf-8"):
    with path.open("wb") as file:
        file.write(bom)
    with path.open("a", newline="", encoding=encoding) as file:
        writer = csv.DictWriter(file, ["text", "label", "weight"])
        writer.writeheader()
        writer.writerows(rows or table())
    return path


def write_jsonl(path, end="\n"):
    lines = [json.dumps(row, ensure_ascii=False) for row in table()]
    lines[7:7] = ["", "{broken"]
    path.write_bytes("".join(line + end for line in lines).encode().removesuffix(end.encode()))
    return path


def write_gzip(path):
    path.write_bytes(gzip.compress(write_csv(path.with_suffix("")).read_bytes()))
    return path


def write_parquet(path):
    pq.write_table(pa.Table.from_pylist(table()), path, row_group_size=4)
    return path


FILES = {
    "csv": lambda at: write_csv(at / "rows.csv"),
    "csv with a byte-order mark": lambda at: write_csv(at / "rows.csv", bom=b"\xef\xbb\xbf"),
    "jsonl": lambda at: write_jsonl(at / "rows.jsonl"),
    "jsonl of Windows": lambda at: write_jsonl(at / "rows.jsonl", end="\r\n"),
    "gzip": lambda at: write_gzip(at / "rows.csv.gz"),
    "latin-1": lambda at: write_csv(at / "rows.csv", encoding="latin-1"),
    "parquet": lambda at: write_parquet(at / "rows.parquet"),
}


def spec_of(path, **more):
    encoding = "latin-1" if more.pop("kind", "") == "latin-1" else "utf-8"
    names = {"source_column": "text", "target_column": "label", "weight_column": "weight"}
    return SourceSpec(train_file=path, max_bad_rows=10, encoding=encoding, **names | more)


def stream(directory, spec, tokenizer, how=T5, sample=None):
    directory.mkdir()
    kept = json.loads(json.dumps(index_to(directory, spec, sample, MOST_LABELS)))
    rows = StreamedRows(directory, kept, spec, tokenizer, how)
    return open_stream(directory, rows, json.loads(json.dumps(sample_lengths(rows, how))), content="1"), kept


def everything(tokenized):
    sides = [tokenized.source_ids, tokenized.target_ids, *([] if tokenized.spans is None else [tokenized.spans])]
    return [[side[row].tolist() for row in range(len(tokenized))] for side in sides], tokenized.weights.tolist()


@pytest.mark.parametrize("kind", FILES)
def test_the_ids_and_weights_are_those_of_the_set_tokenized_first(kind, tmp_path, t5_like):
    spec = spec_of(FILES[kind](tmp_path), kind=kind)
    whole = read_split(spec, "train")
    first = tokenize(whole.examples, t5_like, T5)
    streamed, kept = stream(tmp_path / "entry", spec, t5_like)
    assert everything(streamed) == everything(first)
    assert (tuple(kept["notes"]), tuple(kept["skipped"])) == (whole.notes, whole.skipped)
    # Of so few rows the sample is all of them.
    assert (streamed.source_stats, streamed.target_stats) == (first.source_stats, first.target_stats)
    copied = kind in ("gzip", "latin-1", "parquet")
    assert kept["in_place"] is not copied
    assert (tmp_path / "entry" / ROWS_NAME).exists() is copied


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_rows_held_out_by_a_hash_are_not_in_the_index(kind, tmp_path, t5_like):
    spec = spec_of(FILES[kind](tmp_path), validation_fraction=0.4)
    train, held_out = read_split(spec, "train"), read_split(spec, "validation")
    assert min(len(train.examples), len(held_out.examples)) > 1
    streamed, kept = stream(tmp_path / "entry", spec, t5_like)
    assert everything(streamed) == everything(tokenize(train.examples, t5_like, T5))
    assert (tuple(kept["notes"]), kept["rows"]) == (train.notes, len(train.examples))
    sample = Sample(3, seed=1)
    drawn = list(compress(range(len(train.examples)), sample.drawn(train.examples)))
    assert [row.source for row in training_texts(spec, sample)] == [train.examples[row].source for row in drawn]
    limited, kept = stream(tmp_path / "limited", spec, t5_like, sample=sample)
    assert kept["notes"][-1].startswith(f"training: 3 of {len(train.examples)} rows")
    assert [row.tolist() for row in limited.source_ids] == [streamed.source_ids[row].tolist() for row in drawn]


@pytest.mark.parametrize("chunk", [4, 100])
def test_the_lengths_of_all_rows_are_found_without_keeping_ids(tmp_path, t5_like, monkeypatch, chunk):
    monkeypatch.setattr(streaming, "CHUNK_ROWS", chunk)
    spec = spec_of(FILES["csv"](tmp_path))
    first = tokenize(read_split(spec, "train").examples, t5_like, T5)
    streamed, _ = stream(tmp_path / "entry", spec, t5_like)
    told, lengths = [], tmp_path / "lengths"
    lengths.mkdir()
    about = lengths_to(lengths, streamed.source, T5, lambda *done: told.append(done))
    exact = open_stream(tmp_path / "entry", streamed.source, json.loads(json.dumps(about)), lengths, content="1")
    assert (streamed.estimated, exact.estimated, exact.taken([1]).estimated) == (True, False, False)
    assert exact.source_ids.lengths.tolist() == first.source_ids.lengths.tolist()
    assert exact.target_ids.lengths.tolist() == first.target_ids.lengths.tolist()
    assert (exact.source_stats, exact.target_stats) == (first.source_stats, first.target_stats)
    assert (told[0], told[-1]) == ((0, len(first)), (len(first), len(first)))
    assert {path.stat().st_size for path in lengths.iterdir()} == {4 * len(first)}


def same_batches(mine, theirs):
    names = ("input_ids_BS", "attention_mask_BS", "labels_BT", "weights_BT")
    assert [batch.indices for batch in mine] == [batch.indices for batch in theirs]
    for one, other in zip(mine, theirs, strict=True):
        assert (one.fillers, one.target_tokens, one.target_weight) == (
            other.fillers,
            other.target_tokens,
            other.target_weight,
        )
        for name in names:
            torch.testing.assert_close(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("start", [0, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_the_steps_of_every_rank_are_those_of_the_set_tokenized_first(
    tmp_path, t5_like, gpt_like, causal, start, packed
):
    how = TokenizeSpec(6, 3, causal=causal, separator=" d" if causal else "")
    tokenizer = gpt_like if causal else t5_like
    spec = spec_of(FILES["csv"](tmp_path))
    streamed, _ = stream(tmp_path / "entry", spec, tokenizer, how)
    first = tokenize(read_split(spec, "train").examples, tokenizer, how)
    plan = EpochPlan(len(first), world_size=2, batch_size=2, seed=3, epoch=1, accumulation=2)
    collate = CollateSpec(0, causal=causal, packed=packed)
    for rank in (0, 1):
        mine, theirs = (list(steps(rows, plan, rank, collate, start=start)) for rows in (streamed, first))
        assert len(mine) == plan.num_steps - start
        for some, others in zip(mine, theirs, strict=True):
            same_batches(some, others)


def test_conversations_of_a_causal_model_have_their_spans(tmp_path, gpt_like):
    gpt_like.chat_template = (
        "{% for m in messages %}{{ m.content }} {% if m.role == 'assistant' %}e {% endif %}{% endfor %}"
    )
    turns = [
        [("user", "a b"), ("assistant", "c d")],
        [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")],
    ]
    talks = [{"messages": [{"role": role, "content": text} for role, text in one]} for one in turns * 3]
    path = tmp_path / "talks.jsonl"
    path.write_text("\n".join(map(json.dumps, talks)))
    spec, how = SourceSpec(train_file=path), TokenizeSpec(20, 20, causal=True)
    try:
        first = tokenize(read_split(spec, "train").examples, gpt_like, how)
        streamed, kept = stream(tmp_path / "entry", spec, gpt_like, how)
        assert kept["conversations"]
        assert tuple(kept["notes"]) == read_split(spec, "train").notes
        rows = streamed.taken([1, 4])
        assert [rows.spans[row].tolist() for row in (1, 4)] == [first.spans[row].tolist() for row in (1, 4)]
        assert streamed.spans[1].tolist() == first.spans[1].tolist()
    finally:
        gpt_like.chat_template = None


def test_sets_of_a_mixture_follow_one_another(tmp_path, t5_like):
    spec = spec_of(FILES["jsonl"](tmp_path))
    one, _ = stream(tmp_path / "one", spec, t5_like)
    two, _ = stream(tmp_path / "two", spec_of(FILES["parquet"](tmp_path)), t5_like, TokenizeSpec(6, 3))
    both = chained([one, two])
    wanted = [2, len(one) - 1, len(one), len(both) - 1]
    rows = both.taken(wanted)
    parts = [one.source_ids[2], one.source_ids[len(one) - 1], two.source_ids[0], two.source_ids[len(two) - 1]]
    assert [rows.source_ids[row].tolist() for row in wanted] == [part.tolist() for part in parts]
    assert [both.source_ids[row].tolist() for row in wanted] == [part.tolist() for part in parts]


def test_a_sample_keeps_its_rows_and_their_labels(tmp_path, t5_like):
    spec = spec_of(FILES["csv"](tmp_path))
    rows, sample = read_split(spec, "train").examples, Sample(5, seed=0)
    streamed, kept = stream(tmp_path / "entry", spec, t5_like, sample=sample)
    assert len(streamed) == 5
    assert kept["labels"] == Counter(row.target for row in compress(rows, sample.drawn(rows)))
    assert kept["labels"] != Counter(row.target for row in rows[:5])
    assert "5 of 19 rows" in kept["notes"][-1]
    assert "data.max_train_samples" in kept["notes"][-1]


def test_targets_are_counted_until_there_are_too_many():
    counts = TargetCounts(most=2)
    for target in ("a", "b", "b", "c", "a", "a"):
        counts.add(target)
    assert (counts.labels, counts.majority) == (None, "b")


def test_a_file_that_is_written_to_is_refused(tmp_path, t5_like):
    path = FILES["jsonl"](tmp_path)
    streamed, _ = stream(tmp_path / "entry", spec_of(path), t5_like)
    before = path.read_bytes()
    path.write_bytes(before + b"\n")
    with pytest.raises(DataError, match=r"rows\.jsonl was changed while a run is reading it"):
        streamed.taken([0])
    path.write_bytes(before[: len(before) // 2])
    with pytest.raises(DataError, match="was changed while a run is reading it"):
        streamed.taken([len(streamed) - 1])


def test_a_file_that_replaces_it_changes_nothing(tmp_path, t5_like):
    path = FILES["jsonl"](tmp_path)
    streamed, _ = stream(tmp_path / "entry", spec_of(path), t5_like)
    before = streamed.source_ids[3].tolist()
    other = tmp_path / "other"
    other.write_text("something else")
    os.replace(other, path)
    assert streamed.source_ids[3].tolist() == before


class Source:
    """Rows of which some cannot be read; notes which were asked for, and in which thread."""

    def __init__(self, inner, broken=()):
        self.inner, self.broken, self.asked = inner, broken, []

    def encode(self, rows):
        self.asked.append((threading.current_thread() is threading.main_thread(), list(rows)))
        if set(rows) & set(self.broken):
            raise DataError("this row is broken")
        return self.inner.encode(rows)


def test_rows_are_made_ahead_in_a_thread_and_an_error_comes_with_its_step(tmp_path, t5_like):
    streamed, _ = stream(tmp_path / "entry", spec_of(FILES["csv"](tmp_path)), t5_like)
    source = Source(streamed.source, broken=[5])
    streamed = type(streamed)(**{**vars(streamed), "source": source})
    coming = read_ahead(streamed, iter([[0], [1], [2], [3], [4], [5], [6]]), lambda rows: rows)
    for row in range(5):
        assert next(coming).source_ids[row].tolist() == streamed.taken([row]).source_ids[row].tolist()
    with pytest.raises(DataError, match="this row is broken"):
        next(coming)
    in_thread = [rows for main, rows in source.asked if not main]
    assert in_thread[:6] == [[0], [1], [2], [3], [4], [5]]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tokenize-ahead")]


def test_lengths_are_estimated_by_characters(tmp_path, t5_like):
    rows = [{"text": "a " * count, "label": "b", "weight": 1} for count in (1, 2, 4, 40)]
    path = write_csv(tmp_path / "rows.csv", rows)
    streamed, _ = stream(tmp_path / "entry", spec_of(path), t5_like)
    lengths = streamed.source_ids.lengths
    assert lengths.tolist() == sorted(lengths.tolist())
    assert (lengths[0], lengths[-1], np.diff(lengths[:3]).min()) == (2, 6, 1)


@pytest.mark.parametrize("header", ["text,label,label,label_2", "label,text,label_2,label", "text,label_2,label,label"])
def test_a_real_column_is_not_hidden_by_the_number_of_a_duplicate(header, tmp_path, t5_like):
    path, names = tmp_path / "rows.csv", header.split(",")
    right = [(f"a {WORDS[row % 5]}", WORDS[row % 6]) for row in range(6)]
    cells = [{"text": text, "label_2": target, "label": "wrong"} for text, target in right]
    path.write_text("\n".join([header, *(",".join(row[name] for name in names) for row in cells)]) + "\n")
    spec = SourceSpec(train_file=path, source_column="text", target_column="label_2")
    assert [(row.source, row.target) for row in read_split(spec, "train").examples] == right
    kept = index_to(tmp_path, spec, None, MOST_LABELS)
    streamed = StreamedRows(tmp_path, kept, spec, t5_like, T5).examples(range(6))
    assert [(row.source, row.target) for row in streamed] == right


def test_duplicate_columns_have_the_same_names_streamed(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("id,id,id_2,text\n1,2,3,a\n")
    reader = CsvFile(path, "utf-8", ",")
    named = {"id": "1", "id_3": "2", "id_2": "3", "text": "a"}
    assert [row.cells for row in reader.rows(())] == [named]
    assert reader.row_at(iter(["1,2,3,a\n"])).cells == named
