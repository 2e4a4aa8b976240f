"""A row before it is checked, what yields rows, and rows that cannot be used."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path

from fullshard.errors import DataError
from fullshard.program.data.reading.text_file import LineStarts, open_lines

SHOWN_PROBLEMS = 5


@dataclass(frozen=True)
class Row:
    """A row before it is checked."""

    line: int  # line where it starts, from 1; its number if the data has no lines
    cells: Mapping[str, object]  # cells by column name
    problem: str | None = None  # why it could not be read, or None


class RowReader(ABC):
    """Reader of the rows of a file or dataset. They can be read several times; nothing is read before.

    Attributes:
        where: Name of the data in messages.
        named: Messages about a file whose name says another format than its content.
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self.named: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """Messages for the user about how it is read."""
        return self.named

    @abstractmethod
    def columns(self) -> list[str]:
        """Return the columns in order; a duplicate name is listed twice."""

    @abstractmethod
    def rows(self, wanted: Sequence[str]) -> Iterator[Row]:
        """Yield the rows in order, with at least those of the wanted columns that they have."""


class TextRows(RowReader):
    """Reader of a text file; a caller that needs the positions of lines sets ``starts``."""

    def __init__(self, path: Path, encoding: str) -> None:
        super().__init__(str(path))
        self.starts: LineStarts | None = None
        self._path, self._encoding = path, encoding

    @contextmanager
    def _lines(self) -> Iterator[Iterable[str]]:
        """Open the lines of :func:`open_lines`, and note where they start if a caller needs it."""
        with open_lines(self._path, self._encoding) as lines:
            yield lines if self.starts is None else self.starts.noting(lines)


class UnusableRowError(Exception):
    """Raised for a row that cannot be used; caught within this package."""


class UnusableRowsError(DataError):
    """Raised if more rows than allowed are unusable; ``beyond_shown`` as in :class:`BadRows`."""

    def __init__(self, message: str, beyond_shown: tuple[str, ...]) -> None:
        super().__init__(message)
        self.beyond_shown = beyond_shown


class BadRows:
    """The unusable rows of one file or dataset.

    Attributes:
        count: Number of unusable rows.
        reasons: For each reason, the lines of its rows.
    """

    def __init__(self, where: str) -> None:
        """Start with none; ``where`` names the data in messages."""
        self.count = 0
        self.reasons: dict[str, list[int]] = {}
        self._where = where
        self._found: list[str] = []

    def add(self, line: int, problem: str) -> None:
        """Count a row and remember its problem."""
        self.count += 1
        self.reasons.setdefault(problem, []).append(line)
        self._found.append(f"{self._where}:{line}: {problem}")

    @property
    def beyond_shown(self) -> tuple[str, ...]:
        """Return a line for each row if the message does not show all of them, else none."""
        return tuple(self._found) if self.count > SHOWN_PROBLEMS else ()

    def settle(self, num_rows: int, limit: int) -> tuple[str, ...]:
        """Return the message about skipped rows, if any of ``num_rows`` rows were skipped.

        Raises:
            UnusableRowsError: More rows than ``limit`` (``data.max_bad_rows``) are unusable.
        """
        if not self.count:
            return ()
        shown = [f"  {found}" for found in self._found[:SHOWN_PROBLEMS]]
        if self.count > SHOWN_PROBLEMS:
            shown.append(f"  ... and {self.count - SHOWN_PROBLEMS} more")
            often = [(len(lines), reason) for reason, lines in self.reasons.items() if len(lines) > 1]
            most = sorted(often, key=lambda one: -one[0])[:SHOWN_PROBLEMS]
            shown += [f"  {count:,} rows: {reason}" for count, reason in most] if len(self.reasons) > 1 else []
        outcome = "rows were skipped" if self.count <= limit else "rows cannot be used"
        heading = f"{self._where}: {self.count} of {num_rows} {outcome}"
        if self.count <= limit:
            return ("\n".join([f"{heading} (data.max_bad_rows: {limit}):", *shown]),)
        advice = f"Correct or remove them, or raise data.max_bad_rows (now {limit}) to skip them:"
        raise UnusableRowsError("\n".join([f"{heading}. {advice}", *shown]), self.beyond_shown)


def distinct(names: Sequence[str]) -> tuple[str, ...]:
    """Return names of which each comes once: further ones of a name have a number, as in ``id, id_2``.

    A number never makes a name that is among ``names``, also further on: that column keeps its own.
    """
    found: dict[str, None] = {}
    for name in names:
        numbered = (one for number in count(2) if (one := f"{name}_{number}") not in names)
        found[next(one for one in chain((name,), numbered) if one not in found)] = None
    return tuple(found)
