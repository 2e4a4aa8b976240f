"""Plain text: rows cut out of joined documents as by run_clm, and T5's span corruption, which loses nothing."""

import itertools
import json
import struct
from fractions import Fraction

import numpy as np
import pytest
from transformers import T5Tokenizer

from fullshard.errors import DataError
from fullshard.program.data import (
    CollateSpec,
    Corruption,
    EpochPlan,
    TokenizeSpec,
    corrupted,
    row_tokens,
    sentinel_ids,
    steps,
    tokenize,
)
from fullshard.program.data.examples import Example, SourceSpec
from fullshard.program.data.reading.split import read_inputs, read_split
from fullshard.program.data.tokenizing.spans import corrupt, draw_spans, num_noise, side_lengths

END, SENTINELS = 1, tuple(range(1000, 1040))


def documents(*texts):
    return [Example(text, (text,), line) for line, text in enumerate(texts, start=1)]


def grouped(texts, tokenizer, block):
    """The rows of transformers' run_clm: its ``group_texts``, which drops the rest, over documents with their end."""
    ids = [[*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id] for text in texts]
    joined = list(itertools.chain(*ids))
    total = len(joined) // block * block
    return [joined[start : start + block] for start in range(0, total, block)], joined[total:]


@pytest.mark.parametrize("name", ["gpt_like", "t5_like"])
def test_documents_are_joined_with_the_end_token_and_cut_as_by_run_clm(request, name):
    tokenizer = request.getfixturevalue(name)  # one of them ends each text itself
    texts = ["a b c d e", " ", "e d", "a a a a a a a a b", ""]
    rows = tokenize(documents(*texts), tokenizer, TokenizeSpec(4, 4, causal=True, text_tokens=4))
    expected, rest = grouped([text for text in texts if text.strip()], tokenizer, 4)
    assert rows.target_ids.tolist() == [*expected, rest]
    assert rows.source_ids.tolist() == [[]] * len(rows)


def test_a_last_row_of_one_token_is_left_out_and_no_text_is_an_error(gpt_like):
    spec = TokenizeSpec(4, 4, causal=True, text_tokens=4)
    assert tokenize(documents("a b c d"), gpt_like, spec).target_ids.tolist() == [[3, 4, 5, 6]]
    with pytest.raises(DataError, match="texts are empty"):
        tokenize(documents(" ", ""), gpt_like, spec)


def test_rows_follow_from_the_documents_alone_however_many_are_tokenized_at_once(gpt_like, monkeypatch):
    texts = documents(*("a b c", "d", "e a b c d e a", "b b", "c"))
    spec = TokenizeSpec(4, 4, causal=True, text_tokens=5)
    once = tokenize(texts, gpt_like, spec).target_ids.tolist()
    monkeypatch.setattr("fullshard.program.data.tokenizing.plain_text.CHUNK_DOCUMENTS", 2)
    assert tokenize(texts, gpt_like, spec).target_ids.tolist() == once


def test_the_example_of_the_paper():
    """Figure 2 of arXiv:1910.10683: X, Y and Z are its sentinels."""
    words = ["Thank", "you", "for", "inviting", "me", "to", "your", "party", "last", "week", "."]
    source, target = corrupt(np.arange(11), [(2, 4), (8, 9)], (100, 101, 102), 200)
    names = dict(enumerate(words)) | {100: "<X>", 101: "<Y>", 102: "<Z>", 200: "</s>"}
    assert " ".join(names[one] for one in source.tolist()) == "Thank you <X> me to your party <Y> week . </s>"
    assert " ".join(names[one] for one in target.tolist()) == "<X> for inviting <Y> last <Z> </s>"


def restored(source, target):
    """The text of a row: each sentinel of the source replaced by its span of the target."""
    spans = {}
    for one in target[:-1]:  # without the end token
        if one in SENTINELS:
            spans[one] = here = []
        else:
            here.append(one)
    return [token for one in source[:-1] for token in spans.get(one, [one])]


