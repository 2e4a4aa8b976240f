"""Posts that the ranks of a group publish to each other through the group's store, besides their collectives."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from fullshard.core.comm.line import LINE, Line
from fullshard.core.comm.whereabouts import has_ended, is_stopped, machine

T = TypeVar("T")

PATIENCE_S = 1.0
"""Longest wait for the store's answer, in seconds; the program then continues without it."""

_NEIGHBOUR_LOOKS = 40
"""Number of times that a new board looks for other processes of this machine, which create theirs at the same time."""

_FOR_EVER = datetime.timedelta(days=365)


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


class Board:
    """The posts of a group's ranks, one for each, their failures, and at most one verdict. Any thread may use it.

    If the store is gone, the process that holds it has ended; after that, nothing is read or written.
    """

    def __init__(self, store: Store, rank: int, size: int, line: Line = LINE) -> None:
        """Share ``store``, a connection of this board's own, with the other ranks; each makes one board for a group."""
        self.rank, self.size = rank, size
        self._store = store
        self._store.set_timeout(_FOR_EVER)  # the line bounds waits; an abandoned question would spoil the connection
        self._line = line
        self._lost = False
        # A store may outlive a group and serve a later one of the same name, whose board must be a different one.
        self._life = store.add(f"fullshard/lives/{rank}", 1)
        self._changes = 0
        self._posts: dict[int, Post] = {}
        self._failures: dict[int, RankFailure] = {}
        self._verdict: str | None = None
        self._looks = 0
        self._pids: dict[int, int] = {}
        self._beating: set[int] = set()
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
        self._ask(lambda store: store.set(self._key(f"beat/{self.rank}"), text), None)

    def beats(self, ranks: Iterable[int]) -> dict[int, bytes]:
        """Return the last beat of each of ``ranks`` that has one; none if the store does not answer."""

        def read(store: Store) -> dict[int, bytes]:
            keys = {rank: self._key(f"beat/{rank}") for rank in ranks}
            self._beating |= {rank for rank in keys.keys() - self._beating if store.check([keys[rank]])}
            return {rank: store.get(key) for rank, key in keys.items() if rank in self._beating}

        return self._ask(read, {})

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
        return 0.0 if self._lost else self._line.silent_s()

    def stopped(self, ranks: Iterable[int]) -> dict[int, int]:
        """Return those of ``ranks`` whose process is on this machine and stopped, with its process id."""
        return {rank: self._pids[rank] for rank in ranks if rank in self._pids and is_stopped(self._pids[rank])}

    def is_gone(self, rank: int) -> bool:
        """Return True if the process of ``rank`` was on this machine and has ended."""
        return rank in self._pids and has_ended(self._pids[rank])

    def _register(self) -> None:
        """Publish this process's id to the others of this machine, so that they can tell whether it is stopped."""
        if machine():
            slot = self._store.add(self._key(f"machine/{machine()}"), 1)
            self._store.set(self._key(f"machine/{machine()}/{slot}"), f"{self.rank} {os.getpid()}")

    def _meet_neighbours(self, store: Store) -> None:
        if not machine():
            return
        count = store.add(self._key(f"machine/{machine()}"), 0)
        for slot in range(len(self._pids) + 1, count + 1):
            key = self._key(f"machine/{machine()}/{slot}")
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
            return self._line.ask(lambda: question(self._store), default, PATIENCE_S)
        except RuntimeError:
            self._lost = True
            return default
