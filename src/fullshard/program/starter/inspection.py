"""Inspection of a table: format, columns, lengths of texts, and the likely source and target column."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from fullshard.errors import DataError
from fullshard.program.data.examples import SourceSpec
from fullshard.program.data.reading.cells import cell_of, nested_names
from fullshard.program.data.reading.columns import KNOWN_SHAPES, Recipe, choose, header_note, is_no_target, leaves_open
from fullshard.program.data.reading.conversations import find_conversations
from fullshard.program.data.reading.csv_file import find_delimiter
from fullshard.program.data.reading.encoding import Encoding, find_encoding
from fullshard.program.data.reading.preferences import (
    CHOSEN,
    REJECTED,
    PairedTurns,
    PreferenceRecipe,
    both_of,
    choose_labelled,
    choose_pairs,
    find_label,
    find_paired_turns,
    find_transcripts,
    holds_preferences,
)
from fullshard.program.data.reading.ranked import RankedRecipe, equals_in, ranking
from fullshard.program.data.reading.row import Row, RowReader, UnusableRowError
from fullshard.program.data.reading.split import format_of, open_file
from fullshard.program.data.reading.text_file import is_parquet, open_lines
from fullshard.program.data.reading.transcripts import TranscriptRecipe

MOST_DISTINCT = 1_000
"""Distinct texts are counted up to this number in each column."""

FEW = 50
"""A column with at most this many distinct texts may hold labels."""

_LONG = 20
"""A column whose texts have at least this many characters on average is running text."""


_FACTS = frozenset(
    (
        *(
            "url",
            "uri",
            "link",
            "timestamp",
            "date",
            "time",
            "datetime",
            "created",
            "added",
            "modified",
            "uuid",
            "hash",
        ),
        *("sha", "path", "file", "filename", "repo", "repository", "meta", "metadata", "dump", "crawl", "stars"),
        *("bytes", "size", "length", "tokens", "count"),
    )
)
_LABELS_OR_FACTS = frozenset(["language", "lang", "license", "licence", "source", "domain", "subset", "id"])
_FURTHER = frozenset(["name", "score", "set", "ext", "extension", "at", "prob", "type"])
"""Words in names of columns that are facts about a text, those that may be its label, and words beside them."""


@dataclass(frozen=True)
class Column:
    """Statistics of one column."""

    name: str
    filled: int  # rows with a text or a number in it
    mean: float  # their mean number of characters
    longest: int  # characters of the longest
    distinct: int  # distinct texts, up to 1,000
    is_number: bool  # whether all of them are numbers
    is_code: bool  # whether it looks like an identifier: short texts without blanks, each of them different


@dataclass(frozen=True)
class Preferences:
    """What rows of preferences are."""

    kind: Literal["pairs", "labels"]  # a prompt with a chosen and a rejected completion, or a completion with a label
    sources: tuple[str, ...]  # columns of the prompt; empty: conversations, or texts that begin with it
    target: str  # column of the completion, of pairs the chosen one or the first of equal rank; of conversations theirs
    rejected: str | None = None  # column of the other completion of pairs
    label: str | None = None  # column that says whether the completion is desirable, or which of two is better
    prompt: str = ""  # what the prompt of pairs is, for messages


@dataclass(frozen=True)
class Look:
    """Result of inspecting a table."""

    path: Path
    format: str  # ``csv``, ``tsv``, ``jsonl``, ``json`` or ``parquet``
    encoding: Encoding
    delimiter: str | None  # None if it is not a CSV file
    rows: int
    columns: tuple[Column, ...]  # empty if the rows are conversations
    turns: str | None = None  # the column that holds the conversations; of preferences the chosen ones
    preferences: Preferences | None = None  # None: rows are none
    # two columns of completions of equal rank, if none is known that says which is better, and those that may say it
    equals: tuple[str, str] | None = None
    ranking: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # messages for the user about how it is read

    @property
    def text(self) -> str | None:
        """The column of plain text: the only one, or beside facts about it; None: there are others."""
        if len(self.columns) < 2:
            return self.columns[0].name if self.columns else None
        if self.preferences is not None or self.equals is not None:
            return None
        longest = max(self.columns, key=lambda one: one.mean)
        others = [one for one in self.columns if one is not longest]
        sure = any(not _may_be_label(one) for one in others)
        is_plain = all(_is_fact(one.name) and (sure or one.distinct < 2) for one in others)
        return longest.name if is_plain and not _is_fact(longest.name) else None

    @cached_property
    def by_name(self) -> tuple[tuple[str, ...], str] | None:
        """Source columns and target column as a run would choose them by name or order; None if it cannot."""
        if self.preferences is not None:
            return self.preferences.sources, self.preferences.target
        try:
            recipe = choose(SourceSpec(train_file=self.path), [one.name for one in self.columns], str(self.path))
        except DataError:
            return None
        return recipe.sources, recipe.target

    @property
    def speaking_against(self) -> tuple[str, ...]:
        """Columns whose names speak against the likely target, so that it must be asked for; empty: it is clear."""
        if self.preferences is not None:
            return ()
        if is_no_target(self.likely_target):
            return (self.likely_target,)
        texts = [one for one in self.columns if not one.is_code and not one.is_number and one.mean >= _LONG]
        doubtful = [one for one in self.columns if leaves_open(one.name)]
        is_clear = self.by_name is not None or len({*texts, *doubtful}) < 3
        return () if is_clear else tuple(one.name for one in doubtful)

    @property
    def likely_source(self) -> str:
        """The column that is most likely the model's input."""
        return self.by_name[0][0] if self.by_name and self.by_name[0] else self._likely[0]

    @property
    def likely_target(self) -> str:
        """The column that is most likely the text to be generated."""
        return self.by_name[1] if self.by_name else self._likely[1]

    @cached_property
    def _likely(self) -> tuple[str, str]:
        """The two columns with the longest texts, in order; or the longest and a column of labels."""
        used = [one for one in self.columns if one.filled * 2 >= self.rows and not one.is_code]
        used = used if len(used) > 1 else list(self.columns)
        texts = [one for one in used if not one.is_number] or used
        longest = sorted(texts, key=lambda one: -one.mean)
        if len(longest) > 1 and longest[1].mean >= _LONG:
            first, second = sorted(longest[:2], key=self.columns.index)
            return first.name, second.name
        source = longest[0]
        rest = [one for one in used if one is not source]
        known = [one for one in rest if one.name.lower() in {target for _, target in KNOWN_SHAPES}]
        labels = [one for one in rest if one.distinct <= FEW]
        words = [one for one in labels if not one.is_number]
        return source.name, (known or words or labels or rest)[-1].name


