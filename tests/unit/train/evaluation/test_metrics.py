"""Scores and baselines against values worked out by hand, and against the packages called directly."""

import importlib
import math

import pytest
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu import corpus_bleu, corpus_chrf

from fullshard.errors import ConfigError
from fullshard.program import metrics
from fullshard.program.metrics import (
    METRICS,
    OTHER,
    Metric,
    baselines,
    counted_words,
    format_metric,
    higher_is_better,
    is_better,
    lead,
    needs_text,
    require_packages,
    row_scores,
    score,
)

TEXTS = ["the cat sat on the mat. it slept.", "a dog ran", "no rain today in the north of the country"]
REFERENCES = [
    ("a cat sat on the mat. it was asleep.", "the cat slept on a mat"),
    ("the dog ran away",),
    ("today there is no rain", "no rain in the north today", "the country is dry"),
]
ONE = [right[:1] for right in REFERENCES]


def one(metric, predictions, references, **options):
    return score([metric], predictions, references, **options).values[metric]


def test_exact_match_ignores_only_white_space():
    predictions = ["card arrival", " card  arrival\n", "Card arrival", "card_arrival"]
    assert one("exact_match", predictions, [("card arrival",)] * 4) == 0.5


def test_of_several_references_any_is_an_exact_match():
    assert one("exact_match", ["a", "b", "c"], [("x", "a"), ("b",), ("a", "b")]) == pytest.approx(2 / 3)


def test_rouge_l_is_the_f_measure_of_the_longest_common_subsequence():
    # Common subsequence "the sat" (2 words): precision 2/2, recall 2/3, F = 0.8. The second pair shares nothing.
    assert one("rougeL", ["the sat", "x"], [("the cat sat",), ("y",)]) == pytest.approx(0.4)


def test_rouge_l_stems():
    assert one("rougeL", ["cats running"], [("cat runs",)]) == pytest.approx(1.0)


@pytest.mark.parametrize("references", [ONE, REFERENCES], ids=["one", "several"])
def test_rouge_is_what_rouge_score_gives_for_the_best_reference(references):
    names = ["rouge1", "rouge2", "rougeL"]
    scorer = RougeScorer(names, use_stemmer=True)
    found = score(names, TEXTS, references).values
    for name in names:
        best = [
            max(scorer.score(right, text)[name].fmeasure for right in rights)
            for text, rights in zip(TEXTS, references, strict=True)
        ]
        assert found[name] == pytest.approx(sum(best) / 3, abs=1e-12)
    assert found["rouge1"] > found["rouge2"]


def test_for_rouge_lsum_a_sentence_is_a_line():
    scorer = RougeScorer(["rougeLsum"], use_stemmer=True)
    text, reference = "It slept. The cat sat!", "The cat sat.\nIt slept well."
    expected = scorer.score("The cat sat.\nIt slept well.", "It slept.\nThe cat sat!")["rougeLsum"].fmeasure
    found = score(["rougeLsum", "rougeL"], [text], [(reference,)]).values
    assert found["rougeLsum"] == pytest.approx(expected, abs=1e-12)
    assert found["rougeL"] < expected


def test_bleu_and_chrf_are_sacrebleus_over_the_whole_set_divided_by_100():
    texts, references = TEXTS * 2, ONE * 2
    streams = [[right[0] for right in references]]
    found = score(["bleu", "chrf"], texts, references).values
    assert found["bleu"] == pytest.approx(corpus_bleu(texts, streams).score / 100, abs=1e-12)
    assert found["chrf"] == pytest.approx(corpus_chrf(texts, streams).score / 100, abs=1e-12)
    assert 0 < found["bleu"] < 1


def test_bleu_and_chrf_take_rows_with_different_numbers_of_references():
    streams = [[right[i] if i < len(right) else "" for right in REFERENCES] for i in range(3)]
    found = score(["bleu", "chrf"], TEXTS, REFERENCES).values
    assert found["bleu"] == pytest.approx(corpus_bleu(TEXTS, streams).score / 100, abs=1e-12)
    assert found["chrf"] == pytest.approx(corpus_chrf(TEXTS, streams).score / 100, abs=1e-12)
    assert found["chrf"] > one("chrf", TEXTS, ONE)


def test_accuracy_comes_with_a_confusion_matrix():
    references = [("a",), ("a",), ("b",), ("c",), ("b",)]
    scores = score(["accuracy"], [" a", "b", "b", "what", "b"], references, labels=["b", "a"])
    assert scores.values == {"accuracy": pytest.approx(3 / 5)}
    confusion = scores.confusion
    assert confusion.labels == ("b", "a", "c")  # the training targets' order, then what only held-out rows have
    assert confusion.matrix() == [[2, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 1]]
    assert confusion.mistakes() == [("a", "b", 1), ("c", OTHER, 1)]


