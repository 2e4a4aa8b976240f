"""Heartbeats, completion and failures that the machines of a run exchange through a shared store."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from torch.distributed import Store  # type: ignore[attr-defined]

from fullshard.core.comm.store_posts import Heartbeats
from fullshard.errors import ProcessGroupError
from fullshard.program.launch.failure import Failure
from fullshard.program.launch.processes import WATCH_THREAD

BEAT_SECONDS = 0.5
"""Interval of a machine's heartbeat."""

LOST_SECONDS = 20.0
"""Seconds without a heartbeat after which a machine counts as lost."""

DOUBT_SECONDS = 4.0
"""The same after a rank has lost a connection; also how long its machine waits for another one's failure."""

LEAVE_SECONDS = 5.0
"""Time that the machine with the store waits for the others to read how the run ended."""

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


@dataclass(frozen=True)
class RunFailure:
    """The failure that ends a run on several machines."""

    failure: Failure
    machine: str  # name of the machine where it happened


class MachineEnded(Exception):
    """Another machine has ended the run, or was lost."""

    def __init__(self, failed: RunFailure) -> None:
        """Raise for the failure ``failed`` of the run."""
        super().__init__(failed.failure.message)
        self.failed = failed


def lost_connection(failure: Failure) -> bool:
    """Return whether a failure may only mean that another rank is gone."""
    text = f"{failure.kind}: {failure.message}".lower()
    return failure.kind in _LOST_CONNECTION_KINDS or any(mark in text for mark in _LOST_CONNECTION)


def read_failure(store: Store) -> RunFailure | None:
    """Return the failure that has ended the run, if a machine has reported one."""
    if not store.check(["failed"]):
        return None
    stored = json.loads(store.get("failed"))
    return RunFailure(Failure(**stored["failure"]), stored["machine"])


def post_failure(store: Store, failed: RunFailure) -> RunFailure:
    """Report a failure that ends the run; return the failure that was reported first."""
    text = json.dumps({"failure": asdict(failed.failure), "machine": failed.machine})
    stored = json.loads(store.compare_set("failed", "", text))
    return RunFailure(Failure(**stored["failure"]), stored["machine"])


class PeerMonitor:
    """Thread that sends this machine's heartbeat and watches the others while one set of ranks runs.

    Machine 0 watches all machines; the others watch machine 0 and read its results.

    Attributes:
        restart_requested: Whether a machine waits to restart all ranks.
    """

    def __init__(self, store: Store, number: int, machines: Sequence[str], *, hosts: bool) -> None:
        """Start watching.

        Args:
            store: The store of this rendezvous, written only by its machines.
            number: Number of this machine.
            machines: Names of all machines.
            hosts: Whether the store runs in this process.
        """
        self._hosts = hosts
        self.restart_requested = False
        self._store = store
        self._number = number
        self._machines = machines
        self._failed: RunFailure | None = None
        self._over = False
        self._ended = threading.Event()
        self._store_seen = time.monotonic()
        self._heartbeats = Heartbeats(store, number, self._store_seen)
        # Only with the static rendezvous machine 0 has the store, so its silence is not always the store's.
        self._watched = range(1, len(machines)) if number == 0 else range(1)
        self._thread = threading.Thread(target=self._run, name=WATCH_THREAD, daemon=True)
        self._thread.start()

    @property
    def here(self) -> str:
        """Name of this machine, for messages."""
        return self._machines[self._number]

    @property
    def over(self) -> bool:
        """True if the ranks of all machines have succeeded."""
        return self._over

    def failure(self, silence: float = LOST_SECONDS) -> RunFailure | None:
        """Return the failure that ended the run, or None; a machine silent for ``silence`` seconds is lost."""
        if self._failed is not None:
            return self._failed
        now = time.monotonic()
        if now - self._store_seen > silence:
            return self._lost(0, now - self._store_seen)
        for number in self._watched:
            if (silent_s := self._heartbeats.silent_s(number, now)) > silence:
                return self.post(self._lost(number, silent_s))
        return None

    def post(self, failed: RunFailure) -> RunFailure:
        """Report a failure that ends the run; return the failure that was reported first."""
        with contextlib.suppress(RuntimeError, ValueError):
            self._failed = post_failure(self._store, failed)
            return self._failed
        return failed

    def done(self) -> None:
        """Report that all ranks of this machine have succeeded."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"done/{self._number}", "1")

    def stop(self) -> None:
        """Stop watching."""
        self._ended.set()
        self._thread.join(LEAVE_SECONDS)

    def leave(self) -> None:
        """Stop watching. The machine with the store waits until the others have read how the run ended."""
        self.stop()
        if not self._over and self._failed is None:
            return
        with contextlib.suppress(RuntimeError):
            left = self._store.add("left", 1)
            deadline = time.monotonic() + LEAVE_SECONDS
            while self._hosts and left < len(self._machines) and time.monotonic() < deadline:
                time.sleep(0.05)
                left = self._store.add("left", 0)

    def _lost(self, number: int, seconds: float) -> RunFailure:
        message = (
            f"{self._machines[number]} has sent no heartbeat for {seconds:.0f} s: it is off, cut off from the network, "
            "or its `fullshard launch` was killed. Look at its output."
        )
        failure = Failure(None, ProcessGroupError.__name__, message, None, ProcessGroupError.exit_code, time.time())
        return RunFailure(failure, self.here)

    def _run(self) -> None:
        beat = 0
        # An error means that the store is gone; failure() notices by the time of its last answer.
        with contextlib.suppress(RuntimeError, ValueError):
            while not self._ended.wait(BEAT_SECONDS if beat else 0.0):
                beat += 1
                self._heartbeats.beat(str(beat))
                self._heartbeats.listen(self._watched, time.monotonic())
                if self._number == 0 and self._store.check([f"done/{number}" for number in range(len(self._machines))]):
                    self._store.set("over", "1")
                self._over = self._over or self._store.check(["over"])
                self.restart_requested = self._store.check(["next"])
                stored = read_failure(self._store)
                if stored is not None:  # None may be older than a failure that post() has written since
                    self._failed = stored
                self._store_seen = time.monotonic()
