"""Scores of written text, and what a prediction without any model would score."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rouge_score.rouge_scorer import RougeScorer

MetricName = Literal["exact_match", "rougeL"]

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


@dataclass(frozen=True)
class Baseline:
    """Predictions that need no model, and their score.

    Attributes:
        name: What they are.
        value: Their score, from 0 to 1.
    """

    name: str
    value: float


def score(metric: MetricName, predictions: Sequence[str], references: Sequence[str]) -> float:
    """Score predictions against references.

    Args:
        metric: ``exact_match``: share of predictions equal to their reference, runs of white space counted as one
            space. ``rougeL``: mean F-measure of the longest common subsequence of words, stemmed, as ``rouge-score``
            computes it.
        predictions: At least one text.
        references: As many texts.

    Returns:
        From 0 to 1.
    """
    pairs = list(zip(predictions, references, strict=True))
    if metric == "exact_match":
        return sum(p.split() == r.split() for p, r in pairs) / len(pairs)
    scorer = RougeScorer(["rougeL"], use_stemmer=True)
    return sum(scorer.score(r, p)["rougeL"].fmeasure for p, r in pairs) / len(pairs)


def baseline(
    metric: MetricName, train_targets: Sequence[str], sources: Sequence[str], references: Sequence[str]
) -> Baseline:
    """Score what one would predict without a model.

    Args:
        metric: ``exact_match``: the most frequent training target for every row (of equally frequent ones the first in
            the file). ``rougeL``: the first sentence of each row's own source.
        train_targets: Targets of the training rows.
        sources: Sources of the held-out rows.
        references: Targets of the held-out rows.

    Returns:
        The name of the baseline and its score.
    """
    if metric == "exact_match":
        majority = Counter(train_targets).most_common(1)[0][0]
        return Baseline(f"always {majority!r}", score(metric, [majority] * len(references), references))
    return Baseline("first sentence", score(metric, [lead_sentence(source) for source in sources], references))


def lead_sentence(text: str) -> str:
    """The first sentence of a text: up to the first full stop, exclamation or question mark before white space."""
    return _SENTENCE_END.split(text.strip(), maxsplit=1)[0]
