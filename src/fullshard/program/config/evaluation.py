"""The run file's ``evaluation`` section: metrics on held-out rows, and text generation."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import NonNegativeInt, PositiveInt, model_validator

from fullshard.program.config.section import ConfigSection

Metric = Literal["exact_match", "accuracy", "rouge1", "rouge2", "rougeL", "rougeLsum", "bleu", "chrf", "perplexity"]


class EvaluationConfig(ConfigSection):
    """Metrics on the held-out rows, and text generation."""

    metric: Metric = "exact_match"
    """Metric that selects the best model. exact_match: share of rows whose prediction equals the target; accuracy:
    share of rows with the correct label, with a confusion matrix; rouge*: mean F-measure; bleu, chrf: over all rows;
    perplexity: of the references, without generation; lower is better."""
    metrics: tuple[Metric, ...] = ()
    """Additional metrics to report."""
    lead_sentences: PositiveInt = 1
    """Number of leading source sentences that form the baseline of rouge, bleu and chrf."""
    num_samples_shown: NonNegativeInt = 5
    """Predictions printed next to their references at the end."""
    max_new_tokens: PositiveInt | None = None
    """Maximum tokens generated per row; null: those of the longest target, or data.max_target_length where rows are
    streamed or there is no run."""
    min_new_tokens: NonNegativeInt = 0
    """Minimum tokens generated per row. This and the options below replace the model's own generation settings also
    where they are left out, unlike in Hugging Face's generate: a score then means the same for every model."""
    num_beams: PositiveInt = 1
    """Width of the beam search; 1: greedy."""
    length_penalty: float = 1.0
    """Exponent of the length that divides beam scores; the greater, the longer the texts. Needs num_beams of at least
    2."""
    no_repeat_ngram_size: NonNegativeInt = 0
    """Length of token sequences that may not repeat within a prediction; 0: no limit."""

    @model_validator(mode="after")
    def _no_idle_options(self) -> Self:
        if self.length_penalty != 1.0 and self.num_beams == 1:
            raise ValueError(f"length_penalty: {self.length_penalty} needs num_beams of at least 2; got 1")
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens must be at most max_new_tokens; got {self.min_new_tokens} and {self.max_new_tokens}"
            )
        return self
