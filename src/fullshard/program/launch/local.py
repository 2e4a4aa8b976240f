"""The launcher of ``fullshard train``: N ranks as processes of this machine, with torchrun's environment variables.

The launcher starts every rank, waits until one fails or all have ended, and leaves no process running. A failing rank
writes the reason to a file (``failure``); the launcher reports only the first failure, since it
caused the others. After one that may pass it restarts the ranks if allowed (``attempts``). It does
so without torch's elastic agent, whose import takes as long as the ranks' own, and with forks of one process that has
imported what they need (:mod:`fullshard.program.launch.processes`).

The first Ctrl-C or SIGTERM, SIGUSR1 (Slurm's notice), SIGHUP (the terminal closes) or the file of a notice is passed to
the ranks, which save a checkpoint and exit with ``STOPPED_EXIT_CODE``; ranks outside of training just end. This may
take as long as their step and the disk need, or the grace time. A second Ctrl-C or SIGTERM kills them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, Self

from fullshard.errors import RunStopped
from fullshard.program.launch.attempts import (
    Reached,
    Restarts,
    in_memory,
    kept_directory,
    last_note,
    mark_lost,
    mark_started,
)
from fullshard.program.launch.failure import FAILURE_FILE_VARIABLE, Failure, say_ending
from fullshard.program.launch.messages import say
from fullshard.program.launch.processes import LOOK_SECONDS, ForkServer, ForkServerError, Interpreters, Process, Starter
from fullshard.program.launch.streams import UnreadOutputError
from fullshard.variables import ATTEMPT_VARIABLE, KEEP_VARIABLE, RESTARTS_VARIABLE

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Signals that ask a run to save and stop."""

NOTICES = (signal.SIGUSR1, signal.SIGHUP)
"""Those that never count as the first or second of two: Slurm's notice, after which a SIGTERM comes, and the end of a
terminal, which a shell and the kernel both tell."""


def heard_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that ask this process to stop; without SIGHUP where it is ignored, as under nohup."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(number for number in STOP_SIGNALS if number != signal.SIGHUP or not ignored)


@dataclass(frozen=True)
class Notice:
    """Further ways to request a stop, and the time limit after a request."""

    file: Path | None = None  # the run stops when it appears
    grace_s: float | None = None  # ranks that run longer after the first request are killed; None: never


NO_NOTICE = Notice()


class Stoppable(Protocol):
    """A rank that was started."""

    def terminate(self) -> None:
        """Send SIGTERM."""
        ...

    def kill(self) -> None:
        """Send SIGKILL."""
        ...


class Interrupts:
    """Passes requests to stop (Ctrl-C, timeout, Slurm, a service manager) on to the ranks while entered.

    Attributes:
        asked: True if the ranks were asked to save and exit.
    """

    def __init__(self, ranks: Sequence[Stoppable], notice: Notice) -> None:
        """Pass signals to ``ranks``, a list that may still change."""
        self.asked = False
        self._ranks = ranks
        self._notice = notice
        self._asked_at = 0.0
        self._signals = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        """Install the handlers."""
        # While SIGCHLD is ignored a parent never learns how a child ended, and a program may be started in that state.
        self._before = {signal.SIGCHLD: signal.signal(signal.SIGCHLD, signal.SIG_DFL)}
        self._before |= {number: signal.signal(number, self._interrupt) for number in heard_signals()}
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Restore the previous handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def out_of_time(self) -> bool:
        """Look for the file of the notice; return True if the time limit has passed."""
        if self._notice.file is not None and not self.asked and self._notice.file.exists():
            say(f"{self._notice.file} is there: the run stops")
            self._ask()
        grace_s = self._notice.grace_s
        return self.asked and grace_s is not None and time.monotonic() - self._asked_at > grace_s

    def _interrupt(self, number: int, _frame: FrameType | None) -> None:
        self._signals += number not in NOTICES
        if self._signals > 1:
            for rank in self._ranks:
                rank.kill()
            raise KeyboardInterrupt
        if not self.asked:
            self._ask()

    def _ask(self) -> None:
        self.asked, self._asked_at = True, time.monotonic()
        for rank in self._ranks:
            rank.terminate()


_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd", "/dev/nvhost-gpu")
"""Device files of GPU drivers: Nvidia's, that of Windows' Linux, AMD's, Nvidia's for embedded boards."""

STOP_SECONDS = 10.0
"""Time that ranks have to exit after another one has failed, before they are killed."""

