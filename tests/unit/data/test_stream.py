"""Every rank sees what torch's DistributedSampler would give it, and all together see every row exactly once."""

import itertools
from collections import Counter
from math import prod

import pytest
import torch
from hypothesis import assume, given, strategies as st
from torch.utils.data import DistributedSampler

from fullshard.errors import DataError
from fullshard.program.data.batching import stream
from fullshard.program.data.batching.collate import CollateSpec
from fullshard.program.data.batching.stream import EpochPlan, batches, row_refs
from fullshard.program.data.examples import Example
from fullshard.program.data.tokenizing.tokenize import TokenizeSpec, tokenize


def micro_batches(plan, rank):
    """The rows of one rank by micro-batch."""
    return [row_refs(plan.micro_batch(number, rank)) for number in range(plan.num_batches)]


def rank_rows(plan, rank):
    return [row for rows in micro_batches(plan, rank) for row in rows]


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("num_rows", [1, 2, 10, 11, 12, 97])
@pytest.mark.parametrize("training", [True, False])
def test_rows_equal_those_of_the_distributed_sampler(world_size, num_rows, training):
    for epoch in range(3):
        for rank in range(world_size):
            sampler = DistributedSampler(range(num_rows), world_size, rank, shuffle=training, seed=5)
            sampler.set_epoch(epoch)
            plan = EpochPlan(num_rows, world_size, batch_size=4, seed=5, epoch=epoch, training=training)
            assert [row.index for row in rank_rows(plan, rank)] == list(sampler)
            assert plan.rows_per_rank == len(sampler)


def test_epochs_and_seeds_differ_and_repeat():
    def order(**changes):
        return [row.index for row in rank_rows(EpochPlan(50, 1, 8, **changes), 0)]

    assert order(seed=1, epoch=0) == order(seed=1, epoch=0)
    assert order(seed=1, epoch=0) != order(seed=1, epoch=1)
    assert order(seed=1, epoch=0) != order(seed=2, epoch=0)


@pytest.mark.parametrize("num_rows", [1, 5, 16, 17, 31])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_evaluation_counts_every_row_once_in_equal_steps(num_rows, world_size):
    plan = EpochPlan(num_rows, world_size, batch_size=3, training=False)
    per_rank = [micro_batches(plan, rank) for rank in range(world_size)]
    sizes = {tuple(len(rows) for rows in rank_batches) for rank_batches in per_rank}
    assert len(sizes) == 1
    assert len(per_rank[0]) == plan.num_batches
    counted = Counter(row.index for rank in per_rank for rows in rank for row in rows if not row.filler)
    assert counted == Counter(range(num_rows))


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("num_rows", [7, 100, 1001])
def test_grouping_by_length_keeps_rows_and_sizes_and_saves_padding(world_size, num_rows):
    lengths = tuple(torch.randint(1, 60, (num_rows,), generator=torch.Generator().manual_seed(0)).tolist())

    def padded(plan):
        return sum(
            len(rows) * max(lengths[row.index] for row in rows)
            for rank in range(world_size)
            for rows in micro_batches(plan, rank)
        )

    plain = EpochPlan(num_rows, world_size, 4, seed=3, epoch=1)
    grouped = EpochPlan(num_rows, world_size, 4, seed=3, epoch=1, lengths=lengths)
    for plan in (plain, grouped):
        assert [len(rows) for rows in micro_batches(plan, 0)] == [len(rows) for rows in micro_batches(plain, 0)]
    indices = [
        Counter(row.index for rank in range(world_size) for row in rank_rows(plan, rank)) for plan in (plain, grouped)
    ]
    assert indices[0] == indices[1]
    if num_rows > 7:
        assert padded(grouped) < 0.75 * padded(plain)
    assert padded(grouped) >= sum(lengths)


