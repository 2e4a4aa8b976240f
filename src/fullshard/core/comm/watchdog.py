"""Detection of ranks that can never meet in a collective, reported by name on every rank.

Each rank keeps a flight recorder of the collectives that it issued on a group. During a long wait it publishes the
recorder to the other ranks through the group's store, and those that do not wait answer with where their program is.
If two recorders have different collectives of the same number, the ranks have diverged: nothing later can correct
that, so every rank raises an error that states where each of them is. The same happens if one of them waits in a
collective of torch's own that the others will never join. A rank that is merely slow (it computes, or writes a file)
never counts as diverged. One whose process is stopped, or that cannot be reached, is named in a warning.

A rank that fails publishes the reason, so that the others report the first failure and not that of a neighbour.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from fullshard.core.comm.flight_recorder import Collective, FlightRecorder, divergence, divergence_text, named
from fullshard.core.comm.heartbeat import HeartbeatMonitor
from fullshard.core.comm.stack_probe import Place, main_thread_call, main_thread_place
from fullshard.core.comm.store_posts import STORE_CONNECTION, Post, RankFailure, StorePosts
from fullshard.errors import MismatchError, ProcessGroupError, UserError

WAIT_S = 2.0
"""A wait is published to the other ranks after this many seconds."""

TICK_S = 0.25
"""Interval at which the thread checks this process's wait and the other ranks' posts."""

GRACE_S = 2.0
"""Seconds that diverged ranks wait for each other: to publish where they are, and to read the verdict."""

ANSWER_S = 3.0
"""A rank that has not answered another one's post after this many seconds is silent."""

ASK_AGAIN_S = 10.0
"""Interval at which a waiting rank publishes its post again for a new answer, in seconds."""

WARN_S = 30.0
"""A wait is logged once as a warning after this many seconds."""

LOST_S = 0.3
"""Seconds that a rank which lost a connection waits for the other rank's own report."""

ENDED = "the end of its program"
"""Place of a rank whose program has ended without an error."""

_LOST = (
    "that rank has ended or failed, or the network to it was cut. Look for its own error; if it has none, it ran fewer "
    "collectives than this rank."
)

_WHY_LENGTH = 500

T = TypeVar("T")
_log = logging.getLogger("fullshard")


