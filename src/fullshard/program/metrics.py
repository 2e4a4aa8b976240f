"""The metrics of an evaluation: each is one entry of :data:`METRICS`, which everything that names or shows one reads.

Shares and F-measures are from 0 to 1, and so are BLEU and chrF, which sacrebleu returns from 0 to 100. Of text beyond
ASCII, whose words rouge-score and sacrebleu do not know or count otherwise, this file says what a word is.
"""

from __future__ import annotations

import importlib
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import regex

from fullshard.errors import ConfigError

References = Sequence[Sequence[str]]
"""Correct texts of each row, at least one."""

OTHER = "(other)"
"""Name of text that is not a label in a confusion matrix."""

_NO_SPACES = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
"""Scripts without spaces between words."""

# Texts, not compiled: every verb reads the names of metrics, few score words.
_WORD = (
    rf"(?V1)[[\p{{L}}\p{{N}}]&&[{_NO_SPACES}]]\p{{M}}*"  # a character with its marks
    # the joiners inside of Persian and Hindi words are no letters
    rf"|[[\p{{L}}\p{{N}}]--[{_NO_SPACES}]][[\p{{L}}\p{{M}}\p{{N}}\u200c\u200d]--[{_NO_SPACES}]]*"
)
_HAN = r"\p{Han}"
_OTHER_NO_SPACES = rf"(?V1)[[{_NO_SPACES}]--\p{{Han}}]"
_ANY_NO_SPACES = f"[{_NO_SPACES}]"
_LETTER = r"\p{L}"
_SENTENCE_END = re.compile(
    # also the ends of Hindi, Arabic, Urdu and Amharic sentences; those of Chinese and Japanese need no space after them
    r"(?<=[.!?।॥؟۔።])\s+|(?<=[。！？｡])(?![。！？｡”’」』）])\s*"  # noqa: RUF001
)


class Tokenizer(Protocol):
    """What rouge-score takes as its ``tokenizer``."""

    def tokenize(self, text: str) -> list[str]:
        """Return the words of a text."""
        ...


class WordsOfAnyScript:
    """A tokenizer for rouge-score, whose own one drops all letters but a to z; of ASCII text, words are as by that one.

    Words of other text are runs of letters, marks and digits of any script, in compatibility form (NFKC) and lower
    case; in scripts without spaces between words, single characters.
    """

    def __init__(self, ascii_words: Tokenizer) -> None:
        """Take rouge-score's own tokenizer, which also stems words of a to z."""
        self._ascii_words = ascii_words

    def tokenize(self, text: str) -> list[str]:
        """Return the words of a text."""
        if text.isascii():
            return self._ascii_words.tokenize(text)
        found = regex.findall(_WORD, unicodedata.normalize("NFKC", text).lower())
        return [one for word in found for one in (self._ascii_words.tokenize(word) if word.isascii() else [word])]


def composed(text: str) -> str:
    """Return the text in composed form (NFC): tokenizers compose letters, so a model cannot write them otherwise."""
    return unicodedata.normalize("NFC", text)


def sentences(text: str) -> list[str]:
    """Split a text into sentences, which end with a full stop, exclamation or question mark of any script."""
    return [one for one in _SENTENCE_END.split(text.strip()) if one]


def bleu_words(references: Sequence[str]) -> str:
    """Return the name of sacrebleu's tokenizer for a row: 13a, its default, for scripts with spaces between words.

    Chinese has ``zh``, which takes other words as 13a does. Where most letters are of a script without spaces and not
    all of them are Chinese characters, as in Japanese and Thai, it is ``char``, as sacrebleu's own tokenizers of these
    need further packages or downloads.
    """
    text = "".join(references)
    if text.isascii():
        return "13a"
    without = len(regex.findall(_ANY_NO_SPACES, text))
    if regex.search(_OTHER_NO_SPACES, text) and 2 * without > len(regex.findall(_LETTER, text)):
        return "char"
    return "zh" if regex.search(_HAN, text) else "13a"


def _have_other_letters(references: References) -> bool:
    texts = (text for right in references for text in right if not text.isascii())
    return any(not letter.isascii() for text in texts for letter in regex.findall(_LETTER, text))


def _rouge_words(references: References) -> str | None:
    return "words of any script; characters in scripts without spaces" if _have_other_letters(references) else None


def _bleu_words(references: References) -> str | None:
    tokenizers = sorted(set(map(bleu_words, references)))
    return None if tokenizers == ["13a"] else f"sacrebleu's {' and '.join(tokenizers)}"


def lead(text: str, count: int) -> str:
    """Return the first sentences of a text, joined by spaces."""
    return " ".join(sentences(text)[:count])


