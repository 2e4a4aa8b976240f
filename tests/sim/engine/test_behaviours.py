"""The forty behaviours on four ranks as threads; the hybrid ones on two replicas of two ranks."""

import pytest

from fullshard.testing import run_ranks
from support.behaviours import BEHAVIOURS, Ranks

pytestmark = pytest.mark.parity


def test_there_are_forty():
    assert [name[:3] for name in BEHAVIOURS] == [f"b{number:02d}" for number in range(1, 41)]


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_behaviour(name):
    run_ranks(4, lambda comm: BEHAVIOURS[name](Ranks.as_threads(comm)), timeout_s=40)
