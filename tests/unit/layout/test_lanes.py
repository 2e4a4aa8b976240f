"""Lanes: ranges, owners, gaps and bounds agree with each other, in time independent of the world size."""

from itertools import pairwise
from math import prod

import pytest
from hypothesis import given, settings, strategies as st

from fullshard.core.layout import LaneLayout, Placement, plan_unit
from fullshard.errors import InvariantError

shapes_of_units = st.lists(
    st.lists(st.sampled_from([1, 3, 8, 31, 64, 100, 768]), max_size=3).map(tuple), min_size=1, max_size=7
).map(tuple)
bounded = settings(max_examples=100, deadline=None, derandomize=True)


def test_sizes_add_up():
    lane = LaneLayout(4, 32, (Placement(1, 0, 60, 6, 6), Placement(0, 64, 5, 1, 1)))
    assert (lane.numel, lane.used_numel, lane.padding_numel) == (128, 65, 63)
    assert lane.gaps() == ((60, 64), (69, 128))
    assert [lane.shard_bounds(rank) for rank in range(4)] == [(0, 32), (32, 64), (64, 96), (96, 128)]


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_lane_is_an_error(rank):
    lane = LaneLayout(4, 32, (Placement(0, 0, 60, 6, 6),))
    with pytest.raises(InvariantError, match=f"ranks 0 to 3, not {rank}"):
        lane.local_range(lane.placements[0], rank)


@bounded
@given(shapes_of_units, st.integers(1, 1024))
def test_owners_are_the_ranks_with_a_local_range(shapes, world_size):
    for lane in plan_unit(shapes, world_size).lanes:
        for placement in lane.placements:
            holders = [r for r in range(world_size) if lane.local_range(placement, r) != (0, 0)]
            assert holders == list(lane.owners(placement))


@bounded
@given(shapes_of_units, st.integers(1, 1024))
def test_gaps_and_parameters_tile_the_lane(shapes, world_size):
    for lane in plan_unit(shapes, world_size).lanes:
        pieces = sorted([*lane.gaps(), *((p.start, p.stop) for p in lane.placements)])
        assert pieces[0][0] == 0
        assert pieces[-1][1] == lane.numel
        assert all(before[1] == after[0] for before, after in pairwise(pieces))
        assert sum(hi - lo for lo, hi in lane.gaps()) == lane.padding_numel


def test_ranges_are_arithmetic_at_any_world_size():
    """A lane of a billion ranks answers at once and is as small as a lane of two."""
    lane = LaneLayout(10**9, 4096, (Placement(0, 0, 4096 * 10**9, 4096, 4096),))
    assert lane.local_range(lane.placements[0], 10**9 - 1) == (4096 * (10**9 - 1), 4096 * 10**9)
    owners = lane.owners(lane.placements[0])
    assert (owners.start, owners.stop) == (0, 10**9)
    assert len({lane, LaneLayout(10**9, 4096, lane.placements)}) == 1


def test_a_unit_sums_its_lanes():
    shapes = ((768, 3072), (3072, 768), *((768, 768),) * 4, (768,), (768,))
    layout = plan_unit(shapes, 512)
    assert len(layout.lanes) > 1
    assert layout.numel == sum(lane.world_size * lane.shard_numel for lane in layout.lanes)
    assert layout.used_numel == sum(map(prod, shapes))
    assert layout.padding_numel == layout.numel - layout.used_numel
