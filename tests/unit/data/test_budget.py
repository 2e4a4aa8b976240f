"""Steps by a budget of tokens: no micro-batch above it, every row once, the same steps however ranks share them."""

import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fullshard.errors import DataError
from fullshard.program.data.batching.budget import TokenPlan
from fullshard.program.data.batching.collate import CollateSpec, RowRef, collate
from fullshard.program.data.batching.padding import padding_share, step_sizes
from fullshard.program.data.batching.stream import EpochPlan, steps
from fullshard.program.data.tokenizing.tokenize import LengthStats, TokenizedSet

STATS = LengthStats(1.0, 9, 0, 9)


def token_set(sources, targets):
    return TokenizedSet([[5] * n for n in sources], [[6] * n for n in targets], STATS, STATS)


def plan_of(sources, targets, **options):
    return TokenPlan(np.asarray(sources), np.asarray(targets), **({"causal": False, "world_size": 1} | options))


def draw_lengths(count, seed=0):
    generator = np.random.default_rng(seed)
    return generator.integers(1, 200, count), generator.integers(1, 40, count)


def rows_of(plan, step):
    """Rows of one step over all ranks."""
    places = [place for rank in range(plan.world_size) for place in plan.step_places(step, rank)]
    return sorted(int(i) for indices, fillers in places for i in indices[~fillers])


@st.composite
def cases(draw):
    count = draw(st.integers(1, 120))
    sources, targets = (draw(st.lists(st.integers(1, 60), min_size=count, max_size=count)) for _ in range(2))
    options = {"world_size": draw(st.integers(1, 4)), "accumulation": draw(st.integers(1, 3))}
    options |= {"causal": draw(st.booleans()), "batch_tokens": draw(st.integers(120, 400))}
    return sources, targets, options | {"seed": draw(st.integers(0, 3))}


@settings(max_examples=40, deadline=None)
@given(cases(), st.integers(0, 2))
def test_no_micro_batch_is_above_the_budget_and_every_row_comes_once(case, epoch):
    sources, targets, options = case
    plan = plan_of(sources, targets, **options).for_epoch(epoch)
    assert plan.num_steps == plan_of(sources, targets, **options | {"seed": 9}).num_steps
    seen = Counter()
    for step in range(plan.num_steps):
        ranks = [plan.step_places(step, rank) for rank in range(plan.world_size)]
        shapes = {tuple(len(indices) for indices, _ in places) for places in ranks}
        assert len(shapes) == 1, "ranks differ in micro-batches"
        assert 1 <= len(ranks[0]) <= plan.accumulation
        for indices, fillers in (place for places in ranks for place in places):
            source, target = plan.source_lengths[indices], plan.target_lengths[indices]
            longest = (source + target).max() if plan.causal else source.max() + target.max()
            assert len(indices) * longest <= plan.batch_tokens
            seen.update(indices[~fillers].tolist())
        assert rows_of(plan, step)
    assert seen == Counter(range(len(sources)))