def _plain(text: str) -> str:
    """Replace each run of white space by one space, and compose letters."""
    return " ".join(composed(text).split())


def _matches(names: Sequence[str], predictions: Sequence[str], references: References) -> Scored:
    """Return 1.0 for each row whose prediction equals one of its references, else 0.0."""
    pairs = zip(predictions, references, strict=True)
    hits = [float(_plain(text) in {_plain(one) for one in right}) for text, right in pairs]
    return dict.fromkeys(names, hits)


def _rouge(names: Sequence[str], predictions: Sequence[str], references: References) -> Scored:
    own = _package("rouge_score.tokenizers", names[0]).DefaultTokenizer(use_stemmer=True)
    scorers = _package("rouge_score.rouge_scorer", names[0])
    scorer = scorers.RougeScorer(list(names), tokenizer=WordsOfAnyScript(own))

    def prepare(text: str) -> str:
        # Only rougeLsum depends on line breaks.
        return "\n".join(sentences(text)) if "rougeLsum" in names else text

    pairs = zip(predictions, references, strict=True)
    scores = [scorer.score_multi([prepare(one) for one in right], prepare(text)) for text, right in pairs]
    return {name: [float(each[name].fmeasure) for each in scores] for name in names}


def _bleu(_names: Sequence[str], predictions: Sequence[str], references: References) -> Scored:
    metrics = _package("sacrebleu.metrics", "bleu")
    predictions, references = _composed(predictions, references)
    names = [bleu_words(right) for right in references]
    if set(names) == {"13a"}:
        return {"bleu": _of_corpus(metrics.BLEU(force=True), predictions, references)}
    # Each row has its own tokenizer, so the rows are tokenized before.
    words = {name: metrics.BLEU(tokenize=name, force=True).tokenizer for name in set(names)}
    predictions = [words[name](text.rstrip()) for name, text in zip(names, predictions, strict=True)]
    references = [[words[n](one.rstrip()) for one in right] for n, right in zip(names, references, strict=True)]
    return {"bleu": _of_corpus(metrics.BLEU(tokenize="none", force=True), predictions, references)}


def _chrf(_names: Sequence[str], predictions: Sequence[str], references: References) -> Scored:
    return {"chrf": _of_corpus(_package("sacrebleu.metrics", "chrf").CHRF(), *_composed(predictions, references))}


def _composed(predictions: Sequence[str], references: References) -> tuple[list[str], list[list[str]]]:
    return [composed(text) for text in predictions], [[composed(one) for one in right] for right in references]


def _of_corpus(scorer: Any, predictions: Sequence[str], references: References) -> float:
    # sacrebleu takes streams: the first reference of each row, then the second of each, with None where there is none.
    width = max(len(right) for right in references)
    streams = [[right[i] if i < len(right) else None for right in references] for i in range(width)]
    return scorer.corpus_score(predictions, streams).score / 100


def _perplexity(loss: float) -> float:
    """Return the exponential of a mean loss per target token; infinity where it exceeds float64."""
    return math.exp(loss) if loss < 709 else math.inf


Scored = Mapping[str, list[float] | float]
"""By metric the score of each row, whose mean is the metric's, or the score of all rows together."""


@dataclass(frozen=True)
class Metric:
    """One metric: by generated text (``of_text``) or by the loss (``of_loss``)."""

    name: str
    what: str  # what it is, for the reference
    # Scores predictions against references, for all of the given metrics that have this function: they share its work.
    of_text: Callable[[Sequence[str], Sequence[str], References], Scored] | None = None
    of_loss: Callable[[float], float] | None = None  # the metric of a mean loss per target token
    higher_is_better: bool = True
    of_pairs: bool = False  # whether it is of the rewards of preferences, which an evaluation of them measures
    package: str | None = None  # pip's name of the package that it needs
    module: str | None = None  # a module of that package
    of_labels: bool = False  # whether a prediction is right or wrong; its baseline is the most frequent training target
    of_rows: bool = True  # whether it is the mean of the rows' scores, not a score of all rows together
    confusion: bool = False  # whether it needs a label set, and a confusion matrix is shown
    words: Callable[[References], str | None] | None = None  # how words are counted if not by the package's defaults
    hub_type: str | None = None  # its name on the Hub; None: the same
    shown: str = "{:.2%}"  # its format for people

    @property
    def baseline(self) -> str:
        """What its baseline predicts, for the reference."""
        if self.of_text is None:
            return "none"
        return "the most frequent training target" if self.of_labels else "the source's first `lead_sentences`"


def _of_rouge(name: str, what: str) -> Metric:
    return Metric(
        name,
        f"{what}, words stemmed",
        _rouge,
        package="rouge-score",
        module="rouge_score.rouge_scorer",
        words=_rouge_words,
        hub_type="rouge",
    )


