"""The rows of a split or to predict for, read from files and datasets of every supported format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from hashlib import blake2b, file_digest
from itertools import compress, islice
from pathlib import Path

from fullshard.errors import DataError
from fullshard.program.data.examples import Example, InputRow, InputTable, SourceSpec, Split, Table
from fullshard.program.data.reading.arrow import DatasetRows, ParquetFile, open_dataset
from fullshard.program.data.reading.cells import (
    cell_of,
    cell_weight,
    column_of,
    columns_read,
    require_values,
    with_inner_names,
)
from fullshard.program.data.reading.columns import (
    Recipe,
    choose,
    choose_sources,
    choose_text,
    did_you_mean,
    parse_template,
    prompt_of,
)
from fullshard.program.data.reading.conversations import (
    LOOKED_AT,
    ConversationRecipe,
    TurnCounts,
    conversation_note,
    find_conversations,
    require_conversations,
)
from fullshard.program.data.reading.csv_file import CsvFile
from fullshard.program.data.reading.json_file import JsonFile, JsonLinesFile
from fullshard.program.data.reading.kind import kind_of
from fullshard.program.data.reading.phrasebank import open_phrasebank
from fullshard.program.data.reading.plain_file import PlainTextFile
from fullshard.program.data.reading.preferences import (
    LabelledRecipe,
    PreferenceRecipe,
    choose_labelled,
    choose_pairs,
    find_paired_turns,
    find_transcripts,
)
from fullshard.program.data.reading.ranked import RankedRecipe
from fullshard.program.data.reading.row import BadRows, Row, RowReader, UnusableRowError, distinct
from fullshard.program.data.reading.sample import HeldOut
from fullshard.program.data.reading.text_file import empty, encoding_problem, open_lines, unreadable
from fullshard.program.data.reading.transcripts import TranscriptRecipe
from fullshard.program.data.reading.unused import KNOWN_INPUTS, judging, unused_note
from fullshard.program.data.reading.wikihow import cleaned_article, list_files, read_wikihow

FORMATS = {".csv": "csv", ".tsv": "tsv", ".jsonl": "jsonl", ".json": "json", ".parquet": "parquet"}
FORMATS |= {".txt": "text", ".md": "text"}
"""Formats by suffix; all but Parquet may be gzipped, with .gz appended."""

_RULES = 3
"""Increased when the same file and options give different rows than before, to invalidate caches."""

_SOURCES = {"wikihow": "text", "phrasebank": "sentence"}
"""Source columns of formats that have their own reader for rows with targets."""


def read_split(spec: SourceSpec, split: Split) -> Table:
    """Read the rows of one split. Any process can call it.

    Line breaks, quotes and delimiters inside cells are kept, and JSON numbers keep their text. Empty lines are skipped.

    Args:
        spec: Where the rows come from.
        split: ``train``, or ``validation`` for the held-out rows.

    Returns:
        The rows in the order of the data, at least one, and messages about how they were read.

    Raises:
        DataError: Data is missing, empty or in another format, the columns are ambiguous, or more than ``max_bad_rows``
            rows are unusable (the message has their number and the first ones with their lines).
        ConfigError: The template is malformed.
    """
    if spec.format == "wikihow" and spec.dataset_name is None:
        return read_wikihow(_file(spec, split), spec, split if _split_by_hash(spec) else None)
    opened = open_rows(spec, split)
    held_out = held_out_of(spec, opened.reader.where)
    rows = [row for _, row in opened.usable()]
    notes, skipped = opened.notes(), opened.bad.beyond_shown
    if held_out is None:
        return Table(rows, notes, skipped)
    chosen, note = held_out.rows(rows)
    rows = list(compress(rows, chosen if split == "validation" else ~chosen))
    # The unusable rows are those of one file, whichever side is read: listed with the training rows, once.
    return Table(rows, (*notes, note), skipped if split == "train" else ())


def held_out_of(spec: SourceSpec, where: str) -> HeldOut | None:
    """Return how rows of ``where`` are held out by a hash; None: the splits are separate files or datasets."""
    if not _split_by_hash(spec):
        return None
    return HeldOut(spec.validation_fraction, where, by_class=spec.held_out_by == "classes" and spec.text_column is None)


class OpenedRows:
    """The rows of a file or dataset, the recipe for their examples, and the unusable ones found so far.

    Attributes:
        reader: The rows' reader.
        known: Their columns.
        recipe: How a row becomes an example.
        unused: A message about the columns that are not used; None: all are.
        bad: Unusable rows so far.
    """

    def __init__(self, reader: RowReader, spec: SourceSpec, weights: str | None, known: list[str]) -> None:
        """Choose the columns; ``weights`` names the column of the rows' weights, None gives all weight 1."""
        self.reader, self.known = reader, known
        self.bad = BadRows(reader.where)
        self.recipe = _recipe(reader, known, spec)
        self._num_usable, self._turns = 0, TurnCounts()
        self._limit, self._weights = spec.max_bad_rows, weights
        self._drops_missing = spec.missing_values == "empty" and spec.text_column is None
        if weights is not None and known.count(column_of(weights, known) or weights) != 1:
            raise DataError(
                f"{reader.where} has {known.count(weights)} columns {weights!r} (data.weight_column); one is "
                f"needed.{did_you_mean(weights, known)} Its columns: {', '.join(map(repr, known))}."
            )
        used = [*self.wanted, *([] if spec.weight_column is None else [spec.weight_column])]
        asked = judging(reader, [name for name in known if name not in used])
        self.unused = unused_note(known, used, asked, spec.preferences)

    @property
    def wanted(self) -> list[str]:
        """The columns that are read."""
        return columns_read([*self.recipe.columns, *([] if self._weights is None else [self._weights])], self.known)

    def example(self, row: Row) -> Example:
        """Return the example of a row.

        Raises:
            UnusableRowError: It cannot be used.
        """
        example = self.recipe.example(row)
        if self._drops_missing:
            require_values(example)
        if self._weights is None:
            return example
        return replace(example, weight=cell_weight(self._weights, cell_of(row, self._weights)))

    def usable(self) -> Iterator[tuple[Row, Example]]:
        """Yield every usable row with its example, and count the others."""
        for row in self.reader.rows(self.wanted):
            try:
                example = self.example(row)
            except UnusableRowError as problem:
                self.bad.add(row.line, str(problem))
                continue
            self._num_usable += 1
            self._turns.add(example)
            yield row, example

    def notes(self) -> tuple[str, ...]:
        """Return messages for the user; called after all rows were read.

        Raises:
            DataError: Too many rows are unusable, or none is usable.
        """
        count = self.bad.count
        unused = () if self.unused is None else (f"{self.reader.where}: {self.unused}",)
        skipped = self.bad.settle(self._num_usable + count, self._limit)
        notes = (*self.reader.notes, *self.recipe.notes, *unused, *skipped)
        if not self._num_usable:
            found = f"{count} rows, none of which can be used" if count else "a header but no rows"
            raise DataError("\n".join([f"{self.reader.where} has {found}: at least one row is needed.", *notes]))
        recipe = self.recipe.completed if isinstance(self.recipe, LabelledRecipe | RankedRecipe) else self.recipe
        if isinstance(recipe, ConversationRecipe):
            notes = (conversation_note(recipe, self._turns, self.reader.where), *notes)
        return notes


