"""Articles and their summaries, read from WikiHow's table and padded into batches."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import torch

__all__ = ["Collate", "Row", "read_rows"]


class Row(NamedTuple):
    """An article and its summary."""

    source: str
    target: str


def read_rows(table: str, split: str, limit: int | None = None) -> list[Row]:
    """Return at most ``limit`` rows of ``split`` ("train" or "validation") of a WikiHow CSV file.

    A hash of the titles holds out every twentieth. Rows without headline, text or title are left out.
    """
    csv.field_size_limit(2**24)
    rows = []
    with Path(table).open(newline="", encoding="utf-8") as file:
        for record in csv.DictReader(file):
            headline, text, title = (record[name] or "" for name in ("headline", "text", "title"))
            held_out = crc32(title.encode()) % 20 == 0
            if headline.strip() and text.strip() and title.strip() and held_out == (split == "validation"):
                rows.append(Row(text.replace(".\n,", ".\n"), headline.replace(".,", ".")))
    return rows[:limit]


class Collate:
    """Turns rows into a batch padded to its longest row; labels of padding are -100, which the loss ignores."""

    def __init__(self, tokenizer: Any, source_tokens: int = 512, target_tokens: int = 150) -> None:
        """Cut sources and targets to these lengths."""
        self.tokenizer = tokenizer
        self.source_tokens = source_tokens
        self.target_tokens = target_tokens

    def __call__(self, rows: list[Row]) -> dict[str, torch.Tensor]:
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
