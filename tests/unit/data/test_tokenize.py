"""Ids, special tokens and the count of what was cut off."""

import pytest

from fullshard.data.examples import Example
from fullshard.data.tokenizing.tokenize import LengthStats, TokenizeSpec, tokenize
from fullshard.errors import DataError

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
