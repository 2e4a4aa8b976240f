"""A mixture gives each set its exact share of an epoch, the same whatever the ranks, and no row more than its turn."""

import itertools
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from fullshard.program.data import EpochPlan, LengthStats, Mixture, TokenizedSet, chained
from fullshard.program.data.batching.mixture import shares

CASES = [((10, 30), (1.0, 1.0)), ((7, 100, 3), (0.5, 0.3, 0.2)), ((5, 5), (3.0, 1.0)), ((1, 50), (0.001, 1.0))]


@pytest.mark.parametrize(("total", "weights"), [(40, (1, 1)), (110, (0.5, 0.3, 0.2)), (10, (1, 1, 1)), (7, (0.1,) * 7)])
def test_shares_are_within_one_row_of_the_weights_and_add_up(total, weights):
    found = shares(total, weights)
    assert sum(found) == total
    for count, weight in zip(found, weights, strict=True):
        assert abs(count - Fraction(weight) * total / sum(map(Fraction, weights))) < 1


def test_the_largest_remainders_get_the_rest_and_no_set_gets_nothing():
    assert shares(10, (0.55, 0.25, 0.2)) == (6, 2, 2)  # 5.5, 2.5 and 2: of equal remainders the first set's
    assert shares(10, (0.51, 0.26, 0.23)) == (5, 3, 2)  # 5.1, 2.6 and 2.3
    assert shares(5, (1e-9, 1.0, 1e-9)) == (1, 3, 1)


@pytest.mark.parametrize(("rows", "weights"), CASES)
def test_an_epoch_has_the_counts_and_rows_take_turns_across_epochs(rows, weights):
    mixture = Mixture(rows, weights, seed=3)
    starts = np.cumsum([0, *rows])
    taken: Counter[int] = Counter()
    for epoch in range(5):
        found = mixture.epoch_rows(epoch)
        sizes = [int(((found >= start) & (found < end)).sum()) for start, end in itertools.pairwise(starts)]
        assert tuple(sizes) == mixture.counts == shares(sum(rows), weights)
        taken.update(found.tolist())
        for start, end in itertools.pairwise(starts):
            often = [taken[row] for row in range(start, end)]
            assert max(often) - min(often) <= 1


def test_orders_differ_by_seed_set_and_pass():
    first, other = (Mixture((20, 20), (1.0, 1.0), seed) for seed in (1, 2))
    orders = [first.epoch_rows(0)[:20], first.epoch_rows(1)[:20], first.epoch_rows(0)[20:] - 20]
    orders.append(other.epoch_rows(0)[:20])
    assert len({tuple(order) for order in orders}) == 4


@pytest.mark.parametrize("lengths", [False, True])
def test_a_step_has_the_same_rows_for_any_number_of_ranks(lengths):
    mixture = Mixture((6, 18), (3.0, 1.0), seed=5)
    options = {"lengths": np.arange(24) % 7} if lengths else {}
    plans = [EpochPlan(24, ranks, 8 // ranks, seed=5, mixture=mixture, **options) for ranks in (1, 2, 4)]
    for epoch in (0, 1):
        wanted = Counter(mixture.epoch_rows(epoch).tolist())
        found = [
            [
                sorted(
                    row
                    for rank in range(plan.world_size)
                    for rows, fillers in plan.for_epoch(epoch).step_places(step, rank)
                    for row in rows[~fillers].tolist()
                )
                for step in range(plan.num_steps)
            ]
            for plan in plans
        ]
        assert found[0] == found[1] == found[2]
        assert Counter(row for step in found[0] for row in step) == wanted
        assert max(wanted.values()) == 3  # 18 of a set of 6


def test_evaluation_takes_every_row_once():
    plan = EpochPlan(24, 1, 8, training=False, mixture=Mixture((6, 18), (3.0, 1.0)))
    places = [plan.micro_batch(number, 0)[0] for number in range(plan.num_batches)]
    assert np.concatenate(places).tolist() == list(range(24))


def tokenized(first, count):
    stats = LengthStats(mean=2.0, longest=3, truncated=1, limit=9)
    spans = TokenizedSet([[0, row] for row in range(count)], [[1]] * count, stats, stats).source_ids
    return TokenizedSet(
        [[first + row] * (1 + row % 3) for row in range(count)], [[first, row] for row in range(count)], stats, stats,
        spans=spans,
    )  # fmt: skip


def test_chained_sets_have_the_rows_of_all_without_copying_them():
    parts = [tokenized(10, 4), tokenized(50, 7), tokenized(90, 1)]
    joined = chained(parts)
    assert (len(joined), joined.set_rows) == (12, (4, 7, 1))
    for name in ("source_ids", "target_ids", "spans"):
        rows = [row.tolist() for part in parts for row in getattr(part, name)]
        found = getattr(joined, name)
        assert found.tolist() == rows
        assert found.lengths.tolist() == list(map(len, rows))
        assert found.num_ids == sum(map(len, rows))
        assert np.shares_memory(found[5], getattr(parts[1], name).ids)
    assert joined.source_stats == LengthStats(mean=2.0, longest=3, truncated=3, limit=9)
    assert joined.source_ids.checksum() != chained(parts[::-1]).source_ids.checksum()
    with pytest.raises(IndexError, match="There is no row 12"):
        joined.source_ids[12]


def test_a_mixture_of_one_is_that_set():
    one = tokenized(10, 4)
    assert chained([one]) is one
