"""Plans of a unit: every element has one place, shards are equal, boundaries do not split granules."""

from itertools import pairwise
from math import prod

import pytest
from hypothesis import given, settings, strategies as st

from fullshard.core.layout import LaneLayout, Placement, UnitLayout, plan_unit, unit_layout
from fullshard.errors import ConfigError, InvariantError, ProcessGroupError, WrapError

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


Shapes = tuple[tuple[int, ...], ...]

WORLD_SIZES = (2, 8, 64, 512, 1024)


def t5(width: int, hidden: int, inner: int, heads: int, layers: int) -> list[tuple[Shapes, int]]:
    """Units of a T5 and how often each occurs: first and other blocks of both stacks, and the rest at the root."""
    attention = ((inner, width), (inner, width), (inner, width), (width, inner))
    feed_forward = ((hidden, width), (width, hidden))
    encoder = (*attention, *feed_forward, (width,), (width,))
    decoder = (*attention, *attention, *feed_forward, (width,), (width,), (width,))
    bias = (32, heads)
    return [
        ((*encoder, bias), 1),
        (encoder, layers - 1),
        ((*decoder, bias), 1),
        (decoder, layers - 1),
        (((32128, width), (width,), (width,)), 1),
    ]


def llama3(width: int, hidden: int, layers: int) -> list[tuple[Shapes, int]]:
    """Units of a Llama 3 and how often each occurs: blocks, embedding, head with the last norm."""
    attention = ((width, width), (1024, width), (1024, width), (width, width))
    block = (*attention, (hidden, width), (hidden, width), (width, hidden), (width,), (width,))
    return [(block, layers), (((128256, width),), 1), (((128256, width), (width,)), 1)]


MODELS = {
    "T5-base": t5(768, 3072, 768, 12, 12),
    "T5-3B": t5(1024, 16384, 4096, 32, 24),
    "T5-11B": t5(1024, 65536, 16384, 128, 24),
    "Llama-3-8B": llama3(4096, 14336, 32),
    "Llama-3-70B": llama3(8192, 28672, 80),
}

# Most padding allowed in percent of the parameters, rounded to two decimals, and most lanes of a unit, by world size.
TABLE = {
    "T5-base": [(0.00, 1), (0.15, 1), (0.03, 2), (0.13, 3), (0.40, 3)],
    "T5-3B": [(0.00, 1), (0.11, 1), (0.00, 2), (0.01, 2), (0.05, 2)],
    "T5-11B": [(0.00, 1), (0.11, 1), (0.00, 2), (0.00, 2), (0.01, 2)],
    "Llama-3-8B": [(0.00, 1), (0.01, 1), (0.10, 1), (0.86, 1), (0.08, 3)],
    "Llama-3-70B": [(0.00, 1), (0.04, 1), (0.36, 1), (0.48, 2), (0.97, 2)],
}

CASES = [(model, n, *limits) for model in MODELS for n, limits in zip(WORLD_SIZES, TABLE[model], strict=True)]


def planned(model: str, world_size: int, block_rows: int = 1) -> list[tuple[UnitLayout, int]]:
    return [(plan_unit(shapes, world_size, block_rows=block_rows), times) for shapes, times in MODELS[model]]


def parameters_numel(model: str) -> int:
    return sum(times * prod(shape) for shapes, times in MODELS[model] for shape in shapes)


@pytest.mark.parametrize(("model", "world_size", "percent", "lanes"), CASES)
def test_padding_and_lanes_of_whole_rows(model, world_size, percent, lanes):
    layouts = planned(model, world_size)
    padding = sum(layout.padding_numel * times for layout, times in layouts)
    assert round(100 * padding / parameters_numel(model), 2) <= percent
    assert max(len(layout.lanes) for layout, _ in layouts) <= lanes


@pytest.mark.parametrize(("model", "world_size"), [case[:2] for case in CASES if case[:2] != ("T5-base", 1024)])
def test_no_row_is_split(model, world_size):
    placements = [p for layout, _ in planned(model, world_size) for lane in layout.lanes for p in lane.placements]
    assert all(placement.full_rows for placement in placements)