@pytest.mark.parametrize("length", [2, 3, 4, 7, 20, 141, 568])
def test_source_and_target_give_the_text_back(length):
    ids = np.arange(2, 2 + length)
    for seed in range(20):
        spans = draw_spans(length, (seed, 0, 5))
        source, target = corrupt(ids, spans, SENTINELS, END)
        assert restored(source.tolist(), target.tolist()) == ids.tolist()
        noise, count = num_noise(np.asarray([length]))
        assert (sum(end - start for start, end in spans), len(spans)) == (noise[0], count[0])
        assert all(first[1] < second[0] for first, second in itertools.pairwise(spans))  # spans do not touch
        expected = [int(one[0]) for one in side_lengths(np.asarray([length]))]
        assert [len(source), len(target)] == expected


def test_the_sizes_are_those_of_t5():
    """Of T5's own and Hugging Face's code (compute_input_and_target_lengths): 568 tokens for inputs of 512."""
    assert row_tokens(512) == 568
    noise, spans = num_noise(np.asarray([568]))
    assert (noise[0], spans[0]) == (85, 28)
    assert round(85 / 28, 1) == 3.0
    assert [int(one[0]) for one in side_lengths(np.asarray([568]))] == [512, 115]  # 114 and the last sentinel


def float32(value):
    return struct.unpack("f", struct.pack("f", value))[0]


@pytest.mark.parametrize(("density", "mean"), [(0.15, 3.0), (0.5, 3.0), (0.15, 32.0), (0.3, 2.5)])
def test_the_counts_are_those_of_t5s_float32(monkeypatch, density, mean):
    """By exact arithmetic, whose results are rounded once to float32: 24 bits of a float32 and 12 of a length are exact
    in a Python float. T5's random_spans_noise_mask has no limit on spans; where they need a token between, ours has.
    """
    monkeypatch.setattr("fullshard.program.data.tokenizing.spans.NOISE", density)
    monkeypatch.setattr("fullshard.program.data.tokenizing.spans.MEAN_SPAN", mean)
    lengths = range(2, 4097)
    expected = []
    for length in lengths:
        noise = min(max(round(float32(length * float32(density))), 1), length - 1)
        spans = max(1, round(float32(Fraction(noise) / Fraction(float32(mean)))))
        expected.append((noise, min(spans, length - noise)))
    assert list(zip(*(one.tolist() for one in num_noise(np.asarray(lengths))), strict=True)) == expected
    if (density, mean) == (0.15, 3.0):
        assert [expected[length - 2] for length in (190, 350, 390, 670)] == [(29, 10), (53, 18), (59, 20), (101, 34)]


def test_spans_are_anywhere_in_a_row_and_equally_often():
    """Of a row of 10 tokens 2 are left out, in one span: at one of nine places."""
    starts = np.bincount([draw_spans(10, (seed,))[0][0] for seed in range(900)], minlength=9)
    assert len(starts) == 9
    assert abs(starts - 100).max() < 40  # four standard deviations
    lengths = [end - start for seed in range(300) for start, end in draw_spans(200, (seed,))]
    assert np.mean(lengths) == 3.0
    assert {1, 2, 3, 4, 5, 6} <= set(lengths)


@pytest.fixture
def rows(gpt_like):
    texts = documents(*[" ".join("abcde"[(row * 7 + place) % 5] for place in range(9 + row)) for row in range(30)])
    return tokenize(texts, gpt_like, TokenizeSpec(4, 4, text_tokens=20))


def test_corruption_depends_on_seed_epoch_and_row_and_not_on_ranks(rows):
    how = Corruption(SENTINELS, END, seed=3)
    found = corrupted(rows, how)

    def seen(world, epoch, seed=3, batch=2):
        made = {}
        for rank in range(world):
            plan = EpochPlan(len(rows), world, batch, seed=seed, lengths=found.lengths, epoch=epoch)
            for batches in steps(corrupted(rows, Corruption(SENTINELS, END, seed)), plan, rank, CollateSpec(0)):
                for one in batches:
                    for place, index in enumerate(one.indices):
                        if one.fillers[place]:
                            continue
                        assert index not in made
                        made[index] = (one.input_ids_BS[place].tolist(), one.labels_BT[place].tolist())
        return {index: tuple([x for x in side if x not in (0, -100)] for side in both) for index, both in made.items()}

    one = seen(1, 0)
    assert one == seen(2, 0) == seen(3, 0, batch=1)
    assert len({str(sorted(seen(1, epoch).items())) for epoch in range(3)}) == 3
    assert one != seen(1, 0, seed=4)
    assert seen(1, 1) == seen(2, 1)
    assert len({str(draw_spans(20, (3, 0, row))) for row in range(8)}) > 4  # rows of one length differ
    for index, (source, target) in one.items():
        assert restored(source, target) == rows.target_ids[index].tolist()


