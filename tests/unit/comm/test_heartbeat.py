"""When a rank counts as dead, and when as slow; with a simulated clock."""

import logging
import os

import pytest
import torch
from torch.distributed import HashStore

from fullshard.core.comm import heartbeat
from fullshard.core.comm.flight_recorder import FlightRecorder
from fullshard.core.comm.heartbeat import (
    ASLEEP_S,
    BEAT_S,
    FAR_S,
    IDLE_S,
    LIMIT_VARIABLE,
    NAME_S,
    SILENT_S,
    STOPPED_S,
    HeartbeatMonitor,
)
from fullshard.core.comm.stack_probe import main_thread_long_call
from fullshard.core.comm.store_posts import StoreConnection, StorePosts
from fullshard.errors import ConfigError


class Ranks:
    """Two ranks; the processes of both are known to rank 0 unless they are far from each other."""

    def __init__(self, monkeypatch, *, far=False, size=2):
        store, connection = HashStore(), StoreConnection()
        self.store_posts_of = [StorePosts(store, rank, size, connection) for rank in range(size)]
        self.recorders = [FlightRecorder(rank) for rank in range(size)]
        self.failed = []
        self.monitors = [
            HeartbeatMonitor(*pair, self.failed.append)
            for pair in zip(self.recorders, self.store_posts_of, strict=True)
        ]
        self.now, self.ticks, self.stopped = 0.0, 0, set()
        for store_posts in self.store_posts_of:
            monkeypatch.setattr(store_posts, "look", lambda: None)
            monkeypatch.setattr(store_posts, "_pids", {} if far else {rank: 1000 + rank for rank in range(size)})
            monkeypatch.setattr(store_posts, "stopped", lambda ranks: dict.fromkeys(self.stopped & set(ranks), 0))
        monkeypatch.setattr(heartbeat, "processor_ticks", lambda pid: self.ticks)

    def issue(self, *ranks):
        for rank in ranks:
            self.recorders[rank].issue("all-gather", 8, torch.float32, "unit 3", bound=True)

    def run(self, seconds, *, without=(), computing=False):
        """Let time pass; without ``computing`` the silent rank takes no processor time."""
        for _ in range(round(seconds / 0.25)):
            self.now += 0.25
            self.ticks += computing
            for rank, one in enumerate(self.monitors):
                if rank not in without:
                    one.check(self.now)


@pytest.fixture
def two(monkeypatch, caplog):
    ranks = Ranks(monkeypatch)
    caplog.set_level(logging.WARNING, "fullshard")
    ranks.issue(0, 1)
    ranks.run(3)
    ranks.issue(0)
    return ranks


def test_a_rank_behind_is_named_once_with_its_stack_and_never_given_up(two, caplog):
    two.run(1000)
    assert two.failed == []
    (message,) = caplog.messages
    first, second, *stack = message.split("\n")[0].split(": ") + message.split("\n")[1:]
    assert first.startswith("Rank 0 has issued no collective for ")
    assert second.startswith("rank 1 has issued 1 of 2 collectives, not all-gather of 8 float32 (unit 3)")
    assert any(line.startswith('  File "') and os.path.basename(__file__) in line for line in stack[1:])


def test_it_is_named_within_ten_seconds(two, caplog):
    two.run(NAME_S + 2 * BEAT_S)
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("seconds", [5, STOPPED_S])
def test_a_process_that_is_stopped_for_a_short_time_is_not_dead(two, seconds):
    two.stopped = {1}
    two.run(seconds, without=[1])
    two.stopped = set()
    two.run(60)
    assert two.failed == []


def test_a_process_that_stays_stopped_is_dead(two):
    two.stopped = {1}
    two.run(STOPPED_S + SILENT_S + 2, without=[1])
    (error,) = two.failed
    assert "the process of rank 1 (1001, on this machine) is stopped" in str(error)
    assert error.transient


def test_a_rank_in_one_long_call_is_not_dead_while_it_computes(two, caplog):
    two.run(10 * IDLE_S, without=[1], computing=True)
    assert two.failed == []
    assert "rank 1 has not beaten for " in caplog.text


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize(
    ("call", "given"),
    [("", None), ("", "300"), *((call, None) for call in ("a compile", "a load or save", "the first CUDA call"))],
)
def test_a_rank_that_does_not_beat_and_takes_no_time_is_dead_after_the_limit(monkeypatch, far, call, given):
    """Of another machine it is longer, twice as long in a call that may hold the interpreter, or what users set."""
    monkeypatch.setattr(heartbeat, "main_thread_long_call", lambda: call)
    if given is not None:
        monkeypatch.setenv(LIMIT_VARIABLE, given)
    ranks = Ranks(monkeypatch, far=far)
    limit = float(given or (FAR_S if far else IDLE_S)) * (2 if call else 1)
    ranks.issue(0, 1)
    ranks.run(3)
    ranks.issue(0)
    ranks.run(limit, without=[1])
    assert ranks.failed == []
    ranks.run(SILENT_S + 2, without=[1])
    (error,) = ranks.failed
    assert "rank 1 has not beaten for " in str(error)
    inside = f" ({call}); " if call else "call; "
    assert f"{inside}it is given up after {limit:.0f} s without a beat" in str(error)
    assert ("and without processor time" in str(error)) is not far
    assert LIMIT_VARIABLE in str(error)


@pytest.mark.parametrize("given", ["soon", "3", "-1", "nan", "inf"])
def test_a_limit_that_is_no_number_of_seconds_is_refused(monkeypatch, given):
    monkeypatch.setenv(LIMIT_VARIABLE, given)
    with pytest.raises(ConfigError, match=f"{LIMIT_VARIABLE} must be a number of seconds above 3; got '{given}'"):
        Ranks(monkeypatch)


def test_a_beat_says_which_long_call_the_program_is_in(monkeypatch):
    assert main_thread_long_call() == ""
    calls = {
        "a compile": ("/torch/_inductor/codecache.py", "load"),
        "a load or save": ("/transformers/modeling_utils.py", "from_pretrained"),
        "the first CUDA call": ("/torch/cuda/__init__.py", "_lazy_init"),
    }
    for what, (file, name) in calls.items():
        scope = {"look": main_thread_long_call}
        exec(compile(f"def {name}():\n    return look()\n", f"/site-packages{file}", "exec"), scope)
        assert scope[name]() == what


def test_a_rank_that_was_stopped_itself_blames_nobody(two):
    two.run(20, without=[1])
    two.now += FAR_S + ASLEEP_S  # the machine was frozen
    two.run(IDLE_S - 5, without=[1])
    assert two.failed == []


def test_of_many_ranks_a_few_look_at_all_and_two_of_a_machine_at_its_own(monkeypatch):
    many = Ranks(monkeypatch, size=12)
    for store_posts in many.store_posts_of:
        monkeypatch.setattr(store_posts, "_pids", {rank: rank for rank in (8, 9, 10)})
    watched = [one._watched() for one in many.monitors]
    assert [len(ranks) for ranks in watched] == [11, 11, 11, 11, 0, 0, 0, 0, 2, 2, 0, 0]
