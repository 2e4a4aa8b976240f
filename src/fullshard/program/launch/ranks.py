"""The ranks of one machine: how they are started, watched, asked to stop and ended, and which failure was the cause.

The launcher of one machine uses it (:mod:`~fullshard.program.launch.local`), for fullshard's programs and for scripts.
The rules:

- A first request to stop (Ctrl-C, SIGTERM, Slurm's SIGUSR1, the SIGHUP of a terminal that closes) is passed to the
  ranks, which may save. A second Ctrl-C or SIGTERM kills them.
- After a failure the others get SIGTERM, with a mark that it is no request to save, and ten seconds later SIGKILL.
- Signals go to a rank's process group, so that processes that it started end with it.
- The first failure is reported, since it caused the others.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

from fullshard.errors import RunStopped
from fullshard.program.launch.failure import ERROR_FILE_VARIABLE, Failure, saving_path, say_ending
from fullshard.program.launch.output import Output, Stream
from fullshard.program.launch.processes import LOOK_SECONDS, Interpreters

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Signals that ask a run to save and stop."""

NOTICES = (signal.SIGUSR1, signal.SIGHUP)
"""Those that never count as the first or second of two: Slurm's notice, after which a SIGTERM comes, and the end of a
terminal, which a shell and the kernel both tell."""

STOP_SECONDS = 10.0
"""Time that ranks have to exit after another one has failed, before they are killed."""

STOPPED_EXIT_CODE = RunStopped.exit_code
"""Exit code of a run that was stopped and has saved a checkpoint; the same command resumes from it."""

_DRAIN_SECONDS = 2.0
"""Time to wait for more output of a rank that has ended: a process that it left may keep the pipe open."""

_TICK_SECONDS, _LOOK_SECONDS = 0.02, 0.1

_SILENT_DEATH_SECONDS = 0.1
"""Delay before noticing a rank that died without a report, so that the failures it caused are not taken as first."""

_HINTS = {
    signal.SIGKILL: (
        "The kernel does this when memory runs out (see dmesg): use more ranks, a smaller batch or a smaller model."
    ),
    signal.SIGSEGV: "Native code crashed: an extension in C++ or CUDA. A Python stack may be in the output above.",
    signal.SIGBUS: "Often a full /dev/shm: use fewer DataLoader workers, or give the container more shared memory.",
    signal.SIGABRT: "Native code called abort(); its message is in the output above.",
    signal.SIGTERM: "A process outside this run sent the signal.",
}


class StopAsked(Exception):
    """The first request to stop the run; the launcher passes ``number`` on to the ranks."""

    def __init__(self, number: int) -> None:
        """Raise for a signal, or for the file of a notice."""
        self.number = signal.Signals(number)
        super().__init__(f"received {self.number.name}")


@dataclass
class _Rank:
    """A started rank."""

    number: int
    process: subprocess.Popen[bytes]
    failure_path: Path
    code: int | None = None  # exit code, or minus the signal that ended it; None while it runs
    ended_s: float = 0.0
    sent: set[int] = field(default_factory=set)  # signals that it got while it was running
    threads: list[threading.Thread] = field(default_factory=list)
    forwarding: set[Stream] = field(default_factory=set)

    @property
    def pid(self) -> int:
        """Its process id, valid until :meth:`reap`, and its process group's."""
        return self.process.pid

    def signal(self, *numbers: int) -> None:
        """Send signals to the rank and its children."""
        if self.code is None:
            self.sent.update(numbers)
        for number in numbers:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def drain(self) -> None:
        """Wait until the rank's output is forwarded, however slowly it is read (``| less``)."""
        silent_s = 0.0
        while any(thread.is_alive() for thread in self.threads) and silent_s < _DRAIN_SECONDS:
            time.sleep(_TICK_SECONDS)
            silent_s += 0.0 if self.forwarding else _TICK_SECONDS

    def reap(self) -> None:
        """Forget the process as soon as it has ended."""
        self.threads[-1].join()
        self.process.wait()


