"""Streaming: rows are indexed once, then read in place and tokenized when a step needs them."""

from __future__ import annotations

import copy
import json
import os
import threading
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fullshard.errors import DataError
from fullshard.program.data.examples import Example, SourceSpec
from fullshard.program.data.reading.conversations import ConversationRecipe, SystemTurnCounts, answers_as_rows
from fullshard.program.data.reading.csv_file import CsvFile
from fullshard.program.data.reading.json_file import JsonFile, JsonLinesFile
from fullshard.program.data.reading.row import Row, UnusableRowError
from fullshard.program.data.reading.sample import Sample, sample_notes
from fullshard.program.data.reading.split import OpenedRows, held_out_of, open_rows
from fullshard.program.data.reading.text_file import LineStarts, has_own_line_ends, is_gzip, unreadable
from fullshard.program.data.tokenizing.ragged import EncodedRows, OnDemand, joined_rows
from fullshard.program.data.tokenizing.tokenize import (
    CHUNK_ROWS,
    Counters,
    LengthStats,
    TokenizedSet,
    TokenizeSpec,
    encode_chunks,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

ROWS_NAME = "rows.jsonl"
"""Name of the copy of the rows that a cache entry keeps for rows without access to single ones."""

ANSWERS_NAME = "answers"
"""Name of the file that holds, for each row, the number of the answer within its conversation, from 0."""

_FLUSHED_ROWS = 1 << 16

_COLUMNS = {"starts": "q", "source_characters": "i", "target_characters": "i", "weights": "d", ANSWERS_NAME: "i"}
"""The index's files, each with its :mod:`array` type code."""

_SIDES = ("source", "target")

_LENGTHS = "{}_lengths"
"""Name of the file with the exact lengths of source or target."""

SAMPLED_ROWS = 1000
"""Number of evenly spaced rows that are tokenized in advance for statistics of lengths."""


def index_to(
    directory: Path, spec: SourceSpec, sample: Sample | None, most_labels: int, *, by_answer: bool = False
) -> dict[str, Any]:
    """Write where each usable training row starts, and its lengths in characters; a ``build`` for ``cached``.

    Memory does not grow with the file (a sample takes some bytes a row while it is drawn). A CSV, TSV or JSON Lines
    file in UTF-8 is read in place later. Others, such as Parquet or compressed files, have no access to single
    rows: the columns in use are copied as JSON Lines.

    Args:
        directory: Directory of the files.
        spec: Where the rows come from.
        sample: The rows to draw, for which all are read once more; None: all.
        most_labels: Maximum distinct targets of a label set.
        by_answer: Make a row of each learned answer of a conversation, with the history before it.

    Returns:
        Columns, notes, skipped rows, labels, and other values for ``open_stream``.

    Raises:
        DataError, ConfigError: See :func:`~fullshard.program.data.read_split`.
    """
    drawn = None if sample is None else sample.drawn(_texts(spec))
    opened = open_rows(spec, "train")
    if isinstance(opened.reader, JsonFile):
        raise DataError(
            f"{opened.reader.where} is JSON in one piece, which data.streaming cannot read row by row. Convert it to "
            "JSON Lines, or leave streaming out."
        )
    in_place = reads_in_place(opened, spec)
    trained, about_held_out = _trained(spec)
    targets, system_turns, rows = TargetCounts(most_labels), SystemTurnCounts(), 0
    with ExitStack() as stack:
        idle = {name for name, wanted in (("weights", spec.weight_column), (ANSWERS_NAME, by_answer)) if not wanted}
        files = {name: stack.enter_context((directory / name).open("wb")) for name in _COLUMNS if name not in idle}
        columns = {name: array(_COLUMNS[name]) for name in files}
        every = _drawn(opened.usable(), trained)
        if in_place:
            found = _drawn(_in_place(opened, every), drawn)
        else:
            found = _copied(opened, _drawn(every, drawn), directory / ROWS_NAME)
        for start, example in found:
            system_turns.add(example)
            for answer, row in enumerate(answers_as_rows([example]) if by_answer else [example]):
                rows += 1
                targets.add(row.target)
                values = (start, len(row.source), len(row.target), row.weight, answer)
                for name, value in zip(_COLUMNS, values, strict=True):
                    if name in columns:
                        columns[name].append(value)
            if len(columns["starts"]) >= _FLUSHED_ROWS:
                _flush(columns, files)
        _flush(columns, files)
    notes = (*opened.notes(), *about_held_out)
    notes += () if drawn is None else sample_notes(drawn, "train")
    return {
        "rows": rows,
        "columns": opened.known,
        "notes": notes,
        "skipped": opened.bad.beyond_shown,
        "conversations": isinstance(opened.recipe, ConversationRecipe),
        "system_turns": system_turns.common,
        "in_place": in_place,
        "quoting": opened.reader.quoting if isinstance(opened.reader, CsvFile) else None,
        "labels": targets.labels,
        "majority": targets.majority,
    }


def reads_in_place(opened: OpenedRows, spec: SourceSpec) -> bool:
    """Return True if single rows can be read where they are."""
    if not isinstance(opened.reader, CsvFile | JsonLinesFile):
        return False
    path, is_utf8 = Path(opened.reader.where), spec.encoding.lower().replace("_", "-") in ("utf-8", "utf8", "ascii")
    return is_utf8 and not is_gzip(path) and not has_own_line_ends(path, spec.encoding)


class TargetCounts:
    """Counts distinct targets of a data of any size in little memory.

    Attributes:
        labels: Number of rows of each target; None if there are too many distinct ones.
    """

    def __init__(self, most: int) -> None:
        """Start empty; ``most`` is the maximum number of distinct targets."""
        self.labels: dict[str, int] | None = {}
        self._most = most
        self._counts: Counter[str] = Counter()

    def add(self, target: str) -> None:
        """Count a row, until there are too many targets."""
        if self.labels is None:
            return
        self._counts[target] += 1
        self.labels = self._counts if len(self._counts) <= self._most else None

    @property
    def majority(self) -> str:
        """The most frequent target, the first of equals; with too many targets, among the rows counted so far."""
        return self._counts.most_common(1)[0][0]


def training_texts(spec: SourceSpec, sample: Sample | None) -> Iterator[Example]:
    """Yield the training rows, or a sample of them, without keeping them; any process.

    Raises:
        DataError, ConfigError: See :func:`~fullshard.program.data.read_split`; a limit on unusable rows is not applied.
    """
    return _drawn(_texts(spec), None if sample is None else sample.drawn(_texts(spec)))


def _texts(spec: SourceSpec) -> Iterator[Example]:
    trained, _ = _trained(spec)
    return (example for _, example in _drawn(open_rows(spec, "train").usable(), trained))


def _trained(spec: SourceSpec) -> tuple[NDArray[np.bool_] | None, tuple[str, ...]]:
    """Return which usable rows are not held out, None for all of them, and a note; reads the rows if some are."""
    opened = open_rows(spec, "train")
    if (held_out := held_out_of(spec, opened.reader.where)) is None:
        return None, ()
    chosen, note = held_out.rows(example for _, example in opened.usable())
    return ~chosen, (note,)


def _drawn(rows: Iterable[T], drawn: NDArray[np.bool_] | None) -> Iterator[T]:
    """Yield the chosen ones of all rows, or all of them; reads to the end in either case, so that rows are counted."""
    return iter(rows) if drawn is None else compress(rows, drawn)


def _in_place(opened: OpenedRows, rows: Iterable[tuple[Row, Example]]) -> Iterator[tuple[int, Example]]:
    """Yield the byte offset of each row in its file, and its example."""
    reader = opened.reader
    assert isinstance(reader, CsvFile | JsonLinesFile)
    reader.starts = starts = LineStarts(Path(reader.where))
    for row, example in rows:
        yield starts.take(row.line), example


def _copied(opened: OpenedRows, rows: Iterable[tuple[Row, Example]], path: Path) -> Iterator[tuple[int, Example]]:
    """Copy each row to a file as JSON; yield its byte offset there, and its example."""
    start = 0
    with path.open("wb") as file:
        for row, example in rows:
            # Types that JSON lacks, such as Decimal, become text.
            cells = {name: row.cells.get(name) for name in opened.wanted}
            line = json.dumps(cells, default=str).encode() + b"\n"
            file.write(line)
            yield start, example
            start += len(line)


def _flush(columns: dict[str, array[Any]], files: dict[str, Any]) -> None:
    for name, column in columns.items():
        column.tofile(files[name])
        del column[:]


class StreamedRows:
    """Row source that reads and tokenizes rows of an index. Threads may share it.

    The file stays open, so replacing it has no effect; a file that was written to is refused.
    """

    def __init__(
        self,
        directory: Path,
        kept: dict[str, Any],
        spec: SourceSpec,
        tokenizer: PreTrainedTokenizerBase,
        how: TokenizeSpec,
    ) -> None:
        """Open the file of the index in ``directory``; ``kept`` is what :func:`index_to` returned.

        Raises:
            DataError: The file cannot be read.
        """
        self.starts = np.memmap(directory / "starts", np.int64, mode="r")
        answers = directory / ANSWERS_NAME
        self._answers = np.memmap(answers, np.int32, mode="r") if answers.exists() else None
        # The index knows what quotes are: each rank would read the complete file for it.
        self._opened = open_rows(replace(spec, quoting=kept["quoting"] or spec.quoting), "train", kept["columns"])
        own = self._opened.reader
        if kept["in_place"]:
            assert isinstance(own, CsvFile | JsonLinesFile)
            self._reader: CsvFile | JsonLinesFile = own
            self._path = Path(own.where)
        else:
            self._path = directory / ROWS_NAME
            self._reader = JsonLinesFile(self._path, "utf-8")
        # Copied, because a call changes the tokenizer's settings.
        self._tokenizer, self._how = copy.deepcopy(tokenizer), how
        self._lock = threading.Lock()
        try:
            self._file = self._path.open("rb")
        except OSError as error:
            raise unreadable(self._path, error) from error
        weakref.finalize(self, self._file.close)
        self._state = self._stamp()

    def examples(self, rows: Sequence[int]) -> list[Example]:
        """Return rows as text, in the ascending order of their numbers, which is that of the file.

        Raises:
            DataError: The file was changed.
        """
        found: list[Example] = []
        for row in rows:
            self._file.seek(int(self.starts[row]))
            try:
                example = self._opened.example(self._reader.row_at(self._lines()))
                if self._answers is not None:
                    example = answers_as_rows([example])[self._answers[row]]
                found.append(example)
            except (UnusableRowError, StopIteration, ValueError, IndexError) as error:
                raise self._changed() from error
        if self._stamp() != self._state:
            raise self._changed()
        return found

    def encode(self, rows: Sequence[int]) -> EncodedRows:
        """Return the ids of rows, whose numbers must ascend.

        Raises:
            DataError: The file was changed, or a row cannot be tokenized.
        """
        with self._lock:
            examples = self.examples(rows)
            chunks = encode_chunks(examples, self._tokenizer, self._how, lambda done, total: None)
            return joined_rows(list(chunks))

    def _lines(self) -> Iterator[str]:
        for line in iter(self._file.readline, b""):
            yield line.decode("utf-8", "surrogateescape")

    def _stamp(self) -> tuple[int, int]:
        about = os.fstat(self._file.fileno())
        return about.st_size, about.st_mtime_ns

    def _changed(self) -> DataError:
        return DataError(
            f"{self._path} was changed while a run is reading it (data.streaming reads each row when a step needs it). "
            "Restore its content and resume the run, or train anew on a copy that does not change."
        )


def sample_lengths(rows: StreamedRows, how: TokenizeSpec) -> dict[str, Any]:
    """Tokenize evenly spaced rows; return their statistics and tokens per character, for :func:`open_stream`.

    Raises:
        DataError: See :func:`~fullshard.program.data.tokenize`.
    """
    count = min(SAMPLED_ROWS, len(rows.starts))
    places = [place * len(rows.starts) // count for place in range(count)]
    encoded, texts = rows.encode(places), rows.examples(places)
    counters = Counters(how)
    counters.add(encoded)
    rates = {
        name: float(getattr(encoded, name).full_lengths.sum()) / max(1, sum(len(getattr(one, name)) for one in texts))
        for name in _SIDES
    }
    return {"stats": counters.kept(), "rates": rates, "spans": encoded.spans is not None}


def lengths_to(
    directory: Path, rows: StreamedRows, how: TokenizeSpec, progress: Callable[[int, int], None]
) -> dict[str, Any]:
    """Tokenize all rows of an index once and write their lengths, not their ids; a ``build`` for ``cached``.

    ``progress`` is called with rows done and in total. Returns the statistics of all rows, for :func:`open_stream`.

    Raises:
        DataError: See :func:`~fullshard.program.data.tokenize`.
    """
    counters, total, spans = Counters(how), len(rows.starts), False
    with ExitStack() as stack:
        files = [stack.enter_context((directory / _LENGTHS.format(name)).open("wb")) for name in _SIDES]
        for start in range(0, total, CHUNK_ROWS):
            progress(start, total)
            encoded = rows.encode(range(start, min(start + CHUNK_ROWS, total)))
            counters.add(encoded)
            for file, side in zip(files, (encoded.source, encoded.target), strict=True):
                side.ids.lengths.astype(np.int32).tofile(file)
            spans = encoded.spans is not None
    progress(total, total)
    return {"stats": counters.kept(), "spans": spans}


def open_stream(
    directory: Path, rows: StreamedRows, about: dict[str, Any], exact: Path | None = None, *, content: str
) -> TokenizedSet:
    """Return the ``rows`` of the index in ``directory`` as a set that makes ids on demand.

    ``about`` is the result of :func:`sample_lengths`, or with ``exact``, the entry with the rows' lengths, of
    :func:`lengths_to`. Without, lengths are estimated. ``content`` is a digest of the file, the tokenizer and how it is
    used.
    """
    weights = directory / "weights"
    stats = {name: LengthStats(**about["stats"][name]) for name in _SIDES}
    lengths = {
        name: _estimated(directory / f"{name}_characters", about["rates"][name], stats[name])
        if exact is None
        else np.memmap(exact / _LENGTHS.format(name), np.int32, mode="r")
        for name in _SIDES
    }
    source, target = (OnDemand(rows, name, lengths[name], content) for name in _SIDES)
    found = TokenizedSet(source, target, stats["source"], stats["target"], source=rows, estimated=exact is None)
    spans = OnDemand(rows, "spans", np.zeros(len(found), np.int64), content) if about["spans"] else None
    found = replace(found, spans=spans)
    return replace(found, weights=np.memmap(weights, np.float64, mode="r") if weights.exists() else None)


def _estimated(path: Path, rate: float, stats: LengthStats) -> NDArray[np.int64]:
    """Estimate the tokens of each row from its characters."""
    characters = np.memmap(path, np.int32, mode="r")
    return np.minimum(np.ceil(characters * rate), stats.limit).astype(np.int64).clip(1)
