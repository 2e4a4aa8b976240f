"""Where every element of a unit's parameters is stored, and the planning of that: few lanes, little padding, full rows.

A *unit* is gathered and reduced together. Its memory is one or more *lanes*; a lane is one contiguous buffer of
``world_size`` equal shards, and rank ``r`` owns shard ``r``. A parameter is contiguous in its lane, so the gathered
parameter is a view of the all-gather's output. Everything here is arithmetic on a few integers: no table grows with the
world size, and nothing communicates, so any rank can compute the layout of any other rank.

The invariant
    A parameter of granule ``g`` that starts at ``a`` in a lane of shards of ``S`` elements satisfies
    ``(k * S - a) % g == 0`` for every shard boundary ``k * S`` inside it. With ``g`` = the elements of a row (or of
    ``block_rows`` rows) every rank holds full rows, as Adafactor, Muon and block-wise 8-bit optimizers need.
    Starts and ``S`` are multiples of 16. That never conflicts: boundaries are multiples of 16, so a start that is
    congruent to one modulo ``g`` can also be a multiple of 16.

The lemma
    A parameter that crosses two boundaries or more forces ``g | S`` (subtract the two congruences). So a parameter
    longer than ``2 * S`` forces ``g | S``; one that crosses a single boundary only has to start at the right
    residue, and one that crosses none is free.

The search
    *Filling* a lane of given ``S``: parameters by descending granule, then size, each at the first place that keeps
    the invariant, gaps included; parameters that do not fit are left over.

    *One lane*: for every k, let the k largest parameters be those that force their granule on ``S``, and take the
    smallest ``S`` that is a multiple of these granules, not below an equal share of all elements nor half of the next
    parameter, and that can be filled with all parameters.

    *Several lanes*: let the coarsest granule decide the first lane, try its multiples as ``S``, fill, and plan the
    parameters left over in the remaining lanes. Fine-grained parameters fill the gaps of coarse ones, and lanes that
    waste more than the best plan so far are cut off. The fewest lanes (at most ``MAX_LANES``) within ``LANE_BUDGET``
    win, otherwise the least padding. A lane for each granule instead would split 12.7 % of T5-base's parameters on 512
    ranks, where this search splits none.

    *Row split*: when the least padding is above ``SPLIT_BUDGET`` (fewer rows than ranks, for instance), the coarsest
    granule is divided by a prime and the search repeated; at granule 1 everything fits in one lane. A parameter whose
    boundaries happen to keep its full granule gets it back. There are two strategies, dividing by the smallest prime or
    by the prime that leaves the most in common with the next granule; the one that splits fewer elements wins.

    Example: a T5-base encoder block on 512 ranks has 12 * 768 * 768 elements in matrices, 18 * 768 for each rank.
    The ``(768, 3072)`` matrix forces ``3072 | S`` on its lane. One lane would pad 11 %; a lane of ``S = 9216`` that
    holds it and the ``(3072, 768)`` one, a lane of ``S = 4608`` for the four square ones and a lane of ``S = 16`` for
    the two norms pad 0.1 %, all in full rows.

Everything is integer arithmetic on shapes, the world size and ``block_rows``: each rank computes the same plan alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count
from math import gcd, lcm, prod

from fullshard.errors import ConfigError, InvariantError, ProcessGroupError, WrapError


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


ALIGNMENT = 16
"""Starts of parameters and sizes of shards are multiples of this many elements."""
MAX_LANES = 4
"""A unit has at most this many lanes; each lane is one more all-gather and one more reduce-scatter."""
LANE_BUDGET = 100
"""Fewer lanes win while padding is at most 1/100 of the unit."""
SPLIT_BUDGET = 33
"""Rows are split only when padding would be more than 1/33 (3 %) of the unit."""
NEGLIGIBLE = 16_384
"""Padding of at most this many elements (32 KiB in bfloat16) never justifies a further lane or a split row."""
MAX_WORK = 300_000
"""Placements tried (about a second) before the search for several lanes ends with the best plan so far."""
MAX_STEPS = 128
"""Shard sizes tried for each coarsest granule of a lane."""
MAX_GROWTH = 8
"""Times that a shard size is increased for parameters that did not fit, before its granules are abandoned."""
PATIENT_ROUNDS = 8
"""Rounds in which only the coarsest granule is refined; later, all within a factor of two of it, to end sooner."""


@dataclass(frozen=True, slots=True)
class _Item:
    """A parameter to place: its position in the shapes, sizes, and the preferred and current granule."""

    index: int
    numel: int
    row_numel: int
    preferred: int
    granule: int


@dataclass(frozen=True, slots=True)
class _Filled:
    """A filled lane: its shard size and the starts of its parameters."""

    shard_numel: int
    starts: tuple[tuple[int, _Item], ...]


@lru_cache(maxsize=1024)
def plan_unit(shapes: tuple[tuple[int, ...], ...], world_size: int, *, block_rows: int = 1) -> UnitLayout:
    """Plan where the parameters of one unit are stored. Cached; pure, so every rank computes the same plan.

    Args:
        shapes: Shapes of the parameters; a row is one index of dimension 0, and vectors have rows of one element.
        world_size: Number of ranks that share the unit.
        block_rows: Rows that should stay together on a rank, counted from a parameter's first row.

    Returns:
        The layout. ``Placement.index`` is the position in ``shapes``. If full blocks (or full rows) would cost more
        than 3 % padding, ``Placement.granule`` is smaller and divides the block (or the row).

    Raises:
        WrapError: There is no parameter, or one of them has no element.
        ProcessGroupError: ``world_size`` is below 1.
        ConfigError: ``block_rows`` is below 1.

    Examples:
        >>> layout = plan_unit(((100, 48), (100,)), 4)
        >>> [(p.index, p.start, p.granule) for p in layout.lanes[0].placements]
        [(0, 0, 48), (1, 4800, 1)]
        >>> layout.lanes[0].shard_numel, layout.padding_numel
        (1248, 92)
    """
    _check(shapes, world_size, block_rows)
    items = [_item(index, shape, block_rows) for index, shape in enumerate(shapes)]
    total = _aligned_total(items)
    lane_waste, split_waste = (
        max(total // budget, 2 * ALIGNMENT * world_size, NEGLIGIBLE) for budget in (LANE_BUDGET, SPLIT_BUDGET)
    )
    largest_shard = (total + split_waste) // world_size
    items = [_fit_shard(item, largest_shard) for item in items]
    preferred = [item.preferred for item in items]
    halved = _split_until_found(items, _Search(world_size, lane_waste, split_waste), in_step=False)
    if _split_numel(halved, preferred) == 0:
        return halved
    in_step = _split_until_found(items, _Search(world_size, lane_waste, split_waste), in_step=True)
    return min(halved, in_step, key=lambda layout: (_split_numel(layout, preferred), len(layout.lanes), layout.numel))


def _split_until_found(items: list[_Item], search: _Search, *, in_step: bool) -> UnitLayout:
    """Search with ever finer granules. It terminates: when all granules are 1, one lane is within budget."""
    for rounds in count():
        lanes = search.best_lanes(items)
        if lanes is not None:
            return UnitLayout(tuple(_lane(filled, search.world_size) for filled in lanes), search.world_size)
        items = _refine(items, rounds, in_step=in_step)
    raise InvariantError("No lanes were found for a unit, though granules of one element always fit.")


def _split_numel(layout: UnitLayout, preferred: list[int]) -> int:
    """Return the elements of the parameters whose granule is finer than the preferred one."""
    return sum(p.numel for lane in layout.lanes for p in lane.placements if p.granule != preferred[p.index])


def _check(shapes: tuple[tuple[int, ...], ...], world_size: int, block_rows: int) -> None:
    """Refuse shapes and sizes that have no layout, naming the numbers."""
    if not shapes:
        raise WrapError("A unit needs at least one parameter; got none. Wrap a module that has parameters of its own.")
    for index, shape in enumerate(shapes):
        if any(size < 1 for size in shape):
            raise WrapError(
                f"Every parameter of a unit needs at least one element; parameter {index} of {len(shapes)} has shape "
                f"{tuple(shape)}. Remove it from the model or pass it in ignored_params."
            )
    if world_size < 1:
        raise ProcessGroupError(f"The world size must be at least 1; got {world_size}.")
    if block_rows < 1:
        raise ConfigError(f"block_rows must be at least 1; got {block_rows}.")


def _item(index: int, shape: tuple[int, ...], block_rows: int) -> _Item:
    """Describe one parameter; blocks consist of rows, and vectors and scalars need no granule."""
    if len(shape) < 2:
        return _Item(index, prod(shape), 1, 1, 1)
    row_numel = prod(shape[1:])
    granule = row_numel * min(block_rows, shape[0])
    return _Item(index, prod(shape), row_numel, granule, granule)


def _up(value: int, multiple: int) -> int:
    """Round up to a multiple."""
    return -(-value // multiple) * multiple


def _aligned_total(items: list[_Item]) -> int:
    """Return the elements that parameters take when each starts aligned: a lower bound for every plan."""
    return sum(_up(item.numel, ALIGNMENT) for item in items)


@lru_cache(maxsize=1024)
def _prime_factors(value: int) -> tuple[int, ...]:
    """Return the distinct prime factors of a number above 1, ascending.

    Examples:
        >>> _prime_factors(4800), _prime_factors(7)
        ((2, 3, 5), (7,))
    """
    factors: list[int] = []
    factor = 2
    while factor * factor <= value:
        if value % factor == 0:
            factors.append(factor)
            while value % factor == 0:
                value //= factor
        factor += 1
    return (*factors, value) if value > 1 else tuple(factors)


def _finer(item: _Item, partner: int) -> _Item:
    """Divide the granule by a prime: a block into equal runs of rows, a row into equal parts.

    Takes the prime that leaves the most in common with ``partner``, a granule it may share a lane with, and of these
    the smallest. The result divides the row or is a multiple of it, so a parameter whose rows are split always consists
    of full granules.

    Examples:
        >>> _finer(_Item(0, 9600, 4800, 4800, 4800), 1600).granule
        1600
        >>> _finer(_Item(0, 9600, 4800, 4800, 4800), 1).granule
        2400
    """
    unit = item.row_numel if item.granule > item.row_numel else 1
    choices = [item.granule // factor for factor in _prime_factors(item.granule // unit)]
    return replace(item, granule=max(choices, key=lambda granule: (gcd(granule, partner), granule)))


def _too_coarse(item: _Item, largest_shard: int) -> bool:
    """Return whether no shard up to this size can keep the invariant.

    A shard below half of the parameter has two boundaries inside it, and then needs to be as large as the granule.
    """
    return min(item.granule, -(-item.numel // 2)) > largest_shard


def _fit_shard(item: _Item, largest_shard: int) -> _Item:
    """Make the granule fine enough for a shard of the largest size that the budget allows."""
    while _too_coarse(item, largest_shard):
        item = _finer(item, 1)
    return item


def _refine(items: list[_Item], rounds: int, *, in_step: bool) -> list[_Item]:
    """Make the coarsest granule finer; in late rounds all granules within a factor of two of it."""
    coarsest = max(item.granule for item in items)
    keep = coarsest - 1 if rounds < PATIENT_ROUNDS else coarsest // 2
    partner = max((item.granule for item in items if item.granule <= keep), default=1) if in_step else 1
    return [_finer(item, partner) if item.granule > keep else item for item in items]


class _Search:
    """Search for the lanes of parameters on ``world_size`` ranks, with a bounded amount of work.

    Work is counted in placements tried, not in seconds, so that all ranks stop at the same point.
    """

    def __init__(self, world_size: int, lane_waste: int, split_waste: int) -> None:
        """Start with the full allowance of work.

        Args:
            world_size: Number of ranks that share the unit.
            lane_waste: Elements of padding allowed in a plan with fewer lanes.
            split_waste: Elements of padding allowed in any plan.
        """
        self.world_size = world_size
        self.lane_waste = lane_waste
        self.split_waste = split_waste
        self.work = MAX_WORK

    def best_lanes(self, items: list[_Item]) -> list[_Filled] | None:
        """Return the fewest lanes within ``lane_waste``, else the least waste within ``split_waste``, else None."""
        items = sorted(items, key=lambda item: (-item.granule, -item.numel, item.index))
        best: list[_Filled] | None = None
        limit = self.split_waste
        for lane_count in range(1, MAX_LANES + 1):
            found = self.exactly(items, lane_count, limit)
            if found is not None:
                best, limit = found, self.waste(found, items) - 1
            if best is not None and limit < self.lane_waste:
                break
        return best

    def waste(self, lanes: list[_Filled], items: list[_Item]) -> int:
        """Return the elements of the lanes beyond those of their aligned parameters."""
        return sum(filled.shard_numel for filled in lanes) * self.world_size - _aligned_total(items)

    def exactly(self, items: list[_Item], lane_count: int, limit: int) -> list[_Filled] | None:
        """Plan ``lane_count`` lanes that together waste at most ``limit`` elements, with the least waste found."""
        if lane_count == 1:
            filled = self.one(items, limit)
            return None if filled is None else [filled]
        total = _aligned_total(items)
        best: list[_Filled] | None = None
        for shard_numel in _first_shards(items, self.world_size, total + limit):
            if self.work <= 0:
                break
            filled, left = self.fill(items, shard_numel)
            waste = shard_numel * self.world_size - (total - _aligned_total(left))
            if waste > limit or len(left) in (0, len(items)):
                continue
            rest = self.exactly(left, lane_count - 1, limit - waste)
            if rest is not None:
                best = [filled, *rest]
                limit = self.waste(best, items) - 1
        return best

    def one(self, items: list[_Item], limit: int) -> _Filled | None:
        """Plan one lane for all parameters that wastes at most ``limit`` elements, with the least waste found."""
        total = _aligned_total(items)
        share = _up(-(-total // self.world_size), ALIGNMENT)
        largest = (total + limit) // self.world_size
        best: _Filled | None = None
        tried: set[int] = set()
        step = ALIGNMENT
        # The parameters before this one force their granule on the shard; this one and the rest may have less
        # than two boundaries each.
        for item in sorted(items, key=lambda item: -item.numel):
            floor = max(share, -(-item.numel // 2))
            best = self.grow(items, _up(floor, step), step, largest, tried) or best
            if best is not None:
                largest = best.shard_numel - 1
            if item.numel <= share:
                return best
            step = lcm(step, item.granule)
            if step > largest:
                return best
        return self.grow(items, _up(share, step), step, largest, tried) or best

    def grow(self, items: list[_Item], shard_numel: int, step: int, largest: int, tried: set[int]) -> _Filled | None:
        """Fill shards of ``shard_numel``, increased by multiples of ``step``, until everything fits."""
        for _ in range(MAX_GROWTH):
            if shard_numel > largest or shard_numel in tried:
                return None
            tried.add(shard_numel)
            filled, left = self.fill(items, shard_numel)
            if not left:
                return filled
            shard_numel = _up(shard_numel + -(-_aligned_total(left) // self.world_size), step)
        return None

    def fill(self, items: list[_Item], shard_numel: int) -> tuple[_Filled, list[_Item]]:
        """Place parameters in order, each at the first place that keeps the invariant; also return those left over."""
        self.work -= len(items)
        starts: list[tuple[int, _Item]] = []
        left: list[_Item] = []
        gaps = [(0, self.world_size * shard_numel)]
        for item in items:
            for number, (lo, hi) in enumerate(gaps):
                if hi - lo < item.numel:
                    continue
                start = _first_start(lo, item, shard_numel)
                if start is not None and start + item.numel <= hi:
                    starts.append((start, item))
                    after = _up(start + item.numel, ALIGNMENT)
                    gaps[number : number + 1] = [gap for gap in ((lo, start), (after, hi)) if gap[0] < gap[1]]
                    break
            else:
                left.append(item)
        return _Filled(shard_numel, tuple(starts)), left


def _first_shards(items: list[_Item], world_size: int, capacity: int) -> Iterator[int]:
    """Yield shard sizes to try for the lane of the coarsest granule: multiples of it, and of it and the next ones."""
    if any(_too_coarse(item, capacity // world_size) for item in items):
        return
    step, seen = ALIGNMENT, 0
    for granule in dict.fromkeys(item.granule for item in items):
        step = lcm(step, granule)
        most = capacity // (step * world_size)
        if most == 0:
            return
        if step != seen:
            stride = -(-most // MAX_STEPS)
            yield from range(step * stride, step * most + 1, step * stride)
            seen = step


def _first_start(lo: int, item: _Item, shard_numel: int) -> int | None:
    """Return the first aligned start from ``lo`` (aligned too) on that keeps the invariant, in an unbounded lane."""
    boundary = (lo // shard_numel + 1) * shard_numel
    if lo + item.numel <= boundary:
        return lo
    step = lcm(item.granule, ALIGNMENT)
    if shard_numel % step == 0:
        return _up(lo, step)
    # Now at most one boundary may be inside: start a multiple of the granule before it, and end before the next.
    start = boundary - (boundary - lo) // step * step
    if start + item.numel <= boundary + shard_numel and start < boundary:
        return start
    if item.numel <= shard_numel:
        return boundary
    start = boundary + shard_numel % step
    return start if start + item.numel <= boundary + 2 * shard_numel else None


def _lane(filled: _Filled, world_size: int) -> LaneLayout:
    """Freeze a filled lane, restoring full granules where the boundaries keep them."""
    placements: list[Placement] = []
    for start, item in sorted(filled.starts, key=lambda pair: pair[0]):
        coarser = (item.preferred, max(item.granule, item.row_numel))
        granule = next((g for g in coarser if _keeps(start, item.numel, g, filled.shard_numel)), item.granule)
        placements.append(Placement(item.index, start, item.numel, item.row_numel, granule))
    return LaneLayout(world_size, filled.shard_numel, tuple(placements))


def _keeps(start: int, numel: int, granule: int, shard_numel: int) -> bool:
    """Return whether every shard boundary inside a parameter is a multiple of ``granule`` after its start."""
    first = (start // shard_numel + 1) * shard_numel
    if first >= start + numel:
        return True
    several = first + shard_numel < start + numel
    return (first - start) % granule == 0 and (not several or shard_numel % granule == 0)
