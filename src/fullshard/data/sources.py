"""Rows of the user's data: files and datasets of every kind in, examples with their line numbers out."""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path

from fullshard.data.arrow import DatasetRows, ParquetFile, open_dataset
from fullshard.data.bad_rows import BadRows, UnusableRowError
from fullshard.data.columns import Recipe, choose, choose_sources
from fullshard.data.examples import Example, SourceSpec, Split, Table
from fullshard.data.holdout import hold_out
from fullshard.data.phrasebank import open_phrasebank
from fullshard.data.tables import CsvFile, JsonFile, JsonLinesFile, Origin, unreadable
from fullshard.data.wikihow import list_files, read_wikihow
from fullshard.errors import DataError

FORMATS = {".csv": "csv", ".tsv": "tsv", ".jsonl": "jsonl", ".json": "json", ".parquet": "parquet"}
"""Formats by suffix; all but Parquet may be gzipped, with .gz behind."""
_RULES = 1
"""Goes up when the same file and options give other rows than before, so that what was cached is not used."""
_CHUNK_BYTES = 2**20


def read_split(spec: SourceSpec, split: Split) -> Table:
    """The rows of one split. Any process may call it, alone.

    Line breaks, quotes and delimiters inside cells are kept as they are, and so is a JSON number: its text is what the
    file has. Empty lines are no rows.

    Args:
        spec: Where the rows come from.
        split: ``train``, or ``validation`` for the held-out rows.

    Returns:
        The rows in the order of the data, at least one, and what the user should know of how they were read.

    Raises:
        DataError: Something is missing, empty or of another format, columns cannot be told, or more rows are bad than
            ``max_bad_rows`` (the message counts them and shows the first with their lines).
        ConfigError: The template cannot be understood.
    """
    by_hash = _split_by_hash(spec)
    if spec.format == "wikihow" and spec.dataset_name is None:
        return read_wikihow(_file(spec, split), spec, split if by_hash else None)
    origin = _open(spec, split)
    table = _read_table(origin, spec)
    return hold_out(table, spec.validation_fraction, split, origin.where) if by_hash else table


def read_sources(spec: SourceSpec, split: Split) -> Table:
    """The sources of a split's rows, in columns that are recognised by their names; any process, alone.

    Returns:
        The rows in order; their references are of no use.

    Raises:
        DataError: The table cannot be read or is empty, or it is not clear which columns are the source.
    """
    origin = _open(spec, split)
    recipe = choose_sources(spec, origin.columns(), origin.where)
    return _read_rows(origin, recipe, BadRows(origin.where), spec.max_bad_rows)


def fingerprint(spec: SourceSpec, split: Split) -> str:
    """A hash of what :func:`read_split` reads, for the keys of caches. Any process may call it, alone.

    It depends on the bytes of the files, not on their names and places, and on every option that changes the rows.

    Returns:
        32 hexadecimal digits.

    Raises:
        DataError: The data cannot be read.
    """
    by_hash = _split_by_hash(spec)
    digest = blake2b(digest_size=16)
    options: list[object] = [_RULES, spec.encoding, spec.source_column, spec.target_column, spec.target_lists]
    options += [spec.template, spec.max_bad_rows, [split, spec.validation_fraction] if by_hash else None]
    if _of_dataset(spec, split):
        options += ["dataset", _open_dataset(spec, split).fingerprint]
        digest.update(json.dumps(options).encode())
        return digest.hexdigest()
    path = _file(spec, split)
    files = [path, *split_lists(spec)]
    options += [_format(path, spec), path.suffix.lower(), [file.name for file in files[1:]]]
    digest.update(json.dumps(options).encode())
    for file in files:
        _hash_file(file, digest)
    return digest.hexdigest()


def split_lists(spec: SourceSpec) -> list[Path]:
    """Files beside the training file that say which split a row is of: WikiHow's lists of titles, where they are used.

    Any process may call it, alone.
    """
    return list_files(spec.train_file) if spec.train_file is not None and _split_by_title(spec) else []


def _split_by_hash(spec: SourceSpec) -> bool:
    """Whether both splits come out of the training rows."""
    return _split_by_title(spec) or (spec.validation_file is None and spec.validation_fraction > 0)


