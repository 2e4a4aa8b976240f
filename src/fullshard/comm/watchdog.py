"""Detection of ranks that wait for each other in different collectives, reported on every rank by name.

Each rank keeps a flight recorder of the collectives that it issued on a group. During a long wait it publishes the
recorder to the other ranks, through the group's store. Two recorders that differ in the collective of one number belong
to ranks that have diverged: nothing later corrects that, so every rank raises an error that states where each of them
is. A rank that is merely slow (it computes, or writes a file) has issued no other collective, and never counts as
diverged.
"""

from __future__ import annotations

import atexit
import datetime
import json
import logging
import re
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch._C._distributed_c10d import Store

from fullshard.errors import MismatchError, ProcessGroupError, UserError

T = TypeVar("T")

WAIT_S = 2.0
"""A wait of more seconds is published to the other ranks."""

TICK_S = 0.5
"""Interval at which the thread checks this process's wait and, during a long one, the other ranks' posts."""

GRACE_S = 2.0
"""How long diverged ranks wait for the others: to publish where they are, and to read the verdict."""

WARN_S = 30.0
"""A wait of more seconds is logged as a warning, once."""

HISTORY = 64
"""Collectives in a post. Ranks are only a few apart: only sending, as in a gather, needs no answer of other ranks."""

_RPC_TIMEOUT_S = 5.0
_log = logging.getLogger("fullshard")


class Collective(NamedTuple):
    """One collective as this rank issued it.

    Attributes:
        seq: Its number on this rank and group, from 1.
        kind: Name of the collective.
        numel: Number of elements; 0 if it has no meaning.
        dtype: Their dtype.
        announced: Its purpose, passed to :meth:`~fullshard.comm.protocol.Comm.announce`; may be empty.
        bound: Whether ranks that announced different purposes are in different collectives.
    """

    seq: int
    kind: str
    numel: int
    dtype: torch.dtype
    announced: str
    bound: bool

    def text(self) -> str:
        """Return the description in messages."""
        return self._with(self.announced)

    def name(self) -> str:
        """Return the text that is equal on all ranks that are in the same collective."""
        return self._with(self.announced if self.bound else "")

    def _with(self, purpose: str) -> str:
        size = f" of {self.numel} {str(self.dtype).removeprefix('torch.')}" if self.numel else ""
        return f"{self.kind}{size}" + (f" ({purpose})" if purpose else "")


class FlightRecorder:
    """The last collectives that this rank issued on one group, and the one that it waits in.

    Attributes:
        rank: This rank's number in the group.
        issued: The last collectives, oldest first.
        waiting: The collective that the program waits in now. Setting it is the only cost of a wait.
    """

    def __init__(self, rank: int) -> None:
        """Record the collectives of ``rank``."""
        self.rank = rank
        self.issued: deque[Collective] = deque(maxlen=HISTORY)
        self.waiting: Collective | None = None
        self._seq = 0

    def issue(self, kind: str, numel: int, dtype: torch.dtype, announced: str, *, bound: bool) -> Collective:
        """Number and record the next collective; the arguments are those of :class:`Collective`."""
        self._seq += 1
        call = Collective(self._seq, kind, numel, dtype, announced, bound)
        self.issued.append(call)
        return call


class Post(NamedTuple):
    """The state that one rank publishes to the others.

    Attributes:
        waits: Number of the collective that it waits in; None: it waited long in one of ``calls`` and has resumed.
        calls: Its last collectives, number to name and text.
    """

    waits: int | None
    calls: dict[int, tuple[str, str]]

    def encode(self) -> str:
        """Return the post as JSON."""
        return json.dumps([self.waits, list(self.calls.items())])

    @staticmethod
    def decode(text: bytes) -> Post:
        """Return the post of a JSON text."""
        waits, calls = json.loads(text)
        return Post(waits, {seq: (name, text) for seq, (name, text) in calls})


