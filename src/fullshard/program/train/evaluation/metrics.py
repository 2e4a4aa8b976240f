"""Metrics of generated text, and baselines: scores of predictions that need no model.

Shares and F-measures are from 0 to 1, and so are BLEU and chrF, which sacrebleu returns from 0 to 100.
"""

from __future__ import annotations

import importlib
import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from fullshard.errors import ConfigError
from fullshard.program.config.evaluation import Metric
from fullshard.program.train.evaluation.words import WordsOfAnyScript, bleu_words, composed, sentences
from fullshard.program.train.reporting.scores import LOSS_METRICS, Confusion, Scores

_LABEL_METRICS = ("exact_match", "accuracy")

References = Sequence[Sequence[str]]
"""Correct texts of each row, at least one."""


@dataclass(frozen=True)
class Baseline:
    """The score of predictions that need no model."""

    name: str  # description of the predictions
    value: float  # their score, in the metric's range


def score(
    metrics: Sequence[Metric], predictions: Sequence[str], references: References, *, labels: Collection[str] = ()
) -> Scores:
    """Score predictions against references; any rank, alone.

    ``exact_match``: share of predictions equal to a reference of their row, runs of white space counted as one space.
    ``accuracy``: the same share, with a confusion matrix over the labels. ``rouge1``, ``rouge2``, ``rougeL``,
    ``rougeLsum``: mean F-measure as rouge-score computes it, words stemmed, against the best of a row's references;
    for rougeLsum a sentence is a line. ``bleu``, ``chrf``: of all rows together as sacrebleu computes them. Of text
    beyond ASCII, :mod:`~fullshard.program.train.evaluation.words` says what a word is.

    Args:
        metrics: Names; perplexity, which needs no text, is ignored.
        predictions: At least one text.
        references: As many rows as predictions.
        labels: The label set; references that are not in it are added to it.

    Raises:
        ConfigError: A metric needs sacrebleu or rouge-score, which is not installed.
        ValueError: The numbers of references and predictions differ.
    """
    if len(predictions) != len(references):
        raise ValueError(f"{len(predictions)} predictions for {len(references)} rows of references.")
    rows = row_scores(metrics, predictions, references)
    values = {name: sum(each) / len(predictions) for name, each in rows.items()}
    confusion = _confusion(predictions, references, labels) if "accuracy" in metrics else None
    values |= {name: _corpus(name, predictions, references) for name in ("bleu", "chrf") if name in metrics}
    return Scores({name: values[name] for name in metrics if name in values}, confusion)


def row_scores(metrics: Sequence[Metric], predictions: Sequence[str], references: References) -> dict[str, list[float]]:
    """Return each row's score by the metrics that are means over rows: the label metrics and rouge; any rank, alone.

    Raises:
        ConfigError: A metric needs rouge-score, which is not installed.
    """
    values: dict[str, list[float]] = {}
    if any(name in _LABEL_METRICS for name in metrics):
        hits = _matches(predictions, references)
        values |= {name: hits for name in metrics if name in _LABEL_METRICS}
    rouge = [name for name in metrics if name.startswith("rouge")]
    return values | (_rouge(rouge, predictions, references) if rouge else {})


def baselines(
    metrics: Sequence[Metric],
    sources: Sequence[str],
    references: References,
    *,
    majority: str | Sequence[str] | None,
    lead_sentences: int = 1,
) -> dict[str, Baseline]:
    """Score predictions that need no model; any rank, alone.

    Args:
        metrics: Names. ``exact_match`` and ``accuracy``: the most frequent training target for every row; rouge, bleu
            and chrf: the first sentences of each row's own source; perplexity has none.
        sources: Sources of the held-out rows.
        references: Their references.
        majority: The most frequent training target, or that of each row's set; None: not known, so the metrics that
            need it have no baseline.
        lead_sentences: Number of first sentences.

    Returns:
        The baseline of each metric that has one.

    Raises:
        ConfigError: A metric needs sacrebleu or rouge-score, which is not installed.
    """
    text_metrics: list[Metric] = [name for name in metrics if name not in _LABEL_METRICS + LOSS_METRICS]
    label_metrics = [name for name in metrics if name in _LABEL_METRICS]
    found: dict[str, Baseline] = {}
    if label_metrics and majority is not None:
        always = [majority] * len(references) if isinstance(majority, str) else list(majority)
        share = sum(_matches(always, references)) / len(references)
        what = f"always {always[0]!r}" if len(set(always)) == 1 else "always the most frequent target of a row's set"
        found |= {name: Baseline(what, share) for name in label_metrics}
    if text_metrics:
        name = "first sentence" if lead_sentences == 1 else f"first {lead_sentences} sentences"
        scores = score(text_metrics, [lead(source, lead_sentences) for source in sources], references)
        found |= {metric: Baseline(name, value) for metric, value in scores.values.items()}
    return found


