"""Our own launcher: N ranks as processes of this machine, with torchrun's environment variables.

The launcher starts every rank, waits for the first that fails or for all to succeed, and never leaves one behind. A
rank that fails writes why to a file (:mod:`fullshard.launch.failure`); the launcher shows the first failure only, since
the others are what it did to them.
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from fullshard.errors import ConfigError
from fullshard.launch.failure import FAILURE_FILE_VARIABLE, Failure

STOP_SECONDS = 10.0
"""How long ranks that are told to stop may take before they are killed."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

INTERRUPTED_EXIT_CODE = 130
"""What shells use for a command ended by Ctrl-C: 128 + SIGINT."""


@dataclass(frozen=True)
class _Rank:
    """A started rank and where it would write its failure."""

    number: int
    process: subprocess.Popen[bytes]
    failure_path: Path


def launched_elsewhere() -> bool:
    """Whether torchrun (or another launcher with its variables) started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def choose_nproc(requested: int | None) -> int:
    """How many ranks to start on this machine.

    Args:
        requested: The number the user gave; None: one for each GPU, or 2 on the CPU.

    Returns:
        At least 1.

    Raises:
        ConfigError: More ranks than GPUs, on a machine that has GPUs.
    """
    gpus = torch.cuda.device_count()
    if requested is None:
        return gpus or 2
    if 0 < gpus < requested:
        raise ConfigError(
            f"nproc is {requested} and this machine shows {gpus} GPU{'s' if gpus > 1 else ''}: each rank needs its "
            f"own. Use nproc={gpus}, or run on the CPU by putting CUDA_VISIBLE_DEVICES= in front of the command."
        )
    return requested


def launch(command: Sequence[str], *, nproc: int) -> Failure | None:
    """Run a command as ``nproc`` ranks and wait for them; called once, in the launching process's main thread.

    The ranks inherit standard output and error. Ctrl-C and SIGTERM end them all.

    Args:
        command: Program and arguments, the same for every rank. It must write its failure as
            :mod:`fullshard.launch.failure` says.
        nproc: Number of ranks, at least 1.

    Returns:
        None when every rank ended with exit code 0, else the failure that came first.

    Raises:
        KeyboardInterrupt: Ctrl-C or SIGTERM; all ranks have ended.
    """
    ended: queue.SimpleQueue[_Rank] = queue.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="fullshard-") as scratch, _sigterm_as_interrupt():
        ranks: list[_Rank] = []
        port = _free_port()
        try:
            for number in range(nproc):
                rank = _start(command, number, nproc, port, Path(scratch, f"rank{number}.json"))
                ranks.append(rank)
                threading.Thread(target=_watch, args=(rank, ended), daemon=True).start()
            for _ in ranks:
                first = ended.get()
                if first.process.returncode != 0:
                    return _cause(first, ranks)
        finally:
            _stop(ranks)
    return None


def _start(command: Sequence[str], number: int, nproc: int, port: int, failure_path: Path) -> _Rank:
    """Start one rank in a process group of its own, so that the terminal's Ctrl-C reaches the launcher alone."""
    environment = os.environ | {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        FAILURE_FILE_VARIABLE: str(failure_path),
    }
    # Ranks that each start a thread for every core slow each other down many times over.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // nproc)))
    # The profiler that measures memory on the CPU talks on standard error otherwise; 6 is above all its levels.
    environment.setdefault("KINETO_LOG_LEVEL", "6")
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    process = subprocess.Popen(list(command), env=environment, stdin=subprocess.DEVNULL, process_group=0)
    return _Rank(number, process, failure_path)


def _watch(rank: _Rank, ended: queue.SimpleQueue[_Rank]) -> None:
    """Report the end of a rank; a thread of its own for each."""
    rank.process.wait()
    ended.put(rank)


def _cause(first: _Rank, ranks: Sequence[_Rank]) -> Failure:
    """End all ranks and find the failure that made the others fail; ``first`` is the one whose end was seen first."""
    by_us = _stop(ranks)
    # Killed ranks write nothing; what the others may write is that one was gone.
    killed = [rank for rank in ranks if rank.process.returncode < 0 and (rank is first or rank.number not in by_us)]
    if killed:
        return _killed_failure(killed[0])
    written = [failure for rank in ranks if (failure := Failure.read(rank.failure_path)) is not None]
    if written:
        return min(written, key=lambda failure: failure.time_s)
    # It failed before it could write, while importing; then Python has printed why.
    code = first.process.returncode
    message = f"rank {first.number} ended with exit code {code} before it could say why; see its output above."
    return Failure(first.number, "ProcessGroupError", message, None, code, time.time())


def _killed_failure(rank: _Rank) -> Failure:
    number = -rank.process.returncode
    message = f"rank {rank.number} was ended by signal {number} ({signal.Signals(number).name})."
    if number == signal.SIGKILL:
        message += " The kernel does that when memory runs out: use more ranks, a smaller batch or a smaller model."
    return Failure(rank.number, "ProcessGroupError", message, None, 128 + number, time.time())


def _stop(ranks: Sequence[_Rank]) -> set[int]:
    """End every rank that still runs: SIGTERM, then SIGKILL for those that take too long.

    Returns:
        Numbers of the ranks that these signals ended.
    """
    for rank in ranks:
        rank.process.terminate()
    by_us = set()
    deadline = time.monotonic() + STOP_SECONDS
    for rank in ranks:
        try:
            code = rank.process.wait(max(0.0, deadline - time.monotonic()))
            if code == -signal.SIGTERM:
                by_us.add(rank.number)
        except subprocess.TimeoutExpired:
            rank.process.kill()
            rank.process.wait()
            by_us.add(rank.number)
    return by_us


@contextlib.contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """While ranks run, SIGTERM to the launcher (timeout, Slurm, a service manager) ends them as Ctrl-C does."""

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def rank_command(module: str, arguments: Sequence[str]) -> list[str]:
    """The command that runs a module of this installation as a rank."""
    return [sys.executable, "-m", module, *arguments]


def end_with_launcher() -> None:
    """Have Linux end this rank when the launcher dies, however it dies: nobody else would. Called by a rank, first."""
    if sys.platform == "linux" and FAILURE_FILE_VARIABLE in os.environ:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
