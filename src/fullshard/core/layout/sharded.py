"""Metadata of a sharded parameter that any room may read, without importing the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fullshard.core.layout.lanes import LaneLayout, Placement

Claims = dict[str, tuple[int, tuple[str, ...]]]
"""The parameters that an optimizer steps: by parameter name, the number of its group and that group's options.

This rank's are in a list that every sharded parameter has as ``param.shard_claims``.
"""


@dataclass(frozen=True)
class ShardMeta:
    """Identity and place of one parameter's shard; every sharded parameter has it as ``param.shard_meta``.

    Attributes:
        name: First fully qualified name of the parameter in the model.
        aliases: Its other names, if the parameter is tied.
        global_shape: Shape of the unsharded parameter.
        layout: The layout of the lane that holds it.
        placement: Its place in that lane.
        rank: The rank whose shard this is.

    Examples:
        >>> from fullshard.core.layout.plan import plan_unit
        >>> lane = plan_unit(((9, 8), (5,)), 3).lanes[0]
        >>> meta = ShardMeta("proj.weight", (), (9, 8), lane, lane.placements[0], rank=1)
        >>> meta.element_range, meta.row_range, meta.local_shape
        ((32, 64), (4, 8), (4, 8))
    """

    name: str
    aliases: tuple[str, ...]
    global_shape: tuple[int, ...]
    layout: LaneLayout
    placement: Placement
    rank: int

    @property
    def element_range(self) -> tuple[int, int]:
        """First and past-the-last element of the flattened parameter that this rank holds; ``(0, 0)`` if none."""
        return self.layout.local_range(self.placement, self.rank)

    @property
    def owners(self) -> range:
        """The ranks that hold part of the parameter; they are consecutive."""
        return self.layout.owners(self.placement)

    @property
    def row_range(self) -> tuple[int, int] | None:
        """First and past-the-last row that this rank holds; None if the parameter is not split by full rows."""
        if not self.placement.full_rows:
            return None
        start, stop = self.element_range
        return start // self.placement.row_numel, stop // self.placement.row_numel

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's shard: full rows, or rows of one granule if rows had to be split.

        A scalar has shape ``()`` on the rank that holds it and ``(0,)`` on the others.
        """
        start, stop = self.element_range
        if not self.global_shape:
            return () if stop > start else (0,)
        if self.placement.full_rows:
            return ((stop - start) // self.placement.row_numel, *self.global_shape[1:])
        return ((stop - start) // self.placement.granule, self.placement.granule)


def claims_difference(by_rank: Sequence[Sequence[Claims]]) -> str | None:
    """Describe the first parameter that another rank steps differently from rank 0; return None if there is none."""
    merged = [{name: place for claims in of_rank for name, place in claims.items()} for of_rank in by_rank]
    for rank, other in enumerate(merged):
        for name in [*merged[0], *other]:
            here, there = merged[0].get(name), other.get(name)
            if here != there:
                return f"{name} is in {_place(here, there)} on rank 0 and in {_place(there, here)} on rank {rank}"
        if len(by_rank[rank]) != len(by_rank[0]):
            return f"rank 0 has stepped {len(by_rank[0])} of them and rank {rank} {len(by_rank[rank])}"
    return None


def _place(place: tuple[int, tuple[str, ...]] | None, other: tuple[int, tuple[str, ...]] | None) -> str:
    """Describe a group, with the options that the other group does not have."""
    if place is None:
        return "no optimizer that has stepped"
    number, options = place
    apart = ", ".join(one for one in options if other is not None and one not in other[1])
    return f"group {number} ({apart})" if apart else f"group {number}"