class Ranks:
    """The ranks of one machine. Use it in the main thread: Linux ends the ranks with the thread that starts them.

    Attributes:
        asked: True after the first request to stop.
        insisted: True after a second one, which has killed the ranks.
        ending: True once the ranks of the last start are ended because one has failed.
        reports: True for ranks of fullshard's programs, which report every error; scripts end in any way.
    """

    def __init__(self, starter: Interpreters, failure_files: Path, output: Output | None = None) -> None:
        """Prepare; nothing is started yet.

        Args:
            starter: Starts the processes.
            failure_files: Directory for the ranks' failure files.
            output: Receives the output of ranks of a script, which end in any way. None: ranks of fullshard's programs,
                which report every error and inherit the launcher's output.
        """
        self.asked = self.insisted = self.ending = False
        self._starter = starter
        self._failure_files = failure_files
        self._output = output
        self.reports = output is None
        self._good = (0, STOPPED_EXIT_CODE) if self.reports else (0,)
        self._ranks: list[_Rank] = []
        self._starts = 0
        self._stopped = True
        self._starting = False
        self._held: StopAsked | None = None
        self._insistence = 0  # requests that count as the first or second of two
        self._changed = threading.Event()

    @property
    def numbers(self) -> list[int]:
        """Numbers of the ranks of the last start."""
        return [rank.number for rank in self._ranks]

    @property
    def running(self) -> bool:
        """True from :meth:`start` until :meth:`stop`."""
        return not self._stopped

    @property
    def codes(self) -> list[int]:
        """Exit codes, or minus signals, of the ranks that have ended."""
        return [rank.code for rank in self._ranks if rank.code is not None]

    def start(self, environments: Sequence[Mapping[str, str]]) -> None:
        """Start one rank with each of the environments, in place of the last ones.

        Args:
            environments: Variables of each rank, with its number, ``RANK``.

        Raises:
            StopAsked: The run was asked to stop meanwhile.
        """
        self._starts += 1
        self._ranks = []
        self._stopped = self.ending = False
        directory = self._failure_files / str(self._starts)
        directory.mkdir()
        numbers = [int(variables["RANK"]) for variables in environments]
        paths = [directory / f"rank{number}.json" for number in numbers]
        own = [{**env, ERROR_FILE_VARIABLE: str(path)} for env, path in zip(environments, paths, strict=True)]
        self._starting = True
        try:
            for place, process in enumerate(self._starter.start(own)):
                self._ranks.append(_Rank(numbers[place], process, paths[place]))
                self._watch(self._ranks[-1])
        finally:
            self._starting = False
            held, self._held = self._held, None
            if held is not None:
                raise held

    def _watch(self, rank: _Rank) -> None:
        """Start the threads that see the rank's end and read its output."""
        process = rank.process
        if self._output is not None:
            for stream, pipe in (("stdout", process.stdout), ("stderr", process.stderr)):
                rank.threads.append(threading.Thread(target=self._read, args=(rank, stream, pipe), daemon=True))
        rank.threads.append(threading.Thread(target=self._wait, args=(rank,), daemon=True))
        for thread in rank.threads:
            thread.start()

    def _read(self, rank: _Rank, stream: Stream, pipe: BinaryIO) -> None:
        """Forward a rank's output until its pipe is closed; runs in one thread per stream."""
        assert self._output is not None
        with pipe:
            while data := os.read(pipe.fileno(), 1 << 16):
                rank.forwarding.add(stream)
                self._output.feed(rank.number, stream, data)
                rank.forwarding.discard(stream)
        self._output.end(rank.number, stream)

    def _wait(self, rank: _Rank) -> None:
        """Record when a rank ends; runs in one thread per rank. It is not reaped, so its process id stays valid."""
        end = os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)
        assert end is not None
        rank.ended_s = time.time()
        rank.code = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        self._changed.set()

    def wait(self, seconds: float) -> None:
        """Wait until a rank ends, for ``seconds`` at most."""
        self._changed.wait(seconds)
        self._changed.clear()

    def wait_for_end(self, look: Callable[[], None]) -> None:
        """Wait until all have ended or one has failed; ``look`` is called twice a second and may raise."""
        while not self.all_ended() and not self.any_failed():
            self.wait(LOOK_SECONDS)
            look()

    def all_ended(self) -> bool:
        """Return whether all ranks have ended."""
        return all(rank.code is not None for rank in self._ranks)

    def any_failed(self) -> bool:
        """Return whether a rank has failed; it may still be exiting. A rank that has saved and stops has not."""
        return any(self._has_failed(rank) for rank in self._ranks)

    def _has_failed(self, rank: _Rank) -> bool:
        if rank.code is not None:
            return rank.code not in self._good
        report = Failure.read(rank.failure_path, rank.number)
        return report is not None and report.stopped is None

    def ask(self, number: int, grace_s: float = math.inf) -> bool:
        """Ask all ranks to save and stop, and wait until all have ended.

        Of fullshard's programs, until one has failed: others would wait for it. A script, which may ignore the signal,
        is killed after ``STOP_SECONDS`` unless one of its ranks reports that it saves.

        Args:
            number: The signal.
            grace_s: Seconds until they are killed even if they save.

        Returns:
            False if they took too long and were killed.
        """
        if self._stopped:
            return True
        for rank in self._ranks:
            rank.signal(number)
            if self.reports:  # it saves, or ends by itself: a crash meanwhile is a failure
                rank.sent.discard(number)
        began = time.monotonic()
        while not self.all_ended() and not (self.reports and self.any_failed()):
            passed_s = time.monotonic() - began
            if passed_s > grace_s or not (self.reports or passed_s <= STOP_SECONDS or self._any_saving()):
                self.kill()
                return False
            self.wait(_LOOK_SECONDS)
        if self.all_ended():
            self.kill()  # what they have started
        return True

    def _any_saving(self) -> bool:
        """Return True if a running rank was asked to save and has not reported the end of it."""
        return any(
            rank.code is None and saving_path(rank.failure_path).exists() and not rank.failure_path.exists()
            for rank in self._ranks
        )

    def stop(self) -> None:
        """End every running rank with SIGTERM, and after ``STOP_SECONDS`` with SIGKILL; read their output.

        A rank that has reported its failure is exiting and gets only the SIGKILL. If all ranks have succeeded, their
        background processes are left running.
        """
        if self._stopped or not self._ranks:
            return
        if not self.all_ended() or self.any_failed():
            self.ending = True
            say_ending(self._ranks[0].failure_path)
            for rank in self._ranks:
                if not rank.failure_path.exists():
                    rank.signal(signal.SIGTERM, signal.SIGCONT)  # a stopped process would not react
            deadline = time.monotonic() + STOP_SECONDS
            while not self.all_ended() and (left := deadline - time.monotonic()) > 0:
                self.wait(left)
            self.kill()
        for rank in self._ranks:
            rank.drain()
        self._stopped = True  # from here on process ids may be other processes'
        for rank in self._ranks:
            rank.reap()

    def kill(self) -> None:
        """Kill every rank, and every process in its process group."""
        if not self._stopped:
            for rank in self._ranks:
                rank.signal(signal.SIGKILL)

    def failures(self) -> list[Failure]:
        """Return the ranks' failures, the cause first; without ranks that were only signalled to end.

        A rank that was killed or crashed is a cause. So is the earliest of the others; not one that only aborted, as
        NCCL does because another one failed, nor one that was stopped and has saved.
        """
        return [failure for _, failure in sorted(self._causes(), key=lambda pair: pair[0])]

    def _causes(self) -> Iterator[tuple[tuple[bool, bool, float, int], Failure]]:
        for rank in self._ranks:
            code = rank.code or 0
            failure = Failure.read(rank.failure_path, rank.number)
            # The kernel may kill a rank for memory just before this launcher signals it.
            by_us = bool(rank.sent) and (code != -signal.SIGKILL or signal.SIGKILL in rank.sent)
            if failure is not None:
                stopped = failure.stopped is not None
                yield (True, stopped, 0.0 if stopped else failure.time_s, rank.number), failure
            elif code not in self._good and not by_us:
                failure = silent_failure(rank.number, code, rank.ended_s, reports=self.reports)
                yield (code >= 0 or code == -signal.SIGABRT, False, failure.time_s, rank.number), failure

    def hear(self, number: int, _frame: FrameType | None = None) -> None:
        """Take a request to stop, such as a signal; a handler of signals.

        Raises:
            StopAsked: It is the first one. While ranks are being started it is raised when all have been: otherwise the
                rank that is just started would not be stopped.
        """
        self._insistence += number not in NOTICES
        if self.asked:
            if self._insistence > 1:
                self.insisted = True
                self.kill()
            return
        self.asked = True
        if not self._starting:
            raise StopAsked(number)
        self._held = StopAsked(number)


