"""Scores and baselines against values worked out by hand."""

import pytest

from fullshard.train.metrics import baseline, lead_sentence, score


def test_exact_match_ignores_only_white_space():
    predictions = ["card arrival", " card  arrival\n", "Card arrival", "card_arrival"]
    assert score("exact_match", predictions, ["card arrival"] * 4) == 0.5


def test_rouge_l_is_the_f_measure_of_the_longest_common_subsequence():
    # Common subsequence "the sat" (2 words): precision 2/2, recall 2/3, F = 0.8. The second pair shares nothing.
    assert score("rougeL", ["the sat", "x"], ["the cat sat", "y"]) == pytest.approx(0.4)


def test_rouge_l_stems():
    assert score("rougeL", ["cats running"], ["cat runs"]) == pytest.approx(1.0)


def test_predictions_and_references_must_pair_up():
    with pytest.raises(ValueError, match="longer"):
        score("exact_match", ["a"], ["a", "b"])


def test_majority_baseline_comes_from_the_training_rows():
    result = baseline("exact_match", ["b", "a", "a", "b", "c"], ["s"] * 4, ["a", "b", "b", "b"])
    assert result.name == "always 'b'"  # as frequent as a, and first in the file
    assert result.value == 0.75


def test_lead_baseline_is_each_rows_first_sentence():
    result = baseline("rougeL", ["t"], ["The cat sat. The dog ran.", "Why? So."], ["the cat sat", "so"])
    assert result.name == "first sentence"
    assert result.value == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("text", "expected"),
    [(" One. Two.", "One."), ("v1.5 works", "v1.5 works"), ("Really?! Yes.", "Really?!"), ("no end", "no end")],
)
def test_lead_sentence(text, expected):
    assert lead_sentence(text) == expected
