"""WikiHow as the tutorial's script reads it: ``load_dataset`` and ``wikihow``, on fullshard's reader of the CSV files.

Unlike the tutorial's module it does not take line breaks out of texts, which joined the words around them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from fullshard.data import Example, SourceSpec, read_split

__all__ = ["load_dataset", "wikihow"]

FILES = {"all": "wikihowAll.csv", "sep": "wikihowSep.csv"}
SPLITS = ("train", "validation")


class Rows(list[Example]):
    """The rows of a split."""

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows and of columns: text and headline."""
        return len(self), 2


def load_dataset(name: str, config: str, data_dir: str) -> dict[str, Rows]:
    """Both splits of WikiHow: by its authors' title lists where they lie beside the file, else by a hash of titles."""
    if name != "wikihow" or config not in FILES:
        raise ValueError(f"Only wikihow can be loaded here, as {' or '.join(FILES)}; got {name}, {config}.")
    spec = SourceSpec(train_file=Path(data_dir, FILES[config]), format="wikihow")
    return {split: Rows(read_split(spec, split).examples) for split in SPLITS}


class wikihow(Dataset[dict[str, torch.Tensor]]):
    """The first rows of a split as token ids, each padded to its full length, as the tutorial does it."""

    def __init__(
        self,
        tokenizer: Any,
        type_path: str,
        num_samples: int,
        input_length: int,
        output_length: int,
        print_text: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        """Take at most ``num_samples`` rows of the split ``type_path``."""
        self.rows = load_dataset("wikihow", "all", data_dir="data/")[type_path][:num_samples]
        self.tokenizer = tokenizer
        self.input_length = input_length
        self.output_length = output_length
        self.print_text = print_text

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Ids and attention masks of one row: sources (input_length,), targets (output_length,), int64."""
        row = self.rows[index]
        if self.print_text:
            print("Input Text: ", row.source)
        source, target = self.encode(row.source, self.input_length), self.encode(row.target, self.output_length)
        return {
            "source_ids": source["input_ids"][0],
            "source_mask": source["attention_mask"][0],
            "target_ids": target["input_ids"][0],
            "target_mask": target["attention_mask"][0],
        }

    def encode(self, text: str, length: int) -> Any:
        """Ids of one text, cut or padded to ``length``."""
        return self.tokenizer(text, max_length=length, padding="max_length", truncation=True, return_tensors="pt")
