"""Beats of each rank over the store, by which the others tell a rank that is slow from one that is dead.

Each rank says once a second how many collectives it has issued, the last one (with its unit) and where its program is.
A rank that has issued none for a while reads the others' beats. It names a rank that does not beat, or is behind, with
its stack. A rank whose process is stopped, or beats no more and takes no processor time, is dead after a while: then
this rank fails, so that its launcher starts all of them again. One that computes in a single long call of Python (a
collection of garbage, a tokenizer) does not beat either, but takes processor time; it is slow.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from typing import NamedTuple

from fullshard.comm.board import Board
from fullshard.comm.flight_recorder import FlightRecorder
from fullshard.comm.whereabouts import main_thread_stack, processor_ticks
from fullshard.errors import ProcessGroupError

BEAT_S = 1.0
"""Interval of a rank's beats."""

STUCK_S = 2.0
"""A rank that has issued no collective for more seconds reads the others' beats."""

SILENT_S = 3.0
"""A rank without a beat for more seconds is silent."""

NAME_S = 6.0
"""A rank that others have waited for so long is named."""

STOPPED_S = 10.0
"""A process that is stopped for more seconds is dead. Shorter ones happen: a snapshot, a debugger."""

IDLE_S = 30.0
"""A silent process of this machine that takes no processor time for more seconds is dead."""

FAR_S = 60.0
"""A silent process of another machine is dead after more seconds: nobody here knows whether it computes."""

ASLEEP_S = 3.0
"""If this rank was not asked to look for so long, it has not run itself, and knows nothing of the others."""

LOOKERS = 4
"""Number of ranks that look at all others."""

ENDINGS: list[Callable[[BaseException], None]] = []
"""Called before :func:`end_process` ends the process; one may end it itself."""

_log = logging.getLogger("fullshard")


class Beat(NamedTuple):
    """What a rank says once a second.

    Attributes:
        count: Number of the beat.
        issued: Collectives that it has issued.
        call: The last of them, as text; empty before the first.
        stack: Where its program is, the innermost frame last.
    """

    count: int
    issued: int
    call: str
    stack: str


class _Other:
    """What this rank knows of another one, since it has been stuck itself."""

    def __init__(self, now: float) -> None:
        self.count = -1  # number of its last beat
        self.heard = now  # when that changed last
        self.stopped: float | None = None  # since when its process is stopped
        self.ticks, self.ran = -1, now  # its processor time, and when that changed last
        self.named = ""  # how it was named last


class Pulse:
    """This rank's beats and what the others' say; one for each process, checked in the watchdog's thread."""

    def __init__(self, recorder: FlightRecorder, board: Board, fail: Callable[[ProcessGroupError], None]) -> None:
        """Beat for the rank of ``recorder``; ``fail`` is called once, when another rank is dead."""
        self.recorder = recorder
        self._board = board
        self._fail = fail
        self._beats: dict[int, Beat] = {}
        self._others: dict[int, _Other] = {}
        self._count = self._issued = 0
        self._checked = self._moved = self._beaten = float("-inf")
        self._failed = False

    def leave(self, error: BaseException | None) -> None:
        """Do nothing: a rank that has ended is no longer there to be dead."""

    def is_cause_of(self, error: BaseException) -> None:
        """Return None: this knows no errors of other ranks."""

    def check(self, now: float) -> None:
        """Beat, and look for dead ranks if this one is stuck; ``now`` is in seconds of a monotonic clock."""
        moved = self.recorder.last != self._issued
        if moved or now - self._checked > ASLEEP_S:
            self._issued, self._moved = self.recorder.last, now
            self._others.clear()
        self._checked = now
        if now - self._beaten < BEAT_S:
            return
        self._beaten = now
        self._count += 1
        last = next(reversed(tuple(self.recorder.issued)), None)
        beat = Beat(self._count, self._issued, "" if last is None else last.text(), main_thread_stack())
        self._board.beat(json.dumps(beat))
        self._board.look()
        stuck = now - self._moved > STUCK_S and not self._failed
        # Rank 0 often holds the store: what it said last is no longer there when its process is stopped.
        watched = self._watched() if stuck else [0]
        self._beats |= {rank: Beat(*json.loads(text)) for rank, text in self._board.beats(watched).items()}
        if stuck:
            for rank in watched:
                self._look(rank, now)

    def _watched(self) -> list[int]:
        """Return the ranks that this one looks at: a few look at all, and two of each machine at those there."""
        me, near = self.recorder.rank, sorted(self._board.neighbours())
        watched = range(self._board.size) if me < LOOKERS else near if me in near[:2] else []
        return [rank for rank in watched if rank != me]

    def _look(self, rank: int, now: float) -> None:
        """Name a rank that others wait for, and fail if it is dead."""
        other, beat = self._others.setdefault(rank, _Other(now)), self._beats.get(rank)
        pid = self._board.neighbours().get(rank)
        if beat is not None and beat.count != other.count:
            other.count, other.heard = beat.count, now
        ticks = -1 if pid is None else processor_ticks(pid)
        if ticks != other.ticks:
            other.ticks, other.ran = ticks, now
        other.stopped = (other.stopped or now) if self._board.stopped([rank]) else None
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
                f"{waited}. It is given up. Look for what stopped it, and start again from the last checkpoint.{stack}"
            )
            error.transient = True
            self._fail(error)

    def _state(self, rank: int, other: _Other, pid: int | None, now: float) -> tuple[str, str, bool]:
        """Return what is wrong with a rank, as a kind and in words, empty if nothing is, and whether it is dead."""
        beat, silent_s = self._beats.get(rank), now - other.heard
        if other.stopped is not None:
            state = f"the process of rank {rank} ({pid}, on this machine) is stopped; `kill -CONT {pid}` lets it go on"
            return "stopped", state, now - other.stopped > STOPPED_S
        if silent_s > SILENT_S and self._board.silent_s() < SILENT_S:
            state = f"rank {rank} has not beaten for {silent_s:.0f} s, because it is cut off or in one long call"
            return "silent", state, silent_s > FAR_S if pid is None else min(silent_s, now - other.ran) > IDLE_S
        if beat is not None and beat.issued < self._issued:
            missing = next((call.text() for call in tuple(self.recorder.issued) if call.seq > beat.issued), "")
            return "behind", f"rank {rank} has issued {beat.issued} of {self._issued} collectives, not {missing}", False
        return "", "", False


def end_process(error: ProcessGroupError) -> None:
    """End this process because another rank is dead; for backends whose waits cannot be given up.

    A program of ours reports it as it reports any error; see :data:`ENDINGS`.
    """
    for ending in ENDINGS:
        ending(error)
    print(f"fullshard: {error}", file=sys.stderr, flush=True)
    os._exit(error.exit_code)
