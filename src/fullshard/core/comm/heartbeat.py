"""Beats of each rank over the store, which tell the others whether a rank is slow or dead.

Once a second, each rank publishes how many collectives it has issued, the last one (with its unit) and its stack. A
rank that has issued none for a while reads the others' beats. It names a rank that does not beat or is behind, with
its stack. A rank is dead if its process stays stopped, or if it neither beats nor takes processor time for a while:
then this rank fails, so that its launcher restarts all of them. A rank in a single long call of Python (a garbage
collection, a tokenizer) does not beat either, but it takes processor time: it is slow. One that waits in such a call,
for a disk or a driver, takes none: it is given twice the time in a compile, a load or the first CUDA call.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable
from typing import NamedTuple

from fullshard.core.comm.flight_recorder import FlightRecorder
from fullshard.core.comm.stack_probe import main_thread_long_call, main_thread_stack, processor_ticks
from fullshard.core.comm.store_posts import StorePosts
from fullshard.errors import ConfigError, ProcessGroupError

BEAT_S = 1.0
"""Interval of a rank's beats, in seconds."""

STUCK_S = 2.0
"""A rank that has issued no collective for this long reads the others' beats."""

SILENT_S = 3.0
"""A rank without a beat for this long is silent."""

NAME_S = 6.0
"""A rank that others have waited for this long is named."""

STOPPED_S = 10.0
"""A process that is stopped for this long is dead. Shorter stops are normal: a machine's snapshot, a debugger."""

IDLE_S = 30.0
"""A silent process of this machine that takes no processor time for this long is dead."""

FAR_S = 60.0
"""A silent process of another machine is dead after this long: its processor time cannot be read here."""

LIMIT_VARIABLE = "FULLSHARD_SILENT_LIMIT_S"
"""Environment variable with another number of seconds in place of both; doubled like these in a long call."""

ASLEEP_S = 3.0
"""If this rank's check did not run for this long, it was stopped itself and knows nothing of the others."""

LOOKERS = 4
"""Number of ranks that watch all others."""

ENDINGS: list[Callable[[BaseException], None]] = []
"""Called before :func:`end_process` ends the process; a callback may end it itself."""

_log = logging.getLogger("fullshard")


class Beat(NamedTuple):
    """The message that a rank publishes once a second.

    Attributes:
        count: Number of the beat.
        issued: Collectives that it has issued.
        call: The last of them as text; empty before the first.
        stack: Stack of its program, innermost frame last.
        long: The compile, load, save or first CUDA call that it is in, during which it may not beat; else empty.
    """

    count: int
    issued: int
    call: str
    stack: str
    long: str


class _Other:
    """This rank's knowledge of another one, since it has been stuck itself."""

    def __init__(self, now: float) -> None:
        self.stopped: float | None = None  # since when its process has been stopped
        self.ticks, self.ran = -1, now  # its processor time, and when that last changed
        self.named = ""  # how it was last named


