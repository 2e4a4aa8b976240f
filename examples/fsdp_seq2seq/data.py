"""Articles and their summaries, read from WikiHow's table and padded into batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fullshard.program.data import Example, SourceSpec, read_split

__all__ = ["Collate", "read_rows"]


def read_rows(table: str, split: str, limit: int | None = None) -> list[Example]:
    """Return at most ``limit`` rows of ``split`` ("train" or "validation") of a WikiHow CSV file.

    The split follows the authors' title lists if they are stored next to the file, else a hash of the titles.
    """
    return read_split(SourceSpec(train_file=Path(table), format="wikihow"), split).examples[:limit]


class Collate:
    """Turns rows into a batch padded to its longest row; labels of padding are -100, which the loss ignores."""

    def __init__(self, tokenizer: Any, source_tokens: int = 512, target_tokens: int = 150) -> None:
        """Cut sources and targets to these lengths."""
        self.tokenizer = tokenizer
        self.source_tokens = source_tokens
        self.target_tokens = target_tokens

    def __call__(self, rows: list[Example]) -> dict[str, torch.Tensor]:
        """Return ``input_ids``, ``attention_mask`` and ``labels``, int64 (rows, tokens).

        Without rows the batch is one empty row without labels, so that a rank that has run out of data still takes
        part in the collectives.
        """
        batch = self._encode([row.source for row in rows] or [""], self.source_tokens)
        targets = self._encode([row.target for row in rows] or [""], self.target_tokens)
        learned = targets["attention_mask"].bool() & bool(rows)
        return {**batch, "labels": targets["input_ids"].masked_fill(~learned, -100)}

    def _encode(self, texts: list[str], length: int) -> Any:
        return self.tokenizer(texts, max_length=length, truncation=True, padding=True, return_tensors="pt")
