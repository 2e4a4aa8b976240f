"""The mesh axes of several machines: shards inside each machine, replicas across them."""

import pytest

from fullshard.core.comm import machine_axes
from fullshard.core.comm.mesh import _ranks_of_named
from fullshard.core.testing import run_ranks
from fullshard.errors import ProcessGroupError


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.delenv("FULLSHARD_MACHINE", raising=False)


def axes(size, **options):
    def work(comm):
        replicate, shard = machine_axes(comm, **options)
        return replicate.all_gather_object(comm.rank), shard.all_gather_object(comm.rank)

    return run_ranks(size, work)


def test_ranks_of_a_machine_share_shards_and_those_of_one_place_hold_copies(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert axes(4) == [([0, 2], [0, 1]), ([1, 3], [0, 1]), ([0, 2], [2, 3]), ([1, 3], [2, 3])]


def test_where_the_environment_does_not_say_the_number_is_the_callers_or_one_machines():
    assert axes(4, ranks_each=1)[2] == ([0, 1, 2, 3], [2])
    assert axes(2) == [([0], [0, 1]), ([1], [0, 1])]
    assert axes(2, ranks_each=5) == axes(2)


def test_machines_with_different_numbers_of_ranks_are_refused_on_every_rank():
    with pytest.raises(ProcessGroupError, match="is 1 and 2, of 3 ranks"):
        run_ranks(3, lambda comm: machine_axes(comm, 2 if comm.rank < 2 else 1))
    with pytest.raises(ProcessGroupError, match="is 2, of 3 ranks"):
        axes(3, ranks_each=2)


def test_machines_with_names_are_told_apart_by_them(monkeypatch):
    assert _ranks_of_named(["a", "a", "b", "b"]) == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # of each of two containers of one machine
    monkeypatch.setenv("FULLSHARD_MACHINE", "a")
    assert axes(2) == [([0], [0, 1]), ([1], [0, 1])]


@pytest.mark.parametrize("names", [["a", "a", "b"], ["a", "b", "a", "b"], ["a", None, None]])
def test_machines_whose_names_do_not_divide_the_ranks_are_refused(names):
    with pytest.raises(ProcessGroupError, match="FULLSHARD_MACHINE is, in rank order: a, "):
        _ranks_of_named(names)