def test_t5_base_on_1024_ranks_splits_one_matrix_of_the_encoder_blocks():
    """768 rows of 3072 are fewer than the ranks, and no lanes of whole rows pad an encoder block below 10 %."""
    layouts = planned("T5-base", 1024)
    split = [
        (p.row_numel, p.granule, times)
        for layout, times in layouts
        for lane in layout.lanes
        for p in lane.placements
        if not p.full_rows
    ]
    assert {(row, row % granule) for row, granule, _ in split} == {(3072, 0)}
    assert sum(times for _, _, times in split) == 12


@pytest.mark.parametrize("block_rows", [32, 128])
@pytest.mark.parametrize("model", list(MODELS))
def test_blocks_of_rows_pad_at_most_three_percent(model, block_rows):
    for world_size in WORLD_SIZES:
        padding = sum(layout.padding_numel * times for layout, times in planned(model, world_size, block_rows))
        assert padding <= 0.031 * parameters_numel(model)


ALIGNMENT = 16

dims = st.sampled_from([1, 2, 3, 5, 7, 8, 12, 16, 31, 64, 96, 100, 128, 257, 384, 768, 1000, 1024])
shape_tuples = st.lists(dims, max_size=4).map(tuple).filter(lambda shape: prod(shape) <= 4_000_000)
units = st.lists(shape_tuples, min_size=1, max_size=9).map(tuple)
world_sizes = st.one_of(st.integers(1, 16), st.sampled_from([32, 64, 100, 128, 512, 1024]), st.integers(1, 1024))
block_rows = st.sampled_from([1, 1, 1, 2, 3, 32, 128])


def fresh_plan(shapes: tuple[tuple[int, ...], ...], world_size: int, rows: int = 1) -> UnitLayout:
    return plan_unit.__wrapped__(shapes, world_size, block_rows=rows)


def pairs(layout: UnitLayout) -> list[tuple[LaneLayout, Placement]]:
    return [(lane, placement) for lane in layout.lanes for placement in lane.placements]


def row_numel(shape: tuple[int, ...]) -> int:
    return prod(shape[1:]) if len(shape) > 1 else 1


@bounded
@given(units, world_sizes, block_rows)
def test_every_parameter_is_placed_once_inside_its_lane_and_alone(shapes, world_size, rows):
    layout = fresh_plan(shapes, world_size, rows)
    assert sorted(placement.index for _, placement in pairs(layout)) == list(range(len(shapes)))
    for lane in layout.lanes:
        end = 0
        for placement in lane.placements:
            assert placement.start >= end
            assert placement.start % ALIGNMENT == 0
            assert placement.numel == prod(shapes[placement.index])
            assert placement.row_numel == row_numel(shapes[placement.index])
            end = placement.stop
        assert 0 < end <= lane.numel


@bounded
@given(units, world_sizes, block_rows)
def test_the_ranks_cover_every_element_once_in_equal_shards(shapes, world_size, rows):
    layout = fresh_plan(shapes, world_size, rows)
    for lane in layout.lanes:
        assert lane.world_size == layout.world_size == world_size
        assert lane.shard_numel % ALIGNMENT == 0
        assert lane.numel == world_size * lane.shard_numel
        for placement in lane.placements:
            covered = 0
            for rank in range(world_size):
                start, stop = lane.local_range(placement, rank)
                if start < stop:
                    assert start == covered
                    covered = stop
                else:
                    assert (start, stop) == (0, 0)
            assert covered == prod(shapes[placement.index])


@bounded
@given(units, world_sizes, block_rows)
def test_shard_boundaries_inside_a_parameter_fall_between_granules(shapes, world_size, rows):
    for lane, placement in pairs(fresh_plan(shapes, world_size, rows)):
        for boundary in range(lane.shard_numel, lane.numel, lane.shard_numel):
            if placement.start < boundary < placement.stop:
                assert (boundary - placement.start) % placement.granule == 0


@bounded
@given(units, world_sizes, block_rows)
def test_a_granule_is_the_block_or_a_part_that_divides_it(shapes, world_size, rows):
    for _, placement in pairs(fresh_plan(shapes, world_size, rows)):
        shape, row = shapes[placement.index], row_numel(shapes[placement.index])
        block = row * min(rows, shape[0]) if len(shape) > 1 else 1
        assert block % placement.granule == 0
        assert placement.granule % row == 0 or row % placement.granule == 0
        assert placement.full_rows == (placement.granule % row == 0)


