"""Collectives are measured alone and behind computation: transfers are hidden, what a rank does itself is not."""

import pytest
import torch

from fullshard.planner import links
from fullshard.planner.work import Issued

PAIR = range(2)
PRODUCT_S = 0.001


class Clock:
    """Time that passes only where a test says so."""

    now = 0.0

    def mark(self):
        return self.now

    def seconds(self, since, marks):
        return [mark - since for mark in marks]

    def finish(self):
        pass


class Transfer:
    """A collective that takes ``seconds``: from its issue on, or only while it is waited for."""

    def __init__(self, clock, seconds, *, by_itself):
        self.clock, self.seconds, self.end = clock, seconds, clock.now + seconds if by_itself else None

    def wait(self):
        self.clock.now = self.clock.now + self.seconds if self.end is None else max(self.clock.now, self.end)


class Link:
    """Two ranks with a link of 1 MB a second each way."""

    rank, size, device = 0, 2, torch.device("cpu")

    def __init__(self, clock, *, by_itself):
        self.clock, self.by_itself = clock, by_itself

    def all_gather(self, full, shard):
        return Transfer(self.clock, shard.nbytes / 1e6, by_itself=self.by_itself)

    def reduce_scatter(self, shard, full):
        return Transfer(self.clock, full.nbytes / 2 / 1e6, by_itself=self.by_itself)

    def all_reduce(self, tensor, op="sum"):
        return Transfer(self.clock, tensor.nbytes / 1e6, by_itself=self.by_itself)

    def all_gather_object(self, value):
        return [value] * self.size

    def barrier(self):
        pass


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(links, "clock_of", lambda device: clock)

    def run(self, products):
        clock.now += products * PRODUCT_S

    monkeypatch.setattr(links._Computation, "run", run)
    return clock


@pytest.mark.parametrize(("by_itself", "never_hidden"), [(True, 0.0), (False, 1.0)])
def test_what_computation_does_not_hide_is_measured(by_itself, never_hidden, clock):
    sizes = ((0, "all_gather", 8000), (1, "all_gather", 4000), (2, "reduce_scatter", 4000), (3, "all_reduce", 2000))
    wanted = [Issued(number, kind, sent, PAIR) for number, kind, sent in sizes]
    found = links.measure_collectives(Link(clock, by_itself=by_itself), wanted)
    for kind, measured in found.items():
        for sent, alone, exposed in measured:
            assert alone == pytest.approx(sent / 1e6), kind
            assert exposed == pytest.approx(never_hidden * alone, abs=1e-12), kind
    assert [sent for sent, _, _ in found["all_gather"]] == [4000, 8000]


def test_other_kinds_are_measured_as_all_gathers(clock):
    found = links.measure_collectives(Link(clock, by_itself=True), [Issued(0, "broadcast", 400, PAIR)])
    assert list(found) == ["all_gather"]
