"""The rows of an index as a set: read in place and tokenized when a step needs them."""

from __future__ import annotations

import copy
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fullshard.errors import DataError
from fullshard.program.data.examples import Example, SourceSpec
from fullshard.program.data.reading.bad_rows import UnusableRowError
from fullshard.program.data.reading.conversations import answers_as_rows
from fullshard.program.data.reading.split import open_table
from fullshard.program.data.reading.tables import CsvFile, JsonLinesFile, unreadable
from fullshard.program.data.streaming.index import ANSWERS_NAME, ROWS_NAME
from fullshard.program.data.tokenizing.on_demand import OnDemand
from fullshard.program.data.tokenizing.ragged import EncodedRows, joined_rows
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

_SIDES = ("source", "target")
_LENGTHS = "{}_lengths"
"""Name of the file with the exact lengths of source or target."""

SAMPLED_ROWS = 1000
"""Number of evenly spaced rows that are tokenized in advance for statistics of lengths."""


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
        """Open the file.

        Args:
            directory: The entry with the index.
            kept: What ``index_to`` returned.
            spec: Where the rows come from.
            tokenizer: Any Hugging Face tokenizer; copied, because a call changes its settings.
            how: How text becomes ids.

        Raises:
            DataError: The file cannot be read.
        """
        self.starts = np.memmap(directory / "starts", np.int64, mode="r")
        answers = directory / ANSWERS_NAME
        self._answers = np.memmap(answers, np.int32, mode="r") if answers.exists() else None
        # The index knows what quotes are: each rank would read the complete file for it.
        self._table = open_table(replace(spec, quoting=kept["quoting"] or spec.quoting), "train", kept["columns"])
        own = self._table.reader
        if kept["in_place"]:
            assert isinstance(own, CsvFile | JsonLinesFile)
            self._reader: CsvFile | JsonLinesFile = own
            self._path = Path(own.where)
        else:
            self._path = directory / ROWS_NAME
            self._reader = JsonLinesFile(self._path, "utf-8")
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
                example = self._table.example(self._reader.row_at(self._lines()))
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
    """Tokenize evenly spaced rows to estimate all lengths, for :func:`open_stream`.

    Returns:
        Statistics of the sample, and the tokens per character of each side.

    Raises:
        DataError: See :func:`~fullshard.program.data.tokenize`.
    """
    count = min(SAMPLED_ROWS, len(rows.starts))
    places = [place * len(rows.starts) // count for place in range(count)]
    encoded, texts = rows.encode(places), rows.examples(places)
    counters = Counters(how)
    counters.add(encoded)
    characters = {"source": sum(len(one.source) for one in texts), "target": sum(len(one.target) for one in texts)}
    sides = {"source": encoded.source, "target": encoded.target}
    return {
        "stats": {"source": asdict(counters.source.stats()), "target": asdict(counters.target.stats())},
        "rates": {name: float(side.full_lengths.sum()) / max(1, characters[name]) for name, side in sides.items()},
        "spans": encoded.spans is not None,
    }


def lengths_to(
    directory: Path, rows: StreamedRows, how: TokenizeSpec, progress: Callable[[int, int], None]
) -> dict[str, Any]:
    """Tokenize all rows once and write their lengths, not their ids; a ``build`` for ``cached``.

    Args:
        directory: Directory of the files.
        rows: The rows of an index.
        how: How text becomes ids.
        progress: Called with rows done and in total.

    Returns:
        The statistics of all rows, for :func:`open_stream`.

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
    stats = {"source": asdict(counters.source.stats()), "target": asdict(counters.target.stats())}
    return {"stats": stats, "spans": spans}


def open_stream(directory: Path, rows: StreamedRows, about: dict[str, Any], exact: Path | None = None) -> TokenizedSet:
    """Return the rows of an index as a set that makes ids on demand.

    Args:
        directory: The entry with the index.
        rows: Its rows.
        about: Result of :func:`sample_lengths`, or of :func:`lengths_to` with ``exact``.
        exact: The entry with the rows' lengths; None: lengths are estimated.
    """
    weights = directory / "weights"
    stats = {name: LengthStats(**about["stats"][name]) for name in _SIDES}
    lengths = {
        name: _estimated(directory / f"{name}_characters", about["rates"][name], stats[name])
        if exact is None
        else np.memmap(exact / _LENGTHS.format(name), np.int32, mode="r")
        for name in _SIDES
    }
    source, target = (OnDemand(rows, name, lengths[name]) for name in _SIDES)
    found = TokenizedSet(source, target, stats["source"], stats["target"], source=rows, estimated=exact is None)
    found = replace(found, spans=OnDemand(rows, "spans", np.zeros(len(found), np.int64)) if about["spans"] else None)
    return replace(found, weights=np.memmap(weights, np.float64, mode="r") if weights.exists() else None)


def _estimated(path: Path, rate: float, stats: LengthStats) -> NDArray[np.int64]:
    """Estimate the tokens of each row from its characters."""
    characters = np.memmap(path, np.int32, mode="r")
    return np.minimum(np.ceil(characters * rate), stats.limit).astype(np.int64).clip(1)
