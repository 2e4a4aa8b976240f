"""The behaviours on two real gloo processes; the hybrid ones on two replicas of one rank.

All of them share one pair of processes, because starting it is what takes time. On threads they run in every test run
(``tests/sim/engine/test_behaviours.py``).
"""

from pathlib import Path

import pytest

from support.behaviours import BEHAVIOURS
from support.processes import run_processes

pytestmark = [pytest.mark.dist, pytest.mark.parity, pytest.mark.slow]


@pytest.fixture(scope="module")
def outcomes():
    return run_processes(2, Path(__file__).with_name("behaviours_main.py"), timeout_s=110)


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_behaviour(outcomes, name):
    for rank, text in enumerate(outcomes[name]):
        assert not text, f"rank {rank}:\n{text}"