METRICS: Mapping[str, Metric] = {
    one.name: one
    for one in (
        Metric("exact_match", "share of rows that equal a reference, white space normalised", _matches, of_labels=True),
        Metric(
            "accuracy",
            "the same over the training targets' labels, with a confusion matrix",
            _matches,
            of_labels=True,
            confusion=True,
        ),
        _of_rouge("rouge1", "mean F-measure of words"),
        _of_rouge("rouge2", "mean F-measure of pairs of words"),
        _of_rouge("rougeL", "mean F-measure of the longest common subsequence"),
        _of_rouge("rougeLsum", "the same over lines, one for each sentence"),
        Metric(
            "bleu",
            "BLEU of all rows together, from 0 to 1",
            _bleu,
            package="sacrebleu",
            module="sacrebleu.metrics",
            of_rows=False,
            words=_bleu_words,
        ),
        Metric(
            "chrf",
            "chrF of all rows together, from 0 to 1",
            _chrf,
            package="sacrebleu",
            module="sacrebleu.metrics",
            of_rows=False,
        ),
        Metric(
            "perplexity",
            "exponential of the mean loss of a target token; lower is better; nothing is generated",
            of_loss=_perplexity,
            higher_is_better=False,
            shown="{:,.3f}",
        ),
        Metric("rewards/accuracies", "share of pairs whose chosen completion has the greater reward", of_pairs=True),
        Metric(
            "rewards/margins",
            "mean of the chosen completions' rewards less the rejected ones'; rewards are beta times log-probabilities",
            of_pairs=True,
            shown="{:,.4f}",
        ),
    )
}

REWARDS = tuple(name for name, one in METRICS.items() if one.of_pairs)
"""The metrics of preferences, by TRL's names."""


def metric_of(name: str) -> Metric:
    """Return a metric; of a name that only another version has recorded, a share of rows."""
    return METRICS.get(name) or Metric(name, "", _matches)


def needs_text(metrics: Collection[str]) -> bool:
    """Return whether any of the metrics needs generated text."""
    return any(metric_of(name).of_text is not None for name in metrics)


def higher_is_better(metric: str) -> bool:
    """Return True if higher values of a metric are better."""
    return metric_of(metric).higher_is_better


def is_better(metric: str, value: float, than: float) -> bool:
    """Return True if a value is strictly better than another one."""
    return value > than if higher_is_better(metric) else value < than


def format_metric(metric: str, value: float) -> str:
    """Format a value for people: a share in percent, perplexity as a number."""
    return metric_of(metric).shown.format(value)


def require_packages(metrics: Sequence[str]) -> None:
    """Check that each metric's package is installed, before training rather than at the first evaluation.

    Raises:
        ConfigError: A package is not installed.
    """
    for name in metrics:
        if (module := METRICS[name].module) is not None:
            _package(module, name)


