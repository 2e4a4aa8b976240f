"""Long work says how far it is: by a bar in a terminal, else by a few lines."""

import pytest

from fullshard.program.cli.common import ByteProgress, ShareProgress
from fullshard.program.launch import progress as module
from fullshard.program.launch.progress import WorkProgress


class Clock:
    now = 0.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def lines(capsys):
    said = []

    def read():
        said.extend(line.removeprefix("fullshard: ") for line in capsys.readouterr().err.splitlines())
        return said

    return read


def test_in_a_pipe_each_tenth_of_long_work_is_a_line(clock, lines):
    with WorkProgress("predicting") as progress:
        progress(400, 4000)
        assert lines() == []
        clock.now = 2.0
        for done in range(500, 4001, 100):
            progress(done, 4000)
    # The line for 400 was due before two seconds had passed.
    assert lines() == [f"predicting: {done:,} of 4,000" for done in (500, *range(800, 4000, 400))]


def test_short_work_and_other_ranks_say_nothing(clock, lines):
    with WorkProgress("predicting") as progress, WorkProgress("predicting", shown=False) as other:
        for done in range(10):
            progress(done, 10)
        clock.now = 5.0
        progress(10, 10)
        other(5, 10)
    assert lines() == []


def test_a_second_piece_of_work_begins_again(clock, lines):
    clock.now = 0.0
    with WorkProgress("tokenizing") as progress:
        clock.now = 3.0
        for total in (20, 1000):
            for done in range(0, total + 1, total // 4):
                progress(done, total)
    assert lines() == [
        f"tokenizing: {done} of {total:,}" for total in (20, 1000) for done in (total // 4, total // 2, total * 3 // 4)
    ]


def test_bytes_and_shares_are_said_as_such(clock, lines):
    with ByteProgress("verifying") as progress:
        progress(32 << 20, 128 << 20)
    with ShareProgress("planning", 2, shown=True) as progress:
        clock.now = 9.0
        progress.piece = 1
        progress(1, 2)
    assert lines() == ["verifying: 32.0 MiB of 128.0 MiB", "planning: 75%"]


def test_no_work_at_all_is_no_error(clock, lines):
    with WorkProgress("measuring") as progress:
        clock.now = 3.0
        progress(0, 0)
    assert lines() == []
