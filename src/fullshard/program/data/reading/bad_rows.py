"""Unusable rows: counted, reported, and skipped up to a limit."""

from __future__ import annotations

from fullshard.errors import DataError

SHOWN_PROBLEMS = 5


class UnusableRowError(Exception):
    """Raised for a row that cannot be used; caught within this package."""


class UnusableRowsError(DataError):
    """Raised if more rows than allowed are unusable; ``beyond_shown`` as in :class:`BadRows`."""

    def __init__(self, message: str, beyond_shown: tuple[str, ...]) -> None:
        super().__init__(message)
        self.beyond_shown = beyond_shown


class BadRows:
    """The unusable rows of one table.

    Attributes:
        count: Number of unusable rows.
        reasons: For each reason, the lines of its rows.
    """

    def __init__(self, where: str) -> None:
        """Start with none; ``where`` names the table in messages."""
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
        """Return the message about skipped rows, if any of the table's ``num_rows`` rows were skipped.

        Raises:
            UnusableRowsError: More rows than ``limit`` (``data.max_bad_rows``) are unusable.
        """
        if not self.count:
            return ()
        shown = [f"  {found}" for found in self._found[:SHOWN_PROBLEMS]]
        if self.count > SHOWN_PROBLEMS:
            shown.append(f"  ... and {self.count - SHOWN_PROBLEMS} more")
        outcome = "rows were skipped" if self.count <= limit else "rows cannot be used"
        heading = f"{self._where}: {self.count} of {num_rows} {outcome}"
        if self.count <= limit:
            return ("\n".join([f"{heading} (data.max_bad_rows: {limit}):", *shown]),)
        advice = f"Correct or remove them, or raise data.max_bad_rows (now {limit}) to skip them:"
        raise UnusableRowsError("\n".join([f"{heading}. {advice}", *shown]), self.beyond_shown)
