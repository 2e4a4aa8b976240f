"""The plan of owners and rounds: the same on every rank, balanced, bounded in memory."""

from fractions import Fraction
from itertools import product

from hypothesis import given, settings, strategies as st

from fullshard.core.optim.muon_rounds import RoundPlan, SplitMatrix, newton_schulz_flops, plan_rounds

RANKS = 4


@st.composite
def split_matrices(draw, everywhere=False, most=12):
    """Matrices that two to four of the ranks hold parts of."""
    made = []
    for _ in range(draw(st.integers(0, most))):
        first = 0 if everywhere else draw(st.integers(0, RANKS - 2))
        count = RANKS if everywhere else draw(st.integers(2, RANKS - first))
        pieces = tuple(draw(st.lists(st.integers(1, 50), min_size=count, max_size=count)))
        made.append(SplitMatrix(first, pieces, draw(st.integers(1, 30))))
    return made


loads = st.lists(st.integers(0, 60), min_size=RANKS, max_size=RANKS)


def work_of(plan: RoundPlan, fixed):
    total = list(fixed)
    for matrix, owner in zip(plan.matrices, plan.owners, strict=True):
        total[owner] += matrix.work
    return total


@settings(max_examples=60, deadline=None)
@given(split_matrices(), loads, st.integers(1, 200))
def test_every_rank_has_the_same_plan_and_owners_hold_a_part(matrices, fixed, max_numel):
    plans = [plan_rounds(list(matrices), list(fixed), max_numel) for _ in range(RANKS)]
    assert all(plan == plans[0] for plan in plans)
    assert all(owner in matrix.sharers for matrix, owner in zip(matrices, plans[0].owners, strict=True))
    assert sorted(index for indices in plans[0].rounds for index in indices) == list(range(len(matrices)))


@settings(max_examples=60, deadline=None)
@given(split_matrices(), loads, st.integers(1, 200))
def test_no_owner_gathers_more_in_a_round_than_it_may_but_for_one_matrix(matrices, fixed, max_numel):
    plan = plan_rounds(matrices, fixed, max_numel)
    for indices, rank in product(plan.rounds, range(RANKS)):
        gathered = [matrices[index].numel for index in indices if plan.owners[index] == rank]
        assert sum(gathered) <= max_numel or len(gathered) == 1


@settings(max_examples=60, deadline=None)
@given(split_matrices(), loads, st.integers(1, 200))
def test_there_are_no_rounds_in_which_nobody_gathers_what_would_have_fitted_before(matrices, fixed, max_numel):
    plan = plan_rounds(matrices, fixed, max_numel)
    for earlier, later in zip(plan.rounds, plan.rounds[1:], strict=False):
        for rank in {plan.owners[index] for index in later}:
            before = [matrices[index].numel for index in earlier if plan.owners[index] == rank]
            after = [matrices[index].numel for index in later if plan.owners[index] == rank]
            assert sum(before) + after[0] > max_numel


@settings(max_examples=60, deadline=None)
@given(split_matrices(), loads)
def test_no_rank_is_loaded_above_its_sharers_by_more_than_its_last_matrix(matrices, fixed):
    """When a matrix was given to its owner, that was the least loaded sharer, so not above their mean."""
    plan = plan_rounds(matrices, fixed, 100)
    total = work_of(plan, fixed)
    for rank in range(RANKS):
        owned = [matrix for matrix, owner in zip(matrices, plan.owners, strict=True) if owner == rank]
        if owned:
            smallest = min(owned, key=lambda matrix: matrix.work).work
            candidates = [matrix for matrix in owned if matrix.work == smallest]
            bounds = [
                Fraction(sum(total[sharer] for sharer in last.sharers) - last.work, len(last.pieces)) + last.work
                for last in candidates
            ]
            assert total[rank] <= max(bounds)


@settings(max_examples=25, deadline=None)
@given(split_matrices(everywhere=True, most=5))
def test_where_all_ranks_share_all_matrices_the_largest_load_is_at_most_that_of_graham(matrices):
    plan = plan_rounds(matrices, [0] * RANKS, 100)
    best = min(
        max(sum(m.work for m, owner in zip(matrices, owners, strict=True) if owner == rank) for rank in range(RANKS))
        for owners in product(range(RANKS), repeat=len(matrices))
    )
    assert max(work_of(plan, [0] * RANKS)) <= (Fraction(4, 3) - Fraction(1, 3 * RANKS)) * best


def test_matrices_that_are_whole_on_a_rank_count_as_its_work():
    halves = SplitMatrix(0, (5, 5), 10)
    assert plan_rounds([halves, halves, halves], [0, 25], 100).owners == (0, 0, 0)
    assert plan_rounds([halves, halves, halves], [0, 0], 100).owners.count(0) in (1, 2)


def test_of_equally_loaded_ranks_the_one_that_holds_most_is_the_owner():
    assert plan_rounds([SplitMatrix(1, (5, 7, 6), 10)], [0] * 4, 100).owners == (2,)


def test_work_is_the_flops_of_the_three_products_of_each_iteration():
    assert newton_schulz_flops(300, 20, 5) == newton_schulz_flops(20, 300, 5)
    assert newton_schulz_flops(20, 300, 5) == 5 * (2 * 20 * 20 * 300 + 2 * 20**3 + 2 * 20 * 20 * 300)