def _package(module: str, metric: str) -> Any:
    """Import a module that is slow to import and needed only by some metrics."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = METRICS[metric].package
        raise ConfigError(f"The metric {metric} needs {package}: pip install {package}.") from error


@dataclass(frozen=True)
class Confusion:
    """A confusion matrix: the counts of each pair of correct and predicted label."""

    labels: tuple[str, ...]  # the label set; the index ``len(labels)`` stands for text that is not a label
    # index of the correct label, index of the predicted one, and the number of rows, for cells that are not empty,
    # sorted by the indices
    cells: tuple[tuple[int, int, int], ...]

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Confusion:
        """Return the matrix that ``dataclasses.asdict`` was called on, also if JSON has turned tuples into lists."""
        return cls(tuple(values["labels"]), tuple((right, written, rows) for right, written, rows in values["cells"]))

    def name(self, index: int) -> str:
        """Return the label of an index."""
        return self.labels[index] if index < len(self.labels) else OTHER

    def matrix(self) -> list[list[int]]:
        """Return counts by correct label (row) and predicted label (column); the last column is any other text."""
        counts = [[0] * (len(self.labels) + 1) for _ in self.labels]
        for right, written, rows in self.cells:
            counts[right][written] = rows
        return counts

    def mistakes(self) -> list[tuple[str, str, int]]:
        """Return correct label, predicted label and number of rows of each mistake, the most frequent first."""
        wrong = sorted((cell for cell in self.cells if cell[0] != cell[1]), key=lambda cell: (-cell[2], *cell))
        return [(self.name(right), self.name(written), rows) for right, written, rows in wrong]


@dataclass(frozen=True)
class Scores:
    """Scores of predictions."""

    values: Mapping[str, float]  # value of each metric
    confusion: Confusion | None = None  # the confusion matrix if a metric is accuracy, else None


@dataclass(frozen=True)
class Baseline:
    """The score of predictions that need no model."""

    name: str  # description of the predictions
    value: float  # their score, in the metric's range


def score(
    metrics: Sequence[str],
    predictions: Sequence[str],
    references: References,
    *,
    labels: Collection[str] = (),
    loss: float | None = None,
) -> Scores:
    """Score predictions against references; any rank, alone. :data:`METRICS` says what each metric is.

    Args:
        metrics: Names. Those of the loss are left out without ``loss``.
        predictions: A text for each row; may be empty if no metric needs text.
        references: As many rows as predictions.
        labels: The label set; references that are not in it are added to it.
        loss: The mean loss per target token.

    Raises:
        ConfigError: A metric needs a package that is not installed.
        ValueError: The numbers of references and predictions differ.
    """
    values: dict[str, float] = {}
    if needs_text(metrics):
        if len(predictions) != len(references):
            raise ValueError(f"{len(predictions)} predictions for {len(references)} rows of references.")
        values = _text_values(metrics, predictions, references)
    for name in metrics:
        if (of_loss := METRICS[name].of_loss) is not None and loss is not None:
            values[name] = of_loss(loss)
    confuses = any(METRICS[name].confusion for name in metrics)
    confusion = _confusion(predictions, references, labels) if confuses else None
    return Scores({name: values[name] for name in metrics if name in values}, confusion)


def row_scores(metrics: Sequence[str], predictions: Sequence[str], references: References) -> dict[str, list[float]]:
    """Return each row's score by the metrics that are means over rows; any rank, alone.

    Raises:
        ConfigError: A metric needs a package that is not installed.
    """
    found = _score_texts([name for name in metrics if METRICS[name].of_rows], predictions, references)
    return {name: one for name, one in found.items() if isinstance(one, list)}


def _score_texts(metrics: Sequence[str], predictions: Sequence[str], references: References) -> Scored:
    """Return the scores by the metrics of text; those that share a function are scored together."""
    together: dict[Any, list[str]] = {}
    for name in metrics:
        together.setdefault(METRICS[name].of_text, []).append(name)
    found: dict[str, list[float] | float] = {}
    for of_text, names in together.items():
        found |= {} if of_text is None else of_text(names, predictions, references)
    return found


def _text_values(metrics: Sequence[str], predictions: Sequence[str], references: References) -> dict[str, float]:
    found = _score_texts(metrics, predictions, references)
    return {name: sum(one) / len(one) if isinstance(one, list) else one for name, one in found.items()}


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


def baselines(
    metrics: Sequence[str],
    sources: Sequence[str],
    references: References,
    *,
    majority: str | Sequence[str] | None,
    lead_sentences: int = 1,
) -> dict[str, Baseline]:
    """Score predictions that need no model; any rank, alone.

    Args:
        metrics: Names. Of labels: the most frequent training target for every row; of other texts: the first sentences
            of each row's own source; of the loss there is none.
        sources: Sources of the held-out rows.
        references: Their references.
        majority: The most frequent training target, or that of each row's set; None: not known, so the metrics that
            need it have no baseline.
        lead_sentences: Number of first sentences.

    Returns:
        The baseline of each metric that has one.

    Raises:
        ConfigError: A metric needs a package that is not installed.
    """
    of_labels = [name for name in metrics if METRICS[name].of_labels]
    of_texts = [name for name in metrics if METRICS[name].of_text is not None and name not in of_labels]
    found: dict[str, Baseline] = {}
    if of_labels and majority is not None:
        always = [majority] * len(references) if isinstance(majority, str) else list(majority)
        what = f"always {always[0]!r}" if len(set(always)) == 1 else "always the most frequent target of a row's set"
        found |= {name: Baseline(what, value) for name, value in _text_values(of_labels, always, references).items()}
    if of_texts:
        name = "first sentence" if lead_sentences == 1 else f"first {lead_sentences} sentences"
        leads = [lead(source, lead_sentences) for source in sources]
        found |= {metric: Baseline(name, value) for metric, value in _text_values(of_texts, leads, references).items()}
    return found


def counted_words(metrics: Sequence[str], references: References) -> dict[str, str]:
    """Return how the words of text beyond ASCII are counted, by metric, for the record; any rank, alone.

    Nothing is returned for a metric whose package counts the words of these rows by its defaults.
    """
    counted = {name: words(references) for name in metrics if (words := METRICS[name].words) is not None}
    return {name: how for name, how in counted.items() if how is not None}


def describe_words(words: Mapping[str, str]) -> str:
    """Return a sentence for the user about what :func:`counted_words` returned."""
    return "words are counted so: " + "; ".join(
        f"{' and '.join(name for name in words if words[name] == how)}: {how}" for how in dict.fromkeys(words.values())
    )
