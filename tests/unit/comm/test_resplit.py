"""Exchanges of tensors split along other dimensions, as graphs of the compiler know them."""

import itertools
from types import SimpleNamespace

from fullshard.core.comm import resplit


def test_graphs_of_two_processes_tell_ranks_apart(monkeypatch):
    """Ranks share the compiler's cache on disk, and a rank with fewer heads must not get another's graph."""
    numbers = []
    for rank in range(2):
        monkeypatch.setattr(resplit, "_numbers", itertools.count())  # as in a new process
        made = [resplit.Resplit(SimpleNamespace(rank=rank, size=2)) for _ in range(2)]
        numbers += [one._number for one in made]
    assert len({*numbers}) == 4
