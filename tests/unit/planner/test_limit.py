"""A plan that takes longer than it may is given up."""

import pytest

from fullshard.errors import ConfigError
from fullshard.planner import TookTooLongError, check_time, plan, time_limit
from support.planned import batch, make_model


def test_a_plan_ends_at_its_limit():
    with time_limit(0.0), pytest.raises(TookTooLongError, match="abandoned"):
        plan(make_model, batch, world_size=2, rank=0)
    assert plan(make_model, batch, world_size=2, rank=0).peak_bytes > 0


def test_a_limit_ends_with_its_context():
    with time_limit(60.0):
        with time_limit(-1.0), pytest.raises(ConfigError):
            check_time()
        check_time()