def open_rows(spec: SourceSpec, split: Split, columns: list[str] | None = None) -> OpenedRows:
    """Open the rows of a split, of any format with columns, and choose their columns. Any process can call it.

    Args:
        spec: Where the rows come from.
        split: The split.
        columns: The columns, if they are known, so that a file is not read for them.

    Raises:
        DataError: See :func:`read_split`. If no row could be read, it lists the rows' problems.
        ConfigError: The template is malformed.
    """
    reader = open_split(spec, split)
    columns = reader.columns() if columns is None else columns
    bad, total = BadRows(reader.where), 0
    for row in () if columns else reader.rows(()):
        total += 1
        if row.problem is not None:
            bad.add(row.line, row.problem)
    bad.settle(total, limit=0)
    return OpenedRows(reader, spec, spec.weight_column if split == "train" else None, columns)


def _recipe(
    reader: RowReader, columns: list[str], spec: SourceSpec
) -> Recipe | ConversationRecipe | PreferenceRecipe | TranscriptRecipe | LabelledRecipe | RankedRecipe:
    """Choose how rows with targets, or of plain text, become examples."""
    if spec.preferences == "labels":
        with with_inner_names(reader, columns):
            return choose_labelled(reader, columns, spec)
    if spec.preferences:
        with with_inner_names(reader, columns):
            return choose_pairs(reader, columns, spec)
    if spec.text_column is not None:
        with with_inner_names(reader, columns):
            return choose_text(spec.text_column, columns, reader.where)
    found = find_conversations(reader, columns, spec, completed=True)
    if found is not None:
        return found
    require_conversations(spec, reader.where)
    with with_inner_names(reader, columns):
        return choose(spec, _texts_of(columns, spec), reader.where)