class Board:
    """The posts of a group's ranks, one for each, and at most one verdict, in a store. For use by any thread.

    If the store no longer answers, the process that hosts it has ended; from then on nothing is read or written.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        """Share ``store``, a connection of this board's own, with the other ranks; each makes one board for a group."""
        self.rank, self.size = rank, size
        self._store = store
        self._store.set_timeout(datetime.timedelta(seconds=_RPC_TIMEOUT_S))
        self._lock = threading.Lock()
        self._lost = False
        # A store may outlive a group and serve the next one of the same name, whose board must be a different one.
        self._life = store.add(f"fullshard/lives/{rank}", 1)
        self._changes = 0
        self._posts: dict[int, Post] = {}

    def publish(self, post: Post) -> None:
        """Replace this rank's post."""

        def write(store: Store) -> None:
            store.set(self._key(f"post/{self.rank}"), post.encode())
            store.add(self._key("changes"), 1)

        self._ask(write, None)

    def posts(self) -> Mapping[int, Post]:
        """Return the posts of the ranks that have waited long, by rank."""

        def read(store: Store) -> None:
            changes = store.add(self._key("changes"), 0)
            if changes == self._changes:
                return
            for rank in range(self.size):
                key = self._key(f"post/{rank}")
                if rank in self._posts or store.check([key]):
                    self._posts[rank] = Post.decode(store.get(key))
            self._changes = changes

        self._ask(read, None)
        return self._posts

    def propose(self, verdict: str) -> str:
        """Make ``verdict`` the group's, unless it has one; return the one that it has."""
        return self._ask(lambda store: store.compare_set(self._key("verdict"), "", verdict).decode(), verdict)

    def verdict(self) -> str | None:
        """Return the verdict, or None."""
        key = self._key("verdict")
        return self._ask(lambda store: store.get(key).decode() if store.check([key]) else None, None)

    def acknowledge(self) -> None:
        """Record that this rank has read the verdict; once."""
        self._ask(lambda store: store.add(self._key("acknowledged"), 1), 0)

    def all_acknowledged(self) -> bool:
        """Return whether every rank has read the verdict, or the store is lost."""
        return self._ask(lambda store: store.add(self._key("acknowledged"), 0), self.size) >= self.size

    def _key(self, name: str) -> str:
        return f"fullshard/{self._life}/{name}"

    def _ask(self, question: Callable[[Store], T], default: T) -> T:
        if not self._lock.acquire(timeout=2 * _RPC_TIMEOUT_S):
            return default
        try:
            return default if self._lost else question(self._store)
        except RuntimeError:
            self._lost = True
            return default
        finally:
            self._lock.release()


def divergence(posts: Mapping[int, Post]) -> int | None:
    """Return the number of the first collective in which two ranks' posts differ; None if all agree."""
    first: dict[int, str] = {}
    published = [(seq, name) for post in posts.values() for seq, (name, _) in post.calls.items()]
    return min((seq for seq, name in published if first.setdefault(seq, name) != name), default=None)


def divergence_text(seq: int, posts: Mapping[int, Post], ranks: Sequence[int]) -> str:
    """Return the error text for ranks that diverged at collective ``seq``: where each is, and the remedy.

    Args:
        seq: The collective.
        posts: The posts, by rank in the group.
        ranks: The group's ranks, numbered as in the default group.
    """
    ranks_by_place: dict[str, list[int]] = {}
    for number, rank in enumerate(ranks):
        ranks_by_place.setdefault(_place(seq, posts.get(number)), []).append(rank)
    places = "; ".join(f"{_named(there)}: {place}" for place, there in ranks_by_place.items())
    return (
        f"Ranks are in different collectives, from number {seq} of their group on: {places}. Every rank must call the "
        "same modules in the same order; check code that depends on the rank or the data."
    )


def _place(seq: int, post: Post | None) -> str:
    if post is None:
        return "not waiting in any collective of this group"
    _, there = post.calls.get(seq, ("", "not issued so far"))
    if post.waits is None:
        return f"{there}, not waiting"
    return there if post.waits == seq else f"{there}, waiting in {post.calls[post.waits][1]}"


def _named(ranks: Iterable[int]) -> str:
    names = [str(rank) for rank in ranks]
    return f"rank{'s' if len(names) > 1 else ''} {', '.join(names)}" if names else "no rank"


