"""Rows that cannot be used: counted and shown, skipped up to a limit, never silently."""

from __future__ import annotations

from fullshard.errors import DataError

SHOWN_PROBLEMS = 5


class UnusableRowError(Exception):
    """Why one row cannot be used; it never leaves this room."""


class BadRows:
    """The rows of one table that cannot be used."""

    def __init__(self, where: str) -> None:
        """``where`` is the table as messages call it."""
        self.count = 0
        self._where = where
        self._first: list[tuple[int, str]] = []

    def add(self, line: int, problem: str) -> None:
        """Count a row and remember the first few."""
        self.count += 1
        if len(self._first) < SHOWN_PROBLEMS:
            self._first.append((line, problem))

    def settle(self, num_rows: int, limit: int) -> tuple[str, ...]:
        """What the user should know of the rows that were skipped.

        Args:
            num_rows: Rows of the table, bad ones included.
            limit: Bad rows that are allowed, ``data.max_bad_rows``.

        Returns:
            One note, or none when all rows are good.

        Raises:
            DataError: There are more bad rows than allowed.
        """
        if not self.count:
            return ()
        shown = [f"  {self._where}:{line}: {problem}" for line, problem in self._first]
        if self.count > len(self._first):
            shown.append(f"  ... and {self.count - len(self._first)} more")
        verdict = "rows were skipped" if self.count <= limit else "rows cannot be used"
        heading = f"{self._where}: {self.count} of {num_rows} {verdict}"
        if self.count <= limit:
            return ("\n".join([f"{heading} (data.max_bad_rows: {limit}):", *shown]),)
        advice = f"Mend or remove them, or raise data.max_bad_rows (now {limit}) to skip them:"
        raise DataError("\n".join([f"{heading}. {advice}", *shown]))