def _texts_of(columns: list[str], spec: SourceSpec) -> list[str]:
    """Return the columns that may be source or target: all but the weights' column."""
    return [name for name in columns if name != spec.weight_column]


def read_inputs(path: Path, spec: SourceSpec, *, asks_turns: bool = False) -> InputTable:
    """Read the source of each row of a file; any process.

    In a ``.txt`` file each line is a row. In other files the source is the spec's ``template`` or ``source_column``,
    the only column, or the columns known by name, joined as in training; blank lines are skipped.

    Args:
        path: The file; its suffix gives the format.
        spec: Encoding and columns; the files it names are not read.
        asks_turns: Whether the rows are for a model trained on conversations: then the JSON text of a list of turns in
            a ``prompt`` without its completion is a conversation.

    Returns:
        All rows in order, each with the reason if it cannot be used.

    Raises:
        DataError: The file cannot be read or is empty, no row can be used, or the source column is ambiguous.
        ConfigError: The template is malformed.
    """
    lines = path.suffix.lower() == ".txt"
    table = InputTable(_lines(path, spec.encoding)) if lines else _table(path, spec, asks_turns=asks_turns)
    first = table.rows[0]
    if all(row.problem is not None for row in table.rows):
        raise DataError(
            f"{path}: none of its {len(table.rows):,} rows can be used. The first is line {first.line}: "
            f"{first.problem}."
        )
    return table


def _table(path: Path, spec: SourceSpec, *, asks_turns: bool) -> InputTable:
    column = spec.source_column or spec.text_column or _SOURCES.get(spec.format)
    # Where columns are given, the source also stands in for the target, which may not exist.
    target = spec.target_column
    if spec.template is not None:
        column, target = None, parse_template(spec.template)[0][0]
    elif column is not None:
        target = column
    here = replace(spec, dataset_name=None, format="auto", text_column=None, source_column=column, target_column=target)
    # Text with a target of its own was trained on as text, even if it is JSON.
    from_text = spec.text_column is None and spec.target_column in (None, spec.source_column)
    own = with_rows_of(path, here, here.encoding)
    table = _read_sources(own, from_text=from_text, asks_turns=asks_turns)
    if spec.format != "wikihow":
        return table
    return replace(table, rows=[replace(row, source=cleaned_article(row.source)) for row in table.rows])


def _lines(path: Path, encoding: str) -> list[InputRow]:
    with open_lines(path, encoding) as lines:
        texts = [line.rstrip("\r\n") for line in lines]
    if not texts:
        raise empty(path)
    rows = []
    for line, text in enumerate(texts, start=1):
        # Undecodable text could not be written to the predictions either.
        problem = encoding_problem(text, encoding)
        rows.append(InputRow("" if problem else text, line, problem or (None if text.strip() else "it is empty")))
    return rows


def _read_sources(spec: SourceSpec, *, from_text: bool, asks_turns: bool) -> InputTable:
    """Read the sources of all rows of the validation file with all their cells, also of those that cannot be used.

    ``from_text``: whether JSON text may be a conversation. ``asks_turns``: whether the model was trained on them.
    """
    reader = open_split(spec, "validation")
    columns = reader.columns()
    unread = [] if columns else [row for row in reader.rows(()) if row.problem is not None]
    if unread:
        return InputTable([InputRow("", row.line, row.problem) for row in unread], reader.notes)
    recipe: Recipe | ConversationRecipe | TranscriptRecipe | None
    recipe = find_conversations(reader, columns, spec, completed=False, from_text=from_text, asks_turns=asks_turns)
    left: str | None = None
    if recipe is not None:
        left = unused_note([name for name in columns if name.lower() in KNOWN_INPUTS], recipe.columns, (), None)
    elif (recipe := _prompts_of_pairs(reader, columns, spec)) is None:
        by_name = spec.template is None and spec.source_column is None
        with with_inner_names(reader, columns):
            recipe = (choose_sources if by_name else choose)(spec, _texts_of(columns, spec), reader.where)
    rows: list[InputRow] = []
    for row in reader.rows(columns):
        try:
            found = recipe.input_row(row)
        except UnusableRowError as problem:
            found = InputRow("", row.line, str(problem))
        rows.append(replace(found, cells=row.cells))
    if not rows:
        raise DataError(f"{reader.where} has a header but no rows: at least one row is needed.")
    notes = (*reader.notes, *recipe.notes, *([] if left is None else [f"{reader.where}: {left}"]))
    names = distinct(columns)
    if not isinstance(reader, CsvFile):
        return InputTable(rows, notes, names)
    return InputTable(rows, notes, names, reader.delimiter, quoted=reader.quoting != "none")


