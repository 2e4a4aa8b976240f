"""The watchdog reports diverged ranks on every rank with one text, and no others; with a simulated clock."""

import datetime
import logging
import os
import re
import subprocess
import sys
import threading

import pytest
import torch
from torch.distributed import HashStore

from fullshard.core.comm import watchdog
from fullshard.core.comm.flight_recorder import HISTORY, FlightRecorder, divergence, divergence_text
from fullshard.core.comm.stack_probe import Place, is_stopped, main_thread_place
from fullshard.core.comm.store_posts import PATIENCE_S, StoreConnection, StorePosts
from fullshard.core.comm.watchdog import ANSWER_S, GRACE_S, TICK_S, WAIT_S, WARN_S, GroupWatch
from fullshard.errors import MismatchError, ProcessGroupError


class Rank:
    """One rank of a group of the test."""

    def __init__(self, store, number, ranks, connection):
        self.recorder = FlightRecorder(number)
        self.store_posts = StorePosts(store, number, len(ranks), connection)
        self.broken_at = []
        self.now = 0.0
        self.watch = GroupWatch(self.recorder, self.store_posts, ranks, lambda: self.broken_at.append(self.now))

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
        self.connection = StoreConnection()
        self.ranks = [Rank(self.store, number, ranks or range(size), self.connection) for number in range(size)]
        self.now = 0.0

    def run(self, seconds, without=()):
        """Let time pass; every rank looks once a tick, but for those whose processes do nothing."""
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            for rank in self.ranks:
                if rank in without:
                    continue
                rank.now = self.now
                rank.watch.check(self.now)

    def verdicts(self):
        return [rank.store_posts.verdict() for rank in self.ranks]


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
    first.store_posts.acknowledge = lambda: told.append(1)  # it reads the verdict and does not say so
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
        "rank 2: not issued so far, at "
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
    line = "has waited 30 s in all-gather of 8 float32 (unit 3). Missing so far: rank 1; rank 1 is at "
    for number, message in zip((0, 2), caplog.messages, strict=True):
        assert re.fullmatch(re.escape(f"Rank {number} {line}") + r"\S+:\d+ \(.*\)\.", message)


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

    def set(self, key, value):
        self.add(key, 0)


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
        "Rank 0 waited 3.2 s in all-gather of 8 float32 (unit 3), longer than the group's timeout. Missing: rank 2."
    )
    first, *_ = Group(2).ranks
    first.wait("all-gather", "unit 3")
    text = str(first.failure(peer=1))
    assert text.startswith(
        "Rank 0 waited 3.2 s in all-gather of 8 float32 (unit 3) and lost its connection to rank 1: that rank has "
        "ended or failed, or the network to it was cut. "
    )
    assert text.endswith("(gloo: Connection closed by peer [127.0.0.1]:1)")
    first, *_ = Group(2).ranks
    first.wait("all-gather", "unit 3")
    assert "lost its connection to another rank" in str(first.failure(peer=None))


def test_parting_and_description_of_nothing():
    assert divergence({}) is None
    assert "ranks 0, 1: not waiting in any collective of this group" in divergence_text(1, {}, [0, 1])


# A rank that is gone


@pytest.fixture
def no_wait(monkeypatch):
    """Ranks here fail one after the other in one thread: they need not wait for each other's reports."""
    monkeypatch.setattr(watchdog, "LOST_S", 0.0)


def test_a_failed_group_fails_again_at_once_and_with_the_first_error(no_wait):
    """The clean-up after a failure waits for other messages of the group, which fail for the same reason."""
    group = Group(2)
    first = group.ranks[0]
    first.wait("all-gather", "unit 3")
    told = str(first.failure(peer=1))
    assert first.watch.broken
    first.wait("reduce-scatter", "unit 4")
    assert str(first.failure("[gloo] waits were broken", peer=None)) == told


def test_ranks_that_wait_for_another_survivor_are_told_within_a_look(no_wait):
    """Rank 2 is gone; rank 1 has noticed and waits for nobody any more; rank 0 waits for rank 1."""
    group = Group(3)
    first, second, _ = group.ranks
    second.wait("all-gather")
    second.failure(peer=2)
    second.go_on()
    first.wait("all-gather")
    assert not first.watch.must_fail(first.recorder.waiting)
    group.run(TICK_S)
    assert first.broken_at == [TICK_S]
    assert "and rank 1 lost its connection to rank 2: that rank has ended" in str(first.failure("broken", peer=None))


