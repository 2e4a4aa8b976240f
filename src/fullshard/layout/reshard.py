"""Move a unit from one layout to another: which elements go from which shard to which.

Pure arithmetic: a checkpoint that was written on 8 ranks is read on 3, or a unit is re-planned, by executing the list.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fullshard.errors import MismatchError
from fullshard.layout.lanes import Lane, Placement, UnitLayout


@dataclass(frozen=True, slots=True)
class Copy:
    """One run of elements that is contiguous in its old shard and in its new one.

    Attributes:
        index: Position of the parameter in the shapes that both units were planned from.
        source_lane: Number of the old lane.
        source_rank: Rank that holds the run in the old layout.
        source_start: First element, counted within that rank's shard of that lane.
        target_lane: Number of the new lane.
        target_rank: Rank that holds the run in the new layout.
        target_start: First element, counted within that rank's shard of that lane.
        numel: Elements of the run.
    """

    index: int
    source_lane: int
    source_rank: int
    source_start: int
    target_lane: int
    target_rank: int
    target_start: int
    numel: int


def copy_list(old: UnitLayout, new: UnitLayout) -> list[Copy]:
    """List the copies that turn shards of ``old`` into shards of ``new``. Any rank may call it; all get the same list.

    Every element of every parameter is copied exactly once; padding is not. The list has at most one entry per
    parameter and per shard that holds part of it in either layout.

    Args:
        old: Layout to read from.
        new: Layout to write to, of the same parameters, on any number of ranks.

    Returns:
        The copies by ascending parameter index, then by element within the parameter.

    Raises:
        MismatchError: The layouts hold different parameters.

    Examples:
        >>> from fullshard.layout.plan import plan_unit
        >>> old, new = plan_unit(((12, 8),), 2), plan_unit(((12, 8),), 3)
        >>> [(c.source_rank, c.source_start, c.target_rank, c.target_start, c.numel) for c in copy_list(old, new)]
        [(0, 0, 0, 0, 32), (0, 32, 1, 0, 16), (1, 0, 1, 16, 16), (1, 16, 2, 0, 32)]
    """
    sources, targets = _by_index(old), _by_index(new)
    sizes = [{index: placement.numel for index, (_, _, placement) in table.items()} for table in (sources, targets)]
    if sizes[0] != sizes[1]:
        index = min(i for i in sizes[0].keys() | sizes[1].keys() if sizes[0].get(i) != sizes[1].get(i))
        raise MismatchError(
            f"Both layouts must hold the same parameters; parameter {index} has {sizes[0].get(index, 0)} elements in "
            f"the old one and {sizes[1].get(index, 0)} in the new one. Plan both from the shapes of the same model."
        )
    return [copy for index in sorted(sources) for copy in _copies(sources[index], targets[index])]


def _by_index(layout: UnitLayout) -> dict[int, tuple[int, Lane, Placement]]:
    """Find lane number, lane and placement of each parameter."""
    return {p.index: (number, lane, p) for number, lane in enumerate(layout.lanes) for p in lane.placements}


def _copies(source: tuple[int, Lane, Placement], target: tuple[int, Lane, Placement]) -> Iterator[Copy]:
    """Cut one parameter at the shard boundaries of both layouts."""
    source_lane, old, source_place = source
    target_lane, new, target_place = target
    done = 0
    while done < source_place.numel:
        source_rank, source_start = divmod(source_place.start + done, old.shard_numel)
        target_rank, target_start = divmod(target_place.start + done, new.shard_numel)
        numel = min(source_place.numel - done, old.shard_numel - source_start, new.shard_numel - target_start)
        yield Copy(
            source_place.index, source_lane, source_rank, source_start, target_lane, target_rank, target_start, numel
        )
        done += numel