def _prompts_of_pairs(
    reader: RowReader, columns: list[str], spec: SourceSpec
) -> ConversationRecipe | TranscriptRecipe | None:
    """Return how the prompts of preferences are read of completions that begin with them; None: they do not."""
    if spec.preferences != "pairs" or prompt_of(columns, reader.where) is not None:
        return None
    return find_paired_turns(reader, columns, spec) or find_transcripts(reader, columns, spec)


def fingerprint(spec: SourceSpec, split: Split) -> str:
    """Return a hash of what :func:`read_split` reads, for cache keys. Any process can call it.

    It depends on the files' bytes, not on their names and paths, and on every option that changes the rows.

    Returns:
        32 hexadecimal digits.

    Raises:
        DataError: The data cannot be read.
    """
    digest = blake2b(digest_size=16)
    options: list[object] = [_RULES, spec.encoding, spec.source_column, spec.target_column, spec.target_lists]
    options += [spec.delimiter, spec.template, spec.max_bad_rows]
    options += [[split, spec.validation_fraction, spec.held_out_by] if _split_by_hash(spec) else None]
    # Hashed only if it is not the default, so that runs of versions without the option still resume.
    options += [spec.train_on] if spec.train_on != "assistant" else []
    options += [["preferences", spec.rejected_column]] if spec.preferences == "pairs" else []
    options += [["labels"]] if spec.preferences == "labels" else []
    options += [["label", spec.label_column]] if spec.label_column is not None else []
    options += [["missing", spec.missing_values]] if spec.missing_values != "empty" else []
    options += [["text", spec.text_column]] if spec.text_column is not None else []
    options += [["weights", spec.weight_column]] if spec.weight_column is not None and split == "train" else []
    if _of_dataset(spec, split):
        dataset = _open_dataset(spec, split)
        options += [*_mark_of_turns(dataset, spec), "dataset", *dataset.fingerprint]
        digest.update(json.dumps(options).encode())
        return digest.hexdigest()
    path = _file(spec, split)
    if spec.format not in ("wikihow", "phrasebank"):
        reader = open_split(spec, split)
        # What quotes are, not the option: runs of versions without it still resume if their rows are the same.
        options += [["quoting", "none"]] if isinstance(reader, CsvFile) and reader.quoting == "none" else []
        options += _mark_of_turns(reader, spec)
    files = [path, *split_lists(spec)]
    options += [_format(path, spec), path.suffix.lower(), [file.name for file in files[1:]]]
    digest.update(json.dumps(options).encode())
    for file in files:
        try:
            digest.update(file.stat().st_size.to_bytes(8, "big"))
            with file.open("rb") as content:
                file_digest(content, lambda: digest)
        except OSError as error:
            raise unreadable(file, error) from error
    return digest.hexdigest()


def _mark_of_turns(reader: RowReader, spec: SourceSpec) -> list[object]:
    """Return what marks JSON text that is read as turns, which earlier versions read as text; nothing of other rows."""
    if spec.text_column is not None:
        return []
    if isinstance(reader, JsonLinesFile):
        # Its columns take a pass over the file, and the first rows decide.
        columns = list(dict.fromkeys(name for row in islice(reader.rows(()), LOOKED_AT) for name in row.cells))
    else:
        columns = reader.columns()
    if spec.preferences == "pairs":
        ways = [find_paired_turns(reader, columns, spec, from_text=one) for one in (True, False)]
    else:
        ways = [find_conversations(reader, columns, spec, completed=True, from_text=one) for one in (True, False)]
    return [["turns", "text"]] if ways[0] is not None and ways[1] is None else []


def with_rows_of(path: Path, spec: SourceSpec, encoding: str) -> SourceSpec:
    """Return a run's ``spec`` with another file for its held-out rows, such as one to predict for. Any process.

    Columns and format stay. A CSV file whose header does not have the delimiter of ``spec`` gets its own. What the
    run file says of quotes holds for files of the format of the run's own, by their suffixes.

    Raises:
        DataError: The file cannot be read.
    """
    suffixes = {Path(one.name.lower().removesuffix(".gz")).suffix for one in (path, spec.train_file) if one is not None}
    quoting = spec.quoting if len(suffixes) == 1 else "auto"
    other = replace(spec, validation_file=path, validation_fraction=0.0, encoding=encoding, quoting=quoting)
    if spec.delimiter is None or format_of(path, other) != "csv":
        return other
    fits = len(CsvFile(path, encoding, spec.delimiter, quoting).columns()) > 1
    return other if fits else replace(other, delimiter=None)