def test_the_first_failure_is_named_and_not_the_one_next_to_this_rank(no_wait):
    group = Group(3, ranks=[4, 5, 6])
    first, second, third = group.ranks
    third.watch.leave(ValueError("no rows\nleft"))
    second.wait("all-gather")
    error = second.failure(peer=2)
    assert str(error) == ("Rank 5 waited 3.2 s in all-gather of 8 float32 and rank 6 failed first: ValueError: no rows")
    second.watch.leave(error)  # it was not caught, so the program ends
    first.wait("all-gather")
    assert "and rank 6 failed first: ValueError: no rows" in str(first.failure(peer=1))


def test_what_a_failed_rank_has_still_joined_is_not_broken():
    """Rank 1 fails after its part of a save: rank 0 completes it."""
    group = Group(2)
    first, second = group.ranks
    second.issue("gather")
    second.watch.leave(ValueError("later"))
    first.wait("gather")
    group.run(WARN_S)
    assert not first.broken_at
    first.wait("barrier")
    group.run(TICK_S)
    assert first.broken_at


def test_a_connection_lost_on_both_sides_was_cut(no_wait):
    group = Group(3)
    for rank in group.ranks:
        rank.wait()
    first, second, third = group.ranks
    assert "that rank has ended or failed, or the network" in str(first.failure(peer=1))  # before rank 1 has noticed
    assert "between rank 0 and rank 1 is lost on both sides" in str(second.failure(peer=0))
    group.run(TICK_S)
    assert "between rank 0 and rank 1 is lost on both sides" in str(third.failure("waits were broken", peer=None))


def test_a_rank_whose_program_is_over_ran_fewer_collectives(no_wait):
    group = Group(2)
    first, second = group.ranks
    second.watch.leave(None)
    first.wait()
    group.run(WAIT_S)
    assert "the program of that rank has ended, so it ran fewer collectives than this rank." in str(
        first.failure(peer=1)
    )


# A rank that does not answer


def test_a_rank_that_does_not_answer_is_logged_once_within_seconds(caplog):
    group = Group(3)
    first, second, _ = group.ranks
    first.wait()
    with caplog.at_level(logging.WARNING, "fullshard"):
        group.run(WAIT_S + ANSWER_S + 3 * TICK_S, without=[second])
        assert caplog.messages == [
            "Rank 0 has waited 5 s in all-gather of 8 float32. Rank 1 does not answer: the network is cut, the process "
            "is stopped, or its Python is in one long call."
        ]
        group.run(WARN_S, without=[second])
    assert len(caplog.messages) == 1
    assert not first.broken_at
    text = str(first.failure("Timed out"))
    assert "Missing: ranks 1, 2. Rank 1 does not answer: the network is cut" in text


def test_a_rank_that_stops_answering_during_a_wait_is_logged_too(caplog):
    group = Group(2)
    first, second = group.ranks
    first.wait()
    group.run(WAIT_S + ANSWER_S + 1)
    with caplog.at_level(logging.WARNING, "fullshard"):
        group.run(watchdog.ASK_AGAIN_S + ANSWER_S, without=[second])
    (message,) = caplog.messages
    assert "Rank 1 does not answer" in message