def test_of_several_right_labels_the_written_one_counts():
    confusion = score(["accuracy"], ["b", "c"], [("a", "b"), ("a", "b")], labels=["a", "b", "c"]).confusion
    assert confusion.cells == ((0, 2, 1), (1, 1, 1))


def test_only_accuracy_has_a_confusion_matrix():
    assert score(["exact_match"], ["a"], [("a",)], labels=["a"]).confusion is None


def test_predictions_and_references_must_pair_up():
    with pytest.raises(ValueError, match="1 predictions for 2 rows"):
        score(["exact_match"], ["a"], [("a",), ("b",)])


def test_values_come_in_the_order_asked_for_and_perplexity_needs_the_loss():
    names = ["rougeL", "exact_match", "perplexity", "accuracy", "rouge1"]
    assert list(score(names, ["a"], [("a",)]).values) == ["rougeL", "exact_match", "accuracy", "rouge1"]
    assert score(["perplexity"], [], [], loss=math.log(7)).values["perplexity"] == pytest.approx(7)
    assert score(["perplexity"], [], [], loss=1e4).values["perplexity"] == math.inf
    assert needs_text(["perplexity", "bleu"])
    assert not needs_text(["perplexity"])


def test_only_of_perplexity_the_lower_is_the_better():
    assert is_better("rougeL", 0.5, than=0.4)
    assert not is_better("rougeL", 0.5, than=0.5)
    assert is_better("perplexity", 3.0, than=4.0)
    assert not is_better("perplexity", 4.0, than=4.0)
    assert [higher_is_better(name) for name in ("bleu", "perplexity")] == [True, False]


def test_a_share_is_shown_in_percent_and_perplexity_as_a_number():
    assert format_metric("bleu", 0.2345) == "23.45%"
    assert format_metric("perplexity", 1234.5) == "1,234.500"


def test_majority_baseline_is_one_label_for_every_row():
    names = ["exact_match", "accuracy"]
    found = baselines(names, ["s"] * 4, [("a",), ("b",), ("b",), ("c", "b")], majority="b")
    assert {name: (each.name, each.value) for name, each in found.items()} == dict.fromkeys(names, ("always 'b'", 0.75))


def test_lead_baseline_is_each_rows_first_sentences():
    sources, references = ["The cat sat. The dog ran.", "Why? So."], [("the cat sat",), ("so",)]
    found = baselines(["rougeL", "perplexity"], sources, references, majority="t")
    assert found.keys() == {"rougeL"}
    assert found["rougeL"].name == "first sentence"
    assert found["rougeL"].value == pytest.approx(0.5)
    two = baselines(["rougeL", "chrf"], sources, references, majority="t", lead_sentences=2)
    assert two["rougeL"].name == two["chrf"].name == "first 2 sentences"
    assert two["rougeL"].value == pytest.approx((2 / 3 + 2 / 3) / 2)


def test_without_a_known_majority_there_is_no_such_baseline():
    assert baselines(["exact_match"], ["s"], [("a",)], majority=None) == {}


def test_a_metric_is_one_entry(monkeypatch):
    """Scores, baseline, direction, format and the record of how words are counted follow from it."""

    def shorter(names, predictions, references):
        return {name: [float(len(text)) for text in predictions] for name in names}

    own = Metric("length", "mean length", shorter, higher_is_better=False, shown="{:.0f}", words=lambda rows: "letters")
    monkeypatch.setattr(metrics, "METRICS", {**METRICS, "length": own})
    names = ["length", "exact_match"]
    assert score(names, ["abc", "a"], [("a",)] * 2).values == {"length": 2, "exact_match": 0.5}
    assert row_scores(names, ["abc", "a"], [("a",)] * 2)["length"] == [3, 1]
    found = baselines(names, ["ab. c"], [("a",)], majority="a")
    assert (found["length"].name, found["length"].value) == ("first sentence", 3)
    assert needs_text(["length"])
    assert is_better("length", 1.0, than=2.0)
    assert format_metric("length", 2.0) == "2"
    assert counted_words(names, [("a",)]) == {"length": "letters"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [(" One. Two.", "One."), ("v1.5 works", "v1.5 works"), ("Really?! Yes.", "Really?!"), ("no end", "no end")],
)
def test_first_sentence(text, expected):
    assert lead(text, 1) == expected


@pytest.mark.parametrize(("metric", "package"), [("chrf", "sacrebleu"), ("rouge2", "rouge-score")])
def test_a_missing_package_is_named_before_anything_is_computed(metric, package, monkeypatch):
    def missing(name):
        raise ImportError(name)

    require_packages([metric])
    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=f"pip install {package}"):
        require_packages([metric])
