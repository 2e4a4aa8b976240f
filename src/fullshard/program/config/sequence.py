"""What cannot be combined with ``sharding.sequence_parallel`` above 1, where ranks share each row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fullshard.program.config.model import ModelConfig
from fullshard.program.config.training import TrainingConfig

_ATTENTION = (None, "sdpa", "eager")

_WAYS = ("compile", "t5_attention")
"""Ways that do not ask for a full row's tokens or heads."""


def require_splittable(ranks: int, model: ModelConfig, training: TrainingConfig, ways: Sequence[str]) -> None:
    """Refuse settings with which ``ranks`` cannot share rows; any process.

    Raises:
        ValueError: Some are set, with all of them in the text.
    """
    found = [] if ranks == 1 else list(_problems(model, training, ways))
    if found:
        raise ValueError(
            f"sharding.sequence_parallel: {ranks} cannot be combined with {'; '.join(found)}. Remove these, or "
            "sharding.sequence_parallel"
        )


def _problems(model: ModelConfig, training: TrainingConfig, ways: Sequence[str]) -> Iterator[str]:
    """Yield each setting that stands against it, with the reason."""
    others = [way for way in ways if way not in _WAYS]
    if others:
        yield f"{', '.join(others)} (speed.ways), which replace what rows are split in"
    if model.attn_implementation not in _ATTENTION:
        yield f"model.attn_implementation: {model.attn_implementation}; only sdpa and eager attend to shared rows"
    if model.output_router_logits:
        yield "model.output_router_logits, whose loss needs full rows"
    if training.objective != "sft":
        yield f"training.objective: {training.objective}, whose losses are of full rows"
    if training.precision == "fp8":
        yield "training.precision: fp8, whose scales are those of full rows"