def test_a_stopped_process_of_this_machine_is_named(caplog):
    """Its own process id in place of another's: the state is what is asked for."""
    group = Group(2)
    first, second = group.ranks
    first.wait()
    stopped = subprocess.Popen([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"])
    try:
        os.waitid(os.P_PID, stopped.pid, os.WSTOPPED | os.WNOWAIT)
        group.run(TICK_S)
        first.store_posts._pids[1] = stopped.pid
        with caplog.at_level(logging.WARNING, "fullshard"):
            group.run(WAIT_S + ANSWER_S + TICK_S, without=[second])
    finally:
        stopped.kill()
        stopped.wait()
    assert caplog.messages == [
        f"Rank 0 has waited 5 s in all-gather of 8 float32. The process of rank 1 ({stopped.pid}, on this machine) is "
        f"stopped: `kill -CONT {stopped.pid}` continues it."
    ]
    assert not is_stopped(os.getpid())


class StoppedStore(HashStore):
    """The store of a process that is stopped: no question is answered until it goes on."""

    def __init__(self):
        super().__init__()
        self.runs = threading.Event()
        self.runs.set()

    def add(self, key, amount):
        assert self.runs.wait(60)
        return super().add(key, amount)


def test_a_silent_store_is_logged_and_the_watch_goes_on_when_it_answers(caplog, monkeypatch):
    group = Group(2, StoppedStore())
    for kind, rank in zip(("all-gather", "barrier"), group.ranks, strict=True):
        rank.wait(kind)
    group.store.runs.clear()
    # Real seconds: the connection measures its silence itself.
    monkeypatch.setattr(watchdog, "ANSWER_S", PATIENCE_S / 10)
    with caplog.at_level(logging.WARNING, "fullshard"):
        group.run(WAIT_S + 1)
    text = (
        "The store of the ranks does not answer: the network to the process that holds it (rank 0, or the launcher of "
        "the first machine) is cut, or that process is stopped."
    )
    assert [message.split(". ", 1)[1] for message in caplog.messages] == [text] * 2
    group.store.runs.set()
    with group.connection._free:  # the question that waited is answered
        pass
    group.run(2 * TICK_S + GRACE_S + WAIT_S)
    assert "rank 0: all-gather of 8 float32; rank 1: barrier" in group.verdicts()[0]
    assert group.ranks[0].broken_at


# A rank that waits elsewhere


@pytest.fixture
def in_torchs_barrier(monkeypatch):
    place = Place("torch.distributed.barrier, called at train.py:7 (main)", (0, 1), ((1, 2),))
    monkeypatch.setattr(watchdog, "main_thread_place", lambda: place)


def test_a_rank_in_a_barrier_of_torchs_own_is_told_with_those_that_wait_for_it(in_torchs_barrier, caplog):
    group = Group(2)
    first, second = group.ranks
    first.wait("all-gather", "unit 0")
    group.run(WAIT_S + GRACE_S + 4 * TICK_S)
    text = (
        "Ranks are in different collectives, from number 1 of their group on: rank 0: all-gather of 8 float32 "
        "(unit 0); rank 1: not issued so far, at torch.distributed.barrier, called at train.py:7 (main). Every rank "
    )
    assert group.verdicts()[0].startswith(text)
    assert first.broken_at
    assert second.broken_at
    assert [message.startswith(text) for message in caplog.messages] == [True]


def test_a_barrier_of_other_ranks_is_none_of_this_groups_business(in_torchs_barrier):
    group = Group(2, ranks=[2, 3])
    group.ranks[0].wait("all-gather")
    group.run(WARN_S)
    assert group.verdicts() == [None, None]


def test_a_rank_that_was_in_the_collective_already_may_wait_in_a_barrier(in_torchs_barrier):
    """Rank 0 waits for a third one's part of it."""
    group = Group(2)
    group.ranks[1].issue("all-gather")
    group.ranks[0].wait("all-gather")
    group.run(WARN_S)
    assert group.verdicts() == [None, None]


def test_a_barrier_that_moves_on_is_no_wait(monkeypatch):
    places = iter(range(10_000))
    monkeypatch.setattr(watchdog, "main_thread_place", lambda: Place("barrier", (0, 1), ((next(places), 0),)))
    group = Group(2)
    group.ranks[0].wait("all-gather")
    group.run(WARN_S)
    assert group.verdicts() == [None, None]


def test_a_place_is_the_line_of_the_users_program():
    place = main_thread_place()
    assert place.text.startswith("test_watchdog.py:")
    assert place.text.endswith("(test_a_place_is_the_line_of_the_users_program)")
    assert place.members == ()


class Faulty:
    """A watch whose checks fail, and one that works, of the same thread."""

    def __init__(self, errors):
        self.errors, self.checks, self.left, self.done = iter(errors), 0, 0, threading.Event()

    def check(self, now):
        self.checks += 1
        if self.checks > 6:
            self.done.set()
        if (error := next(self.errors, None)) is not None:
            raise error

    def leave(self, error):
        self.left += 1
        raise RuntimeError("the store is gone")

    def is_cause_of(self, error):
        return None


def test_the_watch_survives_its_own_errors_and_reports_each_once(monkeypatch, caplog):
    monkeypatch.setattr(watchdog, "TICK_S", 0.001)
    one = watchdog.Watchdog()
    again, other = ValueError("odd post"), KeyError("rank")
    faulty, sound = Faulty([again, again, other, other, None]), Faulty([])
    for watch in (faulty, sound):
        one.add(watch)
    assert all(watch.done.wait(10) for watch in (faulty, sound))
    one.leave(None)
    assert (faulty.left, sound.left) == (1, 1)
    reports = [record for record in caplog.records if "The watch over ranks failed and goes on" in record.message]
    texts = [str(record.exc_info[1]) for record in reports]
    assert texts[:2] == ["odd post", "'rank'"]
    assert texts[2:] == ["the store is gone"] * 2
    one._end(os.getpid())