@contextlib.contextmanager
def listening(ranks: Ranks) -> Iterator[None]:
    """Hear signals that ask for a stop inside the context, in this process's main thread."""
    # While SIGCHLD is ignored a parent never learns how a child ended, and a program may be started in that state.
    before: dict[int, Any] = {signal.SIGCHLD: signal.signal(signal.SIGCHLD, signal.SIG_DFL)}
    before |= {number: signal.signal(number, ranks.hear) for number in heard_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def heard_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that ask this process to stop; without those of a terminal where they are ignored.

    nohup ignores SIGHUP. A script's shell ignores SIGINT of a job in its background, so that Ctrl-C ends the script's
    other commands (``tail -f run.log``) and not the job; Python leaves it ignored too.
    """
    ignored = [number for number in (signal.SIGHUP, signal.SIGINT) if signal.getsignal(number) is signal.SIG_IGN]
    return tuple(number for number in STOP_SIGNALS if number not in ignored)


def silent_failure(rank: int, code: int, ended_s: float, *, reports: bool) -> Failure:
    """Return the failure of a rank that did not report one itself.

    Args:
        rank: The rank.
        code: Its exit code, or minus the signal that ended it.
        ended_s: Unix time of its end.
        reports: True if its program reports every error, so that it failed in its imports, which would come again.
    """
    who = f"rank {rank}"
    noticed_s = ended_s - (0.0 if code == -signal.SIGABRT else _SILENT_DEATH_SECONDS)
    if code >= 0 and reports:
        message = f"{who} ended with exit code {code} before it could report why; see its output above."
        return Failure(rank, "ProcessGroupError", message, None, code or 1, noticed_s, transient=False)
    if code >= 0:
        return Failure(rank, "SystemExit", f"{who} ended with exit code {code}.", None, code, noticed_s)
    known = -code in {one.value for one in signal.Signals}
    name = signal.Signals(-code).name if known else "real-time"
    hint = _HINTS.get(signal.Signals(-code), "") if known else ""
    message = f"{who} was killed by signal {-code} ({name}). {hint}".rstrip()
    return Failure(rank, "ProcessGroupError", message, None, 128 - code, noticed_s)
