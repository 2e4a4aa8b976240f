"""The watchdog reports diverged ranks on every rank with one text, and no others; with a simulated clock."""

import datetime
import logging

import pytest
import torch
from torch.distributed import HashStore

from fullshard.comm.watchdog import (
    GRACE_S,
    HISTORY,
    TICK_S,
    WAIT_S,
    WARN_S,
    Board,
    FlightRecorder,
    GroupWatch,
    divergence,
    divergence_text,
)
from fullshard.errors import MismatchError, ProcessGroupError


class Rank:
    """One rank of a group of the test."""

    def __init__(self, store, number, ranks):
        self.recorder = FlightRecorder(number)
        self.board = Board(store, number, len(ranks))
        self.broken_at = []
        self.now = 0.0
        self.watch = GroupWatch(self.recorder, self.board, ranks, lambda: self.broken_at.append(self.now))

    def issue(self, kind="all-gather", announced="", numel=8, *, bound=True):
        return self.recorder.issue(kind, numel, torch.float32, announced, bound=bound)

    def wait(self, *args, **kwargs):
        self.recorder.waiting = self.issue(*args, **kwargs)

    def go_on(self):
        self.recorder.waiting = None

    def failure(self, error="[gloo/pair.cc:1] Connection closed by peer [127.0.0.1]:1. More.", peer=0):
        return self.watch.failure(self.recorder.issued[-1], RuntimeError(error), 3.21, peer)


class Group:
    """Ranks that share a store and a clock."""

    def __init__(self, size, store=None, ranks=None):
        self.store = store or HashStore()
        self.ranks = [Rank(self.store, number, ranks or range(size)) for number in range(size)]
        self.now = 0.0

    def run(self, seconds):
        """Let time pass; every rank looks once a tick."""
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            for rank in self.ranks:
                rank.now = self.now
                rank.watch.check(self.now)

    def verdicts(self):
        return [rank.board.verdict() for rank in self.ranks]


def test_ranks_that_parted_are_told_within_seconds_and_with_one_text():
    group = Group(3)
    for rank in group.ranks:
        rank.wait("reduce-scatter" if rank.recorder.rank == 1 else "all-gather", "unit 3")
    group.run(WAIT_S)
    assert group.verdicts() == [None] * 3
    group.run(4 * TICK_S)
    (text,) = set(group.verdicts())
    assert text.startswith(
        "Ranks are in different collectives, from number 1 of their group on: "
        "ranks 0, 2: all-gather of 8 float32 (unit 3); rank 1: reduce-scatter of 8 float32 (unit 3). Every rank must"
    )
    for rank in group.ranks:
        error = rank.failure()
        assert isinstance(error, MismatchError)
        assert str(error) == text


def test_no_wait_is_broken_before_every_rank_knows_why():
    group = Group(2)
    for kind, rank in zip(("all-gather", "barrier"), group.ranks, strict=True):
        rank.wait(kind)
    first, second = group.ranks
    told = []
    first.board.acknowledge = lambda: told.append(1)  # it reads the verdict and does not say so
    group.run(WAIT_S + 4 * TICK_S)
    assert None not in group.verdicts()
    assert not first.broken_at
    assert not second.broken_at
    group.run(GRACE_S)
    assert first.broken_at
    assert second.broken_at


@pytest.mark.parametrize("behind", [0, 1, 5])
def test_ranks_whose_histories_agree_never_parted(behind):
    """Some ranks wait for data on its way, or are ahead by what they only sent: however long, that is no desync."""
    group = Group(2)
    first, second = group.ranks
    first.wait()
    second.wait()
    for _ in range(behind):
        second.wait()
    group.run(WARN_S + 20)
    assert group.verdicts() == [None, None]
    assert not first.broken_at


def test_a_rank_that_does_not_wait_is_not_reported():
    group = Group(2)
    group.ranks[0].wait("all-gather")
    group.run(WARN_S + 20)
    assert group.verdicts() == [None, None]


def test_a_rank_that_went_on_does_not_look_as_if_it_waited():
    group = Group(3)
    first, second, _ = group.ranks
    for rank in group.ranks:
        rank.wait("all-gather")
    group.run(WAIT_S + 2 * TICK_S)
    for rank in group.ranks:
        rank.go_on()
    group.run(2 * TICK_S)
    first.wait("barrier")
    second.wait("all-gather")
    group.run(WAIT_S + GRACE_S + 2 * TICK_S)
    assert (
        "number 2 of their group on: rank 0: barrier of 8 float32; rank 1: all-gather of 8 float32; "
        "rank 2: not issued so far, not waiting."
    ) in group.verdicts()[0]


