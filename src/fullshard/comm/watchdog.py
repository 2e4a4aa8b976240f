"""Who waits for whom: a wait that takes long is shown to the other ranks, and ranks that parted are told by name.

Each rank keeps a flight recorder of the collectives it issued on a group. While a wait takes long it shows the
recorder to the other ranks, through the group's store. Two recorders that disagree about the collective of one number
belong to ranks that have parted: nothing that comes later mends it, so every rank is told where each of them is. A rank
that is merely slow (it computes, or writes a file) issued nothing else and is never taken for one that parted.
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
from typing import NamedTuple, Protocol, TypeVar

import torch

from fullshard.errors import MismatchError, ProcessGroupError, UserError

T = TypeVar("T")

WAIT_S = 2.0
"""A wait that has taken longer is shown to the other ranks."""

TICK_S = 0.5
"""How often the thread looks whether this process waits and, while it does, at what the others show."""

GRACE_S = 2.0
"""How long ranks that parted wait for the others: to say where they are, and to read the verdict."""

WARN_S = 30.0
"""A wait that has taken longer is worth a line to the user."""

HISTORY = 64
"""Collectives that a rank shows. Ranks drift apart by a few: only sending, as in a gather, needs nobody to answer."""

_RPC_TIMEOUT_S = 5.0
_log = logging.getLogger("fullshard")


class Collective(NamedTuple):
    """One collective as this rank issued it.

    Attributes:
        seq: Its number on this rank and group, from 1.
        kind: The collective, in words.
        numel: Elements it is about; 0 where that says nothing.
        dtype: Their dtype.
        announced: What it is for, as :meth:`~fullshard.comm.protocol.Comm.announce` was told; may be empty.
        bound: Whether ranks that announced different things are apart in it.
    """

    seq: int
    kind: str
    numel: int
    dtype: torch.dtype
    announced: str
    bound: bool

    def text(self) -> str:
        """What people read."""
        return self._with(self.announced)

    def name(self) -> str:
        """What is the same on all ranks that are in the same collective."""
        return self._with(self.announced if self.bound else "")

    def _with(self, purpose: str) -> str:
        size = f" of {self.numel} {str(self.dtype).removeprefix('torch.')}" if self.numel else ""
        return f"{self.kind}{size}" + (f" ({purpose})" if purpose else "")


class FlightRecorder:
    """The last collectives that this rank issued on one group, and the one it waits in.

    Attributes:
        rank: This rank's number in the group.
        issued: The last collectives, oldest first.
        waiting: The collective that the program waits in now. Setting it is all that a wait costs.
    """

    def __init__(self, rank: int) -> None:
        """Record what ``rank`` does."""
        self.rank = rank
        self.issued: deque[Collective] = deque(maxlen=HISTORY)
        self.waiting: Collective | None = None
        self._seq = 0

    def issue(self, kind: str, numel: int, dtype: torch.dtype, announced: str, *, bound: bool) -> Collective:
        """Give the next collective its number; the arguments are those of :class:`Collective`."""
        self._seq += 1
        call = Collective(self._seq, kind, numel, dtype, announced, bound)
        self.issued.append(call)
        return call


class Post(NamedTuple):
    """What one rank shows the others.

    Attributes:
        waits: Number of the collective it waits in; None: it waited long in one of ``calls`` and has gone on.
        calls: Its last collectives, number to name and text.
    """

    waits: int | None
    calls: dict[int, tuple[str, str]]

    def encode(self) -> str:
        """As JSON."""
        return json.dumps([self.waits, list(self.calls.items())])

    @staticmethod
    def decode(text: bytes) -> Post:
        """From JSON."""
        waits, calls = json.loads(text)
        return Post(waits, {seq: (name, text) for seq, (name, text) in calls})


class Store(Protocol):
    """What a board needs of a ``torch.distributed`` store."""

    def set(self, key: str, value: str) -> None:
        """Write."""

    def get(self, key: str) -> bytes:
        """Read; blocks until there is such a key."""
        ...

    def check(self, keys: list[str]) -> bool:
        """Whether there are such keys."""
        ...

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which starts at 0, and return it."""
        ...

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Write if what is there is ``expected`` (empty: nothing is); return what is there afterwards."""
        ...

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """How long an answer may take before it is an error."""


class Board:
    """What the ranks of a group show each other: one post a rank, and at most one verdict. For use by any thread.

    A store that answers no more has gone with the process that kept it; from then on nothing is read or shown.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        """Share ``store``, a connection of this board's own, with the other ranks; each makes one board a group."""
        self.rank, self.size = rank, size
        self._store = store
        self._store.set_timeout(datetime.timedelta(seconds=_RPC_TIMEOUT_S))
        self._lock = threading.Lock()
        self._lost = False
        # A store may outlive a group and serve the next one of the same name: that one's board is another.
        self._life = store.add(f"fullshard/lives/{rank}", 1)
        self._changes = 0
        self._posts: dict[int, Post] = {}

    def show(self, post: Post) -> None:
        """Replace this rank's post."""

        def write(store: Store) -> None:
            store.set(self._key(f"post/{self.rank}"), post.encode())
            store.add(self._key("changes"), 1)

        self._ask(write, None)

    def posts(self) -> Mapping[int, Post]:
        """The posts of the ranks that ever waited long, by rank."""

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
        """Make ``verdict`` that of the group, unless it has one; returns the one it has."""
        return self._ask(lambda store: store.compare_set(self._key("verdict"), "", verdict).decode(), verdict)

    def verdict(self) -> str | None:
        """The verdict, if there is one."""
        key = self._key("verdict")
        return self._ask(lambda store: store.get(key).decode() if store.check([key]) else None, None)

    def acknowledge(self) -> None:
        """Say that this rank has read the verdict; once."""
        self._ask(lambda store: store.add(self._key("told"), 1), 0)

    def all_told(self) -> bool:
        """Whether every rank has read the verdict, or can no longer say so."""
        return self._ask(lambda store: store.add(self._key("told"), 0), self.size) >= self.size

    def _key(self, name: str) -> str:
        return f"fullshard/{self._life}/{name}"

    def _ask(self, question: Callable[[Store], T], otherwise: T) -> T:
        if not self._lock.acquire(timeout=2 * _RPC_TIMEOUT_S):
            return otherwise
        try:
            return otherwise if self._lost else question(self._store)
        except RuntimeError:
            self._lost = True
            return otherwise
        finally:
            self._lock.release()


