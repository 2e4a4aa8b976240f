"""What the ranks of a group publish to each other through the group's store, besides their collectives.

Requests to the store never block for long: torch's store waits for ever while its process is stopped.
"""

from __future__ import annotations

import datetime
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from fullshard.core.comm.stack_probe import has_ended, is_stopped, machine

T = TypeVar("T")

PATIENCE_S = 1.0
"""Longest wait for the store's answer, in seconds; the program then continues without it."""

_NEIGHBOUR_LOOKS = 40
"""Number of first looks in which a rank searches for the other processes of its machine, which register meanwhile."""

_FOR_EVER = datetime.timedelta(days=365)


class StoreConnection:
    """The thread that sends requests to the store, one after the other. One for each process.

    An unanswered request keeps the thread: no other thread may read the connection's bytes. It is answered when the
    store's process runs again or the network is repaired; then the connection is free again.
    """

    def __init__(self) -> None:
        """Prepare the connection; the thread starts with the first request."""
        self._free = threading.Lock()
        self._questions: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._asked_at: float | None = None

    def ask(self, question: Callable[[], T], default: T, patience_s: float) -> T:
        """Return the store's answer, or ``default`` if none came in time; any thread.

        Raises:
            RuntimeError: The store is gone.
        """
        if not self._free.acquire(timeout=patience_s if self.silent_s() < patience_s else 0):
            return default
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="fullshard-store", daemon=True)
            self._thread.start()
        answer: Future[T] = Future()
        self._asked_at = time.monotonic()
        self._questions.put((question, answer))
        try:
            return answer.result(patience_s)
        except TimeoutError:
            return default

    def silent_s(self) -> float:
        """Return the seconds for which the store has not answered; 0 if it has answered all requests."""
        asked_at = self._asked_at
        return 0.0 if asked_at is None else time.monotonic() - asked_at

    def close(self) -> None:
        """End the thread, unless a request is unanswered: then it remains until the process ends."""
        if self._thread is not None and self.silent_s() == 0:
            self._questions.put(None)
            self._thread.join(timeout=1.0)

    def _run(self) -> None:
        while (asked := self._questions.get()) is not None:
            question, answer = asked
            value = error = None
            try:
                value = question()
            except Exception as raised:
                error = raised
            self._asked_at = None
            self._free.release()
            if error is None:
                answer.set_result(value)
            else:
                answer.set_exception(error)


STORE_CONNECTION = StoreConnection()


class Heartbeats:
    """Beats of the members of a group: each writes a changing text to their store, and hears when others have.

    Ranks beat for each other, and so do the launchers of several machines. Who is lost is for them to decide.

    Attributes:
        texts: The last beat of each member that was heard.
    """

    def __init__(self, store: Store, me: int, now: float, prefix: str = "") -> None:
        """Beat as member ``me``; keys begin with ``prefix``. ``now``: seconds of a monotonic clock, as everywhere."""
        self.texts: dict[int, bytes] = {}
        self._store = store
        self._me = me
        self._prefix = prefix
        self.forget(now)

    def beat(self, text: str) -> None:
        """Replace this member's beat."""
        self._store.set(f"{self._prefix}beat/{self._me}", text)

    def listen(self, members: Iterable[int], now: float) -> None:
        """Read the beats of ``members``."""
        for member in members:
            key = f"{self._prefix}beat/{member}"
            if member in self.texts or self._store.check([key]):
                text = self._store.get(key)
                if member not in self._heard or text != self.texts[member]:
                    self._heard[member] = now
                self.texts[member] = text

    def silent_s(self, member: int, now: float) -> float:
        """Return the seconds since a member has beaten, or since :meth:`forget`."""
        return now - self._heard.get(member, self._since)

    def forget(self, now: float) -> None:
        """Count silence from now on."""
        self._heard: dict[int, float] = {}
        self._since = now


class Post(NamedTuple):
    """The state that one rank publishes to the others.

    Attributes:
        waits: Number of the collective that it waits in; None if it waits in none of this group.
        calls: Its last collectives, number to name and text.
        place: Where its program is, if it waits in no collective; may be empty.
        outside: If it waits in a collective of torch's own, the ranks of this group that must join it.
        stamp: Grows with each post of the group.
    """

    waits: int | None
    calls: dict[int, tuple[str, str]]
    place: str = ""
    outside: Sequence[int] = ()
    stamp: int = 0

    def encode(self) -> str:
        """Return the post as JSON."""
        return json.dumps([self.waits, list(self.calls.items()), self.place, self.outside, self.stamp])

    @staticmethod
    def decode(text: bytes) -> Post:
        """Return the post of a JSON text."""
        waits, calls, *others = json.loads(text)
        return Post(waits, {seq: (name, text) for seq, (name, text) in calls}, *others)

    @property
    def last(self) -> int:
        """Number of the last collective that it has issued."""
        return max(self.calls, default=0)


class RankFailure(NamedTuple):
    """The reason why a rank can take no further part in a group.

    Attributes:
        issued: Number of the last collective of this group that it has completed.
        origin: The rank, in the default group, whose failure or end is the cause; often the rank itself.
        why: The error of that rank in one line; empty if the rank has simply disappeared.
    """

    issued: int
    origin: int
    why: str


