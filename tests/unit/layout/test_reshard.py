"""Laws of the copy list: executed on memory made of lists, it moves every element to its new place, and back."""

from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.errors import MismatchError
from fullshard.layout import Copy, UnitLayout, copy_list, plan_unit

Memory = list[list[list[int]]]  # one list of elements by lane and rank

EMPTY = -1

small_units = st.lists(
    st.lists(st.sampled_from([1, 2, 3, 5, 8, 12, 16, 31, 40]), max_size=3).map(tuple).filter(lambda s: prod(s) <= 2000),
    min_size=1,
    max_size=6,
).map(tuple)
world_sizes = st.one_of(st.integers(1, 12), st.integers(1, 1024))
bounded = settings(max_examples=60, deadline=None, derandomize=True)


def empty(layout: UnitLayout) -> Memory:
    return [[[EMPTY] * lane.shard_numel for _ in range(lane.world_size)] for lane in layout.lanes]


def filled(layout: UnitLayout, shapes: tuple[tuple[int, ...], ...]) -> Memory:
    """Memory that holds a different number in every element of every parameter."""
    firsts = [sum(map(prod, shapes[:index])) for index in range(len(shapes))]
    memory = empty(layout)
    for number, lane in enumerate(layout.lanes):
        for placement in lane.placements:
            for element in range(placement.numel):
                rank, offset = divmod(placement.start + element, lane.shard_numel)
                memory[number][rank][offset] = firsts[placement.index] + element
    return memory


def execute(copies: list[Copy], source: Memory, target: Memory) -> None:
    for c in copies:
        values = source[c.source_lane][c.source_rank][c.source_start : c.source_start + c.numel]
        place = slice(c.target_start, c.target_start + c.numel)
        assert len(values) == c.numel
        assert target[c.target_lane][c.target_rank][place] == [EMPTY] * c.numel
        target[c.target_lane][c.target_rank][place] = values


@bounded
@given(small_units, world_sizes, world_sizes, st.sampled_from([1, 4]))
def test_elements_move_to_their_new_place_and_back(shapes, old_size, new_size, block_rows):
    old, new = plan_unit(shapes, old_size), plan_unit(shapes, new_size, block_rows=block_rows)
    before, between, after = filled(old, shapes), empty(new), empty(old)
    execute(copy_list(old, new), before, between)
    assert between == filled(new, shapes)
    execute(copy_list(new, old), between, after)
    assert after == before


@bounded
@given(small_units, world_sizes, world_sizes)
def test_the_list_is_no_longer_than_the_shards_it_touches(shapes, old_size, new_size):
    old, new = plan_unit(shapes, old_size), plan_unit(shapes, new_size)
    owners = sum(len(lane.owners(p)) for unit in (old, new) for lane in unit.lanes for p in lane.placements)
    copies = copy_list(old, new)
    assert len(shapes) <= len(copies) <= owners - len(shapes)
    assert [copy.index for copy in copies] == sorted(copy.index for copy in copies)


def test_parameters_move_between_lanes():
    """On 512 ranks a T5-base block has three lanes, on 8 ranks one."""
    shapes = ((768, 3072), (3072, 768), *((768, 768),) * 4, (768,), (768,))
    old, new = plan_unit(shapes, 512), plan_unit(shapes, 8)
    copies = copy_list(old, new)
    assert {copy.source_lane for copy in copies} == {0, 1, 2}
    assert {copy.target_lane for copy in copies} == {0}
    assert sum(copy.numel for copy in copies) == sum(map(prod, shapes))


def test_layouts_of_different_parameters_are_refused():
    with pytest.raises(MismatchError, match="parameter 1 has 8 elements in the old one and 9 in the new one"):
        copy_list(plan_unit(((4, 4), (8,)), 2), plan_unit(((4, 4), (9,)), 2))


def test_a_missing_parameter_is_refused():
    with pytest.raises(MismatchError, match="parameter 1 has 0 elements in the old one and 8 in the new one"):
        copy_list(plan_unit(((4, 4),), 2), plan_unit(((4, 4), (8,)), 2))