def test_what_parted_is_told_even_if_ranks_wait_elsewhere():
    group = Group(2)
    first, second = group.ranks
    first.issue("all-gather", "unit 1")
    first.wait("barrier")
    second.wait("all-gather", "unit 2")
    group.run(WAIT_S + GRACE_S + 2 * TICK_S)
    assert (
        "number 1 of their group on: rank 0: all-gather of 8 float32 (unit 1), waiting in barrier of 8 float32; "
        "rank 1: all-gather of 8 float32 (unit 2)."
    ) in group.verdicts()[0]


def test_a_wait_for_what_was_issued_long_ago_is_shown():
    group = Group(2)
    first, second = group.ranks
    old = first.issue("gather", "unit 1")
    for _ in range(HISTORY + 10):
        first.issue("all-gather")
    first.recorder.waiting = old
    second.wait("broadcast")
    group.run(WAIT_S + GRACE_S + 2 * TICK_S)
    assert "rank 0: gather of 8 float32 (unit 1); rank 1: broadcast" in group.verdicts()[0]


def test_purposes_tell_collectives_apart_only_where_they_bind():
    for bound in (True, False):
        group = Group(2)
        for rank in group.ranks:
            rank.wait("all-reduce", f"unit {rank.recorder.rank}", bound=bound)
        group.run(WAIT_S + GRACE_S + 2 * TICK_S)
        assert (group.verdicts()[0] is not None) == bound


def test_ranks_are_named_as_the_world_counts_them():
    group = Group(2, ranks=[1, 3])
    for kind, rank in zip(("all-gather", "barrier"), group.ranks, strict=True):
        rank.wait(kind)
    group.run(WAIT_S + 4 * TICK_S)
    assert "rank 1: all-gather of 8 float32; rank 3: barrier" in group.verdicts()[0]
    group = Group(2, ranks=[1, 3])
    group.ranks[0].wait()
    assert "Rank 1 waited 3.2 s in all-gather of 8 float32 and lost its connection to rank 3" in str(
        group.ranks[0].failure(peer=1)
    )


def test_a_long_wait_is_logged_once(caplog):
    group = Group(3)
    group.ranks[0].wait("all-gather", "unit 3")
    group.ranks[2].wait("all-gather", "unit 3")
    with caplog.at_level(logging.WARNING, "fullshard"):
        group.run(WARN_S - TICK_S)
        assert caplog.messages == []
        group.run(WARN_S)
    line = "has waited 30 s in all-gather of 8 float32 (unit 3). Not there so far: rank 1."
    assert caplog.messages == [f"Rank 0 {line}", f"Rank 2 {line}"]


def test_a_store_that_served_an_earlier_group_does_not_speak_for_this_one():
    earlier = Group(2)
    for kind, rank in zip(("all-gather", "barrier"), earlier.ranks, strict=True):
        rank.wait(kind)
    earlier.run(WAIT_S + 4 * TICK_S)
    assert None not in earlier.verdicts()
    group = Group(2, earlier.store)
    group.ranks[0].wait("broadcast")
    group.run(WAIT_S + GRACE_S + 2 * TICK_S)
    assert group.verdicts() == [None, None]


class DeadStore:
    """The store of a process that has ended."""

    def __init__(self):
        self.alive = True
        self.asked = 0

    def set_timeout(self, timeout):
        assert isinstance(timeout, datetime.timedelta)

    def add(self, key, amount):
        if not self.alive:
            self.asked += 1
            raise RuntimeError("Broken pipe")
        return 1

    check = get = set = compare_set = lambda self, *_: self.add("", 0)


def test_a_store_that_is_gone_is_asked_once():
    store = DeadStore()
    group = Group(2, store)
    store.alive = False
    for rank in group.ranks:
        rank.wait()
    group.run(WARN_S)
    assert store.asked == 2  # once a rank
    assert not group.ranks[0].broken_at
    assert isinstance(group.ranks[0].failure(), ProcessGroupError)


def test_failures_say_what_was_waited_for_and_for_whom():
    group = Group(3)
    first, second, _ = group.ranks
    first.wait("all-gather", "unit 3")
    second.wait("all-gather", "unit 3")
    group.run(WAIT_S + TICK_S)
    text = str(first.failure("[gloo/buffer.cc:2] Timed out waiting 9ms for recv operation to complete"))
    assert text.startswith(
        "Rank 0 waited 3.2 s in all-gather of 8 float32 (unit 3), longer than the group's timeout. Not there: rank 2."
    )
    text = str(first.failure(peer=1))
    assert text.startswith(
        "Rank 0 waited 3.2 s in all-gather of 8 float32 (unit 3) and lost its connection to rank 1: that rank has "
    )
    assert text.endswith("(gloo: Connection closed by peer [127.0.0.1]:1)")
    assert "lost its connection to another rank" in str(first.failure(peer=None))


def test_parting_and_description_of_nothing():
    assert divergence({}) is None
    assert "ranks 0, 1: not waiting in any collective of this group" in divergence_text(1, {}, [0, 1])
