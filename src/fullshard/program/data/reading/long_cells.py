"""Cells longer than the csv module allows by default."""

from __future__ import annotations

import csv
import threading

CELL_LIMIT_CHARACTERS = 2**31 - 1
"""Limit for the csv module, whose default of 131,072 characters is too short for articles."""


class LongCells:
    """Raises the csv module's limit on cell length while a table is read, then restores it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readers = 0
        self._before = 0

    def __enter__(self) -> None:
        """Count one more reader; the limit is global to the module and shared by all threads."""
        with self._lock:
            if self._readers == 0:
                self._before = csv.field_size_limit(CELL_LIMIT_CHARACTERS)
            self._readers += 1

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._readers -= 1
            if self._readers == 0:
                csv.field_size_limit(self._before)


LONG_CELLS = LongCells()
