"""A table with chosen columns: yields its usable rows and collects what was found while reading them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fullshard.errors import DataError
from fullshard.program.data.examples import Example, SourceSpec
from fullshard.program.data.reading.bad_rows import BadRows, UnusableRowError
from fullshard.program.data.reading.cells import cell_weight
from fullshard.program.data.reading.columns import Recipe, choose
from fullshard.program.data.reading.conversations import (
    ConversationRecipe,
    TurnCounts,
    conversation_note,
    find_conversations,
    require_conversations,
)
from fullshard.program.data.reading.nested import cell_of, column_of, columns_read, with_inner_names
from fullshard.program.data.reading.tables import Row, RowReader


class OpenedTable:
    """A table, the recipe for its examples, and the unusable rows found so far.

    Attributes:
        reader: The table's reader.
        known: The table's columns.
        bad: Unusable rows so far.
        num_usable: Usable rows so far.
    """

    def __init__(
        self, reader: RowReader, spec: SourceSpec, weights: str | None, columns: list[str] | None = None
    ) -> None:
        """Choose the columns; ``weights`` names the column of the rows' weights, None gives all weight 1.

        Raises:
            DataError: Columns are missing or ambiguous.
            ConfigError: The template is malformed.
        """
        self.reader = reader
        self.known = columns_of(reader) if columns is None else columns
        self.bad = BadRows(reader.where)
        self.num_usable = 0
        self._turns = TurnCounts()
        self._limit, self._weights = spec.max_bad_rows, weights
        self._recipe: Recipe | ConversationRecipe | None = find_conversations(reader, self.known, spec, completed=True)
        if self._recipe is None:
            require_conversations(spec, reader.where)
            with with_inner_names(reader, self.known):
                self._recipe = choose(spec, texts_of(self.known, spec), reader.where)
        if weights is not None and self.known.count(column_of(weights, self.known) or weights) != 1:
            raise DataError(
                f"{reader.where} has {self.known.count(weights)} columns {weights!r} (data.weight_column); one is "
                f"needed. Its columns: {', '.join(map(repr, self.known))}."
            )

    @property
    def wanted(self) -> list[str]:
        """The columns that are read."""
        assert self._recipe is not None
        return columns_read([*self._recipe.columns, *([] if self._weights is None else [self._weights])], self.known)

    @property
    def holds_conversations(self) -> bool:
        """True if the rows are conversations."""
        return isinstance(self._recipe, ConversationRecipe)

    def example(self, row: Row) -> Example:
        """Return the example of a row.

        Raises:
            UnusableRowError: It cannot be used.
        """
        assert self._recipe is not None
        example = self._recipe.example(row)
        if self._weights is None:
            return example
        return replace(example, weight=cell_weight(self._weights, cell_of(row, self._weights)))

    def usable_rows(self) -> Iterator[tuple[Row, Example]]:
        """Yield every usable row with its example, and count the others."""
        for row in self.reader.rows(self.wanted):
            try:
                example = self.example(row)
            except UnusableRowError as problem:
                self.bad.add(row.line, str(problem))
                continue
            self.num_usable += 1
            self._turns.add(example)
            yield row, example

    def usable(self) -> Iterator[Example]:
        """Yield the example of every usable row, and count the others."""
        return (example for _, example in self.usable_rows())

    def notes(self) -> tuple[str, ...]:
        """Return messages for the user; called after all rows were read.

        Raises:
            DataError: Too many rows are unusable, or none is usable.
        """
        assert self._recipe is not None
        count = self.bad.count
        notes = (*self.reader.notes, *self._recipe.notes, *self.bad.settle(self.num_usable + count, self._limit))
        if not self.num_usable:
            found = f"{count} rows, none of which can be used" if count else "a header but no rows"
            raise DataError("\n".join([f"{self.reader.where} has {found}: at least one row is needed.", *notes]))
        if isinstance(self._recipe, ConversationRecipe):
            notes = (conversation_note(self._recipe, self._turns, self.reader.where), *notes)
        return notes


def texts_of(columns: list[str], spec: SourceSpec) -> list[str]:
    """Return the columns that may be source or target: all but the weights' column."""
    return [name for name in columns if name != spec.weight_column]


def columns_of(reader: RowReader) -> list[str]:
    """Return the columns of a table.

    Raises:
        DataError: No row could be read; the message lists the rows' problems instead of missing columns.
    """
    columns, bad, total = reader.columns(), BadRows(reader.where), 0
    for row in reader.rows(()) if not columns else ():
        total += 1
        if row.problem is not None:
            bad.add(row.line, row.problem)
    bad.settle(total, limit=0)
    return columns