def _split_by_title(spec: SourceSpec) -> bool:
    """Whether the rows are WikiHow's, whose splits come out of one file unless a file is given for each."""
    return spec.validation_file is None and spec.format == "wikihow" and spec.dataset_name is None


def _of_dataset(spec: SourceSpec, split: Split) -> bool:
    """Whether the rows of a split are a dataset's; a file of held-out rows comes before its own split."""
    return spec.dataset_name is not None and (split == "train" or spec.validation_file is None)


def _file(spec: SourceSpec, split: Split) -> Path:
    """The file that holds the rows of a split."""
    path = spec.train_file if split == "train" or _split_by_hash(spec) else spec.validation_file
    if path is None:
        key = "train_file" if split == "train" else "validation_file (or data.validation_fraction)"
        raise DataError(f"There are no rows for {split}: set data.{key}.")
    return path


def _format(path: Path, spec: SourceSpec) -> str:
    """How a file is read."""
    if spec.format != "auto":
        return spec.format
    suffix = path.suffix.lower()
    inner = Path(path.stem).suffix.lower() if suffix == ".gz" else suffix
    if inner not in FORMATS or (suffix, inner) == (".gz", ".parquet"):
        found = repr(path.suffix) if path.suffix else "no suffix"
        kinds = ", ".join(FORMATS)
        raise DataError(f"{path}: a data file must end in {kinds} (or that and .gz); got {found}. Set data.format.")
    return FORMATS[inner]


def _open(spec: SourceSpec, split: Split) -> Origin:
    """The table that holds the rows of a split."""
    if _of_dataset(spec, split):
        return _open_dataset(spec, split)
    path = _file(spec, split)
    match _format(path, spec):
        case "csv":
            return CsvFile(path, spec.encoding)
        case "tsv":
            return CsvFile(path, spec.encoding, delimiter="\t")
        case "jsonl":
            return JsonLinesFile(path, spec.encoding)
        case "json":
            return JsonFile(path, spec.encoding)
        case "parquet":
            return ParquetFile(path)
        case _:
            return open_phrasebank(path, spec.encoding)


def _open_dataset(spec: SourceSpec, split: Split) -> DatasetRows:
    """The dataset's split that holds the rows of a split of ours."""
    assert spec.dataset_name is not None
    name = spec.train_split if split == "train" or spec.validation_fraction else spec.validation_split
    if name is None:
        raise DataError("There are no rows for validation: set data.validation_split or data.validation_fraction.")
    return open_dataset(spec.dataset_name, spec.dataset_config_name, name)


def _read_table(origin: Origin, spec: SourceSpec) -> Table:
    """All rows of a table that can be used."""
    bad = BadRows(origin.where)
    columns = origin.columns()
    if not columns:
        total = _count_unreadable(origin, bad)
        bad.settle(total, limit=0)  # no row could be read at all: the rows' own problems say more than their columns
    recipe = choose(spec, columns, origin.where)
    return _read_rows(origin, recipe, bad, spec.max_bad_rows)


def _read_rows(origin: Origin, recipe: Recipe, bad: BadRows, limit: int) -> Table:
    """What a recipe makes of a table's rows."""
    examples: list[Example] = []
    for row in origin.rows(recipe.columns):
        try:
            examples.append(recipe.example(row))
        except UnusableRowError as problem:
            bad.add(row.line, str(problem))
    notes = (*origin.notes, *recipe.notes, *bad.settle(len(examples) + bad.count, limit))
    if not examples:
        found = f"{bad.count} rows, none of which can be used" if bad.count else "a header but no rows"
        raise DataError("\n".join([f"{origin.where} has {found}: at least one row is needed.", *notes]))
    return Table(examples, notes)


def _count_unreadable(origin: Origin, bad: BadRows) -> int:
    """Rows of a table without a readable one."""
    total = 0
    for row in origin.rows(()):
        total += 1
        if row.problem is not None:
            bad.add(row.line, row.problem)
    return total


def _hash_file(path: Path, digest: blake2b) -> None:
    """Put a file's size and bytes into a hash."""
    try:
        digest.update(path.stat().st_size.to_bytes(8, "big"))
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    except OSError as error:
        raise unreadable(path, error) from error
