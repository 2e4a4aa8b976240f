"""The division of a tensor's dimension 0 over ranks, and which tensors are divided alike."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from fullshard.core.comm import Comm, same_group
from fullshard.core.layout import ShardMeta
from fullshard.errors import ShardingError


@dataclass(frozen=True, eq=False, slots=True)
class Cut:
    """The division of dimension 0 of a tensor over ranks. Rows of a vector are its elements.

    Attributes:
        name: The parameter, for messages.
        comm: The ranks.
        key: The same on all ranks, and equal for two tensors whose rows are divided alike; None if a mask picked rows.
        first: First row here, counted in the full tensor.
        total: Rows of the full tensor; not meaningful without a key.
        shape: Full shape if it does not follow from the rows here: for scalars, and if rows are divided too.
        whole_rows: True if this rank holds full rows.
        parts: For a vector joined from several: the cut, elements in full and elements here of each.
    """

    name: str
    comm: Comm
    key: Hashable
    first: int
    total: int
    shape: tuple[int, ...] | None = None
    whole_rows: bool = True
    parts: tuple[tuple[Cut, int, int], ...] = ()

    def full_shape(self, rows: torch.Tensor) -> tuple[int, ...] | None:
        """Return the shape of the full tensor that ``rows``, (rows here, *rest), belong to; None if not known."""
        if self.key is None:
            return None
        return (self.total, *rows.shape[1:]) if self.shape is None else self.shape

    def full_numel(self, rows: torch.Tensor) -> int | None:
        """Return the number of elements of the full tensor; None if not known without communication."""
        shape = self.full_shape(rows)
        return None if shape is None else prod(shape)

    def first_element(self, rows: torch.Tensor) -> int:
        """Return the index of the first element here in the flattened full tensor."""
        return self.first * (prod(rows.shape[1:]) if rows.dim() else 1)

    def flat(self, rows: torch.Tensor) -> Cut:
        """Return the cut of ``rows.flatten()``."""
        if self.key is None or (rows.dim() == 1 and self.shape is None):
            return self
        inner = prod(rows.shape[1:]) if rows.dim() else 1
        total = self.full_numel(rows)
        assert total is not None
        return Cut(self.name, self.comm, ("flat", self.key, inner), self.first_element(rows), total)

    def picked(self) -> Cut:
        """Return the cut of elements picked by a mask: the numbers of other ranks are not known."""
        return Cut(f"elements of {self.name}", self.comm, None, 0, 0)


def cut_of(meta: ShardMeta, comm: Comm) -> Cut:
    """Return the cut of a sharded parameter."""
    start, _ = meta.element_range
    placement, layout = meta.placement, meta.layout
    shape = None if meta.global_shape and placement.full_rows else meta.global_shape
    row = placement.row_numel if placement.full_rows else placement.granule
    key = (layout.world_size, layout.shard_numel, placement.start, placement.numel, row, placement.granule)
    return Cut(meta.name, comm, key, start // row, placement.numel // row, shape, placement.full_rows)


def joined(parts: list[tuple[Cut, torch.Tensor]]) -> Cut:
    """Return the cut of flattened shards joined in this rank's order, as ``parameters_to_vector`` does."""
    of_parts = []
    for cut, rows in parts:
        numel = cut.full_numel(rows)
        if numel is None or cut.parts or not same_group(cut.comm, parts[0][0].comm):
            raise ShardingError(
                f"Elements of {cut.name} and of {parts[0][0].name} cannot be put into one vector: each must be a "
                "flattened shard of the same ranks. Put together what full_tensor() returns."
            )
        of_parts.append((cut, numel, rows.numel()))
    key = ("joined", *(cut.key for cut, _, _ in of_parts))
    total = sum(numel for _, numel, _ in of_parts)
    return Cut("a vector of shards", parts[0][0].comm, key, 0, total, whole_rows=False, parts=tuple(of_parts))


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among arguments, including those inside lists, tuples and dicts."""
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list, dict)):
            yield from tensors_in(value)
