"""Types shared by all of data: an example, a table of examples, and where rows come from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Split = Literal["train", "validation"]


@dataclass(frozen=True)
class Example:
    """One row."""

    source: str  # the input text as in the data, or the filled-in template; without the prefix
    references: tuple[str, ...]  # correct targets, at least one. Training uses the first
    # line of the file where the row starts, from 1 (the header of a CSV is line 1); the row's number, from 1, if the
    # data has no lines
    line: int

    @property
    def target(self) -> str:
        """The target text: the first reference."""
        return self.references[0]


@dataclass(frozen=True)
class InputRow:
    """One row to predict for."""

    source: str  # as in :class:`Example`; empty where it could not be read
    line: int  # as in :class:`Example`
    problem: str | None = None  # why it cannot be used; None: it can


@dataclass(frozen=True)
class InputTable:
    """The rows to predict for: all of them, in the order of the data."""

    rows: list[InputRow]
    notes: tuple[str, ...] = ()  # as in :class:`Table`


@dataclass(frozen=True)
class SourceSpec:
    """Where rows come from: the options of the same names in the run file's ``data`` section."""

    train_file: Path | None = None
    validation_file: Path | None = None
    dataset_name: str | None = None
    dataset_config_name: str | None = None
    train_split: str = "train"
    validation_split: str | None = "validation"
    validation_fraction: float = 0.0
    format: Literal["auto", "csv", "tsv", "jsonl", "json", "parquet", "wikihow", "phrasebank"] = "auto"
    encoding: str = "utf-8"
    delimiter: str | None = None
    source_column: str | None = None
    target_column: str | None = None
    target_lists: Literal["references", "join"] = "references"
    template: str | None = None
    max_bad_rows: int = 0


@dataclass(frozen=True)
class Table:
    """The rows of one split."""

    examples: list[Example]  # the examples in the order of the data
    # messages for the user: columns chosen by name, rows that were skipped, with their lines
    notes: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()  # a line for each skipped row, if there are more than the notes show
