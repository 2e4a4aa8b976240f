"""Unusable rows: counted, reported, and skipped up to a limit."""

from __future__ import annotations

from fullshard.errors import DataError

SHOWN_PROBLEMS = 5


class UnusableRowError(Exception):
    """The reason why one row cannot be used; caught within this package."""


class BadRows:
    """The unusable rows of one table."""

    def __init__(self, where: str) -> None:
        """Start with none; ``where`` names the table in messages."""
        self.count = 0
        self._where = where
        self._first: list[tuple[int, str]] = []

    def add(self, line: int, problem: str) -> None:
        """Count a row and remember the first few."""
        self.count += 1
        if len(self._first) < SHOWN_PROBLEMS:
            self._first.append((line, problem))

    def settle(self, num_rows: int, limit: int) -> tuple[str, ...]:
        """Return the messages about skipped rows.

        Args:
            num_rows: Rows of the table, including unusable ones.
            limit: Allowed unusable rows, ``data.max_bad_rows``.

        Returns:
            One message, or none if all rows are usable.

        Raises:
            DataError: There are more unusable rows than allowed.
        """
        if not self.count:
            return ()
        shown = [f"  {self._where}:{line}: {problem}" for line, problem in self._first]
        if self.count > len(self._first):
            shown.append(f"  ... and {self.count - len(self._first)} more")
        outcome = "rows were skipped" if self.count <= limit else "rows cannot be used"
        heading = f"{self._where}: {self.count} of {num_rows} {outcome}"
        if self.count <= limit:
            return ("\n".join([f"{heading} (data.max_bad_rows: {limit}):", *shown]),)
        advice = f"Correct or remove them, or raise data.max_bad_rows (now {limit}) to skip them:"
        raise DataError("\n".join([f"{heading}. {advice}", *shown]))