@settings(max_examples=40, deadline=None)
@given(cases(), st.permutations([0, 1, 2]))
def test_a_run_that_goes_on_shared_otherwise_has_the_same_rows_in_each_step(case, order):
    sources, targets, options = case
    first = plan_of(sources, targets, **options)
    group = options["world_size"] * options["accumulation"]
    numbers = [options["world_size"], options["accumulation"], options["batch_tokens"] // 120]
    first = plan_of(sources, targets, **options | {"batch_tokens": numbers[2] * 120})
    world_size, accumulation, unit = (numbers[place] for place in order)
    changed = {"world_size": world_size, "accumulation": accumulation, "batch_tokens": unit * 120, "group": group}
    second = plan_of(sources, targets, **options | changed)
    assert second.num_steps == first.num_steps
    for step in range(first.num_steps):
        assert rows_of(first, step) == rows_of(second, step)
        sizes = {tuple(len(rows) for rows, _ in second.step_places(step, rank)) for rank in range(world_size)}
        assert len(sizes) == 1


def test_ranks_and_accumulation_share_a_fresh_runs_steps_alike():
    lengths = draw_lengths(300)
    plans = [plan_of(*lengths, batch_tokens=900, world_size=w, accumulation=a) for w, a in ((1, 4), (2, 2), (4, 1))]
    rows = [[rows_of(plan, step) for step in range(plan.num_steps)] for plan in plans]
    assert rows[0] == rows[1] == rows[2]


def test_epochs_differ_in_order_and_company_and_repeat_exactly():
    lengths = draw_lengths(2000)
    plan = plan_of(*lengths, batch_tokens=1000, seed=3)
    again = plan_of(*lengths, batch_tokens=1000, seed=3, epoch=1)
    rows = [[rows_of(p, step) for step in range(p.num_steps)] for p in (plan, plan.for_epoch(1), again)]
    assert rows[1] == rows[2]
    assert rows[0] != rows[1]
    company = [{tuple(step) for step in epoch} for epoch in rows[:2]]
    assert len(company[0] & company[1]) < 0.3 * len(rows[0])


def test_a_budget_is_mostly_used_and_little_of_it_is_padding():
    sources, targets = draw_lengths(4000)
    plan, tokenized = plan_of(sources, targets, batch_tokens=4000, world_size=2), token_set(sources, targets)
    assert padding_share(plan, tokenized, CollateSpec(0)) < 0.12
    assert np.mean(step_sizes(plan, tokenized, 1, CollateSpec(0))) > 0.85 * 4000
    rows = plan_of(sources, targets, batch_tokens=4000, causal=True)
    assert padding_share(rows, tokenized, CollateSpec(0, causal=True)) < 0.07


def test_a_row_above_the_budget_is_refused_with_both_numbers():
    plan_of([90], [10], batch_tokens=100)
    with pytest.raises(DataError, match=r"may have 99 tokens, and the longest row has 100, .*_tokens to at least"):
        plan_of([90], [10], batch_tokens=99)
    with pytest.raises(DataError, match="An epoch needs batch_tokens of at least 1; got 0"):
        plan_of([90], [10], batch_tokens=0)
    with pytest.raises(DataError, match="There is no rank 1: ranks are 0 to 0"):
        plan_of([90], [10], batch_tokens=100).step_places(0, 1)


@pytest.mark.parametrize("start", [0, 1, 4])
def test_steps_are_made_from_any_one_on_and_none_before(start):
    sources, targets = draw_lengths(60)
    tokenized = token_set(sources, targets)
    plans = [
        plan_of(sources, targets, batch_tokens=600, world_size=2, accumulation=2, seed=1),
        EpochPlan(60, 2, 4, seed=1, lengths=tokenized.lengths, accumulation=3),
    ]
    for plan in plans:
        spec = CollateSpec(pad_token_id=0)
        everything = [[b.indices for b in batches] for batches in steps(tokenized, plan, 1, spec)]
        rest = [[b.indices for b in batches] for batches in steps(tokenized, plan, 1, spec, start=start)]
        assert len(everything) == plan.num_steps
        assert rest == everything[start:]
        with pytest.raises(DataError, match="The plan is for 60 rows, the set has 1"):
            next(steps(token_set([1], [1]), plan, 0, spec))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_the_padding_share_is_that_of_the_batches(causal, packed):
    sources, targets = draw_lengths(37)
    tokenized = token_set(sources, targets)
    plan = EpochPlan(37, 2, 5, seed=1, accumulation=2)
    spec = CollateSpec(pad_token_id=0, causal=causal, packed=packed)
    real = positions = 0
    for rank in range(2):
        for step, batches in enumerate(steps(tokenized, plan, rank, spec)):
            sizes = [b.input_ids_BS.numel() + (0 if causal else b.labels_BT.numel()) for b in batches]
            real += sum(batch.tokens for batch in batches)
            positions += sum(sizes)
            told = step_sizes(plan, tokenized, rank, spec)[step]
            assert told == max(sizes) or (packed and 0.97 * max(sizes) < told <= max(sizes))
    share = padding_share(plan, tokenized, spec)
    assert share == pytest.approx(1 - real / positions)
    assert share < 0.06 if packed else share > 0.2


def test_packed_rows_lie_end_to_end_and_know_their_places():
    tokenized = token_set([3, 1, 2, 2], [1, 2, 1, 1])
    rows = [RowRef(0), RowRef(1), RowRef(2, filler=True), RowRef(3)]
    batch = collate(rows, tokenized, CollateSpec(pad_token_id=0, packed=True))
    assert batch.packing.segments_BS.tolist() == [[1, 1, 1, 2, 3, 3, 4, 4]]
    assert batch.packing.positions_BS.tolist() == [[0, 1, 2, 0, 0, 1, 0, 1]]
    assert batch.packing.target_segments_BT.tolist() == [[1, 2, 2, 3, 4]]
    assert batch.labels_BT.tolist() == [[6, 6, 6, -100, 6]]
    assert (batch.target_tokens, batch.tokens, batch.indices) == (4, 10, (0, 1, 2, 3))
    moved = batch.to("meta")
    assert {t.device.type for t in (moved.packing.segments_BS, moved.packing.positions_BS)} == {"meta"}
    joined = collate(rows, tokenized, CollateSpec(pad_token_id=0, causal=True, packed=True))
    assert joined.labels_BT.tolist() == [[-100] * 3 + [6, -100, 6, 6] + [-100] * 3 + [-100, -100, 6]]
    assert joined.packing.target_segments_BT is joined.packing.segments_BS
    assert (joined.target_tokens, joined.tokens) == (4, 10)


def test_a_target_without_a_prompt_predicts_nothing_over_the_border():
    tokenized = TokenizedSet([[], []], [[6, 7], [8, 9]], STATS, STATS)
    batch = collate([RowRef(0), RowRef(1)], tokenized, CollateSpec(pad_token_id=0, causal=True, packed=True))
    assert batch.labels_BT.reshape(2, 2).tolist() == [[-100, 7], [-100, 9]]
    assert batch.target_tokens == 2


def test_a_plan_of_a_million_rows_takes_seconds():
    generator = np.random.default_rng(0)
    sources, targets = generator.integers(50, 512, 1_000_000), generator.integers(5, 128, 1_000_000)
    started = time.perf_counter()
    by_tokens = plan_of(sources, targets, batch_tokens=8192, world_size=2)
    by_tokens.step_places(0, 0)
    EpochPlan(1_000_000, 2, 16, lengths=sources + targets).step_places(0, 0)
    assert time.perf_counter() - started < 20
