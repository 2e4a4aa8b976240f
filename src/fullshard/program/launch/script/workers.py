"""The processes of a script's ranks on this machine: start, output, end and failures."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from fullshard.program.launch.failure import FAILURE_FILE_VARIABLE, Failure, saving_path, say_ending
from fullshard.program.launch.script.child import LAUNCHER_VARIABLE
from fullshard.program.launch.script.output import Output, Stream

CHILD = Path(__file__).with_name("child.py")

STOP_SECONDS = 10.0
"""Time that ranks have to exit after a signal, before they are killed; those that save have longer."""

_DRAIN_SECONDS = 2.0
"""Time to wait for more output of a rank that has ended: a process that it left may keep the pipe open."""

_LOOK_SECONDS = 0.02

_SILENT_DEATH_SECONDS = 0.1
"""Delay before noticing a rank that died without a report, so that the failures it caused are not taken as first."""

_HINTS = {
    signal.SIGKILL: (
        "The kernel does this when memory runs out (see dmesg): use more ranks, a smaller batch or a smaller model."
    ),
    signal.SIGSEGV: "Native code crashed: an extension in C++ or CUDA. Its Python stack is in the output above.",
    signal.SIGBUS: "Often a full /dev/shm: use fewer DataLoader workers, or give the container more shared memory.",
    signal.SIGABRT: "Native code called abort(); its message is in the output above.",
    signal.SIGTERM: "A process outside this run sent the signal.",
}

_CRASHES = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
"""Signals that are not a consequence of another rank's failure."""


@dataclass
class _Worker:
    """A started rank."""

    rank: int
    process: subprocess.Popen[bytes]
    failure_path: Path
    returncode: int | None = None
    ended_s: float = 0.0
    signalled: bool = False
    threads: list[threading.Thread] = field(default_factory=list)
    forwarding: set[Stream] = field(default_factory=set)

    def drain(self) -> None:
        """Wait until the rank's output is forwarded, however slowly it is read (``| less``)."""
        silent_s = 0.0
        while any(thread.is_alive() for thread in self.threads) and silent_s < _DRAIN_SECONDS:
            time.sleep(_LOOK_SECONDS)
            silent_s += 0.0 if self.forwarding else _LOOK_SECONDS

    def signal(self, number: int) -> None:
        """Send a signal to the rank and its children. It is not reaped yet, so its process id is still valid."""
        if self.returncode is None:
            self.signalled = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


