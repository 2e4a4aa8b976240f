"""Several machines that run one script tell each other that they are there, that they are done, and why they fail."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from fullshard.errors import ProcessGroupError
from fullshard.launch.failure import Failure

BEAT_SECONDS = 0.5
"""How often a machine shows that it is there."""

LOST_SECONDS = 20.0
"""After how long without a sign a machine is taken to be gone."""

DOUBT_SECONDS = 4.0
"""The same once a rank has lost a connection; and how long a machine that has only lost one waits for the reason."""

LEAVE_SECONDS = 5.0
"""How long the last words of a run stay there to be read."""

_LOST_CONNECTION = (
    "connection closed by peer",
    "connection reset",
    "connection refused",
    "broken pipe",
    "remote process exited",
    "socket timeout",
    "nccl",
    "gloo",
    "process group",
)
_LOST_CONNECTION_KINDS = ("DistBackendError", "DistNetworkError", "DistStoreError", "ProcessGroupError")


class MeetingPlace(Protocol):
    """What is used of a ``torch.distributed`` store."""

    def set(self, key: str, value: str, /) -> Any:
        """Write a value."""
        ...

    def get(self, key: str, /) -> bytes:
        """Read a value; waits for it."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Whether all these values are there."""
        ...

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter; its new value."""
        ...

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Write a value if the present one is as expected; the value then there."""
        ...


@dataclass(frozen=True)
class Verdict:
    """Why a run on several machines ends.

    Attributes:
        failure: What happened.
        machine: Where, for messages.
    """

    failure: Failure
    machine: str


class MachineEnded(Exception):
    """Another machine has ended the run, or is gone."""

    def __init__(self, verdict: Verdict) -> None:
        """``verdict`` says why."""
        super().__init__(verdict.failure.message)
        self.verdict = verdict


def lost_connection(failure: Failure) -> bool:
    """Whether a failure may be no more than that another rank is gone."""
    text = f"{failure.kind}: {failure.message}".lower()
    return failure.kind in _LOST_CONNECTION_KINDS or any(mark in text for mark in _LOST_CONNECTION)


def in_words(failure: Failure) -> str:
    """A failure without its traceback: which rank, and what."""
    if failure.rank is None or failure.stopped is not None or failure.message.startswith(f"rank {failure.rank} "):
        return failure.message or failure.kind
    return f"rank {failure.rank}: {failure.kind}" + (f": {failure.message}" if failure.message else "")


def brief(failure: Failure) -> str:
    """A failure on one line."""
    line = in_words(failure).splitlines()[0]
    return line if len(line) <= 200 else f"{line[:200]}…"


def read_verdict(store: MeetingPlace) -> Verdict | None:
    """Why the run has ended, if somebody has said so."""
    if not store.check(["failed"]):
        return None
    said = json.loads(store.get("failed"))
    return Verdict(Failure(**said["failure"]), said["machine"])


def post_verdict(store: MeetingPlace, verdict: Verdict) -> Verdict:
    """Say why the run ends; who says it first is right, and that is what is returned."""
    text = json.dumps({"failure": asdict(verdict.failure), "machine": verdict.machine})
    said = json.loads(store.compare_set("failed", "", text))
    return Verdict(Failure(**said["failure"]), said["machine"])


class Watch:
    """One machine's eye on the others, for as long as one set of ranks runs: a thread of its own.

    Machine 0 looks at all, the others at what it says.

    Attributes:
        somebody_waits: Whether a machine wants to start all ranks anew.
    """

    def __init__(self, store: MeetingPlace, number: int, machines: Sequence[str], *, hosts: bool) -> None:
        """Start to watch.

        Args:
            store: Where the machines of this round, and nobody else, write.
            number: This machine.
            machines: The names of all.
            hosts: Whether the store lives in this process.
        """
        self._hosts = hosts
        self.somebody_waits = False
        self._store = store
        self._number = number
        self._machines = machines
        self._verdict: Verdict | None = None
        self._over = False
        self._ended = threading.Event()
        now = time.monotonic()
        self._store_seen = now
        self._beats: dict[int, tuple[bytes, float]] = {}
        self._started = now
        self._thread = threading.Thread(target=self._run, name="fullshard-machines", daemon=True)
        self._thread.start()

    @property
    def here(self) -> str:
        """This machine, for messages."""
        return self._name(self._number)

    @property
    def over(self) -> bool:
        """Whether all machines are done."""
        return self._over

    def verdict(self, silence: float = LOST_SECONDS) -> Verdict | None:
        """Why the run is over, as far as the others know; None while all is well.

        Args:
            silence: Seconds after which a machine that shows nothing is gone.
        """
        if self._verdict is not None:
            return self._verdict
        now = time.monotonic()
        if now - self._store_seen > silence:
            return self._gone(0, now - self._store_seen)
        if self._number == 0:
            for number in range(1, len(self._machines)):
                seen = self._beats.get(number, (b"", self._started))[1]
                if now - seen > silence:
                    return self.post(self._gone(number, now - seen))
        return None

    def post(self, verdict: Verdict) -> Verdict:
        """Say why the run ends; returns what was said first."""
        with contextlib.suppress(RuntimeError, ValueError):
            self._verdict = post_verdict(self._store, verdict)
            return self._verdict
        return verdict

    def done(self) -> None:
        """Say that all ranks of this machine have ended well."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"done/{self._number}", "1")

    def leave(self) -> None:
        """Stop watching. The machine with the store stays until the others have read what was said last."""
        self._ended.set()
        self._thread.join(LEAVE_SECONDS)
        if not self._over and self._verdict is None:
            return
        with contextlib.suppress(RuntimeError):
            left = self._store.add("left", 1)
            deadline = time.monotonic() + LEAVE_SECONDS
            while self._hosts and left < len(self._machines) and time.monotonic() < deadline:
                time.sleep(0.05)
                left = self._store.add("left", 0)

    def _name(self, number: int) -> str:
        return self._machines[number]

    def _gone(self, number: int, seconds: float) -> Verdict:
        message = (
            f"{self._name(number)} has shown nothing for {seconds:.0f} s: it is off, cut from the network, or its "
            "`fullshard launch` was killed. Look at its output."
        )
        failure = Failure(None, ProcessGroupError.__name__, message, None, ProcessGroupError.exit_code, time.time())
        return Verdict(failure, self.here)

    def _run(self) -> None:
        beat = 0
        with contextlib.suppress(RuntimeError, ValueError):  # the store is gone: the time of the last answer tells
            while not self._ended.wait(BEAT_SECONDS if beat else 0.0):
                beat += 1
                self._store.set(f"beat/{self._number}", str(beat))
                if self._number == 0:
                    self._look_at_all()
                self._over = self._over or self._store.check(["over"])
                self.somebody_waits = self._store.check(["next"])
                said = read_verdict(self._store)
                if said is not None:  # None may be older than what post() has written meanwhile
                    self._verdict = said
                self._store_seen = time.monotonic()

    def _look_at_all(self) -> None:
        """Machine 0: who is there, and whether all are done."""
        others = range(1, len(self._machines))
        for number in others:
            key = f"beat/{number}"
            beat = self._store.get(key) if self._store.check([key]) else b""
            if beat != self._beats.get(number, (b"", 0.0))[0]:
                self._beats[number] = (beat, time.monotonic())
        if self._store.check([f"done/{number}" for number in range(len(self._machines))]):
            self._store.set("over", "1")