AGAIN_SECONDS = 1.5
"""Time until a second SIGTERM: a training rank takes the first one as a request to save a checkpoint."""

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Settings of torch's allocator; torch reads the first name, and the older ones if it is missing."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

_LAUNCHER_VARIABLE = "FULLSHARD_LAUNCHER_PID"
"""Process id of the launcher, by which a rank notices that it has died."""

INTERRUPTED_EXIT_CODE = 130
"""Exit code in shells of a command ended by Ctrl-C: 128 + SIGINT."""

UNREAD_EXIT_CODE = 141
"""Exit code in shells of a command whose output nothing reads any more, as after ``| head``: 128 + SIGPIPE."""

STOPPED_EXIT_CODE = RunStopped.exit_code
"""Exit code of a run that was stopped and has saved a checkpoint; the same command resumes from it."""


@dataclass(frozen=True)
class _Rank:
    """A started rank and the path of its failure file."""

    number: int
    process: Process
    failure_path: Path

    @property
    def code(self) -> int:
        """Exit code of a rank that has ended, or minus the signal that ended it."""
        assert self.process.returncode is not None
        return self.process.returncode

    def terminate(self) -> None:
        """Send SIGTERM if it is still running."""
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL if it is still running."""
        self.process.send_signal(signal.SIGKILL)


def launched_elsewhere() -> bool:
    """Return whether torchrun (or another launcher with its variables) started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _has_gpu_driver() -> bool:
    """Return True if this machine has a GPU driver and so perhaps a GPU; takes no time."""
    return any(Path(device).exists() for device in _DRIVERS)


def gpu_count() -> int:
    """Return the number of GPUs visible to this process; imports torch, which is slow, only if there is a driver."""
    if not _has_gpu_driver():
        return 0
    count: int = import_module("torch").cuda.device_count()
    return count


def choose_nproc(requested: int | None) -> int:
    """Choose the number of ranks to start on this machine: as requested; None: one per GPU, or 2 on the CPU.

    More ranks than GPUs share the GPUs, which is reported when they join (:func:`fullshard.init`).
    """
    return requested or gpu_count() or 2


