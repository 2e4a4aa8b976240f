"""Ranks as processes: forks of one that has imported their program, or interpreters that each import it.

The imports take 4 to 8 s of a core. Forks pay for them once for all ranks, and not again for a restart.

The parent of a fork is the launcher, not the process that it copies: that one, the fork server, forks a child which
forks the ranks and ends, and Linux gives orphans to the nearest ancestor that asked for them. So the launcher signals
ranks, waits for them and learns how they ended as with interpreters, and they detect its death. They survive if the
fork server dies; the next attempt then starts another one.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

from fullshard.errors import ProcessGroupError

FORK_SERVER = "fullshard.program.launch.programs.forks"
"""Module of the fork server."""

LONGEST_MESSAGE = 1 << 20
"""Largest request or answer in bytes; a request for 64 ranks takes about 30,000."""

LOOK_SECONDS = 0.5
"""Interval at which the launcher looks for a request to stop while it waits."""

LAUNCHER_VARIABLE = "FULLSHARD_LAUNCHER_PID"
"""Process id of the launcher, by which a rank notices that it has died."""

INTERRUPTED_EXIT_CODE = 130
"""Exit code in shells of a command ended by Ctrl-C: 128 + SIGINT."""

WATCH_THREAD = "fullshard-machines"
"""Name of the thread that watches other machines."""

_STORE_THREADS = (WATCH_THREAD, "RendezvousKeepAliveTimer")  # the second one is that of torch's c10d rendezvous

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


class ForkServerError(Exception):
    """The fork server ended before it had forked; the argument is its exit code, or minus the signal."""


class Interpreters:
    """Starter that runs the command in a new process for each rank."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], *, piped: bool = False) -> None:
        """Store the command; nothing is started yet. ``piped``: the launcher reads what ranks print."""
        self._command = list(command)
        self._environment = dict(environment)
        self._stream = subprocess.PIPE if piped else None

    def start(
        self, variables: Sequence[Mapping[str, str]], look: Callable[[], None]
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Start the ranks in sessions of their own, so that the terminal's Ctrl-C reaches only the launcher."""
        for mine in variables:
            environment = {**self._environment, **mine}
            yield subprocess.Popen(
                self._command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=self._stream,
                stderr=self._stream,
                start_new_session=True,
            )

    def close(self) -> None:
        """Do nothing: nothing is left."""


class ForkServer:
    """Starter that forks ranks of ``python -m MODULE ARGUMENTS`` from one process.

    A rank runs the module's ``main(ARGUMENTS)``; its ``import_more(ARGUMENTS)``, if there is one, runs before in the
    fork server.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Store the command; the first attempt starts the server."""
        self._command = list(command)
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def close(self) -> None:
        """End the fork server; ranks are not its children."""
        if self._process is not None and self._socket is not None:
            self._process.kill()
            self._process.wait()
            self._socket.close()

    def start(self, variables: Sequence[Mapping[str, str]], look: Callable[[], None]) -> Iterator[int]:
        """Fork the ranks, by a new server if none is running; yields process ids of children of this process.

        Raises:
            ForkServerError: The server ended, for example by an import error, which it has printed.
        """
        if self._process is None or self._process.poll() is not None:
            self._begin()
        assert self._process is not None
        assert self._socket is not None
        answer = b""
        with _adopting(), contextlib.suppress(ConnectionError):
            self._socket.send(json.dumps([dict(mine) for mine in variables]).encode())
            while not select.select([self._socket], [], [], LOOK_SECONDS)[0]:
                look()
            answer = self._socket.recv(LONGEST_MESSAGE)
        if not answer:
            raise ForkServerError(self._process.wait())
        yield from json.loads(answer)

    def _begin(self) -> None:
        if self._socket is not None:
            self._socket.close()
        # Packets: a message arrives completely or not at all, whenever one of the two is killed.
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        interpreter, module = self._command[:2], self._command[2:]
        with theirs:
            self._process = subprocess.Popen(
                [*interpreter, FORK_SERVER, str(theirs.fileno()), *module],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                process_group=0,
            )


def waits_for_store() -> bool:
    """Return whether a thread of this launcher still calls a store, as after a machine with one was lost.

    No call ends it. If the store's answer, or its absence, comes while Python ends, C++ aborts the process.
    """
    return any(thread.name.startswith(_STORE_THREADS) for thread in threading.enumerate())


Starter = Interpreters | ForkServer
"""Starts the ranks of each attempt."""


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Make this process the parent of orphans among its descendants inside the context.

    Raises:
        ProcessGroupError: The system does not allow it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise ProcessGroupError(
            "The launcher must become the parent of its forked ranks (prctl PR_SET_CHILD_SUBREAPER), which this system "
            f"refused: {os.strerror(ctypes.get_errno())}. Start the ranks with torchrun, or on another system."
        )
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def end_with_launcher() -> None:
    """Make Linux end this rank when the launcher dies, even by SIGKILL. A rank calls this first."""
    if sys.platform == "linux" and LAUNCHER_VARIABLE in os.environ:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        # The launcher may have died while this rank was importing, which takes seconds; then no signal comes.
        if os.getppid() != int(os.environ[LAUNCHER_VARIABLE]):
            os._exit(INTERRUPTED_EXIT_CODE)
