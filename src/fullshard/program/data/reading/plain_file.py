"""Files of plain text, without columns: a text in each paragraph, or in each line where no line is empty."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from fullshard.errors import DataError
from fullshard.program.data.reading.row import Row, TextRows
from fullshard.program.data.reading.text_file import empty, encoding_problem

COLUMN = "text"
"""Name of the column that the texts are in."""

_LOOKED_AT = 20
"""Lines in which tabs are counted."""

_FEWEST_LINES = 3
"""Lines with as many tabs as each other that make a table."""


class PlainTextFile(TextRows):
    """A file whose texts are its paragraphs: lines without an empty one between them; or its lines, if none is empty.

    A text keeps the line breaks inside it.
    """

    def columns(self) -> list[str]:
        """Return the one column.

        Raises:
            DataError: The file is empty, or a table by its tabs.
        """
        with self._lines() as lines:
            first = list(islice((line for line in lines if line.strip()), _LOOKED_AT))
        if not first:
            raise empty(self._path)
        tabs = {line.rstrip("\r\n").count("\t") for line in first}
        if len(first) >= _FEWEST_LINES and len(tabs) == 1 and tabs != {0}:
            raise DataError(
                f"{self._path} would be read as plain text, but each of its lines has {max(tabs)} "
                f"tab{'s' if max(tabs) > 1 else ''}. If it is a table, rename it to .tsv or set data.format: tsv; if "
                "it is text, replace the tabs."
            )
        return [COLUMN]

    def rows(self, wanted: Sequence[str]) -> Iterator[Row]:
        """Yield the texts, each with the number of its first line."""
        del wanted
        with self._lines() as lines:
            by_paragraph = self._has_paragraphs(lines)
        with self._lines() as lines:
            yield from self._texts(lines, by_paragraph=by_paragraph)

    @staticmethod
    def _has_paragraphs(lines: Iterable[str]) -> bool:
        """Return whether an empty line is between two others."""
        begun = ended = False
        for line in lines:
            if not line.strip():
                ended = begun
            elif ended:
                return True
            else:
                begun = True
        return False

    def _texts(self, lines: Iterable[str], *, by_paragraph: bool) -> Iterator[Row]:
        text: list[str] = []
        number = 0
        for number, line in enumerate(lines, start=1):
            if line.strip():
                text.append(line)
            if text and not (line.strip() and by_paragraph):
                yield self._row(text, number - len(text) + (1 if line.strip() else 0))
                text = []
        if text:
            yield self._row(text, number - len(text) + 1)

    def _row(self, lines: Sequence[str], first: int) -> Row:
        text = "".join(lines).strip("\r\n").replace("\r\n", "\n")
        problem = encoding_problem(text, self._encoding)
        return Row(first, {} if problem else {COLUMN: text}, problem)
