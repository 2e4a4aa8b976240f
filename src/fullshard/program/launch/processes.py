"""Ranks as processes: an interpreter for each, all started side by side."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence

LOOK_SECONDS = 0.5
"""Interval at which the launcher looks for a request to stop while it waits."""

LAUNCHER_VARIABLE = "FULLSHARD_LAUNCHER_PID"
"""Process id of the launcher, by which a rank notices that it has died."""

INTERRUPTED_EXIT_CODE = 130
"""Exit code in shells of a command ended by Ctrl-C: 128 + SIGINT."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Interpreters:
    """Runs the command in a new process for each rank."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], *, piped: bool = False) -> None:
        """Store the command; nothing is started yet. ``piped``: the launcher reads what ranks print."""
        self._command = list(command)
        self._environment = dict(environment)
        self._stream = subprocess.PIPE if piped else None

    def start(self, variables: Sequence[Mapping[str, str]]) -> Iterator[subprocess.Popen[bytes]]:
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


def waits_for_store() -> bool:
    """Return whether a thread of torch's agent in this launcher still calls a store, as after a machine was lost.

    No call ends it. If the store's answer, or its absence, comes while Python ends, C++ aborts the process.
    """
    return any(thread.name.startswith("RendezvousKeepAliveTimer") for thread in threading.enumerate())


def end_with_launcher() -> None:
    """Make Linux end this rank when the launcher dies, even by SIGKILL. A rank calls this first."""
    if sys.platform == "linux" and LAUNCHER_VARIABLE in os.environ:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        # The launcher may have died while this rank was importing, which takes seconds; then no signal comes.
        if os.getppid() != int(os.environ[LAUNCHER_VARIABLE]):
            os._exit(INTERRUPTED_EXIT_CODE)
