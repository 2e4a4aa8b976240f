"""What rows are once they are read, and what is to be read: the words that all of this room speaks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Split = Literal["train", "validation"]


@dataclass(frozen=True)
class Example:
    """One row.

    Attributes:
        source: The text the model reads, as the data has it, without the prefix; with a template, filled in.
        references: Texts that are right answers, at least one. Training learns the first.
        line: Line of the file that the row starts on, from 1 (the header of a CSV is line 1); the row's number, from 1,
            where the data has no lines.
    """

    source: str
    references: tuple[str, ...]
    line: int

    @property
    def target(self) -> str:
        """The text the model is to write: the first reference."""
        return self.references[0]


@dataclass(frozen=True)
class SourceSpec:
    """Where rows come from; the options of the run file's ``data`` section of the same names."""

    train_file: Path | None = None
    validation_file: Path | None = None
    dataset_name: str | None = None
    dataset_config_name: str | None = None
    train_split: str = "train"
    validation_split: str | None = "validation"
    validation_fraction: float = 0.0
    format: Literal["auto", "csv", "tsv", "jsonl", "json", "parquet", "wikihow", "phrasebank"] = "auto"
    encoding: str = "utf-8"
    source_column: str | None = None
    target_column: str | None = None
    target_lists: Literal["references", "join"] = "references"
    template: str | None = None
    max_bad_rows: int = 0


@dataclass(frozen=True)
class Table:
    """The rows of one split.

    Attributes:
        examples: In the order of the data.
        notes: What the user should know: columns that were recognised, rows that were skipped, with their lines.
    """

    examples: list[Example]
    notes: tuple[str, ...] = ()