def test_grouped_batches_are_shuffled_alike_on_all_ranks_and_anew_in_each_epoch():
    lengths = tuple(range(1, 97))

    def longest(epoch, rank):
        plan = EpochPlan(96, 2, 4, seed=3, epoch=epoch, lengths=lengths)
        return [max(lengths[row.index] for row in rows) for rows in micro_batches(plan, rank)]

    assert longest(0, 0) != sorted(longest(0, 0), reverse=True)
    assert longest(0, 0) != longest(1, 0)
    assert all(abs(a - b) == 1 for a, b in zip(longest(0, 0), longest(0, 1), strict=True))


def test_grouped_evaluation_starts_with_the_longest_and_counts_every_row_once():
    lengths = (3, 9, 1, 7, 5)
    plan = EpochPlan(5, 2, batch_size=2, training=False, lengths=lengths)
    assert [row.index for row in rank_rows(plan, 0)] == [1, 4, 0]
    rows = rank_rows(plan, 0) + rank_rows(plan, 1)
    assert Counter(row.index for row in rows if not row.filler) == Counter(range(5))
    assert sum(row.filler for row in rows) == 1


def test_lengths_must_be_those_of_the_rows():
    with pytest.raises(DataError, match="An epoch of 4 rows needs 4 lengths; got 3"):
        EpochPlan(4, 2, 2, lengths=(1, 2, 3))


@st.composite
def splits(draw):
    """Rows, lengths, and two ways of sharing one global batch between ranks, micro-batches and accumulation."""
    num_rows = draw(st.integers(1, 200))
    sizes = st.lists(st.integers(1, 4), min_size=3, max_size=3)
    first = draw(sizes)
    second = draw(st.permutations(first)) if draw(st.booleans()) else [prod(first), 1, 1]
    lengths = draw(st.none() | st.lists(st.integers(1, 9), min_size=num_rows, max_size=num_rows).map(tuple))
    return num_rows, lengths, first, draw(st.permutations(second))


def plan_of(num_rows, lengths, split, **more):
    world_size, batch_size, accumulation = split
    return EpochPlan(num_rows, world_size, batch_size, accumulation=accumulation, lengths=lengths, **more)


def rows_of_steps(plan):
    """For each step the rows of all ranks in order of place: rank r has every world_size-th."""
    found = []
    for step in range(plan.num_steps):
        per_rank = [plan.step_places(step, rank) for rank in range(plan.world_size)]
        micro_batches = [[row_refs(places) for places in some] for some in zip(*per_rank, strict=True)]
        found.append([row for some in micro_batches for together in zip(*some, strict=True) for row in together])
    return found


@given(splits(), st.integers(0, 3), st.booleans())
def test_the_rows_of_each_step_are_those_of_any_other_split_of_the_global_batch(case, epoch, earlier):
    num_rows, lengths, first, second = case
    group_rows = first[0] * first[1] if earlier else None  # as earlier versions chose and recorded it
    more = {"seed": 7, "epoch": epoch, "group_rows": group_rows}
    steps, others = (rows_of_steps(plan_of(num_rows, lengths, split, **more)) for split in (first, second))
    ours, theirs = ([[row.index for row in step if not row.filler] for step in run] for run in (steps, others))
    assert ours == theirs
    assert sorted(index for step in ours for index in step) == list(range(num_rows))
    assert all(len(step) == prod(first) for step in ours[:-1])
    assert ours[-1]


@given(splits())
def test_a_step_has_neighbours_by_length_in_its_window_and_so_has_each_micro_batch(case):
    num_rows, lengths, split, _ = case
    lengths = lengths or (1,) * num_rows
    found = []
    for step in rows_of_steps(plan_of(num_rows, lengths, split)):
        of_step = [lengths[row.index] for row in step if not row.filler]
        assert of_step == sorted(of_step, reverse=True)  # micro-batches are runs of it
        found.append((-max(of_step), -min(of_step)))
    assume(num_rows <= stream.WINDOW_GROUPS * prod(split))  # one window
    found.sort()
    assert all(longer[1] <= shorter[0] for longer, shorter in itertools.pairwise(found))