def launch(
    command: Sequence[str], *, nproc: int, saves: bool = True, max_restarts: int = 0, notice: Notice = NO_NOTICE
) -> Failure | None:
    """Run a command as ``nproc`` ranks and wait for them; called once, in the launching process's main thread.

    The ranks inherit standard output and error.

    Args:
        command: Program and arguments, the same for every rank. It must write its failure to the file of
            :mod:`fullshard.program.launch.failure`. Without a GPU, ranks of ``python -m MODULE …`` are forks of one
            process: the module has a function ``main(arguments)``.
        nproc: Number of ranks, at least 1.
        saves: True if ranks that train save a checkpoint when they are stopped. Only they know whether they train:
            rank 0 announces that it stops (:mod:`fullshard.program.launch.programs.signals`); other ranks are silent.
        max_restarts: How often to restart all ranks after one was lost; they continue from their newest checkpoint.
        notice: Further ways to request a stop, and the time limit after a request.

    Returns:
        None when every rank ended with exit code 0; rank 0's report when all were stopped and have saved; else the
        first failure of the last attempt, or of the one before it when the same step failed twice.

    Raises:
        UnreadOutputError: A rank's output has no reader any more, as after ``| head``; all ranks have ended.
        KeyboardInterrupt: A second Ctrl-C or SIGTERM, or one before the ranks could save; all ranks have ended.
    """
    ranks: list[_Rank] = []
    with (
        kept_directory() as kept,
        Interrupts(ranks, notice) as interrupts,
        contextlib.closing(_starter(command, nproc, kept)) as starter,
    ):
        restarts = Restarts(max_restarts, kept)
        while True:
            with socket.create_server(("127.0.0.1", 0)) as probe:
                port = probe.getsockname()[1]  # free now
            variables = {
                ATTEMPT_VARIABLE: str(restarts.done),
                RESTARTS_VARIABLE: str(max_restarts - restarts.done),
                "WORLD_SIZE": str(nproc),
                "LOCAL_WORLD_SIZE": str(nproc),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            failure = _attempt(starter, variables, ranks, interrupts, str(kept), saves=saves)
            if failure is None or interrupts.asked:
                return failure
            then = restarts.after(failure)
            if isinstance(then, Failure):
                return then
            _pause(then, interrupts, str(kept))


def _starter(command: Sequence[str], nproc: int, kept: Path) -> Starter:
    """Return how to start ranks: as forks on Linux, unless there may be a GPU.

    A fork of a process that has initialised a GPU cannot use it, and it is unverified that no import does so.
    """
    environment = {
        # glibc asks for huge pages: until its first step was done a rank took 24,500 page faults in place of 176,000,
        # and a recovery 0.3 s less. Later steps take as long as before.
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        **os.environ,
        **default_variables(nproc),
        KEEP_VARIABLE: str(kept),
        _LAUNCHER_VARIABLE: str(os.getpid()),
    }
    if command[1] == "-m" and sys.platform == "linux" and not _has_gpu_driver():
        return ForkServer(command, environment)
    return Interpreters(command, environment)


def _attempt(
    starter: Starter,
    variables: Mapping[str, str],
    ranks: list[_Rank],
    interrupts: Interrupts,
    kept: str,
    *,
    saves: bool,
) -> Failure | None:
    """Start the ranks, in place of those in ``ranks``, and wait until one has failed or all have ended."""

    def look() -> None:
        if interrupts.out_of_time() or interrupts.asked:
            raise _interrupted(kept, saves=saves)

    ranks.clear()
    with tempfile.TemporaryDirectory(prefix="fullshard-") as scratch:
        mark_started(kept)
        paths = [Path(scratch, f"rank{number}.json") for number in range(int(variables["WORLD_SIZE"]))]
        own = [{"RANK": str(n), "LOCAL_RANK": str(n), FAILURE_FILE_VARIABLE: str(path)} for n, path in enumerate(paths)]
        try:
            for number, process in enumerate(starter.start([{**variables, **one} for one in own], look)):
                ranks.append(_Rank(number, process, paths[number]))
                if interrupts.asked:
                    ranks[-1].terminate()
            return _outcome(ranks, interrupts, kept, saves=saves)
        except ForkServerError as error:
            look()
            mark_lost(kept)
            return _unreported(None, error.args[0])
        finally:
            _stop(ranks)


def _outcome(ranks: Sequence[_Rank], interrupts: Interrupts, kept: str, *, saves: bool) -> Failure | None:
    """Wait until one rank has failed or all have ended."""
    ended: queue.SimpleQueue[_Rank] = queue.SimpleQueue()
    for rank in ranks:
        threading.Thread(target=_watch, args=(rank, ended), daemon=True).start()
    for _ in ranks:
        first = _next(ended, interrupts)
        if first is None:
            for rank in ranks:
                rank.kill()
            return _out_of_time(kept)
        if interrupts.asked and first.code in (-signal.SIGTERM, -signal.SIGUSR1, INTERRUPTED_EXIT_CODE):
            # The rank was not training yet, or not any more.
            raise _interrupted(kept, saves=saves)
        if first.code == UNREAD_EXIT_CODE:
            raise UnreadOutputError
        if first.code not in (0, STOPPED_EXIT_CODE):
            mark_lost(kept)
            return _cause(first, ranks)
    return Failure.read(ranks[0].failure_path)


def _interrupted(kept: str, *, saves: bool) -> KeyboardInterrupt:
    """Return the exception for a stop outside of a training step, after reporting it."""
    if saves:
        step, reached = in_memory(kept), last_note(kept) or Reached(0)
        lost = f"; step {step:,} was in memory only and is lost" if step > reached.saved else ""
        say(f"no step was being trained, so this stop saved no checkpoint and deleted none{lost}")
    return KeyboardInterrupt()


def _pause(seconds: float, interrupts: Interrupts, kept: str) -> None:
    """Wait before the ranks restart.

    Raises:
        KeyboardInterrupt: A stop was requested; no ranks are running.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not interrupts.out_of_time() and not interrupts.asked:
        time.sleep(min(0.1, seconds))
    if interrupts.asked:
        raise _interrupted(kept, saves=True)


def default_variables(nproc: int) -> dict[str, str]:
    """Return default variables of ``nproc`` ranks, without those that the user has set."""
    defaults = {
        # One thread per core in every rank oversubscribes the cores and is many times slower.
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // nproc)),
        # Otherwise the profiler that measures CPU memory prints on standard error; 6 is above all its levels.
        "KINETO_LOG_LEVEL": "6",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    if not any(name in os.environ for name in _ALLOCATOR_VARIABLES):
        # Batches of many lengths leave gaps between fixed segments of CUDA's allocator.
        defaults[_ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"
    return {name: value for name, value in defaults.items() if name not in os.environ}


def _watch(rank: _Rank, ended: queue.SimpleQueue[_Rank]) -> None:
    """Report the end of a rank; runs in one thread per rank."""
    rank.process.wait()
    ended.put(rank)


def _next(ended: queue.SimpleQueue[_Rank], interrupts: Interrupts) -> _Rank | None:
    """Wait for the next rank to end; return None if the time limit of a stop has passed.

    Wakes twice a second: a signal just before a wait is handled only after it, and a file may have appeared.
    """
    while True:
        with contextlib.suppress(queue.Empty):
            return ended.get(timeout=LOOK_SECONDS)
        if interrupts.out_of_time():
            return None


def _out_of_time(kept: str) -> Failure:
    """Return the report of ranks that did not save in time; earlier checkpoints are unchanged."""
    reached = last_note(kept) or Reached(0)
    where = "where it began" if reached.path is None else f"{reached.path}, saved after step {reached.saved:,}"
    message = f"The ranks did not save in the time of --grace and were ended. The same command resumes from {where}."
    stopped = {"stopped": True, "step": reached.saved, "checkpoint": reached.path}
    return Failure(0, "RunStopped", message, None, STOPPED_EXIT_CODE, time.time(), stopped)


def _cause(first: _Rank, ranks: Sequence[_Rank]) -> Failure:
    """End all ranks and return the failure that caused the others; ``first`` is the rank seen ending first."""
    say_ending(first.failure_path)
    by_us = _stop(ranks)
    # Killed ranks write nothing; the others may write that they lost the connection to one.
    killed = [rank for rank in ranks if rank.code < 0 and (rank is first or rank.number not in by_us)]
    written = [failure for rank in ranks if (failure := Failure.read(rank.failure_path)) is not None]
    # A rank that aborts often does so because another one failed, whose report has the cause.
    causes = [rank for rank in killed if rank.code != -signal.SIGABRT] if written else killed
    if causes:
        return _unreported(causes[0].number, causes[0].code)
    if written:
        return min(written, key=lambda failure: (failure.stopped is not None, failure.time_s))
    return _unreported(first.number, first.code)


def _unreported(rank: int | None, code: int) -> Failure:
    """Return the failure of a rank, or of the process to be forked (None), that did not report one itself."""
    who = "the process that imports for all ranks" if rank is None else f"rank {rank}"
    if code >= 0:
        # It failed before it could write, during imports; Python has printed the reason.
        message = f"{who} ended with exit code {code} before it could report why; see its output above."
        return Failure(rank, "ProcessGroupError", message, None, code or 1, time.time(), transient=False)
    known = -code in {one.value for one in signal.Signals}
    name = signal.Signals(-code).name if known else "real-time"
    message = f"{who} was killed by signal {-code} ({name})."
    if -code == signal.SIGKILL:
        message += " The kernel does that when memory runs out: use more ranks, a smaller batch or a smaller model."
    return Failure(rank, "ProcessGroupError", message, None, 128 - code, time.time())


def _stop(ranks: Sequence[_Rank]) -> set[int]:
    """End every running rank: SIGTERM twice, then SIGKILL for those that take too long.

    Returns:
        Numbers of the ranks that these signals ended.
    """
    running = list(ranks)
    for seconds in (min(AGAIN_SECONDS, STOP_SECONDS), max(0.0, STOP_SECONDS - AGAIN_SECONDS)):
        for rank in running:
            rank.terminate()
            rank.process.send_signal(signal.SIGCONT)  # a stopped process would not react
        deadline = time.monotonic() + seconds
        running = [rank for rank in running if not _ends_by(rank, deadline)]
    for rank in running:
        rank.kill()
        rank.process.wait()
    terminated = {rank.number for rank in ranks if rank.code in (-signal.SIGTERM, INTERRUPTED_EXIT_CODE)}
    return terminated | {rank.number for rank in running}


def _ends_by(rank: _Rank, deadline: float) -> bool:
    """Wait for a rank until a time of the monotonic clock; return whether it has ended."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        rank.process.wait(max(0.0, deadline - time.monotonic()))
    return rank.process.returncode is not None


def rank_command(module: str, arguments: Sequence[str]) -> list[str]:
    """Return the command that runs a module of this installation, with a function ``main(arguments)``, as a rank."""
    return [sys.executable, "-m", module, *arguments]


def end_with_launcher() -> None:
    """Make Linux end this rank when the launcher dies, even by SIGKILL. A rank calls this first."""
    if sys.platform == "linux" and _LAUNCHER_VARIABLE in os.environ:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        # The launcher may have died while this rank was importing, which takes seconds; then no signal comes.
        if os.getppid() != int(os.environ[_LAUNCHER_VARIABLE]):
            os._exit(INTERRUPTED_EXIT_CODE)
