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
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from fullshard.errors import ProcessGroupError

FORK_SERVER = "fullshard.program.launch.programs.forks"
"""Module of the fork server."""

LONGEST_MESSAGE = 1 << 20
"""Largest request or answer in bytes; a request for 64 ranks takes about 30,000."""

LOOK_SECONDS = 0.5
"""Interval at which the launcher looks for a request to stop while it waits."""

_POLL_SECONDS = 0.01

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


class ForkServerError(Exception):
    """The fork server ended before it had forked; the argument is its exit code, or minus the signal."""


class Interpreters:
    """Starter that runs the command in a new process for each rank."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Store the command; nothing is started yet."""
        self._command = list(command)
        self._environment = dict(environment)

    def start(self, variables: Sequence[Mapping[str, str]], look: Callable[[], None]) -> Iterator[Process]:
        """Start the ranks in process groups of their own, so that the terminal's Ctrl-C reaches only the launcher."""
        for mine in variables:
            environment = {**self._environment, **mine}
            yield subprocess.Popen(self._command, env=environment, stdin=subprocess.DEVNULL, process_group=0)

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

    def start(self, variables: Sequence[Mapping[str, str]], look: Callable[[], None]) -> Iterator[Process]:
        """Fork the ranks, by a new server if none is running.

        Raises:
            ForkServerError: The server ended, for example by an import error, which it has printed.
        """
        if self._process is None or self._process.poll() is not None:
            self._begin()
        yield from [Fork(pid) for pid in self._forked(variables, look)]

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

    def _forked(self, variables: Sequence[Mapping[str, str]], look: Callable[[], None]) -> list[int]:
        """Return the process ids of new forks, which are children of this process."""
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
        return json.loads(answer)


class Fork:
    """A child of this process that ``subprocess`` did not start; any thread may wait for it."""

    def __init__(self, pid: int) -> None:
        """Take over the child with this process id."""
        self.pid = pid
        self.returncode: int | None = None
        # Reentrant: a signal's handler may send a signal while the main thread checks whether the process has ended.
        self._lock = threading.RLock()

    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended; return its exit code, or minus the signal that ended it.

        Raises:
            subprocess.TimeoutExpired: The process is still running after ``timeout`` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self._poll()) is None:
            if deadline is None:
                with contextlib.suppress(ChildProcessError):  # another thread has seen its end
                    os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            elif time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0.0)
            else:
                time.sleep(_POLL_SECONDS)
        return code

    def _poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                try:
                    # The code is noted before Linux forgets it: a signal's handler may do all of this in the middle.
                    ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                    if ended is not None:
                        self.returncode = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
                        os.waitpid(self.pid, 0)
                except ChildProcessError:
                    if self.returncode is None:
                        raise
            return self.returncode

    def send_signal(self, sig: int, /) -> None:
        """Send a signal if it is still running; under the lock: a reaped process id may belong to another one."""
        with self._lock:
            if self._poll() is None:
                os.kill(self.pid, sig)


Process = subprocess.Popen[bytes] | Fork
"""A rank's process."""

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
