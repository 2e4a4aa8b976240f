"""FinancialPhraseBank: ``Sentences_*Agree.txt``, or JSON Lines with ``sentence`` and ``label``."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from fullshard.program.data.reading.json_file import JsonLinesFile
from fullshard.program.data.reading.row import Row, RowReader, TextRows
from fullshard.program.data.reading.text_file import empty, encoding_problem, open_lines

LABELS = ("negative", "neutral", "positive")
"""In the order of the numbers that the JSON form may use instead."""


def open_phrasebank(path: Path, encoding: str) -> RowReader:
    """Open sentences and labels; ``.jsonl`` and ``.json`` are JSON Lines, all other files the authors' form."""
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() != ".gz"]
    actual = _actual_encoding(path, encoding)
    opened = _JsonForm(path, actual) if suffixes and suffixes[-1] in (".jsonl", ".json") else _TextForm(path, actual)
    if actual != encoding:
        opened.named = (f"{path} is not {encoding.upper()} and was read as {actual.upper()}.",)
    return opened


class _JsonForm(JsonLinesFile):
    """Lines with ``sentence`` and ``label``, the label a name or its number."""

    def rows(self, wanted: Sequence[str]) -> Iterator[Row]:
        """Yield rows with the labels' names."""
        for row in super().rows(wanted):
            yield row if row.problem else _labelled(row, row.cells.get("label"))


class _TextForm(TextRows):
    """Lines of ``sentence@label``."""

    def columns(self) -> list[str]:
        """Return the columns of the JSON form."""
        return ["sentence", "label"]

    def rows(self, wanted: Sequence[str]) -> Iterator[Row]:
        """Yield the lines that are not blank, split at the last ``@``."""
        del wanted
        blank = True
        with self._lines() as lines:
            for line, raw in enumerate(lines, start=1):
                if not raw.strip():
                    continue
                blank = False
                sentence, at, label = raw.rstrip("\r\n").rpartition("@")
                problem = encoding_problem(raw, self._encoding)
                if problem is None and not at:
                    problem = "the line has no @ between sentence and label"
                row = Row(line, {"sentence": sentence, "label": label}, problem)
                yield row if problem else _labelled(row, label)
        if blank:
            raise empty(self._path)


def _actual_encoding(path: Path, encoding: str) -> str:
    """Return the given encoding, or the authors' ISO-8859-1 if it is UTF-8 and the file is not."""
    with open_lines(path, encoding) as lines:
        readable = all(encoding_problem(line, encoding) is None for line in lines)
    return encoding if readable or codecs.lookup(encoding).name != "utf-8" else "iso-8859-1"


def _labelled(row: Row, label: object) -> Row:
    """Return the row with its label's name, or with a problem."""
    text = str(label).strip().lower()
    if text.isascii() and text.isdigit() and int(text) < len(LABELS):
        text = LABELS[int(text)]
    if text not in LABELS:
        return replace(row, problem=f"the label is {label!r}, not one of {', '.join(LABELS)}")
    return replace(row, cells={**row.cells, "label": text})
