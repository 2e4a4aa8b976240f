"""The run file's ``data`` section: where rows come from and how they become text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError, model_validator

from fullshard.program.config.section import ASKED, EVALUATION, FREE, SAME, ConfigSection, Fraction, Option
from fullshard.program.data.examples import SourceSpec

_OF_PAIRS = (
    "source_column",
    "target_column",
    "template",
    "source_prefix",
    "target_lists",
    "train_on",
    "separator",
    "chat_template",
    "weight_column",
    "label_column",
    "missing_values",
    "max_target_length",
)
"""Options that plain text has no use for."""

_OF_A_SET = ("train_file", "validation_file", "dataset_name", "dataset_config_name", "train_split", "validation_split")
"""Options that each set of a mixture gives itself."""

SetName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_-]*$")]
"""Name of a set: part of keys and of file names."""


class SetConfig(ConfigSection):
    """One data set of a mixture, under a name of your choice; options left out are taken from `data`."""

    # An option without words of its own is what it is in ``data``.

    weight: Annotated[Annotated[float, Field(gt=0)] | None, SAME] = None
    """This set's share of the rows of an epoch, relative to the sum of all weights. Set it for all sets or for none:
    without weights each row of each set comes once. An epoch has as many rows as all sets together."""
    train_file: Annotated[Path | None, Option("same", names="file", own_machine=True)] = None
    """As data.train_file. Set exactly one of train_file and dataset_name."""
    validation_file: Annotated[Path | None, Option("evaluation", names="file", own_machine=True)] = None
    validation_fraction: Annotated[Fraction | None, Option("evaluation", holds_out=True)] = None
    dataset_name: Annotated[str | None, Option("same", names="dataset")] = None
    dataset_config_name: Annotated[str | None, SAME] = None
    train_split: Annotated[str | None, SAME] = None
    validation_split: Annotated[str | None, EVALUATION] = None
    format: Annotated[str | None, ASKED] = None
    delimiter: Annotated[str | None, SAME] = None
    quoting: Annotated[str | None, SAME] = None
    source_column: Annotated[str | None, ASKED] = None
    target_column: Annotated[str | None, ASKED] = None
    template: Annotated[str | None, ASKED] = None
    source_prefix: Annotated[str | None, ASKED] = None
    weight_column: Annotated[str | None, SAME] = None


class DataConfig(ConfigSection):
    """The rows for training and evaluation."""

    train_file: Annotated[Path | None, Option("same", names="file", own_machine=True)] = None
    """A .csv, .tsv, .jsonl, .json, .parquet, .txt or .md file, or a file of the given format, relative to the run
    file's directory or the working directory. Set exactly one of train_file, dataset_name and sets."""
    validation_file: Annotated[
        Path | None, Option("evaluation", names="file", own_machine=True, also=("test_file",))
    ] = None
    """Held-out rows for evaluation, in the same format."""
    dataset_name: Annotated[str | None, Option("same", names="dataset", also=("dataset", "dataset_id"))] = None
    """A directory written by datasets' save_to_disk, or the id of a dataset on the Hub."""
    dataset_config_name: Annotated[str | None, SAME] = None
    """Configuration of the dataset on the Hub."""
    train_split: Annotated[str, SAME] = "train"
    """Split of dataset_name to train on."""
    validation_split: Annotated[str | None, EVALUATION] = "validation"
    """Split of dataset_name for evaluation; null: none."""
    validation_fraction: Annotated[Fraction, Option("evaluation", holds_out=True)] = 0.0
    """Approximate share of the training rows to hold out, for data without held-out rows. A hash of a row's source
    decides: the rows are the same in every run, in whatever order the table has them, and rows with the same source
    stay together. For a conversation, the turns before the first answer are hashed. The run prints the actual share."""
    held_out_by: Annotated[Literal["classes", "source"], FREE] = "classes"
    """How validation_fraction chooses rows. classes: of few distinct targets, each one's rows are held out in the
    same share, those with the smallest hashes; of kto's labels likewise. Of other rows, and with source: by the hash
    alone, so that a row keeps its side when rows are added; with a few hundred rows the share may be off by half."""
    format: Annotated[
        Literal["auto", "csv", "tsv", "jsonl", "json", "parquet", "text", "wikihow", "phrasebank"], ASKED
    ] = "auto"
    """Format of the files; auto: by their suffix, or by the content where that is plainly another. text: plain text,
    which has one column, text: a row for each paragraph, or for each line if no line is empty. wikihow: the
    authors' wikihowAll.csv or wikihowSep.csv; phrasebank: FinancialPhraseBank's Sentences_*Agree.txt or its JSON Lines
    form."""
    encoding: Annotated[str, ASKED] = "utf-8"
    """Encoding of text files; a byte-order mark is removed. phrasebank is read as ISO-8859-1 if it is not UTF-8."""
    delimiter: Annotated[str | None, SAME] = None
    """Character between the cells of CSV files; null: comma, semicolon, tab or |, found in the header and the first
    rows."""
    quoting: Annotated[Literal["auto", "none", "csv"], Option("same", before="auto")] = "auto"
    """Double quotes in CSV and TSV files. csv: they enclose cells that hold delimiters, line breaks or doubled quotes;
    none: they are characters of the text, and each line is a row; auto: found by whether they pair up cell by cell, and
    reported if they do not."""
    text_column: Annotated[str | None, Option("same", travels=True, also=("dataset_text_field", "text_field"))] = None
    """Column of plain text to train on, instead of source and target. The texts are joined, each with the end token
    after it, and cut into rows. A causal model learns every token of a row, an encoder-decoder with sentinel tokens
    (T5's family) the spans that are left out of it."""
    source_column: Annotated[str | None, ASKED] = None
    """Column of the model's input text, or of conversations; null: chosen by its name, or the first of two columns.
    A name with dots, such as translation.en, reaches into objects; so do those of target_column, template and
    weight_column."""
    target_column: Annotated[str | None, Option("same", travels=True, also=("summary_column",))] = None
    """Column of the model's target text; null: chosen by its name, or the second of two columns."""
    rejected_column: Annotated[str | None, ASKED] = None
    """Preferences: column of the rejected completion; null: rejected. source_column is then the prompt, and
    target_column the chosen completion; null: prompt, question, instruction or input (joined with others as for other
    rows), and chosen. Without a prompt the completions begin with it."""
    label_column: Annotated[str | None, SAME] = None
    """Preferences: column of labels. kto: whether a completion is desirable (true or false, good or bad, thumbs up or
    down); null: label. Pairs: which of target_column and rejected_column is better, by the name of the column or by
    what it ends in, such as 0, b or model_b; null: the target_column is."""
    missing_values: Annotated[Literal["empty", "text"], Option("same", before="empty")] = "empty"
    """Targets that are only NaN, None, null, N/A, NA, <NA> or the like, as tables write missing values. empty: as an
    empty cell, so that the row is unusable (see max_bad_rows); text: a target like any other."""
    target_lists: Annotated[Literal["references", "join"], ASKED] = "references"
    """Meaning of a list in the target column. references: several references, of which training uses the first; join:
    one text in pieces."""
    source_prefix: Annotated[str, ASKED] = ""
    """Text put before every source, such as "summarize: "."""
    template: Annotated[str | None, ASKED] = None
    """Source composed of several columns, such as "question: {question} context: {context}"; instead of
    source_column."""
    chat_template: Annotated[bool | None, ASKED] = None
    """Causal models: whether to apply the tokenizer's chat template to the source; null: if it has one. Conversations
    need one: a tokenizer without one gets a plain template, which is reported and saved with the model."""
    separator: Annotated[str | None, ASKED] = None
    """Causal models without a chat template: text between source and target; null: a line break, unless the tokenizer
    ends every text with a special token or the template ends with text of its own. Recorded with the run."""
    weight_column: Annotated[str | None, SAME] = None
    """Column with a positive number for each training row, by which the loss of its tokens is multiplied; null: all
    rows have weight 1. A step's loss is divided by the sum of the weights of its target tokens. Held-out rows need no
    weights."""
    train_on: Annotated[Literal["assistant", "last"], ASKED] = "assistant"
    """Conversations: the turns that are learned. assistant: all of the assistant's; last: its last one."""
    max_bad_rows: Annotated[NonNegativeInt, SAME] = 0
    """Maximum unusable rows per file that are skipped, counted and reported. One more is an error."""
    max_source_length: Annotated[
        PositiveInt, Option("same", travels=True, also=("max_input_length", "max_length", "max_seq_length"))
    ] = 512
    """Maximum tokens of a source; longer ones are truncated and counted. The history of a conversation loses its oldest
    turns. With text_column, the tokens of a row."""
    max_target_length: Annotated[PositiveInt, Option("same", travels=True, also=("output_max_length",))] = 128
    """Maximum tokens of a target; longer ones are truncated and counted."""
    max_train_samples: Annotated[PositiveInt | None, Option("same", draws_rows=True)] = None
    """Number of rows to train on; null: all. A hash of each row and the seed decides which: they are a random sample,
    the same on every rank and in every run, in whatever order the rows are. In a mixture, of each set."""
    max_eval_samples: Annotated[PositiveInt | None, Option("evaluation", draws_rows=True)] = None
    """Number of held-out rows to evaluate on, drawn as for max_train_samples; null: all. In a mixture, of each set."""
    cache_dir: Annotated[Path | None, Option("free", names="place", own_machine=True)] = None
    """Cache directory of token ids; null: fullshard/ in the user's cache directory."""
    streaming: Annotated[bool, Option("same", before=False)] = False
    """Read and tokenize training rows while training, for data too large to tokenize first. An index takes 32 to 48
    bytes a row in memory. Steps have the same rows as without it, except that group_by_length estimates lengths.
    Held-out rows are tokenized first, and so are training rows with per_device_train_batch_tokens, for their lengths
    only."""
    sets: Annotated[Mapping[SetName, SetConfig], SAME] = {}
    """The data sets of a mixture by name, instead of train_file and dataset_name. Metrics are evaluated on all sets'
    held-out rows together, which decides which model is kept, and on each set."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if self.sets:
            self._fitting_sets()
            return self
        if (self.train_file is None) == (self.dataset_name is None):
            given = "neither" if self.train_file is None else "both"
            raise ValueError(f"exactly one of train_file and dataset_name must be given; got {given} (and no sets)")
        self._no_idle_options()
        self._fitting_text()
        self._fitting_streaming()
        if self.validation_fraction and self.validation_file is not None:
            raise ValueError("validation_fraction holds out training rows and cannot be combined with validation_file")
        if self.template is not None and self.source_column is not None:
            raise ValueError("template and source_column both set the source; give one")
        self._fitting_cells()
        return self

    def _fitting_sets(self) -> None:
        """Check the sets, each completed by the options given here, and their weights."""
        if idle := self.given(*_OF_A_SET):
            raise ValueError(f"with sets, {' and '.join(idle)} of each set is given inside sets; remove it here")
        without = [name for name, one in self.sets.items() if one.weight is None]
        if 0 < len(without) < len(self.sets):
            raise ValueError(
                f"sets: {len(without)} of {len(self.sets)} have no weight: {', '.join(without)}. Give all of them one, "
                "or none: then each row comes once an epoch"
            )
        for name in self.sets:
            try:
                self._part(name)
            except ValidationError as error:
                first = error.errors()[0]
                where = "".join(f".{key}" for key in first["loc"])
                raise ValueError(f"sets.{name}{where}: {first['msg'].removeprefix('Value error, ')}") from error

    def _part(self, name: str) -> DataConfig:
        """Return the ``data`` section that a set amounts to."""
        own = {key: value for key, value in self.sets[name].model_dump().items() if value is not None}
        own.pop("weight", None)
        rest = {key: value for key, value in self.model_dump().items() if key != "sets"}
        # Options of a set replace those of the mixture.
        if own.keys() & {"validation_file", "validation_split"}:
            rest["validation_fraction"] = 0.0
        if own.keys() & {"template", "source_column"}:
            rest |= {"template": None, "source_column": None}
        return DataConfig.model_validate({**rest, **own})

    @property
    def parts(self) -> Mapping[str, DataConfig]:
        """The section of each set of a mixture by name; without sets this section, named "" (a mixture of one)."""
        return {name: self._part(name) for name in self.sets} or {"": self}

    @property
    def weights(self) -> tuple[float, ...]:
        """The weight of each set; empty: they have none."""
        return tuple(one.weight for one in self.sets.values() if one.weight is not None)

    def _fitting_cells(self) -> None:
        """Check the delimiter, and that delimiter and quoting have a file to which they apply."""
        one = self.delimiter
        if one is not None and (len(one) != 1 or one in ' "\r\n'):
            raise ValueError(
                f"delimiter must be one character other than a blank, a quote or a line break; got {one!r}. "
                'Write it in YAML\'s quotes, such as ";" or "\\t"'
            )
        if one is not None:
            self._require_files("delimiter", "CSV", ("csv",))
        if self.quoting != "auto":
            self._require_files("quoting", "CSV and TSV", ("csv", "tsv"))

    def _require_files(self, option: str, kinds: str, formats: tuple[str, ...]) -> None:
        """Raise ValueError unless one of the files has one of the formats to which an option applies."""
        if self.format not in ("auto", *formats):
            raise ValueError(f"{option} applies to {kinds} files, but format is {self.format}; leave it out")
        files = [file for file in (self.train_file, self.validation_file) if file is not None]
        names = [file.name.lower().removesuffix(".gz") for file in files]
        if self.format == "auto" and not any(name.endswith(tuple(f".{one}" for one in formats)) for name in names):
            given = " and ".join(file.name for file in files) or "dataset_name"
            raise ValueError(f"{option} applies to {kinds} files; {given} is not one. Leave it out, or set format: csv")

    def _fitting_text(self) -> None:
        """Check that plain text has no options of sources and targets."""
        if self.text_column is None:
            return
        # A finished run has recorded that nothing is put around its texts.
        idle = [name for name in self.given(*_OF_PAIRS) if getattr(self, name) not in ("", False)]
        if idle:
            raise ValueError(
                f"text_column is for plain text, and {' and '.join(idle)} for rows with a source and a target. Leave "
                "out one or the other; for texts with targets, write source_column instead of text_column"
            )
        if self.streaming:
            raise ValueError(
                "streaming reads each row when a step needs it, and the rows of text_column are cut out of all texts "
                "joined. Leave streaming out: the texts are tokenized once, and their ids are read from data.cache_dir"
            )

    def _fitting_streaming(self) -> None:
        """Check that the rows can be streamed."""
        name = "" if self.train_file is None else self.train_file.name.lower().removesuffix(".gz")
        if not self.streaming:
            return
        if self.format in ("json", "wikihow", "phrasebank") or (self.format == "auto" and name.endswith(".json")):
            kind = "json" if self.format == "auto" else self.format
            raise ValueError(
                f"streaming reads CSV, TSV, JSON Lines, Parquet and datasets. {kind} is read as a whole: convert "
                "the file to JSON Lines (set format: jsonl if it is), or leave streaming out"
            )

    def _no_idle_options(self) -> None:
        """Refuse options that would have no effect."""
        if self.dataset_name is None and (idle := self.given("dataset_config_name", "train_split", "validation_split")):
            raise ValueError(f"{' and '.join(idle)} need dataset_name, which is not given")
        if self.validation_fraction and self.validation_split is not None and self.given("validation_split"):
            raise ValueError("validation_fraction holds out training rows and cannot be combined with validation_split")
        if self.dataset_name is not None and (
            idle := self.given("format", "encoding", "delimiter", "quoting", "validation_file")
        ):
            raise ValueError(f"{' and '.join(idle)} need train_file; dataset_name is given")
        own = ("text_column", "source_column", "target_column", "template", "target_lists", "train_on", "weight_column")
        if self.format == "wikihow" and (idle := self.given(*own)):
            raise ValueError(f"format: wikihow has fixed columns; leave out {' and '.join(idle)}")

    @property
    def holds_out(self) -> bool:
        """True if there are rows to evaluate on."""
        if self.sets:
            return any(part.holds_out for part in self.parts.values())
        if self.validation_file is not None or self.validation_fraction or self.format == "wikihow":
            return True
        return self.dataset_name is not None and self.validation_split is not None


def source_spec(data: DataConfig, objective: str = "sft") -> SourceSpec:
    """Return where the rows of one set come from, for ``training.objective``; any process, alone."""
    names = {each.name for each in fields(SourceSpec)} - {"preferences"}
    kinds: dict[str, Literal["pairs", "labels"] | None] = {"sft": None, "kto": "labels"}
    return SourceSpec(**{name: getattr(data, name) for name in names}, preferences=kinds.get(objective, "pairs"))
