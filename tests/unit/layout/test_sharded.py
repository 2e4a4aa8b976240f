"""Shard metadata: the shapes of all ranks together form the parameter."""

from math import prod

from hypothesis import given, settings, strategies as st

from fullshard.core.layout import ShardMeta, plan_unit


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
