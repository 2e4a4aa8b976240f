"""Parts of optimizer state: the ranks together write the unsharded tensor, each element once."""

from math import prod

import pytest
from hypothesis import given, settings, strategies as st

from fullshard.core.layout import ShardMeta, along_rows, by_block, elementwise, on_all_owners, plan_unit
from fullshard.errors import InvariantError

SHAPES = st.lists(st.lists(st.sampled_from([1, 2, 5, 31, 64, 1000]), max_size=3).map(tuple), min_size=1, max_size=6)


def every_rank(shapes, world_size):
    """For each parameter, what every rank knows about it."""
    return [
        [ShardMeta(f"p{p.index}", (), shapes[p.index], lane, p, rank) for rank in range(world_size)]
        for lane in plan_unit(tuple(shapes), world_size).lanes
        for p in lane.placements
    ]


def assert_written_once(parts):
    numel = prod(parts[0].shape)
    written = sorted(part.written for part in parts if part.written != (0, 0))
    assert [low for low, _ in written] == [0, *(high for _, high in written[:-1])]
    assert written[-1][1] == numel
    for part in parts:
        assert prod(part.local_shape) == part.numel == part.held[1] - part.held[0]
        assert part.written == (0, 0) or part.held[0] <= part.written[0] < part.written[1] <= part.held[1]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(SHAPES, st.integers(1, 60), st.sampled_from([1, 3, 16, 24, 256, 5000]))
def test_the_ranks_write_every_element_of_a_state_once(shapes, world_size, block):
    for ranks in every_rank(shapes, world_size):
        shape = ranks[0].global_shape
        assert_written_once([elementwise(meta) for meta in ranks])
        assert_written_once([on_all_owners(meta, (7, 3)) for meta in ranks])
        assert_written_once([by_block(meta, block) for meta in ranks])
        if len(shape) > 1 and ranks[0].row_range is not None:
            assert_written_once([along_rows(meta, shape[:-1]) for meta in ranks])
            assert_written_once([along_rows(meta, (*shape[:-1], 1)) for meta in ranks])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(SHAPES, st.integers(1, 60), st.sampled_from([1, 3, 16, 24, 256, 5000]))
def test_a_rank_holds_the_blocks_of_all_its_elements_and_no_others(shapes, world_size, block):
    for ranks in every_rank(shapes, world_size):
        for meta in ranks:
            start, stop = meta.element_range
            touched = {index // block for index in (start, stop - 1)} if stop > start else set()
            low, high = by_block(meta, block).held
            assert (set() if low == high else {low, high - 1}) == touched


def test_state_on_all_owners_is_nowhere_else():
    ranks = next(ranks for ranks in every_rank([(64, 31), (5,)], 2) if ranks[0].global_shape == (5,))
    assert [on_all_owners(meta, (8,)).held for meta in ranks if meta.rank not in meta.owners] == [(0, 0)]


def test_split_rows_have_no_state_along_them():
    meta = every_rank([(4, 1_000_000)], 8)[0][0]
    with pytest.raises(InvariantError, match="not split by rows"):
        along_rows(meta, (4,))