class Workers:
    """The ranks of one machine. Use it in the main thread: Linux ends the ranks with the thread that starts them."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], output: Output, scratch: Path) -> None:
        """Prepare; the ranks start on entry.

        Args:
            arguments: ``script`` or ``module``, its path or name, and the script's arguments.
            environment: Variables of every rank, overriding this process's.
            output: Receives the ranks' output.
            scratch: Directory for the ranks' failure files.
        """
        self._command = [sys.executable, str(CHILD), *arguments]
        self._environment = environment
        self._output = output
        self._scratch = scratch
        self._workers: list[_Worker] = []
        self._starts = 0
        self._stopped = True
        self._starting = False
        self._held: BaseException | None = None

    @property
    def ranks(self) -> list[int]:
        """Numbers of the ranks of the last start."""
        return [worker.rank for worker in self._workers]

    def start(self, environments: Mapping[int, Mapping[str, str]]) -> dict[int, int]:
        """Start one rank per local rank with its variables; return the process ids.

        Raises:
            BaseException: The error given to :meth:`hold` meanwhile.
        """
        self._starts += 1
        self._workers = []
        self._stopped = False
        self._starting = True
        try:
            for local_rank, variables in environments.items():
                self._workers.append(self._start(int(variables["RANK"]), variables))
                assert len(self._workers) == local_rank + 1
        finally:
            self._starting = False
        held, self._held = self._held, None
        if held is not None:
            raise held
        return {local_rank: worker.process.pid for local_rank, worker in enumerate(self._workers)}

    def hold(self, error: BaseException) -> bool:
        """Defer ``error`` until all ranks have started; return True if they are being started.

        For a signal's handler: raised between a rank's start and its registration, the rank would not be stopped.
        """
        if self._starting:
            self._held = error
        return self._starting

    def _start(self, rank: int, variables: Mapping[str, str]) -> _Worker:
        failure_path = self._scratch / str(self._starts) / f"rank{rank}.json"
        failure_path.parent.mkdir(exist_ok=True)
        environment = {**os.environ, **self._environment, **variables}
        environment[FAILURE_FILE_VARIABLE] = str(failure_path)
        environment[LAUNCHER_VARIABLE] = str(os.getpid())
        process = subprocess.Popen(
            self._command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # the terminal's Ctrl-C reaches only the launcher
        )
        worker = _Worker(rank, process, failure_path)
        assert process.stdout is not None
        assert process.stderr is not None
        for target, arguments in (
            (self._read, (worker, "stdout", process.stdout)),
            (self._read, (worker, "stderr", process.stderr)),
            (_wait, (worker,)),
        ):
            worker.threads.append(threading.Thread(target=target, args=arguments, daemon=True))
            worker.threads[-1].start()
        return worker

    def _read(self, worker: _Worker, stream: Stream, pipe: BinaryIO) -> None:
        """Forward a rank's output until its pipe is closed; runs in one thread per stream."""
        with pipe:
            while data := os.read(pipe.fileno(), 1 << 16):
                worker.forwarding.add(stream)
                self._output.feed(worker.rank, stream, data)
                worker.forwarding.discard(stream)
        self._output.end(worker.rank, stream)

    def all_ended(self) -> bool:
        """Return whether all ranks have ended."""
        return all(worker.returncode is not None for worker in self._workers)

    def any_failed(self) -> bool:
        """Return whether a rank has failed; it may still be exiting."""
        return any(worker.returncode or worker.failure_path.exists() for worker in self._workers)

    def stop(self, number: int = signal.SIGTERM, seconds: float = STOP_SECONDS, *, saves: bool = False) -> None:
        """End every running rank with a signal, then SIGKILL; read their output to the end.

        A rank that has reported its failure is exiting and gets only the SIGKILL. If all ranks have succeeded, their
        background processes are left running.

        Args:
            number: The signal.
            seconds: Time until SIGKILL.
            saves: Whether ranks that save a checkpoint because of the signal may take as long as they need. Not after
                another rank has failed: they would wait for it.
        """
        if self._stopped:
            return
        if not self.all_ended() or self.any_failed():
            self._end(number, seconds, saves=saves)
        for worker in self._workers:
            worker.drain()
            worker.process.wait()
        self._stopped = True

    def _end(self, number: int, seconds: float, *, saves: bool) -> None:
        if not saves:
            say_ending(self._workers[0].failure_path)
        for worker in self._workers:
            if not worker.failure_path.exists():
                worker.signal(number)
        deadline = time.monotonic() + seconds
        while not self.all_ended() and (time.monotonic() < deadline or (saves and self._any_saving())):
            time.sleep(_LOOK_SECONDS)
        self.kill()

    def _any_saving(self) -> bool:
        """Return True if a running rank was asked to save and has not reported the end of it."""
        return any(
            worker.returncode is None and saving_path(worker.failure_path).exists() and not worker.failure_path.exists()
            for worker in self._workers
        )

    def kill(self) -> None:
        """Kill every rank, and every process in its process group."""
        for worker in self._workers:
            worker.signal(signal.SIGKILL)

    def failures(self) -> list[Failure]:
        """Return the ranks' failures, the cause first; without ranks that were only signalled to end."""
        return [failure for _, failure in sorted(self._causes(), key=lambda pair: pair[0])]

    def _causes(self) -> Iterator[tuple[tuple[bool, float, int], Failure]]:
        """Yield each failure with its sort key: crashes first, then by time."""
        for worker in self._workers:
            code = worker.returncode or 0
            written = Failure.read(worker.failure_path)
            if written is not None:
                yield (True, written.time_s, worker.rank), written
            elif code and not worker.signalled:
                failure = _silent_failure(worker.rank, code, worker.ended_s)
                yield (-code not in _CRASHES, failure.time_s, worker.rank), failure


def _wait(worker: _Worker) -> None:
    """Record when a rank ends; runs in one thread per rank."""
    end = os.waitid(os.P_PID, worker.process.pid, os.WEXITED | os.WNOWAIT)
    assert end is not None
    worker.ended_s = time.time()
    worker.returncode = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status


def _silent_failure(rank: int, code: int, ended_s: float) -> Failure:
    """Return the failure of a rank that did not report one: a signal, or an exit code."""
    if code > 0:
        message = f"rank {rank} ended with exit code {code}."
        return Failure(rank, "SystemExit", message, None, code, ended_s - _SILENT_DEATH_SECONDS)
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal
        name = "real-time"
    message = f"rank {rank} was killed by signal {-code} ({name})."
    hint = _HINTS.get(-code)  # type: ignore[call-overload]
    credit = 0.0 if -code == signal.SIGABRT else _SILENT_DEATH_SECONDS
    text = message if hint is None else f"{message} {hint}"
    return Failure(rank, "ProcessGroupError", text, None, 128 - code, ended_s - credit)
