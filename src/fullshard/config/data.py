"""The run file's ``data`` section: where rows come from and how they become text."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import NonNegativeInt, PositiveInt, model_validator

from fullshard.config.section import Fraction, Section


class DataConfig(Section):
    """The rows to learn from and to evaluate on."""

    train_file: Path | None = None
    """A .csv, .tsv, .jsonl, .json or .parquet file, or what format says, relative to the run file's directory or to
    the working directory. Exactly one of train_file and dataset_name."""
    validation_file: Path | None = None
    """Held-out rows for evaluation, in the same format."""
    dataset_name: str | None = None
    """A directory written by datasets' save_to_disk, or the id of a dataset on the Hub."""
    dataset_config_name: str | None = None
    """Configuration of the dataset on the Hub."""
    train_split: str = "train"
    """Split of dataset_name to train on."""
    validation_split: str | None = "validation"
    """Split of dataset_name to evaluate on; null: none."""
    validation_fraction: Fraction = 0.0
    """Share of the training rows that is held out instead, chosen by a hash of each row's source: the same rows in
    every run. For data that comes in one piece."""
    format: Literal["auto", "csv", "tsv", "jsonl", "json", "parquet", "wikihow", "phrasebank"] = "auto"
    """How files are read; auto: by their suffix. wikihow: wikihowAll.csv or wikihowSep.csv as its authors ship it;
    phrasebank: FinancialPhraseBank's Sentences_*Agree.txt or its JSON Lines form."""
    encoding: str = "utf-8"
    """Encoding of text files; a byte-order mark is left out. phrasebank is read as ISO-8859-1 where it is not UTF-8."""
    source_column: str | None = None
    """Column of the text the model reads; null: recognised by its name."""
    target_column: str | None = None
    """Column of the text the model is to write; null: recognised by its name."""
    target_lists: Literal["references", "join"] = "references"
    """A list in the target column is several references, of which training takes the first, or one text in pieces."""
    source_prefix: str = ""
    """Text put before every source, such as "summarize: "."""
    template: str | None = None
    """The source made of several columns, such as "question: {question} context: {context}"; in place of
    source_column."""
    chat_template: bool | None = None
    """Causal models: whether the source is put into the tokenizer's chat template; null: where it has one."""
    max_bad_rows: NonNegativeInt = 0
    """Rows of each file that may be skipped because they cannot be used; they are counted and shown. One more ends the
    run."""
    max_source_length: PositiveInt = 512
    """Most tokens of a source; the rest is cut off and counted."""
    max_target_length: PositiveInt = 128
    """Most tokens of a target; the rest is cut off and counted."""
    max_train_samples: PositiveInt | None = None
    """Use only the first rows for training; null: all."""
    max_eval_samples: PositiveInt | None = None
    """Use only the first rows for evaluation; null: all."""
    cache_dir: Path | None = None
    """Where token ids are kept between runs; null: fullshard/ in the user's cache directory."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.train_file is None) == (self.dataset_name is None):
            given = "neither" if self.train_file is None else "both"
            raise ValueError(f"exactly one of train_file and dataset_name must be given; got {given}")
        self._no_idle_options()
        if self.validation_fraction and self.validation_file is not None:
            raise ValueError("validation_fraction holds out training rows; it does not go with validation_file")
        if self.template is not None and self.source_column is not None:
            raise ValueError("template and source_column both say what the source is; give one")
        return self

    def _no_idle_options(self) -> None:
        """Refuse what would be ignored.

        Raises:
            ValueError: An option is given that the data's origin has no use for.
        """

        def given(*names: str) -> list[str]:
            return [name for name in names if getattr(self, name) != type(self).model_fields[name].default]

        if self.dataset_name is None and (idle := given("dataset_config_name", "train_split", "validation_split")):
            raise ValueError(f"{' and '.join(idle)} go with dataset_name, which is not given")
        if self.validation_fraction and self.validation_split is not None and given("validation_split"):
            raise ValueError("validation_fraction holds out training rows; it does not go with validation_split")
        if self.dataset_name is not None and (idle := given("format", "encoding", "validation_file")):
            raise ValueError(f"{' and '.join(idle)} go with train_file; dataset_name is given")
        own = ("source_column", "target_column", "template", "target_lists")
        if self.format == "wikihow" and (idle := given(*own)):
            raise ValueError(f"format: wikihow knows its own columns; leave out {' and '.join(idle)}")

    @property
    def holds_out(self) -> bool:
        """Whether there are rows to evaluate on."""
        if self.validation_file is not None or self.validation_fraction or self.format == "wikihow":
            return True
        return self.dataset_name is not None and self.validation_split is not None