def parting(posts: Mapping[int, Post]) -> int | None:
    """The number of the first collective that two ranks show differently; None where all histories agree."""
    first: dict[int, str] = {}
    shown = [(seq, name) for post in posts.values() for seq, (name, _) in post.calls.items()]
    return min((seq for seq, name in shown if first.setdefault(seq, name) != name), default=None)


def describe(seq: int, posts: Mapping[int, Post], ranks: Sequence[int]) -> str:
    """What users read when ranks parted at collective ``seq``: where each is, and the remedy.

    Args:
        seq: The collective.
        posts: What ranks showed, by rank in the group.
        ranks: The group's ranks as the user counts them.
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
    return f"rank{'s' if len(names) > 1 else ''} {', '.join(names)}" if names else "nobody"


class Watch:
    """Looks after the waits of this rank on one group. One a group and process.

    Attributes:
        recorder: What this rank issued, and what it waits in.
        broken: Whether ranks have parted and every wait is to fail.
    """

    def __init__(
        self, recorder: FlightRecorder, board: Board, ranks: Sequence[int], break_waits: Callable[[], None]
    ) -> None:
        """Compare ``recorder`` with the other ranks'.

        Args:
            recorder: This rank's.
            board: The group's.
            ranks: The group's ranks as the user counts them: those of the whole world.
            break_waits: Makes this process's waits on the group fail.
        """
        self.recorder = recorder
        self._board = board
        self._ranks = ranks
        self._break_waits = break_waits
        self.broken = False
        self._call: Collective | None = None
        self._since = 0.0
        self._shown = self._warned = False
        self._parted_since: float | None = None
        self._verdict: str | None = None
        self._verdict_since = 0.0

    def look(self, now: float) -> None:
        """Do what is due; the thread calls it every :data:`TICK_S`.

        Args:
            now: Seconds of a clock that only goes forward.
        """
        call = self.recorder.waiting
        if call is not self._call:
            self._call, self._since, self._warned = call, now, False
            if self._shown:
                self._show(None)
        elif call is not None and now - self._since >= WAIT_S:
            self._look_at_others(call, now)

    def failure(self, call: Collective, error: RuntimeError, waited_s: float, peer: int | None) -> UserError:
        """What to raise for an ``error`` of the backend in ``call``.

        Args:
            call: The collective that failed.
            error: What the backend raised.
            waited_s: Seconds that this rank waited.
            peer: Rank that the failed message was from or for; None: it failed as it was issued.
        """
        verdict = self._verdict or self._board.verdict()
        if verdict is not None:
            return MismatchError(verdict)
        what = f"Rank {self._ranks[self.recorder.rank]} waited {waited_s:.1f} s in {call.text()}"
        if "Timed out" in str(error):
            return ProcessGroupError(
                f"{what}, longer than the group's timeout. Not there: {_named(self._absent(call))}. If they are only "
                "slow, give the group a longer timeout; else look for what they wait for."
            )
        where = "another rank" if peer is None else f"rank {self._ranks[peer]}"
        reason = re.sub(r"^\[.*?\] ", "", str(error)).split(". ")[0]
        return ProcessGroupError(
            f"{what} and lost its connection to {where}: that rank has ended or failed. Look for its own error; if it "
            f"has none, it ran fewer collectives than this rank. (gloo: {reason})"
        )

    def _show(self, call: Collective | None) -> None:
        self._shown = call is not None
        # What is waited for may have been issued long ago.
        calls = [*([call] if call else []), *tuple(self.recorder.issued)]
        shown = {issued.seq: (issued.name(), issued.text()) for issued in calls}
        self._board.show(Post(call.seq if call else None, shown))

    def _look_at_others(self, call: Collective, now: float) -> None:
        if not self._shown:
            self._show(call)
        posts = self._board.posts()
        if self._verdict is None:
            self._verdict = self._board.verdict() or self._judge(posts, now)
            self._verdict_since = now
            if self._verdict is not None:
                self._board.acknowledge()
        if self._verdict is not None:
            # Breaking a wait closes this rank's connections, so that others fail too: they shall know why by then.
            if self._board.all_told() or now - self._verdict_since >= GRACE_S:
                self.broken = True
                self._break_waits()
        elif not self._warned and now - self._since >= WARN_S:
            self._warned = True
            _log.warning(
                "Rank %d has waited %.0f s in %s. Not there so far: %s.",
                self._ranks[self.recorder.rank], now - self._since, call.text(), _named(self._absent(call)),
            )  # fmt: skip

    def _judge(self, posts: Mapping[int, Post], now: float) -> str | None:
        seq = parting(posts)
        if seq is None:
            return None
        if self._parted_since is None:
            self._parted_since = now
        waiting = sum(post.waits is not None for post in posts.values())
        if waiting < self._board.size and now - self._parted_since < GRACE_S:
            return None
        return self._board.propose(describe(seq, posts, self._ranks))

    def _absent(self, call: Collective) -> list[int]:
        posts = self._board.posts()
        there = {self.recorder.rank} | {number for number, post in posts.items() if post.waits == call.seq}
        return [rank for number, rank in enumerate(self._ranks) if number not in there]


class Watchdog:
    """The thread that looks after every :class:`Watch` of this process."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._watches: weakref.WeakSet[Watch] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, watch: Watch) -> None:
        """Look after ``watch`` while anybody else holds it; starts the thread if there is none."""
        with self._lock:
            self._watches.add(watch)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="fullshard-watchdog", daemon=True)
                self._thread.start()
                # A thread that the interpreter's end finds inside torch's C++ aborts the process.
                atexit.register(self._end)

    def _run(self) -> None:
        while not self._stop.wait(TICK_S):
            with self._lock:
                watches = list(self._watches)
            for watch in watches:
                watch.look(time.monotonic())

    def _end(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * _RPC_TIMEOUT_S)


WATCHDOG = Watchdog()