def perplexity(loss: float) -> float:
    """Return the exponential of a mean loss per target token; infinity where it exceeds float64."""
    return math.exp(loss) if loss < 709 else math.inf


def needs_text(metrics: Sequence[Metric]) -> bool:
    """Return whether any of the metrics needs generated text."""
    return any(name not in LOSS_METRICS for name in metrics)


def higher_is_better(metric: str) -> bool:
    """Return True if higher values of a metric are better."""
    return metric not in LOSS_METRICS


def is_better(metric: str, value: float, than: float) -> bool:
    """Return True if a value is strictly better than another one."""
    return value > than if higher_is_better(metric) else value < than


def require_packages(metrics: Sequence[Metric]) -> None:
    """Check that each metric's package is installed, before training rather than at the first evaluation.

    Raises:
        ConfigError: A package is not installed.
    """
    for name in metrics:
        if name.startswith("rouge"):
            _package("rouge_score.rouge_scorer", "rouge-score", name)
        elif name in ("bleu", "chrf"):
            _package("sacrebleu.metrics", "sacrebleu", name)


def lead(text: str, count: int) -> str:
    """Return the first sentences of a text, joined by spaces."""
    return " ".join(sentences(text)[:count])


def _plain(text: str) -> str:
    """Replace each run of white space by one space, and compose letters."""
    return " ".join(composed(text).split())


def _matches(predictions: Sequence[str], references: References) -> list[float]:
    """Return 1.0 for each row whose prediction equals one of its references, else 0.0."""
    pairs = zip(predictions, references, strict=True)
    return [float(_plain(text) in {_plain(one) for one in right}) for text, right in pairs]


def _confusion(predictions: Sequence[str], references: References, labels: Collection[str]) -> Confusion:
    """Count labels; a row's label is the reference that was predicted, or else its first reference."""
    held_out = (one for right in references for one in right)
    names = tuple(dict.fromkeys(_plain(text) for text in (*labels, *held_out)))
    index = {name: position for position, name in enumerate(names)}
    cells: Counter[tuple[int, int]] = Counter()
    for text, right in zip(predictions, references, strict=True):
        written = _plain(text)
        answers = [_plain(one) for one in right]
        answer = written if written in answers else answers[0]
        cells[index[answer], index.get(written, len(names))] += 1
    return Confusion(names, tuple((answer, written, rows) for (answer, written), rows in sorted(cells.items())))


def _rouge(names: Sequence[str], predictions: Sequence[str], references: References) -> dict[str, list[float]]:
    own = _package("rouge_score.tokenizers", "rouge-score", names[0]).DefaultTokenizer(use_stemmer=True)
    scorers = _package("rouge_score.rouge_scorer", "rouge-score", names[0])
    scorer = scorers.RougeScorer(list(names), tokenizer=WordsOfAnyScript(own))
    # Only rougeLsum depends on line breaks.
    prepare = _line_by_line if "rougeLsum" in names else str
    pairs = zip(predictions, references, strict=True)
    scores = [scorer.score_multi([prepare(one) for one in right], prepare(text)) for text, right in pairs]
    return {name: [float(each[name].fmeasure) for each in scores] for name in names}


def _line_by_line(text: str) -> str:
    return "\n".join(sentences(text))


def _corpus(metric: str, predictions: Sequence[str], references: References) -> float:
    metrics = _package("sacrebleu.metrics", "sacrebleu", metric)
    predictions = [composed(text) for text in predictions]
    references = [[composed(one) for one in right] for right in references]
    scorer = metrics.BLEU(force=True) if metric == "bleu" else metrics.CHRF()
    names = [bleu_words(right) for right in references] if metric == "bleu" else []
    if set(names) - {"13a"}:
        # Each row has its own tokenizer, so the rows are tokenized before.
        words = {name: metrics.BLEU(tokenize=name, force=True).tokenizer for name in set(names)}
        predictions = [words[name](text.rstrip()) for name, text in zip(names, predictions, strict=True)]
        references = [[words[n](one.rstrip()) for one in right] for n, right in zip(names, references, strict=True)]
        scorer = metrics.BLEU(tokenize="none", force=True)
    # sacrebleu takes streams: the first reference of each row, then the second of each, with None where there is none.
    width = max(len(right) for right in references)
    streams = [[right[i] if i < len(right) else None for right in references] for i in range(width)]
    return scorer.corpus_score(predictions, streams).score / 100


def _package(module: str, package: str, metric: str) -> Any:
    """Import a module that is slow to import and needed only by some metrics."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"The metric {metric} needs {package}: pip install {package}.") from error
