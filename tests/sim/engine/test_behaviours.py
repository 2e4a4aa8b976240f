"""The behaviours on four ranks as threads; the hybrid ones on two replicas of two ranks."""

import pytest

from fullshard.core.comm.device import CudaDevice, Device
from fullshard.core.testing import run_ranks
from support.behaviours import BEHAVIOURS, Ranks

pytestmark = pytest.mark.parity


def test_their_numbers_have_no_gap():
    assert [name[:3] for name in BEHAVIOURS] == [f"b{number:02d}" for number in range(1, 42)]


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_behaviour(name):
    run_ranks(4, lambda comm: BEHAVIOURS[name](Ranks.as_threads(comm)), timeout_s=40)


REDUCING = ("b08", "b12", "b19", "b20", "b21", "b33", "b36")


@pytest.mark.parametrize("name", [name for name in BEHAVIOURS if name.startswith(REDUCING)])
def test_behaviour_with_as_many_reduces_under_way_as_on_cuda(name, monkeypatch):
    monkeypatch.setattr(Device, "reduces_behind", CudaDevice.reduces_behind)
    run_ranks(4, lambda comm: BEHAVIOURS[name](Ranks.as_threads(comm)), timeout_s=40)
