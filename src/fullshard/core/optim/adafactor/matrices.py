"""A rank's view of a parameter as matrices whose rows and columns have statistics.

Parameters of two dimensions or more are matrices of their last two, R rows of C columns, one for each index of the
earlier dimensions. Shards are runs of full rows of dimension 0 wherever possible, so a rank holds, of one parameter,
one of:

- complete matrices: of a parameter on one rank, or one of three dimensions or more split by full rows;
- full rows of one matrix: two dimensions, split by full rows;
- a run of elements that may begin or end inside a row, or inside a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch

from fullshard.core.layout import ShardMeta, StatePart, along_rows, on_all_owners
from fullshard.core.optim.shards import as_rows

Factor = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class RowBlock:
    """The same rows of each of some consecutive matrices."""

    values: torch.Tensor  # this rank's elements of them, (k, r, C)
    first_row: int  # index of the first row among those that have a statistic here; k * r rows follow each other
    first_matrix: int  # index of the first matrix among those whose columns have statistics here

    def rows_of(self, statistic: torch.Tensor) -> torch.Tensor:
        """Return the rows' elements of a row statistic, (k, r, 1), a view."""
        count, rows, _ = self.values.shape
        return statistic.view(-1)[self.first_row : self.first_row + count * rows].view(count, rows, 1)

    def columns_of(self, statistic: torch.Tensor) -> torch.Tensor:
        """Return the matrices' elements of a column or matrix statistic, (k, 1, C or 1), a view."""
        count, _, columns = self.values.shape
        width = columns if statistic.ndim > 1 else 1
        flat = statistic.view(-1, width)
        return flat[self.first_matrix : self.first_matrix + count].view(count, 1, width)


@dataclass(frozen=True)
class Matrices:
    """The matrices of one parameter on one rank.

    Attributes:
        meta: Of the parameter, which has two dimensions or more.
        held: ``matrices``: complete matrices; ``rows``: full rows of the only one; ``elements``: a run of elements.
        shape: Shape of what the statistics here cover: this rank's part, or the full parameter if all its matrices are
            here or this rank holds a run of elements. Without the last dimension it is the shape of the row statistics,
            without the last but one that of the column statistics.
    """

    meta: ShardMeta
    held: Literal["matrices", "rows", "elements"]
    shape: tuple[int, ...]

    @property
    def row_count(self) -> int:
        """Rows that have a statistic here."""
        return prod(self.shape[:-1])

    @property
    def matrix_count(self) -> int:
        """Matrices whose columns have statistics here."""
        return prod(self.shape[:-2])

    @property
    def shared_numel(self) -> int:
        """Number of partial sums that the owners add up: over split rows or columns, and over row statistics."""
        if self.held == "elements":
            return self.row_count + self.matrix_count * self.shape[-1]
        return 1 + self.shape[-1] if self.held == "rows" else 0

    def sums_of_squares(self, local: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return sums of the squares of this rank's elements.

        Args:
            local: The elements, in any shape.

        Returns:
            Over each row, (rows,), and over each column of each matrix, (matrices, C), of those that have a statistic
            here; zero where this rank has no element.
        """
        if self.held != "elements":
            squares = local.reshape(-1, *self.shape[-2:]).square()
            return squares.sum(2).view(-1), squares.sum(1)
        rows = local.new_zeros(self.row_count)
        columns = local.new_zeros(self.matrix_count, self.shape[-1])
        for block in self._blocks(local):
            squares = block.values.square()
            block.rows_of(rows).copy_(squares.sum(2, keepdim=True))
            block.columns_of(columns).copy_(squares.sum(1, keepdim=True))
        return rows, columns

    def scaled(self, local: torch.Tensor, statistics: tuple[torch.Tensor, ...], factor: Factor) -> torch.Tensor:
        """Return this rank's elements times ``factor`` of the statistics of their row, column and matrix.

        Args:
            local: The elements, in any shape.
            statistics: Of the rows, (rows,), of the columns, (matrices, C), and of the matrices, (matrices,).
            factor: Called with blocks of these, (k, r, 1), (k, 1, C) and (k, 1, 1); returns a new tensor (k, r, C).

        Returns:
            A new tensor of the shape of ``local``.
        """
        rows, columns, matrices = statistics
        if self.held != "elements":
            height, width = self.shape[-2:]
            made = factor(rows.view(-1, height, 1), columns.view(-1, 1, width), matrices.view(-1, 1, 1))
            return made.mul_(local.reshape(made.shape)).view(local.shape)
        parts = [
            factor(block.rows_of(rows), block.columns_of(columns), block.columns_of(matrices)).mul_(block.values)
            for block in self._blocks(local)
        ]
        flat = parts[0].view(-1) if len(parts) == 1 else torch.cat([part.view(-1) for part in parts])
        before = self.meta.element_range[0] % self.shape[-1]
        return flat[before : before + local.numel()].view(local.shape)

    def _blocks(self, local: torch.Tensor) -> Iterator[RowBlock]:
        """Yield a run of elements block by block, in order; incomplete rows are filled up with zeros."""
        height, width = self.shape[-2:]
        rows, at = as_rows(self.meta, local)
        end = at + len(rows)
        while at < end:
            matrix, inside = divmod(at, height)
            left = end - at
            count = (
                1 if inside or left < height else left // height
            )  # part of a matrix, or all complete ones that follow
            taken = min(left, height - inside) if count == 1 else count * height
            start = at - end + len(rows)
            yield RowBlock(rows[start : start + taken].view(count, -1, width), at, matrix)
            at += taken

    def part_of_rows(self, shape: tuple[int, ...]) -> StatePart:
        """Return which part of the full parameter's row statistics, of ``shape``, this rank has."""
        if self._all_here:
            return on_all_owners(self.meta, shape)
        return along_rows(self.meta, shape)

    def part_of_columns(self, shape: tuple[int, ...]) -> StatePart:
        """Return which part of the full parameter's column statistics, of ``shape``, this rank has."""
        if self._all_here or self.held == "rows":
            return on_all_owners(self.meta, shape)
        return along_rows(self.meta, shape)

    @property
    def _all_here(self) -> bool:
        """True if each owner of the parameter has the statistics of all of it."""
        return self.held == "elements" or len(self.meta.owners) < 2


def matrices_of(meta: ShardMeta) -> Matrices | None:
    """Return a rank's view of a parameter's matrices; None for fewer than two dimensions."""
    if len(meta.global_shape) < 2:
        return None
    if len(meta.owners) < 2:
        return Matrices(meta, "matrices", meta.global_shape)
    if meta.row_range is None:
        return Matrices(meta, "elements", meta.global_shape)
    return Matrices(meta, "rows" if len(meta.global_shape) == 2 else "matrices", meta.local_shape)
