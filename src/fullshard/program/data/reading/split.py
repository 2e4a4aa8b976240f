"""The rows of a split, read from files and datasets of every supported format."""

from __future__ import annotations

import json
from dataclasses import replace
from hashlib import blake2b
from itertools import islice
from pathlib import Path

from fullshard.errors import DataError
from fullshard.program.data.examples import InputRow, InputTable, SourceSpec, Split, Table
from fullshard.program.data.reading.arrow import DatasetRows, ParquetFile, open_dataset
from fullshard.program.data.reading.bad_rows import UnusableRowError
from fullshard.program.data.reading.columns import Recipe, choose, choose_sources
from fullshard.program.data.reading.conversations import LOOKED_AT, ConversationRecipe, find_conversations
from fullshard.program.data.reading.holdout import Sides
from fullshard.program.data.reading.kind import kind_note, kind_of
from fullshard.program.data.reading.nested import with_inner_names
from fullshard.program.data.reading.opened import OpenedTable, texts_of
from fullshard.program.data.reading.phrasebank import open_phrasebank
from fullshard.program.data.reading.tables import CsvFile, JsonFile, JsonLinesFile, RowReader, distinct, unreadable
from fullshard.program.data.reading.wikihow import list_files, read_wikihow

FORMATS = {".csv": "csv", ".tsv": "tsv", ".jsonl": "jsonl", ".json": "json", ".parquet": "parquet"}
"""Formats by suffix; all but Parquet may be gzipped, with .gz appended."""

_RULES = 2
"""Increased when the same file and options give different rows than before, to invalidate caches."""

_CHUNK_BYTES = 2**20


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
    by_hash = _split_by_hash(spec)
    if spec.format == "wikihow" and spec.dataset_name is None:
        return read_wikihow(_file(spec, split), spec, split if by_hash else None)
    opened = open_table(spec, split)
    sides = sides_of(spec, opened.reader.where)
    rows = [row for row in opened.usable() if sides is None or sides.side(row) == split]
    table = Table(rows, opened.notes(), opened.bad.beyond_shown)
    if sides is None:
        return table
    # The unusable rows are those of one file, whichever side is read: listed with the training rows, once.
    return Table(table.examples, (*table.notes, sides.note()), table.skipped if split == "train" else ())


def sides_of(spec: SourceSpec, where: str) -> Sides | None:
    """Return which rows of the table ``where`` are held out by a hash; None: the splits are separate tables."""
    return Sides(spec.validation_fraction, where) if _split_by_hash(spec) else None


def open_table(spec: SourceSpec, split: Split, columns: list[str] | None = None) -> OpenedTable:
    """Open the table of a split, of any format with columns, and choose its columns. Any process can call it.

    Args:
        spec: Where the rows come from.
        split: The split.
        columns: The table's columns, if they are known, so that a file is not read for them.

    Raises:
        DataError, ConfigError: See :func:`read_split`.
    """
    return OpenedTable(_open(spec, split), spec, spec.weight_column if split == "train" else None, columns)


def read_sources(spec: SourceSpec, split: Split, *, from_text: bool = True, asks_turns: bool = False) -> InputTable:
    """Read the source of every row of a split, in columns given by the spec or chosen by name. Any process can call it.

    ``from_text``: whether JSON text may be a conversation. ``asks_turns``: whether the model was trained on them.

    Returns:
        The rows in order with all their cells, also those that cannot be used.

    Raises:
        DataError: The table cannot be read or is empty, or the source columns are ambiguous.
        ConfigError: The template is malformed.
    """
    reader = _open(spec, split)
    columns = reader.columns()
    unread = [] if columns else [row for row in reader.rows(()) if row.problem is not None]
    if unread:
        return InputTable([InputRow("", row.line, row.problem) for row in unread], reader.notes)
    recipe: Recipe | ConversationRecipe | None
    recipe = find_conversations(reader, columns, spec, completed=False, from_text=from_text, asks_turns=asks_turns)
    if recipe is None:
        by_name = spec.template is None and spec.source_column is None
        with with_inner_names(reader, columns):
            recipe = (choose_sources if by_name else choose)(spec, texts_of(columns, spec), reader.where)
    rows: list[InputRow] = []
    for row in reader.rows(columns):
        try:
            found = recipe.input_row(row)
        except UnusableRowError as problem:
            found = InputRow("", row.line, str(problem))
        rows.append(replace(found, cells=row.cells))
    if not rows:
        raise DataError(f"{reader.where} has a header but no rows: at least one row is needed.")
    notes, names = (*reader.notes, *recipe.notes), distinct(columns)
    if not isinstance(reader, CsvFile):
        return InputTable(rows, notes, names)
    return InputTable(rows, notes, names, reader.delimiter, quoted=reader.quoting != "none")