@bounded
@given(units, world_sizes, block_rows)
def test_padding_and_lanes_stay_within_their_budgets(shapes, world_size, rows):
    layout = fresh_plan(shapes, world_size, rows)
    aligned = sum(-(-prod(shape) // ALIGNMENT) * ALIGNMENT for shape in shapes)
    allowed = max(0.0304 * aligned, 2 * ALIGNMENT * world_size, 16_384)
    assert layout.numel - aligned <= allowed
    assert layout.used_numel == sum(map(prod, shapes))
    assert layout.padding_numel == layout.numel - layout.used_numel
    assert len(layout.lanes) <= 4


@bounded
@given(units, block_rows)
def test_one_rank_pads_nothing_beyond_alignment(shapes, rows):
    layout = fresh_plan(shapes, 1, rows)
    assert len(layout.lanes) == 1
    assert layout.numel == sum(-(-prod(shape) // ALIGNMENT) * ALIGNMENT for shape in shapes)


@settings(bounded, max_examples=150)
@given(start=st.integers(0, 12), numel=st.integers(1, 700), granule=st.integers(1, 60), shard=st.integers(1, 12))
def test_the_first_start_is_what_trying_every_start_finds(start, numel, granule, shard):
    """The closed form against trying every aligned start over three shards."""
    lo, shard_numel = start * ALIGNMENT, shard * ALIGNMENT

    def keeps(at: int) -> bool:
        return all((b - at) % granule == 0 for b in range(0, at + numel, shard_numel) if b > at)

    # Whether a start keeps the promise depends on its place in its shard, and its residue if shards are no multiple.
    limit = lo + 3 * shard_numel
    expected = next((at for at in range(lo, limit, ALIGNMENT) if keeps(at)), None)
    assert unit_layout._first_start(lo, unit_layout._Item(0, numel, granule, granule, granule), shard_numel) == expected


def test_small_models_keep_whole_rows_in_one_lane():
    """Padding of a few thousand elements never costs a further lane or a split row."""
    block = ((64, 64), (64, 64), (64, 64), (64, 64), (256, 64), (64, 256), (64,), (64,))
    for world_size in (2, 3, 4, 5, 6, 7, 8):
        layout = plan_unit(block, world_size)
        assert len(layout.lanes) == 1
        assert all(placement.full_rows for _, placement in pairs(layout))


@pytest.mark.parametrize("world_size", [2, 64, 1024, 16384])
def test_a_lone_norm_vector_costs_at_most_the_smallest_shards(world_size):
    layout = plan_unit(((768,),), world_size)
    assert layout.numel == world_size * max(ALIGNMENT, -(-768 // world_size // ALIGNMENT) * ALIGNMENT)


@pytest.mark.parametrize("world_size", [64, 512, 1024])
def test_norm_vectors_beside_matrices_cost_at_most_one_small_lane(world_size):
    matrices = ((4096, 4096), (4096, 4096))
    bare, normed = plan_unit(matrices, world_size), plan_unit((*matrices, (4096,), (4096,)), world_size)
    assert bare.padding_numel == 0
    assert normed.padding_numel <= max(2 * ALIGNMENT * world_size, 0.01 * bare.numel)


def test_rows_longer_than_a_shard_are_split_into_equal_parts():
    """Four rows for eight ranks: half a row each, and the plan says so."""
    layout = plan_unit(((4, 1_000_000),), 8)
    placement = layout.lanes[0].placements[0]
    assert not placement.full_rows
    assert placement.granule == 500_000
    assert layout.padding_numel == 0


def test_blocks_shrink_to_fewer_rows_before_rows_are_split():
    placement = plan_unit(((512, 4096),), 64, block_rows=128).lanes[0].placements[0]
    assert placement.granule == 8 * 4096
    assert placement.full_rows


def test_a_gcd_of_granules_is_found_when_halving_misses_it():
    """GPT-2 XL's 1600 wide block on 512 ranks: thirds of 4800 agree with rows of 1600, halves of it never do."""
    layout = plan_unit(((1600, 4800), (1600, 1600), (1600, 6400), (6400, 1600), (1600,)), 512)
    granules = {placement.index: placement.granule for _, placement in pairs(layout)}
    assert granules == {0: 1600, 1: 1600, 2: 3200, 3: 1600, 4: 1}
    assert layout.padding_numel < 0.02 * layout.numel


def test_scalars_and_many_dimensions_are_placed():
    layout = plan_unit(((), (7,), (6, 5, 4), (4, 3, 2, 5)), 3)
    found = {p.index: (p.numel, p.row_numel, p.granule) for _, p in pairs(layout)}
    assert found == {0: (1, 1, 1), 1: (7, 1, 1), 2: (120, 20, 20), 3: (120, 30, 30)}


def test_every_rank_computes_the_same_plan():
    shapes = ((1600, 4800), (100, 7), (3000, 96), (513,), (31, 5, 9))
    assert fresh_plan(shapes, 96) == fresh_plan(shapes, 96)


def test_identical_units_are_planned_once():
    assert plan_unit(((64, 32), (64,)), 4) is plan_unit(((64, 32), (64,)), 4)


def llama_70b_block() -> tuple[tuple[int, ...], ...]:
    attention = ((8192, 8192), (1024, 8192), (1024, 8192), (8192, 8192))
    return (*attention, (28672, 8192), (28672, 8192), (8192, 28672), (8192,), (8192,))


@pytest.mark.parametrize("world_size", [2, 64, 1024, 16384])
def test_a_giant_unit_of_500_tensors_is_planned_in_whole_rows(world_size):
    shapes = llama_70b_block() * 55
    layout = plan_unit(shapes, world_size)
    assert layout.padding_numel <= 0.01 * layout.numel
    assert all(placement.full_rows for _, placement in pairs(layout))


def test_work_on_a_hopeless_unit_is_bounded(monkeypatch):
    """Two hundred matrices without a common granule on 512 ranks: no four lanes hold their rows whole."""
    work = 2000
    monkeypatch.setattr(unit_layout, "MAX_WORK", work)
    rounds, placed = 0, 0
    best_lanes, fill = unit_layout._Search.best_lanes, unit_layout._Search.fill

    def counting_best_lanes(search, items):
        nonlocal rounds
        rounds += 1
        return best_lanes(search, items)

    def counting_fill(search, items, shard_numel):
        nonlocal placed
        placed += len(items)
        return fill(search, items, shard_numel)

    monkeypatch.setattr(unit_layout._Search, "best_lanes", counting_best_lanes)
    monkeypatch.setattr(unit_layout._Search, "fill", counting_fill)
    shapes = tuple((400 + 7 * i % 501, 301 + 11 * i % 997) for i in range(200))
    layout = fresh_plan(shapes, 512)
    assert layout.padding_numel <= 0.031 * layout.numel
    assert not all(placement.full_rows for _, placement in pairs(layout))
    # Two ladders: the patient rounds, then one for each factor of two in the longest row.
    assert rounds <= 2 * (unit_layout.PATIENT_ROUNDS + (301 + 997).bit_length())
    # Single lanes are always tried, a few dozen fills in each round at most; only further lanes count against MAX_WORK.
    assert placed < 2 * work + rounds * 24 * len(shapes)


EXACT = {
    "rows of 12 beside rows of 100,000, which are split": (
        (((3, 100000), (7, 12)), 16, 1),
        [(18800, [(0, 0, 25), (1, 300000, 12)])],
    ),
    "rows that share a granule": ((((400, 9600), (300, 1600)), 64, 1), [(68800, [(0, 0, 1600), (1, 3840000, 1600)])]),
    "blocks of 32 rows, and of fewer": (
        (((1000, 64), (64, 1000), (31,), (3, 100)), 7, 32),
        [(10240, [(0, 0, 2048), (3, 64000, 300), (2, 64304, 1)]), (10000, [(1, 0, 2000)])],
    ),
    "unrelated rows": (
        (((64, 257), (96, 1000), (31, 768), (1000, 7), (7,)), 32, 1),
        [(4000, [(1, 0, 1000), (4, 96000, 1), (3, 96080, 7), (0, 103088, 1)]), (768, [(2, 0, 768)])],
    ),
    "unrelated blocks on 100 ranks": (
        (((96, 1000), (31, 768), (128, 100), (1024, 3)), 100, 2),
        [(1200, [(2, 0, 200), (0, 12800, 25), (3, 108816, 6)]), (288, [(1, 0, 96)])],
    ),
    "a block of T5-base on 1,024 ranks: one matrix in half rows": (
        (((768, 768),) * 4 + ((3072, 768), (768, 3072), (768,), (768,)), 1024, 1),
        [
            (4608, [(5, 0, 1536), (4, 2359296, 768)]),
            (2304, [(0, 0, 768), (1, 589824, 768), (2, 1179648, 768), (3, 1769472, 768)]),
            (16, [(6, 0, 1), (7, 768, 1)]),
        ],
    ),
}


@pytest.mark.parametrize("name", EXACT)
def test_plans_stay_as_they_are(name):
    """Shard sizes, and index, start and granule of each parameter; another plan has other memory and messages."""
    (shapes, world_size, rows), expected = EXACT[name]
    lanes = fresh_plan(shapes, world_size, rows).lanes
    assert [(one.shard_numel, [(p.index, p.start, p.granule) for p in one.placements]) for one in lanes] == expected


@pytest.mark.parametrize(
    ("start", "numel", "granule", "kept"),
    [
        (5, 15, 7, True),  # no boundary inside
        (5, 30, 15, True),  # one, after a granule
        (5, 30, 10, False),
        (0, 50, 10, True),  # two
        (5, 50, 15, False),  # only the first of two
        (5, 35, 15, True),  # the second one is the end
    ],
)
def test_boundaries_of_shards_of_20_keep_a_granule(start, numel, granule, kept):
    assert unit_layout._keeps(start, numel, granule, shard_numel=20) is kept


def test_a_granule_too_coarse_for_any_shard_is_divided_by_the_smallest_prime():
    item = unit_layout._Item(index=0, numel=12, row_numel=6, preferred=6, granule=6)
    assert unit_layout._fit_shard(item, 4).granule == 3


@pytest.mark.parametrize(("value", "factors"), [(2, (2,)), (7, (7,)), (49, (7,)), (4800, (2, 3, 5)), (2 * 97, (2, 97))])
def test_prime_factors_come_once_each_and_ascend(value, factors):
    assert unit_layout._prime_factors(value) == factors


def test_parameters_with_a_finer_granule_than_preferred_count_as_split():
    lane = plan_unit(((100, 48), (100,)), 4)
    assert unit_layout._split_numel(lane, [48, 1]) == 0
    assert unit_layout._split_numel(lane, [96, 1]) == 4800


def test_no_shard_size_is_tried_twice():
    items = [unit_layout._item(index, (600, row), 1) for index, row in enumerate((96, 48, 32))]
    sizes = list(unit_layout._first_shards(items, 4, 200_000))
    assert sizes
    assert len(set(sizes)) == len(sizes)


def test_no_parameters_are_refused():
    with pytest.raises(WrapError, match="at least one parameter"):
        plan_unit((), 2)


def test_a_parameter_without_elements_is_refused_by_its_shape():
    with pytest.raises(WrapError, match=r"parameter 1 of 2 has shape \(0, 768\)"):
        plan_unit(((3,), (0, 768)), 2)


def test_a_world_of_no_ranks_is_refused():
    with pytest.raises(ProcessGroupError, match="got 0"):
        plan_unit(((3,),), 0)


def test_blocks_of_no_rows_are_refused():
    with pytest.raises(ConfigError, match="got 0"):
        plan_unit(((3, 4),), 2, block_rows=0)


@pytest.mark.parametrize(("largest_shard", "too_coarse"), [(4800, False), (4799, True)])
def test_a_shard_of_one_granule_is_large_enough_for_it(largest_shard, too_coarse):
    item = unit_layout._Item(index=0, numel=2 * 4800, row_numel=4800, preferred=4800, granule=4800)
    assert unit_layout._too_coarse(item, largest_shard) is too_coarse