class GroupWatch:
    """Watches the waits of this rank on one group. One for each group and process.

    Attributes:
        recorder: This rank's collectives, and the one that it waits in.
        broken: Whether ranks have diverged and every wait must fail.
    """

    def __init__(
        self, recorder: FlightRecorder, board: Board, ranks: Sequence[int], break_waits: Callable[[], None]
    ) -> None:
        """Compare ``recorder`` with the other ranks'.

        Args:
            recorder: This rank's.
            board: The group's.
            ranks: The group's ranks, numbered as in the default group.
            break_waits: Makes this process's waits on the group fail.
        """
        self.recorder = recorder
        self._board = board
        self._ranks = ranks
        self._break_waits = break_waits
        self.broken = False
        self._call: Collective | None = None
        self._since = 0.0
        self._published = self._warned = False
        self._diverged_since: float | None = None
        self._verdict: str | None = None
        self._verdict_since = 0.0

    def check(self, now: float) -> None:
        """Check the current wait and act on it; the thread calls it every :data:`TICK_S`.

        Args:
            now: Seconds of a monotonic clock.
        """
        call = self.recorder.waiting
        if call is not self._call:
            self._call, self._since, self._warned = call, now, False
            if self._published:
                self._publish(None)
        elif call is not None and now - self._since >= WAIT_S:
            self._check_others(call, now)

    def failure(self, call: Collective, error: RuntimeError, waited_s: float, peer: int | None) -> UserError:
        """Return the exception to raise for an ``error`` of the backend in ``call``.

        Args:
            call: The collective that failed.
            error: The backend's error.
            waited_s: Seconds that this rank waited.
            peer: Rank that the failed message was from or for; None: it failed when it was issued.
        """
        verdict = self._verdict or self._board.verdict()
        if verdict is not None:
            return MismatchError(verdict)
        what = f"Rank {self._ranks[self.recorder.rank]} waited {waited_s:.1f} s in {call.text()}"
        if "Timed out" in str(error):
            return ProcessGroupError(
                f"{what}, longer than the group's timeout. Not there: {_named(self._absent(call))}. If these ranks "
                "are only slow, set a longer timeout for the group; otherwise find out what they wait for."
            )
        where = "another rank" if peer is None else f"rank {self._ranks[peer]}"
        reason = re.sub(r"^\[.*?\] ", "", str(error)).split(". ")[0]
        return ProcessGroupError(
            f"{what} and lost its connection to {where}: that rank has ended or failed. Look for its own error; if it "
            f"has none, it ran fewer collectives than this rank. (gloo: {reason})"
        )

    def _publish(self, call: Collective | None) -> None:
        self._published = call is not None
        # The collective waited for may have been issued too long ago to be in ``issued``.
        calls = [*([call] if call else []), *tuple(self.recorder.issued)]
        published = {issued.seq: (issued.name(), issued.text()) for issued in calls}
        self._board.publish(Post(call.seq if call else None, published))

    def _check_others(self, call: Collective, now: float) -> None:
        if not self._published:
            self._publish(call)
        posts = self._board.posts()
        if self._verdict is None:
            self._verdict = self._board.verdict() or self._judge(posts, now)
            self._verdict_since = now
            if self._verdict is not None:
                self._board.acknowledge()
        if self._verdict is not None:
            # Breaking a wait closes this rank's connections, so other ranks' waits fail too. They must have read the
            # verdict by then, or they would report a lost connection instead.
            if self._board.all_acknowledged() or now - self._verdict_since >= GRACE_S:
                self.broken = True
                self._break_waits()
        elif not self._warned and now - self._since >= WARN_S:
            self._warned = True
            _log.warning(
                "Rank %d has waited %.0f s in %s. Not there so far: %s.",
                self._ranks[self.recorder.rank], now - self._since, call.text(), _named(self._absent(call)),
            )  # fmt: skip

    def _judge(self, posts: Mapping[int, Post], now: float) -> str | None:
        seq = divergence(posts)
        if seq is None:
            return None
        if self._diverged_since is None:
            self._diverged_since = now
        waiting = sum(post.waits is not None for post in posts.values())
        if waiting < self._board.size and now - self._diverged_since < GRACE_S:
            return None
        return self._board.propose(divergence_text(seq, posts, self._ranks))

    def _absent(self, call: Collective) -> list[int]:
        posts = self._board.posts()
        there = {self.recorder.rank} | {number for number, post in posts.items() if post.waits == call.seq}
        return [rank for number, rank in enumerate(self._ranks) if number not in there]


class Watchdog:
    """The thread that watches every :class:`GroupWatch` of this process."""

    def __init__(self) -> None:
        """Start no thread yet."""
        self._watches: weakref.WeakSet[GroupWatch] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, watch: GroupWatch) -> None:
        """Check ``watch`` while it is referenced elsewhere; starts the thread if there is none."""
        with self._lock:
            self._watches.add(watch)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="fullshard-watchdog", daemon=True)
                self._thread.start()
                # If the interpreter exits while the thread is inside torch's C++ code, the process aborts.
                atexit.register(self._end)

    def _run(self) -> None:
        while not self._stop.wait(TICK_S):
            with self._lock:
                watches = list(self._watches)
            for watch in watches:
                watch.check(time.monotonic())

    def _end(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * _RPC_TIMEOUT_S)


WATCHDOG = Watchdog()