class GroupWatch:
    """Watches the waits of this rank on one group. One for each group and process.

    Attributes:
        recorder: This rank's collectives, and the one that it waits in.
        store_posts: Where the group's ranks tell each other where they are.
        broken: True if the group is unusable, so that every wait must fail at once.
        monitor: Sends and reads beats, if the group has all ranks; it ends with the watch.
    """

    def __init__(
        self, recorder: FlightRecorder, store_posts: StorePosts, ranks: Sequence[int], break_waits: Callable[[], None]
    ) -> None:
        """Compare ``recorder`` with the other ranks'.

        Args:
            recorder: Records this rank's collectives.
            store_posts: The group's posts.
            ranks: The group's ranks, numbered as in the default group.
            break_waits: Makes this process's waits on the group fail.
        """
        self.recorder = recorder
        self.broken = False
        self.store_posts = store_posts
        self._ranks = ranks
        self._break_waits = break_waits
        self._call: Collective | None = None
        self._since = self._verdict_since = 0.0
        self._published: Collective | None = None
        self._warned_slow = self._warned_silent = False
        self._stamp, self._answered, self._asked = 0, 0, 0.0
        self._outside: tuple[Place, float, bool] | None = None
        self._diverged_since: float | None = None
        self._verdict: str | None = None
        self._error: UserError | None = None
        self._own: RankFailure | None = None
        self._reported = True
        self.monitor: HeartbeatMonitor | None = None

    @property
    def _me(self) -> int:
        """Return this rank's number in the default group."""
        return self._ranks[self.recorder.rank]

    # In the program's thread

    def must_fail(self, call: Collective) -> bool:
        """Return True if ``call`` cannot complete: the group is broken, or another rank has failed before it."""
        return self.broken or any(call.seq > failed.issued for failed in self._others().values())

    def failure(self, call: Collective, error: RuntimeError, waited_s: float, peer: int | None) -> UserError:
        """Return the exception to raise for a backend's ``error`` in ``call``; afterwards the group is unusable.

        Every later failure returns the first one again: what fails then, such as the clean-up, has the same cause.

        Args:
            call: The collective that failed.
            error: The backend's error.
            waited_s: Seconds that this rank waited.
            peer: Rank that the failed message was from or for; None: no particular one.
        """
        if self._error is None:
            what = f"Rank {self._me} waited {waited_s:.1f} s in {call.text()}"
            self._error = self._cause(call, what, str(error), peer)
        self.broken = True
        again = type(self._error)(str(self._error))
        again.transient = isinstance(again, ProcessGroupError)  # ranks that have diverged would diverge again
        return again

    def _cause(self, call: Collective, what: str, error: str, peer: int | None) -> UserError:
        self.store_posts.look()
        verdict = self._verdict or self.store_posts.verdict()
        if verdict is not None:
            return MismatchError(verdict)
        if "Timed out" in error:
            silent = self._silent(call)
            text = (
                f"{what}, longer than the group's timeout. Missing: {named(self._absent(call))}. "
                f"{f'{silent} ' if silent else ''}If these ranks "
                "are only slow, set a longer timeout for the group; otherwise find out what they wait for."
            )
            self._report(call.seq - 1, self._me, f"ProcessGroupError: {text}")
            return ProcessGroupError(text)
        failed = self._wait_for_report(call, peer)
        if failed is not None:
            number, (_, origin, why) = failed
            self._report(call.seq - 1, self._ranks[number] if origin == self._me else origin, why)
            return ProcessGroupError(f"{what} and {self._reported_text(*failed)}")
        reason = re.sub(r"^\[.*?\] ", "", error).split(". ")[0]
        unheard = set(range(self.store_posts.size)) - set(self._others())  # their reports may have ended with the store
        gone = [self._ranks[number] for number in sorted(unheard) if self.store_posts.is_gone(number)]
        if len(gone) > 1:  # nobody can say which was first
            return ProcessGroupError(
                f"{what} and lost its connection to {named(gone)}: they have ended. Look for their own errors. "
                f"(gloo: {reason})"
            )
        where = "another rank" if peer is None else f"rank {self._ranks[peer]}"
        post = self.store_posts.posts().get(-1 if peer is None else peer)
        if post is not None and post.place == ENDED:
            how = "the program of that rank has ended, so it ran fewer collectives than this rank."
        else:
            how = _LOST
        return ProcessGroupError(f"{what} and lost its connection to {where}: {how} (gloo: {reason})")

    def _wait_for_report(self, call: Collective, peer: int | None) -> tuple[int, RankFailure] | None:
        """Return the rank whose failure explains the end of the connection to ``peer``, and that failure."""
        deadline, last = time.monotonic() + LOST_S, False
        while (failed := self._failed_rank(peer)) is None and not last and peer is not None:
            # This rank reports first: if only the network is cut, the other rank looks for this report meanwhile.
            self._report(call.seq - 1, self._ranks[peer], "")
            # A rank that has ended may have reported just before: that is looked for once more.
            last = self.store_posts.is_gone(peer) or time.monotonic() > deadline
            if not last:
                time.sleep(LOST_S / 10)
            self.store_posts.look()
        return failed

    def _failed_rank(self, peer: int | None) -> tuple[int, RankFailure] | None:
        """Return the failure of ``peer``; if it has none or knows no error, that of a rank that does."""
        others = self._others()
        known = min((rank for rank, failed in others.items() if failed.why), default=None)
        number = peer if known is None and peer is not None else known
        if peer is None and known is None:
            number = min(others, default=None)
        return None if number is None or number not in others else (number, others[number])

    def _reported_text(self, number: int, failed: RankFailure) -> str:
        """Return the second half of an error's text, for the failure that rank ``number`` has reported."""
        rank, origin = self._ranks[number], failed.origin
        if failed.why:
            return f"rank {origin} failed first: {failed.why}"
        both = {**self._others(), self.recorder.rank: self._own}
        back = both.get(self._ranks.index(origin)) if origin in self._ranks else None
        if origin == self._me or (back is not None and back.origin == rank and not back.why):
            return (
                f"the connection between rank {rank} and rank {origin} is lost on both sides, while both run: the "
                "network between them was cut. Check it, and start again from the last checkpoint."
            )
        return f"rank {rank} lost its connection to rank {origin}: {_LOST}"

    def _others(self) -> Mapping[int, RankFailure]:
        failures = self.store_posts.failures()
        return {rank: failed for rank, failed in failures.items() if rank != self.recorder.rank}

    def _report(self, issued: int, origin: int, why: str) -> None:
        """Publish once that this rank can take no further part in the group."""
        if self._own is None:
            self._own = RankFailure(issued, origin, why)
            self._reported = self.store_posts.report(self._own)

    def fail(self, error: ProcessGroupError) -> None:
        """Make every wait on the group fail with ``error``; any thread."""
        self._error, self.broken = self._error or error, True
        self._break_waits()

    def leave(self, error: BaseException | None) -> None:
        """Publish that this rank's program has ended, because of ``error`` if there is one."""
        if self.store_posts.size == 1:
            return
        if error is None:
            self.store_posts.publish(self._post(None)._replace(place=ENDED))
        else:
            self._report(self.recorder.last, *_origin(error, self._me))

    def is_cause_of(self, error: BaseException) -> RankFailure | None:
        """Return this rank's report in this group if ``error`` was raised because of it, else None."""
        return self._own if self._error is not None and str(self._error) == str(error) else None

    # In the watchdog's thread

    def check(self, now: float) -> None:
        """Check the current wait and act on it; the thread calls it every :data:`TICK_S`.

        Args:
            now: Seconds of a monotonic clock.
        """
        if self.store_posts.size == 1:
            return
        call = self.recorder.waiting
        if call is not self._call:
            self._call, self._since = call, now
            self._warned_slow = self._warned_silent = False
        if self._published not in (None, call):
            self._publish(None, now)
        self.store_posts.look()
        if self._own is not None and not self._reported:
            self._reported = self.store_posts.report(self._own)
        if self._diverged(now) or (call is not None and self.must_fail(call)):
            self._end_waits(call)
        elif call is not None and now - self._since >= WAIT_S:
            self._check_others(call, now)
        else:
            self._answer(call, now)

    def _end_waits(self, call: Collective | None) -> None:
        self.broken = True
        if call is not None or self._outside is not None:
            self._break_waits()
        self._outside = None

    def _post(self, call: Collective | None) -> Post:
        # The awaited collective may be too old to be in ``issued``.
        calls = [*([call] if call else []), *tuple(self.recorder.issued)]
        return Post(call.seq if call else None, {issued.seq: (issued.name(), issued.text()) for issued in calls})

    def _publish(self, call: Collective | None, now: float, outside: Sequence[int] = ()) -> None:
        place = main_thread_place() if call is None else None
        where = main_thread_call() if call is not None else place.text if place else ""
        post = self._post(call)._replace(place=where, outside=outside)
        self._stamp = self.store_posts.publish(post)
        if self._stamp:  # 0 if the store does not answer: retried at the next check
            self._published, self._asked = call, now

    def _answer(self, call: Collective | None, now: float) -> None:
        """Tell ranks that wait long where this one is, and check whether it waits outside the group's collectives."""
        asking = {
            rank: post.stamp
            for rank, post in self.store_posts.posts().items()
            if rank != self.recorder.rank and post.waits is not None
        }
        newest = max(asking.values(), default=0)
        if newest > self._answered:
            self._publish(call, now)
            self._answered = newest if self._stamp else 0
            if self._outside is not None:
                self._outside = (*self._outside[:2], False)
        if call is not None or not asking:
            self._outside = None
            return
        place = main_thread_place()
        members = [number for number, rank in enumerate(self._ranks) if place is not None and rank in place.members]
        if place is None or not members:
            self._outside = None
        elif self._outside is None or self._outside[0].frames != place.frames:
            self._outside = (place, now, False)
        elif now - self._outside[1] >= GRACE_S and not self._outside[2]:
            self._publish(None, now, members)
            self._outside = (place, self._outside[1], self._stamp > 0)

    def _diverged(self, now: float) -> bool:
        """Return True if the group has a verdict and the other ranks have had time to read it.

        Breaking a wait closes this rank's connections, so other ranks' waits fail too. They must have read the verdict
        by then, or they would report a lost connection instead.
        """
        if self.broken:
            return self._verdict is not None
        if self._verdict is None:
            self._verdict, self._verdict_since = self.store_posts.verdict(), now
            if self._verdict is None:
                return False
            if self._outside is not None:
                _log.error("%s", self._verdict)  # the program is in torch's code, whose error cannot contain it
            self.store_posts.acknowledge()
        return self.store_posts.all_acknowledged() or now - self._verdict_since >= GRACE_S

    def _check_others(self, call: Collective, now: float) -> None:
        if self._published is None or now - self._asked >= ASK_AGAIN_S:
            self._publish(call, now)
        posts, waited = self.store_posts.posts(), now - self._since
        if self._verdict is not None or self._judge(call, posts, now):
            return
        if not self._warned_silent and waited >= WAIT_S + ANSWER_S and now - self._asked >= ANSWER_S:
            silent = self._silent(call)
            if silent:
                self._warned_silent = True
                _log.warning("Rank %d has waited %.0f s in %s. %s", self._me, waited, call.text(), silent)
        if not self._warned_slow and not self._warned_silent and waited >= WARN_S:
            self._warned_slow = True
            _log.warning(
                "Rank %d has waited %.0f s in %s. Missing so far: %s.",
                self._me, waited, call.text(), self._absent_with_places(call),
            )  # fmt: skip

    def _judge(self, call: Collective, posts: Mapping[int, Post], now: float) -> bool:
        """Propose a verdict if ranks have diverged; return True if they have."""
        seq = divergence(posts)
        if seq is not None:
            if self._diverged_since is None:
                self._diverged_since = now
            waiting = sum(post.waits is not None for post in posts.values())
            if waiting < self.store_posts.size and now - self._diverged_since < GRACE_S:
                return False
        elif any(self._waits_outside(post, call) for post in posts.values()):
            seq = call.seq
        if seq is None:
            return False
        self.store_posts.propose(divergence_text(seq, posts, self._ranks))
        return True

    def _waits_outside(self, post: Post, call: Collective) -> bool:
        """Return True if a rank answered by ``post`` that it waits for this one elsewhere, and this one in ``call``."""
        return self.recorder.rank in post.outside and call.seq > post.last and post.stamp > self._stamp > 0

    def _silent(self, call: Collective) -> str:
        """Describe which ranks, or the store, do not answer, and the possible reasons; empty if all answer."""
        absent = self._absent_numbers(call)
        store_is_silent = self.store_posts.silent_s() >= ANSWER_S / 2
        stopped = self.store_posts.stopped(range(self.store_posts.size) if store_is_silent else absent)
        if stopped:
            return " ".join(
                f"The process of rank {self._ranks[number]} ({pid}, on this machine) is stopped: `kill -CONT {pid}` "
                "continues it."
                for number, pid in stopped.items()
            )
        if store_is_silent:
            return (
                "The store of the ranks does not answer: the network to the process that holds it (rank 0, or the "
                "launcher of the first machine) is cut, or that process is stopped."
            )
        posts = self.store_posts.posts()
        silent = [n for n in absent if self._stamp and (n not in posts or posts[n].stamp < self._stamp)]
        if not silent:
            return ""
        who = named(self._ranks[number] for number in silent).capitalize()
        return (
            f"{who} {'does' if len(silent) == 1 else 'do'} not answer: the network is cut, the process is stopped, or "
            "its Python is in one long call."
        )

    def _absent_numbers(self, call: Collective) -> list[int]:
        posts = self.store_posts.posts()
        there = {self.recorder.rank} | {number for number, post in posts.items() if post.waits == call.seq}
        return [number for number in range(self.store_posts.size) if number not in there]

    def _absent(self, call: Collective) -> list[int]:
        return [self._ranks[number] for number in self._absent_numbers(call)]

    def _absent_with_places(self, call: Collective) -> str:
        posts, absent = self.store_posts.posts(), self._absent_numbers(call)
        places = [f"rank {self._ranks[n]} is at {posts[n].place}" for n in absent if n in posts and posts[n].place]
        return named(self._ranks[n] for n in absent) + "".join(f"; {place}" for place in places)


