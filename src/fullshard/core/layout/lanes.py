"""Where every element of a unit's parameters is stored: placements, lanes and unit layouts.

A *unit* is gathered and reduced together. Its memory is one or more *lanes*; a lane is one contiguous buffer of
``world_size`` equal shards, and rank ``r`` owns shard ``r``. A parameter is contiguous in its lane, so the gathered
parameter is a view of the all-gather's output. Everything here is arithmetic on a few integers: no table grows with the
world size, and nothing communicates, so any rank can compute the layout of any other rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from fullshard.errors import InvariantError


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of one parameter in its lane. All sizes are in elements.

    Attributes:
        index: Position of the parameter in the shapes that the unit was planned from.
        start: First lane element of the parameter, a multiple of 16.
        numel: Elements of the parameter.
        row_numel: Elements of one row (one index of dimension 0); 1 for vectors and scalars.
        granule: Elements that are never split: every shard boundary inside the parameter is a multiple of ``granule``
            elements after ``start``.
    """

    index: int
    start: int
    numel: int
    row_numel: int
    granule: int

    @property
    def stop(self) -> int:
        """The lane element just past the parameter."""
        return self.start + self.numel

    @property
    def full_rows(self) -> bool:
        """True if every rank holds full rows of the parameter.

        Examples:
            >>> Placement(index=0, start=0, numel=96, row_numel=8, granule=16).full_rows
            True
            >>> Placement(index=0, start=0, numel=96, row_numel=8, granule=4).full_rows
            False
        """
        return self.granule % self.row_numel == 0


@dataclass(frozen=True, slots=True)
class LaneLayout:
    """One contiguous buffer of ``world_size`` equal shards. All sizes are in elements.

    Attributes:
        world_size: Number of shards, one per rank.
        shard_numel: Elements of each shard, a multiple of 16.
        placements: The parameters of the lane by ascending start; they do not overlap.

    Examples:
        >>> lane = LaneLayout(2, 48, (Placement(0, 0, 60, row_numel=6, granule=6), Placement(1, 64, 5, 1, 1)))
        >>> lane.numel, lane.used_numel, lane.padding_numel
        (96, 65, 31)
        >>> lane.gaps()
        ((60, 64), (69, 96))
    """

    world_size: int
    shard_numel: int
    placements: tuple[Placement, ...]

    @property
    def numel(self) -> int:
        """Elements of the gathered lane, padding included."""
        return self.world_size * self.shard_numel

    @property
    def used_numel(self) -> int:
        """Elements of the lane that belong to parameters."""
        return sum(placement.numel for placement in self.placements)

    @property
    def padding_numel(self) -> int:
        """Elements of the lane that belong to no parameter."""
        return self.numel - self.used_numel

    def shard_bounds(self, rank: int) -> tuple[int, int]:
        """Return the first and past-the-last lane element of a rank's shard.

        Args:
            rank: Rank within the lane's group, from 0 to ``world_size - 1``.

        Returns:
            ``(lo, hi)`` with ``hi - lo == shard_numel``.

        Raises:
            InvariantError: The rank is not one of the lane's ranks.

        Examples:
            >>> LaneLayout(4, 16, ()).shard_bounds(3)
            (48, 64)
        """
        if not 0 <= rank < self.world_size:
            raise InvariantError(
                f"A lane of {self.world_size} shards has ranks 0 to {self.world_size - 1}, not {rank}."
            )
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def local_range(self, placement: Placement, rank: int) -> tuple[int, int]:
        """Return the elements of a parameter that a rank holds.

        Args:
            placement: One of the lane's placements.
            rank: Rank within the lane's group, from 0 to ``world_size - 1``.

        Returns:
            First and past-the-last element, counted within the flattened parameter; ``(0, 0)`` if it holds none.

        Raises:
            InvariantError: The rank is not one of the lane's ranks.

        Examples:
            >>> lane = LaneLayout(3, 48, (Placement(0, 0, 60, row_numel=6, granule=6),))
            >>> [lane.local_range(lane.placements[0], rank) for rank in range(3)]
            [(0, 48), (48, 60), (0, 0)]
        """
        lo, hi = self.shard_bounds(rank)
        first, last = max(lo, placement.start), min(hi, placement.stop)
        return (first - placement.start, last - placement.start) if first < last else (0, 0)

    def owners(self, placement: Placement) -> range:
        """Return the ranks that hold part of a parameter; they are consecutive.

        Args:
            placement: One of the lane's placements.

        Returns:
            The ranks in ascending order, never empty.

        Examples:
            >>> lane = LaneLayout(1024, 16, (Placement(0, 32, 60, row_numel=4, granule=4),))
            >>> lane.owners(lane.placements[0])
            range(2, 6)
        """
        return range(placement.start // self.shard_numel, (placement.stop - 1) // self.shard_numel + 1)

    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Return the intervals ``(lo, hi)`` of the lane that belong to no parameter, ascending, none of them empty."""
        edges = [0, *(edge for p in self.placements for edge in (p.start, p.stop)), self.numel]
        return tuple((lo, hi) for lo, hi in zip(edges[::2], edges[1::2], strict=True) if lo < hi)


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """The lanes of one unit; every parameter is in exactly one of them. All sizes are in elements.

    Attributes:
        lanes: The lanes, each of ``world_size`` shards.
        world_size: Number of ranks that share the unit.
    """

    lanes: tuple[LaneLayout, ...]
    world_size: int

    @property
    def numel(self) -> int:
        """Elements of the gathered unit, padding included."""
        return sum(lane.numel for lane in self.lanes)

    @property
    def used_numel(self) -> int:
        """Elements of the unit that belong to parameters."""
        return sum(lane.used_numel for lane in self.lanes)

    @property
    def padding_numel(self) -> int:
        """Elements of the unit that belong to no parameter."""
        return self.numel - self.used_numel
