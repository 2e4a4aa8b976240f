"""How another number of ranks divides the rows of a step."""

import pytest

from fullshard.errors import ConfigError
from fullshard.program.train.setup.steps import Division, began_with


@pytest.mark.parametrize(
    ("ranks", "each", "accumulation"), [(8, 4, 2), (4, 4, 4), (2, 4, 8), (1, 4, 16), (16, 4, 1), (64, 1, 1)]
)
def test_other_ranks_take_the_same_rows_in_micro_batches_that_are_not_larger(ranks, each, accumulation):
    assert Division(8, 4, 2, False).on(ranks) == Division(ranks, each, accumulation, False)


@pytest.mark.parametrize(("ranks", "each", "accumulation"), [(1, 1, 6), (3, 1, 2), (2, 3, 1), (1, 6, 1)])
def test_rows_are_grouped_by_the_global_batch(ranks, each, accumulation):
    assert Division(ranks, each, accumulation, False).group == 6


def test_micro_batches_become_smaller_where_they_must():
    assert Division(3, 4, 1, False).on(2) == Division(2, 3, 2, False)


def test_a_token_budget_stays_as_it_is():
    assert Division(4, 1000, 1, True).on(2) == Division(2, 1000, 2, True)
    assert Division(4, 1000, 1, True).on(2).group == Division(4, 1000, 1, True).group
    assert Division(4, 1000, 2, True).group == 8
    with pytest.raises(ConfigError, match="4 micro-batches a step, and 3 ranks"):
        Division(4, 1000, 1, True).on(3)


def test_settings_that_were_changed_hold():
    began = Division(2, 4, 1, False)
    assert began_with(Division(1, 4, 1, False), began) == began
    changed = Division(1, 4, 2, False)
    assert began_with(changed, began) == changed
    assert began_with(changed, None) == changed


@pytest.mark.parametrize("values", [{}, {"division": None}, {"division": {"ranks": 2}}, {"division": 3}])
def test_values_of_older_versions_have_none(values):
    assert Division.began(values) is None


def test_it_is_read_from_what_it_wrote():
    division = Division(2, 4, 3, True)
    assert Division.began({"division": division.as_values()}) == division