def _words(name: str) -> set[str]:
    return set(re.split(r"[^a-z0-9]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())) - {""}


def _is_fact(name: str) -> bool:
    """Return whether a column's name says that it is a fact about a text, such as url or repo_name."""
    words = _words(name)
    known = words & (_FACTS | _LABELS_OR_FACTS)
    return bool(known) and (words <= _FACTS | _LABELS_OR_FACTS | _FURTHER or bool(words & {"meta", "metadata"}))


def _may_be_label(one: Column) -> bool:
    """Return whether a fact may be what a text is to be told by, such as its language."""
    return not _words(one.name) & (_FACTS - _LABELS_OR_FACTS)


def look_at(path: Path, given: str | None = None, label: str | None = None) -> Look:
    """Read a complete table and describe it; one process.

    ``given`` is the encoding that the user named. ``label`` is the column that says whether a completion is desirable,
    or which of two is better; None: found.

    Raises:
        DataError: The file cannot be read, is empty, or its encoding is not clear, or the label says neither.
    """
    encoding = _encoding_of(path, given)
    kind = format_of(path, SourceSpec(encoding=encoding.name))
    delimiter = None
    if kind == "csv":
        with open_lines(path, encoding.name) as lines:
            delimiter = find_delimiter(lines, path)
    reader = open_file(path, SourceSpec(encoding=encoding.name, delimiter=delimiter))
    names = reader.columns()
    preferences = _preferences(reader, names, label)
    turns = _turns(reader, names, preferences)
    equals, more = _equals(reader, names) if preferences is None else (None, ())
    if turns is not None:
        rows = sum(1 for _ in reader.rows([turns]))
        return Look(path, kind, encoding, delimiter, rows, (), turns, preferences, equals, more, reader.notes)
    inner = nested_names(reader, names)
    if not inner:
        raise DataError(f"{path} has no columns: texts, or a source and a target column are needed.")
    rows, texts = 0, {name: list[str]() for name in inner}
    for row in reader.rows(names):
        rows += 1
        for name in inner:
            text = _text(row, name)
            if text.strip():
                texts[name].append(text)
    if not rows:
        raise DataError(f"{path} has a header but no rows: at least one row is needed.")
    columns = tuple(_column(name, found) for name, found in texts.items())
    notes = (*reader.notes, *_header_notes(kind, texts))
    return Look(path, kind, encoding, delimiter, rows, columns, None, preferences, equals, more, notes)


def _turns(reader: RowReader, names: Sequence[str], preferences: Preferences | None) -> str | None:
    """Return the column that holds the conversations; of preferences the chosen ones, if these are conversations."""
    if preferences is not None and preferences.sources:
        return None
    if preferences is None or preferences.kind == "labels":
        talk = find_conversations(reader, names, SourceSpec(), completed=True)
        return None if talk is None else talk.turns
    pair = SourceSpec(target_column=preferences.target, rejected_column=preferences.rejected)
    return preferences.target if find_paired_turns(reader, names, pair) is not None else None


def _preferences(reader: RowReader, names: Sequence[str], label: str | None) -> Preferences | None:
    """Return what rows of preferences are; None: they are none.

    Raises:
        DataError: The user's ``label`` is no label of such rows.
    """
    lower = {name.strip().lower() for name in names}
    is_pair = {CHOSEN, REJECTED} <= lower or equals_in([name for name in names if name != label]) is not None
    if label is not None and is_pair:
        return _of_pairs(choose_pairs(reader, names, SourceSpec(preferences="pairs", label_column=label)))
    spec = SourceSpec(preferences="pairs")
    found = find_paired_turns(reader, names, spec) or find_transcripts(reader, names, spec)
    if label is None and (found is not None or holds_preferences(names)):
        return _of_pairs(found or choose_pairs(reader, names, spec))
    label = label or find_label(reader, names)
    if label is None:
        return None
    recipe = choose_labelled(reader, names, SourceSpec(preferences="labels", label_column=label)).completed
    if isinstance(recipe, Recipe):
        return Preferences("labels", recipe.sources, recipe.target, label=label)
    return Preferences("labels", (), recipe.turns, label=label)


def _equals(reader: RowReader, names: Sequence[str]) -> tuple[tuple[str, str] | None, tuple[str, ...]]:
    """Return two columns of completions of equal rank, if there are, and those that may say which is better."""
    equals = equals_in(names)
    others = [name for name in names if name not in (equals or ())]
    return equals, tuple(ranking(reader, others, equals)) if equals else ()


def _of_pairs(found: PreferenceRecipe | PairedTurns | TranscriptRecipe | RankedRecipe) -> Preferences:
    label = found.label if isinstance(found, RankedRecipe) else None
    pairs: Any = found.completed if isinstance(found, RankedRecipe) else found
    sources = pairs.accepted.sources if isinstance(pairs, PreferenceRecipe) else ()
    columns = sources
    if isinstance(pairs, PairedTurns):
        columns = (pairs.prompt,) if pairs.prompt is not None else pairs.asks.sources if pairs.asks is not None else ()
    prompt = " and ".join(columns) if columns else "what both begin with"
    return Preferences("pairs", sources, *both_of(pairs), label=label, prompt=prompt)


def _encoding_of(path: Path, given: str | None) -> Encoding:
    """Return the encoding of a table.

    Raises:
        DataError: It is not clear, or not that of all lines.
    """
    if given is not None:
        return Encoding(given)
    if path.suffix.lower() == ".parquet" or is_parquet(path):
        return Encoding("utf-8")
    found = find_encoding(path)
    if found.problem is not None:  # complete labels could be dropped as unusable lines
        raise DataError(
            f"{path}: {found.problem}. Name the encoding of all lines: --encoding NAME. Or save the file as UTF-8 "
            "(in a shell: iconv -f NAME -t utf-8), or write a run file of your own with data.max_bad_rows to skip them."
        )
    return found


def _header_notes(kind: str, texts: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return a message if a header looks like a row: by its names, or because they are among their columns' texts."""
    if kind not in ("csv", "tsv"):
        return ()
    note, found = header_note(list(texts)), [name for name, cells in texts.items() if name in cells]
    if note is None and found:
        listed = ", ".join(map(repr, found))
        note = (
            f"the header looks like a row: {listed} is also a cell below. If the file has no line with the columns' "
            "names, add one: its first row is not used otherwise."
        )
    return () if note is None else (note,)


def _text(row: Row, name: str) -> str:
    """Return the text of a row's cell: the joined parts of a list, nothing for an object or a row of another shape."""
    try:
        cell = cell_of(row, name) if row.problem is None else None
    except UnusableRowError:
        return ""
    if isinstance(cell, list):
        return " ".join(part for part in cell if isinstance(part, str))
    return str(cell) if isinstance(cell, (str, int, float)) else ""


def _column(name: str, texts: Sequence[str]) -> Column:
    lengths = [len(text) for text in texts]
    distinct: set[str] = set()
    for text in texts:
        if len(distinct) < MOST_DISTINCT:
            distinct.add(text)
    every = len(distinct) == min(len(texts), MOST_DISTINCT)
    mean = sum(lengths) / max(1, len(lengths))
    code = every and mean < _LONG and len(texts) > 1 and not any(" " in text.strip() for text in texts)
    return Column(name, len(texts), mean, max(lengths, default=0), len(distinct), all(map(_is_number, texts)), code)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