def split_lists(spec: SourceSpec) -> list[Path]:
    """Return the files next to the training file that assign rows to splits: WikiHow's title lists, if used."""
    return list_files(spec.train_file) if spec.train_file is not None and _split_by_title(spec) else []


def _split_by_hash(spec: SourceSpec) -> bool:
    """Return whether both splits are taken from the training rows."""
    return _split_by_title(spec) or (spec.validation_file is None and spec.validation_fraction > 0)


def _split_by_title(spec: SourceSpec) -> bool:
    """Return whether the rows are WikiHow's, whose splits are in one file unless each has its own."""
    return spec.validation_file is None and spec.format == "wikihow" and spec.dataset_name is None


def _of_dataset(spec: SourceSpec, split: Split) -> bool:
    """Return whether a split is read from a dataset; a file of held-out rows overrides the dataset's split."""
    return spec.dataset_name is not None and (split == "train" or spec.validation_file is None)


def _file(spec: SourceSpec, split: Split) -> Path:
    """Return the file with the rows of a split."""
    path = spec.train_file if split == "train" or _split_by_hash(spec) else spec.validation_file
    if path is None:
        key = "train_file" if split == "train" else "validation_file (or data.validation_fraction)"
        raise DataError(f"There are no rows for {split}: set data.{key}.")
    return path


def _format(path: Path, spec: SourceSpec) -> str:
    """Return the format of a file."""
    if spec.format != "auto":
        return spec.format
    suffix = path.suffix.lower()
    inner = Path(path.stem).suffix.lower() if suffix == ".gz" else suffix
    if inner not in FORMATS or (suffix, inner) == (".gz", ".parquet"):
        found = repr(path.suffix) if path.suffix else "no suffix"
        kinds = ", ".join(FORMATS)
        raise DataError(f"{path}: a data file must end in {kinds} (or that and .gz); got {found}. Set data.format.")
    return FORMATS[inner]


def format_of(path: Path, spec: SourceSpec) -> str:
    """Return the format of a file: the given one, else by its content, where its suffix says another.

    Raises:
        DataError: Its suffix is unknown, or it cannot be read.
    """
    named = _format(path, spec)
    if spec.format != "auto":
        return named
    columns = (spec.text_column, spec.source_column, spec.target_column, spec.weight_column)
    return kind_of(path, named, spec.encoding, [name for name in columns if name is not None])


def open_split(spec: SourceSpec, split: Split) -> RowReader:
    """Open the rows of a split, of any format but WikiHow's.

    Raises:
        DataError: See :func:`format_of`.
    """
    if _of_dataset(spec, split):
        return _open_dataset(spec, split)
    return open_file(_file(spec, split), spec)


def open_file(path: Path, spec: SourceSpec) -> RowReader:
    """Open the rows of a file, of any format but WikiHow's; the files that the spec names are not read.

    Raises:
        DataError: See :func:`format_of`.
    """
    kind = format_of(path, spec)
    if kind == "phrasebank":
        return open_phrasebank(path, spec.encoding)
    if kind in ("csv", "tsv"):
        reader = CsvFile(path, spec.encoding, "\t" if kind == "tsv" else spec.delimiter, spec.quoting)
    elif kind == "parquet":
        reader = ParquetFile(path)
    else:
        reader = {"jsonl": JsonLinesFile, "json": JsonFile, "text": PlainTextFile}[kind](path, spec.encoding)
    named = _format(path, spec)
    if kind != named:
        reader.named = (f"{path} is named as {named}, and its content is {kind}: it is read as that (data.format).",)
    return reader


def _open_dataset(spec: SourceSpec, split: Split) -> DatasetRows:
    """Open the dataset's split for one of our splits."""
    assert spec.dataset_name is not None
    name = spec.train_split if split == "train" or spec.validation_fraction else spec.validation_split
    if name is None:
        raise DataError("There are no rows for validation: set data.validation_split or data.validation_fraction.")
    return open_dataset(spec.dataset_name, spec.dataset_config_name, name)
