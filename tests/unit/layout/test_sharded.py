"""What a rank holds: of a parameter, of its optimizer's state, and as boxes."""

from itertools import pairwise
from math import prod

import pytest
from hypothesis import given, settings, strategies as st

from fullshard.core.layout import ShardMeta, along_rows, boxes, by_block, elementwise, on_all_owners, plan_unit
from fullshard.errors import InvariantError


def shards(shapes: tuple[tuple[int, ...], ...], world_size: int) -> list[list[ShardMeta]]:
    """What every rank knows about each parameter."""
    return [
        [ShardMeta(f"p{p.index}", (), shapes[p.index], lane, p, rank) for rank in range(world_size)]
        for lane in plan_unit(shapes, world_size).lanes
        for p in lane.placements
    ]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.lists(st.sampled_from([1, 2, 5, 31, 64, 1000]), max_size=3).map(tuple), min_size=1, max_size=6).map(
        tuple
    ),
    st.integers(1, 200),
)
def test_local_shapes_hold_every_element_once_and_rows_follow_each_other(shapes, world_size):
    for ranks in shards(shapes, world_size):
        shape = ranks[0].global_shape
        assert sum(prod(meta.local_shape) for meta in ranks) == prod(shape)
        for meta in ranks:
            start, stop = meta.element_range
            assert prod(meta.local_shape) == stop - start
        if not all(meta.row_range for meta in ranks):
            continue
        ranges = [meta.row_range for meta in ranks if meta.element_range != (0, 0)]
        assert [lo for lo, _ in ranges] == [0, *(hi for _, hi in ranges[:-1])]
        assert ranges[-1][1] == (shape[0] if shape else 1)
        if len(shape) > 1:
            assert all(meta.local_shape[1:] == shape[1:] for meta in ranks)


def test_a_scalar_is_a_scalar_on_its_owner_only():
    assert [meta.local_shape for meta in shards(((),), 3)[0]] == [(), (0,), (0,)]


def test_split_rows_have_no_row_range_and_are_rows_of_one_granule():
    metas = shards(((4, 1_000_000),), 8)[0]
    assert {meta.row_range for meta in metas} == {None}
    assert {meta.local_shape for meta in metas} == {(1, 500_000)}


def test_metas_of_one_shard_are_equal_and_hashable():
    first, second = shards(((9, 8), (5,)), 3), shards(((9, 8), (5,)), 3)
    assert first == second
    assert len({*first[0], *second[0]}) == 3


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


bounded = settings(max_examples=200, deadline=None, derandomize=True)


@st.composite
def runs(draw, largest=5):
    shape = tuple(draw(st.lists(st.integers(1, largest), max_size=4)))
    start, stop = sorted((draw(st.integers(0, prod(shape))), draw(st.integers(0, prod(shape)))))
    return shape, start, stop


def elements(shape, box):
    """The flattened elements of a box, in the order of its own flattened elements."""
    found = [0]
    for size, offset, count in zip(shape, box.offsets, box.sizes, strict=True):
        found = [base * size + offset + i for base in found for i in range(count)]
    return found


def fewest(shape, start, stop):
    """Fewest boxes for the run, by trying every box that begins at every element."""
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    best = {stop: 0}
    for first in range(stop - 1, start - 1, -1):
        ends = [first + 1] if not shape else []
        for size, stride in zip(shape, strides, strict=True):
            if first % stride == 0:
                ends += [first + n * stride for n in range(1, size - first // stride % size + 1)]
        best[first] = 1 + min(best[end] for end in ends if end <= stop)
    return best[start]


@given(runs())
@bounded
def test_boxes_hold_exactly_the_run_in_order(run):
    shape, start, stop = run
    found = boxes(shape, start, stop)
    assert [one for box in found for one in elements(shape, box)] == list(range(start, stop))
    assert [box.start for box in found] == [elements(shape, box)[0] for box in found]
    assert all(before.start + before.numel == after.start for before, after in pairwise(found))


@given(runs())
@bounded
def test_boxes_are_as_few_as_can_be(run):
    shape, start, stop = run
    found = boxes(shape, start, stop)
    assert len(found) == fewest(shape, start, stop)
    assert len(found) <= max(1, 2 * len(shape) - 1)


def test_an_empty_tensor_has_no_boxes():
    assert boxes((0, 8), 0, 0) == []
    assert boxes((), 0, 0) == []