class HeartbeatMonitor:
    """Sends this rank's beats and evaluates the others'; one for each process, checked in the watchdog's thread."""

    def __init__(
        self, recorder: FlightRecorder, store_posts: StorePosts, fail: Callable[[ProcessGroupError], None]
    ) -> None:
        """Beat for the rank of ``recorder``; ``fail`` is called once, when another rank is dead.

        Raises:
            ConfigError: ``FULLSHARD_SILENT_LIMIT_S`` is set and not a number of seconds.
        """
        self._limits = _limits()
        self.recorder = recorder
        self._posts = store_posts
        self._fail = fail
        self._others: dict[int, _Other] = {}
        self._count = self._issued = 0
        self._checked = self._moved = self._beaten = float("-inf")
        self._failed = False

    def leave(self, error: BaseException | None) -> None:
        """Do nothing: a rank that has ended is not dead."""

    def is_cause_of(self, error: BaseException) -> None:
        """Return None: the monitor knows no errors of other ranks."""

    def check(self, now: float) -> None:
        """Beat, and look for dead ranks if this one is stuck; ``now`` is in seconds of a monotonic clock."""
        moved = self.recorder.last != self._issued
        if moved or now - self._checked > ASLEEP_S:
            self._issued, self._moved = self.recorder.last, now
            self._others.clear()
            self._posts.heartbeats.forget(now)
        self._checked = now
        if now - self._beaten < BEAT_S:
            return
        self._beaten = now
        self._count += 1
        last = next(reversed(tuple(self.recorder.issued)), None)
        call = "" if last is None else last.text()
        beat = Beat(self._count, self._issued, call, main_thread_stack(), main_thread_long_call())
        self._posts.beat(json.dumps(beat))
        self._posts.look()
        stuck = now - self._moved > STUCK_S and not self._failed
        # Rank 0 often holds the store: when its process is stopped, its last beat cannot be read any more.
        watched = self._watched() if stuck else [0]
        self._posts.listen(watched, now)
        if stuck:
            for rank in watched:
                self._look(rank, now)

    def _watched(self) -> list[int]:
        """Return the ranks that this one watches: a few watch all, and two of each machine watch those on it."""
        me, near = self.recorder.rank, sorted(self._posts.neighbours())
        watched = range(self._posts.size) if me < LOOKERS else near if me in near[:2] else []
        return [rank for rank in watched if rank != me]

    def _look(self, rank: int, now: float) -> None:
        """Name a rank that others wait for, and fail if it is dead."""
        other, beat = self._others.setdefault(rank, _Other(now)), self._beat_of(rank)
        pid = self._posts.neighbours().get(rank)
        ticks = -1 if pid is None else processor_ticks(pid)
        if ticks != other.ticks:
            other.ticks, other.ran = ticks, now
        other.stopped = (other.stopped or now) if self._posts.stopped([rank]) else None
        kind, state, dead = self._state(rank, other, pid, now)
        stack = ""
        if beat is not None:
            stack = f" Its stack at its last beat{f', after {beat.call}' if beat.call else ''}:\n{beat.stack}"
        waited = f"Rank {self.recorder.rank} has issued no collective for {now - self._moved:.0f} s: {state}"
        if kind not in ("", other.named) and now - self._moved >= NAME_S:
            other.named = kind
            _log.warning("%s.%s", waited, stack)
        if dead:
            self._failed = True
            error = ProcessGroupError(
                f"{waited}. Find out what stopped it, and start again from the last checkpoint.{stack}"
            )
            error.transient = True
            self._fail(error)

    def _beat_of(self, rank: int) -> Beat | None:
        text = self._posts.heartbeats.texts.get(rank)
        return None if text is None else Beat(*json.loads(text))

    def _state(self, rank: int, other: _Other, pid: int | None, now: float) -> tuple[str, str, bool]:
        """Return a rank's trouble as a kind and in words, empty if there is none, and whether the rank is dead."""
        beat, silent_s = self._beat_of(rank), self._posts.heartbeats.silent_s(rank, now)
        if other.stopped is not None:
            state = f"the process of rank {rank} ({pid}, on this machine) is stopped; `kill -CONT {pid}` continues it"
            return "stopped", state, now - other.stopped > STOPPED_S
        if silent_s > SILENT_S and self._posts.silent_s() < SILENT_S:
            inside = beat.long if beat is not None else ""
            limit = self._limits[pid is None] * (2 if inside else 1)
            state = (
                f"rank {rank} has not beaten for {silent_s:.0f} s, because it is cut off or in one long call"
                f"{f' ({inside})' if inside else ''}; it is given up after {limit:.0f} s without a beat"
                f"{'' if pid is None else ' and without processor time'} ({LIMIT_VARIABLE} changes that)"
            )
            return "silent", state, (silent_s if pid is None else min(silent_s, now - other.ran)) > limit
        if beat is not None and beat.issued < self._issued:
            missing = next((call.text() for call in tuple(self.recorder.issued) if call.seq > beat.issued), "")
            return "behind", f"rank {rank} has issued {beat.issued} of {self._issued} collectives, not {missing}", False
        return "", "", False


def _limits() -> tuple[float, float]:
    """Return the seconds after which a silent rank of this machine, and one of another, is dead."""
    given = os.environ.get(LIMIT_VARIABLE, "")
    if not given:
        return IDLE_S, FAR_S
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not SILENT_S < seconds < float("inf"):
        raise ConfigError(f"{LIMIT_VARIABLE} must be a number of seconds above {SILENT_S:.0f}; got {given!r}.")
    return seconds, seconds


def end_process(error: ProcessGroupError) -> None:
    """End this process because another rank is dead; for backends whose waits cannot be interrupted.

    A program of fullshard's reports it like any error; see :data:`ENDINGS`.
    """
    for ending in ENDINGS:
        ending(error)
    with contextlib.suppress(OSError):
        print(f"fullshard: {error}", file=sys.stderr, flush=True)
    os._exit(error.exit_code)
