"""Ids, special tokens and the count of what was cut off."""

import pytest

from fullshard.errors import DataError
from fullshard.program.data import choose_separator, describe_separator
from fullshard.program.data.examples import Example
from fullshard.program.data.tokenizing.tokenize import LengthStats, TokenizeSpec, tokenize
from support.trained_tokenizer import byte_tokenizer

ROWS = [Example("a b", ("label",), 2), Example("a b c d e", ("label label label label",), 3)]


def test_encoder_decoder_rows_end_with_eos_and_truncation_keeps_it(t5_like):
    tokenized = tokenize(ROWS, t5_like, TokenizeSpec(max_source_length=4, max_target_length=3))
    assert tokenized.source_ids.tolist() == [[3, 4, 1], [3, 4, 5, 1]]
    assert tokenized.target_ids.tolist() == [[8, 1], [8, 8, 1]]
    assert tokenized.source_stats == LengthStats(mean=3.5, longest=6, truncated=1, limit=4)
    assert tokenized.target_stats == LengthStats(mean=2.5, longest=5, truncated=1, limit=3)
    assert len(tokenized) == 2
    assert tokenized.lengths.tolist() == [5, 7]


def test_a_row_of_exactly_the_limit_is_not_truncated(t5_like):
    tokenized = tokenize(ROWS, t5_like, TokenizeSpec(max_source_length=6, max_target_length=5))
    assert (tokenized.source_stats.truncated, tokenized.target_stats.truncated) == (0, 0)
    assert tokenized.source_ids[1].tolist() == [3, 4, 5, 6, 7, 1]


def test_prefix_counts_in_the_limit(t5_like):
    tokenized = tokenize(ROWS, t5_like, TokenizeSpec(4, 8, source_prefix="prefix: "))
    assert tokenized.source_ids.tolist() == [[9, 3, 4, 1], [9, 3, 4, 1]]
    assert tokenized.source_stats.truncated == 1


def test_causal_targets_get_one_eos_and_prompts_what_the_tokenizer_gives(t5_like, gpt_like):
    spec = TokenizeSpec(max_source_length=4, max_target_length=3, causal=True)
    plain = tokenize(ROWS, gpt_like, spec)
    assert plain.source_ids.tolist() == [[3, 4], [3, 4, 5, 6]]
    assert plain.target_ids.tolist() == [[8, 1], [8, 8, 1]]
    assert plain.target_stats == LengthStats(mean=2.5, longest=5, truncated=1, limit=3)
    ended = tokenize(ROWS, t5_like, spec)
    assert ended.source_ids.tolist() == [[3, 4, 1], [3, 4, 5, 1]]
    assert ended.target_ids.tolist() == plain.target_ids.tolist()


@pytest.mark.parametrize("causal", [False, True])
def test_a_limit_without_room_for_text(t5_like, causal):
    rule = "leaves no room for text: the tokenizer adds 1 special tokens. Use at least 2."
    with pytest.raises(DataError, match=f"A max_source_length of 1 {rule}"):
        tokenize(ROWS, t5_like, TokenizeSpec(1, 5, causal=causal))
    with pytest.raises(DataError, match=f"A max_target_length of 1 {rule}"):
        tokenize(ROWS, t5_like, TokenizeSpec(5, 1, causal=causal))


def test_no_rows(t5_like):
    with pytest.raises(DataError, match="no rows to tokenize"):
        tokenize([], t5_like, TokenizeSpec(5, 5))


def prompt(tokenizer, limit=20, **changes):
    return tokenize(ROWS[:1], tokenizer, TokenizeSpec(limit, 20, causal=True, **changes))


def test_the_separator_is_between_source_and_target():
    tokenizer = byte_tokenizer()
    assert prompt(tokenizer).source_ids.tolist() == [[3, *map(ord, "a b")]], "else they are one word: 'a blabel'"
    with_break = prompt(tokenizer, separator="\n")
    assert with_break.source_ids.tolist() == [[3, *map(ord, "a b\n")]]
    assert with_break.target_ids.tolist() == [[*map(ord, "label"), 1]]
    ended = prompt(byte_tokenizer(tail=("</s>",)), separator=" ->")
    assert ended.source_ids.tolist() == [[3, *map(ord, "a b ->"), 1]]


def test_a_truncated_source_keeps_the_separator():
    tokenized = prompt(byte_tokenizer(tail=("</s>",)), limit=5, separator="=>")
    assert tokenized.source_ids.tolist() == [[3, ord("a"), *map(ord, "=>"), 1]]
    assert tokenized.source_stats == LengthStats(mean=5, longest=7, truncated=1, limit=5)
    exact = prompt(byte_tokenizer(), limit=5, separator=":")
    assert (exact.source_ids.tolist(), exact.source_stats.truncated) == ([[3, *map(ord, "a b:")]], 0)
    with pytest.raises(DataError, match=r"adds 1 special tokens and the separator has 2\. Use at least 4"):
        prompt(byte_tokenizer(), limit=3, separator="=>")


@pytest.mark.parametrize(
    ("given", "template", "tail", "expected", "note"),
    [
        (None, None, (), "\n", r"source and target are separated by '\n' (data.separator)"),
        (None, "question: {q}", (), "\n", r"source and target are separated by '\n' (data.separator)"),
        (None, "{q}\nAnswer:", (), "", "nothing is put between source and target (data.separator)"),
        (None, None, ("</s>",), "", "source and target are separated by '</s>' (data.separator)"),
        (" =", "{q} A:", ("</s>",), " =", "source and target are separated by ' =</s>' (data.separator)"),
        ("", None, (), "", "nothing is put between source and target (data.separator)"),
    ],
)
def test_the_separator_is_a_line_break_unless_the_source_ends_with_something_of_its_own(
    given, template, tail, expected, note
):
    tokenizer = byte_tokenizer(tail)
    assert choose_separator(given, template, tokenizer) == expected
    assert describe_separator(expected, tokenizer) == note


def test_a_separator_that_the_tokenizer_drops_is_refused():
    with pytest.raises(DataError, match=r"drops the separator '\\n' .*Set data\.separator to a text that it keeps"):
        prompt(byte_tokenizer(drops_breaks=True), separator="\n")