def fingerprint(spec: SourceSpec, split: Split) -> str:
    """Return a hash of what :func:`read_split` reads, for cache keys. Any process can call it.

    It depends on the files' bytes, not on their names and paths, and on every option that changes the rows.

    Returns:
        32 hexadecimal digits.

    Raises:
        DataError: The data cannot be read.
    """
    by_hash = _split_by_hash(spec)
    digest = blake2b(digest_size=16)
    options: list[object] = [_RULES, spec.encoding, spec.source_column, spec.target_column, spec.target_lists]
    options += [
        spec.delimiter,
        spec.template,
        spec.max_bad_rows,
        [split, spec.validation_fraction] if by_hash else None,
    ]
    # Hashed only if it is not the default, so that runs of versions without the option still resume.
    options += [spec.train_on] if spec.train_on != "assistant" else []
    options += [["weights", spec.weight_column]] if spec.weight_column is not None and split == "train" else []
    if _of_dataset(spec, split):
        dataset = _open_dataset(spec, split)
        options += [*_mark_of_turns(dataset, spec), "dataset", dataset.fingerprint]
        digest.update(json.dumps(options).encode())
        return digest.hexdigest()
    path = _file(spec, split)
    if spec.format not in ("wikihow", "phrasebank"):
        reader = _open(spec, split)
        # What quotes are, not the option: runs of versions without it still resume if their rows are the same.
        options += [["quoting", "none"]] if isinstance(reader, CsvFile) and reader.quoting == "none" else []
        options += _mark_of_turns(reader, spec)
    files = [path, *split_lists(spec)]
    options += [_format(path, spec), path.suffix.lower(), [file.name for file in files[1:]]]
    digest.update(json.dumps(options).encode())
    for file in files:
        _hash_file(file, digest)
    return digest.hexdigest()


def _mark_of_turns(reader: RowReader, spec: SourceSpec) -> list[object]:
    """Return what marks JSON text that is read as turns, which earlier versions read as text; nothing of other rows."""
    if isinstance(reader, JsonLinesFile):
        # Its columns take a pass over the file, and the first rows decide.
        columns = list(dict.fromkeys(name for row in islice(reader.rows(()), LOOKED_AT) for name in row.cells))
    else:
        columns = reader.columns()
    ways = [find_conversations(reader, columns, spec, completed=True, from_text=one) for one in (True, False)]
    return [["turns", "text"]] if ways[0] is not None and ways[1] is None else []


def with_rows_of(path: Path, spec: SourceSpec, encoding: str) -> SourceSpec:
    """Return a run's ``spec`` with another file for its held-out rows, such as one to predict for. Any process.

    Columns and format stay. A CSV file whose header does not have the delimiter of ``spec`` gets its own. What the
    run file says of quotes holds for files of the format of the run's own.

    Raises:
        DataError: The file cannot be read.
    """
    quoting = spec.quoting if _is_like_own(path, spec) else "auto"
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


def _is_like_own(path: Path, spec: SourceSpec) -> bool:
    """Return whether a file has the format of the run's training file, by their suffixes."""
    kinds = {Path(file.name.lower().removesuffix(".gz")).suffix for file in (path, spec.train_file) if file is not None}
    return len(kinds) == 1


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
    columns = (spec.source_column, spec.target_column, spec.weight_column)
    return kind_of(path, named, spec.encoding, [name for name in columns if name is not None])


def _open(spec: SourceSpec, split: Split) -> RowReader:
    """Open the table with the rows of a split."""
    if _of_dataset(spec, split):
        return _open_dataset(spec, split)
    return open_file(_file(spec, split), spec)


def open_file(path: Path, spec: SourceSpec) -> RowReader:
    """Open a table in a file, of any format but WikiHow's; the files that the spec names are not read.

    Raises:
        DataError: See :func:`format_of`.
    """
    kind = format_of(path, spec)
    notes = tuple(kind_note(path, _format(path, spec), kind))
    if kind in ("csv", "tsv"):
        cells = CsvFile(path, spec.encoding, "\t" if kind == "tsv" else spec.delimiter, spec.quoting)
        cells.named = notes
        return cells
    if kind == "phrasebank":
        return open_phrasebank(path, spec.encoding)
    if kind == "parquet":
        reader = ParquetFile(path)
    else:
        reader = (JsonLinesFile if kind == "jsonl" else JsonFile)(path, spec.encoding)
    reader.notes = notes
    return reader


def _open_dataset(spec: SourceSpec, split: Split) -> DatasetRows:
    """Open the dataset's split for one of our splits."""
    assert spec.dataset_name is not None
    name = spec.train_split if split == "train" or spec.validation_fraction else spec.validation_split
    if name is None:
        raise DataError("There are no rows for validation: set data.validation_split or data.validation_fraction.")
    return open_dataset(spec.dataset_name, spec.dataset_config_name, name)


def _hash_file(path: Path, digest: blake2b) -> None:
    """Add a file's size and bytes to a hash."""
    try:
        digest.update(path.stat().st_size.to_bytes(8, "big"))
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    except OSError as error:
        raise unreadable(path, error) from error