class StorePosts:
    """The posts of a group's ranks, one for each, their failures, and at most one verdict. Any thread may use it.

    If the store is gone, the process that holds it has ended; after that, nothing is read or written.
    """

    def __init__(self, store: Store, rank: int, size: int, connection: StoreConnection = STORE_CONNECTION) -> None:
        """Share ``store``, a client of this object's own, with the other ranks; each makes one object for a group."""
        self.rank, self.size = rank, size
        self._store = store
        self._store.set_timeout(_FOR_EVER)  # ask() bounds waits; an abandoned one spoils the connection
        self._connection = connection
        self._lost = False
        # A store may outlive a group and serve a later one of the same name, whose posts must not mix with these.
        self._life = store.add(f"fullshard/lives/{rank}", 1)
        self._changes = 0
        self._posts: dict[int, Post] = {}
        self._failures: dict[int, RankFailure] = {}
        self._verdict: str | None = None
        self._looks = 0
        self._pids: dict[int, int] = {}
        self.heartbeats = Heartbeats(store, rank, time.monotonic(), self._key(""))
        self._register()

    def publish(self, post: Post) -> int:
        """Replace this rank's post; return its stamp, 0 if the store does not answer."""

        def write(store: Store) -> int:
            stamp = store.add(self._key("stamps"), 1)
            store.set(self._key(f"post/{self.rank}"), post._replace(stamp=stamp).encode())
            store.add(self._key("changes"), 1)
            return stamp

        return self._ask(write, 0)

    def report(self, failure: RankFailure) -> bool:
        """Publish that this rank can take no further part; only the first report counts. True if the store has it."""

        def write(store: Store) -> bool:
            store.compare_set(self._key(f"failed/{self.rank}"), "", json.dumps(failure))
            store.add(self._key("changes"), 1)
            return True

        return self._ask(write, self._lost)

    def look(self) -> None:
        """Read new posts; a single request to the store if there are none."""
        self._ask(self._read, None)

    def _read(self, store: Store) -> None:
        if self._looks < _NEIGHBOUR_LOOKS:
            self._looks += 1
            self._meet_neighbours(store)
        changes = store.add(self._key("changes"), 0)
        if changes == self._changes:
            return
        posts, failures = dict(self._posts), dict(self._failures)  # copies, as other threads may be reading
        for rank in range(self.size):
            key = self._key(f"post/{rank}")
            if rank in posts or store.check([key]):
                posts[rank] = Post.decode(store.get(key))
            key = self._key(f"failed/{rank}")
            if rank not in failures and store.check([key]):
                failures[rank] = RankFailure(*json.loads(store.get(key)))
        key = self._key("verdict")
        if self._verdict is None and store.check([key]):
            self._verdict = store.get(key).decode()
        self._posts, self._failures, self._changes = posts, failures, changes

    def beat(self, text: str) -> None:
        """Replace this rank's beat, once a second."""
        self._ask(lambda _: self.heartbeats.beat(text), None)

    def listen(self, ranks: Iterable[int], now: float) -> None:
        """Read the last beats of ``ranks`` into ``heartbeats``, if the store answers."""
        self._ask(lambda _: self.heartbeats.listen(ranks, now), None)

    def meet(self, pids: Mapping[int, int]) -> None:
        """Take process ids of ranks on this machine, which the first looks would find."""
        self._pids = {**self._pids, **pids}

    def neighbours(self) -> Mapping[int, int]:
        """Return the known process ids of the ranks on this machine."""
        return self._pids

    def posts(self) -> Mapping[int, Post]:
        """Return the posts at the last look, by rank."""
        return self._posts

    def failures(self) -> Mapping[int, RankFailure]:
        """Return the failures at the last look, by rank."""
        return self._failures

    def verdict(self) -> str | None:
        """Return the verdict at the last look, or None."""
        return self._verdict

    def propose(self, verdict: str) -> str:
        """Make ``verdict`` the group's unless it has one; return the group's."""

        def write(store: Store) -> str:
            stored = store.compare_set(self._key("verdict"), "", verdict).decode()
            store.add(self._key("changes"), 1)
            return stored

        self._verdict = self._ask(write, verdict)
        return self._verdict

    def acknowledge(self) -> None:
        """Record that this rank has read the verdict; once."""
        self._ask(lambda store: store.add(self._key("acknowledged"), 1), 0)

    def all_acknowledged(self) -> bool:
        """Return whether every rank has read the verdict, or the store is lost."""
        return self._ask(lambda store: store.add(self._key("acknowledged"), 0), self.size) >= self.size

    def silent_s(self) -> float:
        """Return the seconds for which the store has not answered."""
        return 0.0 if self._lost else self._connection.silent_s()

    def stopped(self, ranks: Iterable[int]) -> dict[int, int]:
        """Return those of ``ranks`` whose process is on this machine and stopped, with its process id."""
        return {rank: self._pids[rank] for rank in ranks if rank in self._pids and is_stopped(self._pids[rank])}

    def is_gone(self, rank: int) -> bool:
        """Return True if the process of ``rank`` was on this machine and has ended."""
        return rank in self._pids and has_ended(self._pids[rank])

    def _register(self) -> None:
        """Publish this process's id to the others of this machine, so that they can tell whether it is stopped."""
        if machine():
            number = self._store.add(self._key(f"machine/{machine()}"), 1)
            self._store.set(self._key(f"machine/{machine()}/{number}"), f"{self.rank} {os.getpid()}")

    def _meet_neighbours(self, store: Store) -> None:
        if not machine():
            return
        count = store.add(self._key(f"machine/{machine()}"), 0)
        for number in range(len(self._pids) + 1, count + 1):
            key = self._key(f"machine/{machine()}/{number}")
            if not store.check([key]):
                return  # the entry is just being written
            rank, pid = store.get(key).split()
            self._pids[int(rank)] = int(pid)

    def _key(self, name: str) -> str:
        return f"fullshard/{self._life}/{name}"

    def _ask(self, question: Callable[[Store], T], default: T) -> T:
        if self._lost:
            return default
        try:
            return self._connection.ask(lambda: question(self._store), default, PATIENCE_S)
        except RuntimeError:
            self._lost = True
            return default
