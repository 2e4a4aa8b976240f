"""The run file's ``evaluation`` section: what is measured on held-out rows, and how text is generated."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import NonNegativeInt, PositiveInt, model_validator

from fullshard.config.section import Section

Metric = Literal["exact_match", "accuracy", "rouge1", "rouge2", "rougeL", "rougeLsum", "bleu", "chrf", "perplexity"]


class EvaluationConfig(Section):
    """What is measured on the held-out rows."""

    metric: Metric = "exact_match"
    """The metric that decides which model is the best. exact_match: share of rows written exactly; accuracy: share of
    rows whose label was written, with a confusion matrix; rouge*: mean F-measure; bleu, chrf: of the whole set;
    perplexity: of the references, the lower the better, without generating."""
    metrics: tuple[Metric, ...] = ()
    """Further metrics that are measured and reported."""
    lead_sentences: PositiveInt = 1
    """Sentences of the source that the baseline of rouge, bleu and chrf consists of."""
    num_samples_shown: NonNegativeInt = 5
    """Predictions shown beside their references at the end."""
    max_new_tokens: PositiveInt | None = None
    """Most tokens generated for a row; null: data.max_target_length."""
    min_new_tokens: NonNegativeInt = 0
    """Fewest tokens generated for a row."""
    num_beams: PositiveInt = 1
    """Width of the beam search; 1: greedy."""
    length_penalty: float = 1.0
    """Power of the length that beams' scores are divided by; above 1 prefers longer texts. Only with num_beams."""
    no_repeat_ngram_size: NonNegativeInt = 0
    """No sequence of so many tokens is written twice in a row's text; 0: any may."""

    @model_validator(mode="after")
    def _no_idle_options(self) -> Self:
        if self.length_penalty != 1.0 and self.num_beams == 1:
            raise ValueError(f"length_penalty: {self.length_penalty} needs num_beams of at least 2; got 1")
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens must be at most max_new_tokens; got {self.min_new_tokens} and {self.max_new_tokens}"
            )
        return self
