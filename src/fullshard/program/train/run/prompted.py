"""The tokenizer of a run, saved together with what decides how the run's model is asked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fullshard.program.config import PROMPT_NAME, prompt_text
from fullshard.program.train.run.assemble import Assembly
from fullshard.state.storage import write_text


class PromptedTokenizer:
    """Takes the tokenizer's place where a model or a checkpoint is saved."""

    def __init__(self, parts: Assembly) -> None:
        """Keep the run's parts."""
        self._parts = parts

    def save_pretrained(self, directory: Path) -> None:
        """Write the tokenizer and ``fullshard_prompt.json``; on rank 0."""
        parts = self._parts
        parts.tokenizer.save_pretrained(directory)
        labels = None if parts.evaluation is None else parts.evaluation.rows.labels
        labels = labels if isinstance(labels, Mapping) else None
        text = prompt_text(parts.config, parts.system_turns, labels, conversations=bool(parts.system_turns))
        write_text(directory / PROMPT_NAME, text)