def test_the_checksum_that_ranks_compare_knows_text_and_seed(rows):
    sums = {
        corrupted(rows, Corruption(SENTINELS, END, seed)).source_ids.for_epoch(epoch).checksum()
        for seed in (3, 4)
        for epoch in (0, 1)
    }
    assert len(sums) == 4


def test_sentinels_are_t5s_and_too_few_are_an_error_with_the_length_that_fits(gpt_like):
    tokenizer = T5Tokenizer(vocab=[("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -8.0)], extra_ids=100)
    ids = sentinel_ids(tokenizer, 512)
    assert len(ids) == 29
    assert tokenizer.convert_ids_to_tokens(list(ids[:2])) == ["<extra_id_0>", "<extra_id_1>"]
    with pytest.raises(
        DataError, match=r"need 116 sentinel tokens.*has 100.*max_source_length to at most (\d+)"
    ) as one:
        sentinel_ids(tokenizer, 2080)
    fits = int(str(one.value).rpartition(" ")[2].strip("."))
    assert len(sentinel_ids(tokenizer, fits)) == 100
    with pytest.raises(DataError, match=r"has 0\. Train a model of T5's family"):
        sentinel_ids(gpt_like, 512)


def test_a_column_of_text_is_read_whole_and_empty_cells_are_no_bad_rows(tmp_path):
    texts = ["one\ntwo", "", None, "three"]
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"id": n, "body": text}) + "\n" for n, text in enumerate(texts)))
    spec = SourceSpec(train_file=path, text_column="body")
    assert [row.source for row in read_split(spec, "train").examples] == ["one\ntwo", "", "", "three"]
    with pytest.raises(DataError, match="no column 'text'"):
        read_split(SourceSpec(train_file=path, text_column="text"), "train")
    asked = read_inputs(path, spec)
    assert [row.source for row in asked.rows if row.problem is None] == ["one\ntwo", "three"]


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        ("one\ntwo\n\n  \nthree\n", [(1, "one\ntwo"), (5, "three")]),
        ("\n\nfirst\r\nsecond\r\n\r\nthird", [(3, "first\nsecond"), (6, "third")]),
        ("one\ntwo\nthree\n\n", [(1, "one"), (2, "two"), (3, "three")]),
        ("  - a\n    b\n\n\n    - c, d\n", [(1, "  - a\n    b"), (5, "    - c, d")]),
        ('a, b\nc, d\n{"text": "e"}', [(1, "a, b"), (2, "c, d"), (3, '{"text": "e"}')]),
        ("only one", [(1, "only one")]),
    ],
)
def test_a_text_file_has_its_paragraphs_or_else_its_lines(tmp_path, content, texts):
    for name in ("book.txt", "BOOK.MD"):
        (tmp_path / name).write_bytes(content.encode())
        split = read_split(SourceSpec(train_file=tmp_path / name, text_column="text"), "train")
        assert [(row.line, row.target) for row in split.examples] == texts


def test_a_text_file_of_json_lines_or_cells_is_no_prose(tmp_path):
    (tmp_path / "rows.txt").write_text('{"text": "a"}\n{"text": "b"}\n')
    spec = SourceSpec(train_file=tmp_path / "rows.txt", text_column="text")
    assert [row.target for row in read_split(spec, "train").examples] == ["a", "b"]
    (tmp_path / "rows.txt").write_text("text\tlabel\nx\tno\ny\tyes\n")
    with pytest.raises(DataError, match=r"1 tab\b.*data.format: tsv"):
        read_split(spec, "train")
