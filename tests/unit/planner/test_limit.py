"""A plan is abandoned after a number of operators, wherever it spends them; no clock decides."""

import pytest

from fullshard.errors import ConfigError
from fullshard.planner import TooMuchWorkError, plan, spend, work_limit
from support.planned import batch, make_model


def test_a_plan_stops_in_the_middle_of_its_operators():
    with work_limit(1000), pytest.raises(TooMuchWorkError, match="abandoned"):
        plan(make_model, batch, world_size=2)


def test_a_plan_ends_at_the_same_operator_every_time():
    def taken(limit):
        steps = []

        def inputs():
            steps.append(1)
            return batch()

        try:
            with work_limit(limit):
                plan(make_model, inputs, world_size=1, rank=0)
        except TooMuchWorkError:
            return None
        return len(steps)

    enough = 1
    while taken(enough) is None:
        enough *= 2
    assert [taken(enough), taken(enough // 2)] * 3 == [taken(enough), None] * 3


def test_the_inner_of_two_limits_holds_inside_it_and_the_outer_one_again_after_it():
    with work_limit(60):
        with work_limit(0), pytest.raises(ConfigError):
            spend(1)
        spend(60)
        with pytest.raises(ConfigError):
            spend(1)
    spend(10**9)