def _origin(error: BaseException, me: int) -> tuple[int, str]:
    """Return the rank whose failure led to ``error`` on rank ``me``, and its error in one line."""
    cause: BaseException | None = error
    while cause is not None:
        for watch in WATCHDOG.watches():
            known = watch.is_cause_of(cause)
            if known is not None:
                return known.origin, known.why
        cause = cause.__cause__ or cause.__context__
    first, *_ = str(error).splitlines() or [""]
    return me, f"{type(error).__name__}{f': {first}' if first else ''}"[:_WHY_LENGTH]


class Watched(Protocol):
    """Checked by the watchdog's thread: a :class:`GroupWatch`, or the process's :class:`HeartbeatMonitor`."""

    def check(self, now: float) -> None:
        """Look for trouble, at ``now`` seconds of a monotonic clock."""
        ...

    def leave(self, error: BaseException | None) -> None:
        """Publish that this process's program has ended."""
        ...

    def is_cause_of(self, error: BaseException) -> RankFailure | None:
        """Return this rank's report if ``error`` was raised because of it, else None."""
        ...


class Watchdog:
    """The thread that checks every :class:`Watched` of this process."""

    def __init__(self) -> None:
        """Prepare the watchdog; the thread starts with the first :meth:`add`."""
        self._watches: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._left = False
        self._told: weakref.WeakKeyDictionary[Watched, str] = weakref.WeakKeyDictionary()

    def add(self, watch: Watched) -> None:
        """Check ``watch`` while it is referenced elsewhere; starts the thread if there is none."""
        with self._lock:
            self._watches.add(watch)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="fullshard-watchdog", daemon=True)
                self._thread.start()
                # If the interpreter exits while the thread is inside torch's C++ code, the process aborts.
                atexit.register(self._end, os.getpid())

    def watches(self) -> list[Watched]:
        """Return the watched objects in use."""
        with self._lock:
            return list(self._watches)

    def leave(self, error: BaseException | None) -> None:
        """Publish that this process's program has ended, because of ``error`` if given; the first call counts."""
        if not self._left:
            self._left = True
            for watch in self.watches():
                self._survive(watch, watch.leave, error)

    def _run(self) -> None:
        while not self._stop.wait(TICK_S):
            if not threading.main_thread().is_alive():  # other threads may keep the process alive for long
                self.leave(_uncaught())
            for watch in self.watches():
                self._survive(watch, watch.check, time.monotonic())

    def _survive(self, watch: Watched, action: Callable[[T], None], value: T) -> None:
        """Call ``action``; its errors are reported and do not end the watch, without which a hang waits for ever."""
        try:
            action(value)
        except Exception as error:
            if self._told.get(watch) != (text := f"{type(error).__name__}: {error}"):  # once, not at each tick
                self._told[watch] = text
                _log.exception("The watch over ranks failed and goes on; a hang may be told late. Please report this.")

    def _end(self, pid: int) -> None:
        if os.getpid() != pid:  # a fork does not have these threads
            return
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=10.0)
        self.leave(_uncaught())
        STORE_CONNECTION.close()


def _uncaught() -> BaseException | None:
    """Return the exception that has ended the main thread, or None."""
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)


WATCHDOG = Watchdog()


def announce_failure(error: BaseException) -> None:
    """Tell the ranks of every group that this one ends because of ``error``; for programs that handle it themselves."""
    WATCHDOG.leave(error)