@pytest.mark.parametrize("lengths", [None, tuple(range(1, 12))])
def test_training_repeats_are_fillers_at_the_end(lengths):
    plan = EpochPlan(11, 3, batch_size=2, lengths=lengths)
    ranks = [rank_rows(plan, rank) for rank in range(3)]
    assert [[row.filler for row in rows] for rows in ranks] == [[False] * 4, [False] * 4, [False] * 3 + [True]]


def test_more_ranks_than_rows_get_fillers_alone():
    plan = EpochPlan(2, 5, batch_size=2)
    assert [[row.filler for row in rank_rows(plan, rank)] for rank in range(5)] == [
        [False],
        [False],
        [True],
        [True],
        [True],
    ]


def test_skipping_gives_what_not_skipping_gives_and_makes_nothing_before(t5_like, monkeypatch):
    tokenized = tokenize([Example("a " * (n % 5 + 1), ("label",), n) for n in range(11)], t5_like, TokenizeSpec(8, 8))
    plan = EpochPlan(11, 2, batch_size=2, seed=1, lengths=tokenized.lengths)
    everything = [batch.indices for batch in batches(tokenized, plan, 1, CollateSpec(pad_token_id=0))]
    made = []
    collate = stream.collate
    monkeypatch.setattr(stream, "collate", lambda rows, *rest: made.append(rows) or collate(rows, *rest))
    for start in range(len(everything) + 1):
        made.clear()
        rest = [batch.indices for batch in batches(tokenized, plan, 1, CollateSpec(pad_token_id=0), start=start)]
        assert rest == everything[start:]
        assert len(made) == len(rest)


@pytest.mark.parametrize("name", ["num_rows", "world_size", "batch_size", "group_rows"])
def test_sizes_must_be_positive(name):
    sizes = {"num_rows": 4, "world_size": 2, "batch_size": 2, name: 0}
    with pytest.raises(DataError, match=f"An epoch needs {name} of at least 1; got 0"):
        EpochPlan(**sizes)


@pytest.mark.parametrize("rank", [-1, 2])
def test_rank_must_exist(rank):
    with pytest.raises(DataError, match=f"There is no rank {rank}: ranks are 0 to 1"):
        EpochPlan(4, 2, 2).step_places(0, rank)


def test_batches_follow_the_plan_and_leave_the_global_random_state_alone(t5_like):
    tokenized = tokenize([Example("a " * (n + 1), ("label",), n) for n in range(7)], t5_like, TokenizeSpec(8, 8))
    plan = EpochPlan(7, 2, batch_size=3, seed=1, training=False)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    ranks = [list(batches(tokenized, plan, rank, CollateSpec(pad_token_id=0))) for rank in range(2)]
    assert torch.equal(before, torch.get_rng_state())
    assert [[batch.indices for batch in rank] for rank in ranks] == [[(0, 2, 4), (6,)], [(1, 3, 5), (0,)]]
    assert ranks[1][1].fillers == (True,)
    assert ranks[1][1].target_tokens == 0
    assert sum(batch.target_tokens for rank in ranks for batch in rank) == 7 * 2
    assert ranks[0][0].input_ids_BS.shape == (3, 6)


def test_plan_for_another_set(t5_like):
    tokenized = tokenize([Example("a", ("label",), 2)], t5_like, TokenizeSpec(8, 8))
    with pytest.raises(DataError, match="The plan is for 3 rows, the set has 1"):
        next(batches(tokenized, EpochPlan(3, 1, 1), 0, CollateSpec(pad_token_id=0)))


@pytest.mark.parametrize("accumulation", [1, 3, 20])
def test_steps_are_the_micro_batches_in_their_order(accumulation):
    plan = EpochPlan(50, 2, batch_size=4, seed=1, lengths=tuple(range(50)), accumulation=accumulation)
    for rank in range(2):
        of_steps = [row_refs(places) for step in range(plan.num_steps) for places in plan.step_places(step, rank)]
        assert of_steps == micro_batches(plan, rank)
    assert all(len(plan.step_places(step, 0)) == accumulation for step in range(plan.num_steps - 1))
