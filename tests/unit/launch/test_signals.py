"""What SIGTERM and Ctrl-C do to a rank that trains."""

import os
import queue
import signal
import subprocess
import sys

import pytest

from fullshard.program.launch.failure import say_ending
from fullshard.program.launch.programs import signals
from fullshard.program.launch.programs.signals import StopSignals
from fullshard.program.launch.ranks import STOP_SIGNALS
from support.processes import TESTS, environment, run_ranks

AGAIN = """
import ctypes, os, signal, threading
from fullshard.program.launch.failure import say_ending
from fullshard.program.launch.programs import signals

def again():
    while not stop.requested:
        pass
    os.kill(os.getpid(), signal.SIGINT)

signals.SAME_REQUEST_SECONDS = 0.0
with signals.StopSignals() as stop:
    threading.Thread(target=again, daemon=True).start()
    os.kill(os.getpid(), signal.SIGTERM)
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):  # the second time it waits for itself, in C, for ever
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""


def until_requested(stop):
    while not stop.requested:
        pass


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_is_a_wish_and_its_echo_changes_nothing(number, monkeypatch):
    monkeypatch.setattr(signals, "SAME_REQUEST_SECONDS", 1e9)
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with StopSignals() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        until_requested(stop)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.parametrize(("rank", "times"), [("0", 1), ("1", 0)])
def test_one_rank_says_that_it_stops_and_only_while_it_trains(rank, times, monkeypatch, capfd):
    monkeypatch.setattr(signals, "SAME_REQUEST_SECONDS", 1e9)
    monkeypatch.setenv("RANK", rank)
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        until_requested(stop)
        os.kill(os.getpid(), signal.SIGINT)
    assert capfd.readouterr().err.count("stopping after this step with a checkpoint") == times


def test_one_more_ends_the_process_whatever_it_waits_for(tmp_path):
    script = tmp_path / "again.py"
    script.write_text(AGAIN)
    with pytest.raises(AssertionError, match="rank 0 ended with 130"):
        run_ranks(1, script, timeout_s=100)


def test_the_end_of_an_attempt_is_no_wish_to_save(tmp_path, monkeypatch, capfd):
    """The launcher ends the ranks because one of them has failed."""
    ended = queue.SimpleQueue()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "rank0.json"))
    monkeypatch.setattr(signals.os, "_exit", ended.put)
    monkeypatch.setattr(signals, "report_saving", lambda: None)
    say_ending(tmp_path / "rank1.json")
    with StopSignals():
        os.kill(os.getpid(), signal.SIGTERM)
        assert ended.get(timeout=30) == 130


@pytest.mark.parametrize(
    ("ignored", "heard"),
    [
        ("HUP", "INT TERM USR1"),  # nohup
        ("INT QUIT", "TERM USR1 HUP"),  # the background of a script
        ("HUP INT QUIT TERM USR1", "TERM USR1"),
    ],
)
def test_what_a_terminal_sends_stays_ignored_where_the_run_was_started_so(ignored, heard):
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers_of(ignored)}
    try:
        with StopSignals():
            those = {number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert those == numbers_of(heard)


def numbers_of(names):
    return {signal.Signals[f"SIG{name}"] for name in names.split()}


IGNORED = "HUP INT QUIT TERM USR1 USR2 CHLD"
CHILD = "import signal; print(*(one.name for one in signal.Signals if signal.getsignal(one) is signal.SIG_IGN))"
TEST = f"""
import subprocess, sys
from support.processes import give_children_default_signals
give_children_default_signals()
subprocess.run([sys.executable, "-c", {CHILD!r}], check=True)
"""


def test_tests_start_processes_that_hear_what_the_tests_ignore():
    shell = ["bash", "-c", f"trap '' {IGNORED}; exec \"$@\"", "bash", sys.executable, "-c", TEST]
    done = subprocess.run(shell, env=environment(PYTHONPATH=str(TESTS)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not {one.name for one in numbers_of(IGNORED)} & set(done.stdout.split())
