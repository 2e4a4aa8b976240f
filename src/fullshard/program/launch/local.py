"""The launcher of one machine: N ranks as processes, with torchrun's environment variables.

The launcher starts every rank, waits until one fails or all have ended, and leaves no process running
(:mod:`fullshard.program.launch.ranks`). After a failure that may pass it restarts the ranks if allowed (``attempts``).
It does so without torch, whose import takes as long as the ranks' own.

A request to stop is passed to the ranks as SIGTERM. They save a checkpoint and exit with ``STOPPED_EXIT_CODE``; ranks
outside of training just end. This may take as long as their step and the disk need, or the grace time.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from fullshard.errors import ProcessGroupError
from fullshard.program.launch.attempts import (
    Reached,
    Restarts,
    in_memory,
    last_note,
    mark_lost,
    mark_started,
    scratch_directory,
)
from fullshard.program.launch.failure import Failure
from fullshard.program.launch.messages import say
from fullshard.program.launch.processes import INTERRUPTED_EXIT_CODE, LAUNCHER_VARIABLE, Interpreters
from fullshard.program.launch.ranks import STOPPED_EXIT_CODE, Ranks, StopAsked, listening
from fullshard.program.launch.streams import UnreadOutputError
from fullshard.variables import ATTEMPT_VARIABLE, RESTARTS_VARIABLE, SCRATCH_VARIABLE

_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd", "/dev/nvhost-gpu")
"""Device files of GPU drivers: Nvidia's, that of Windows' Linux, AMD's, Nvidia's for embedded boards."""

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Settings of torch's allocator; torch reads the first name, and the older ones if it is missing."""

UNREAD_EXIT_CODE = 141
"""Exit code in shells of a command whose output nothing reads any more, as after ``| head``: 128 + SIGPIPE."""


@dataclass(frozen=True)
class Notice:
    """Further ways to request a stop, and the time limit after a request."""

    file: Path | None = None  # the run stops when it appears
    grace_s: float | None = None  # ranks that run longer after the first request are killed; None: never


NO_NOTICE = Notice()


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
    """Choose the number of ranks to start on this machine: as requested; None: one per GPU, or 2 on the CPU."""
    return requested or gpu_count() or 2


def launch(
    command: Sequence[str], *, nproc: int, saves: bool = True, max_restarts: int = 0, notice: Notice = NO_NOTICE
) -> Failure | None:
    """Run a command as ``nproc`` ranks and wait for them; called once, in the launching process's main thread.

    The ranks inherit standard output and error.

    Args:
        command: Program and arguments, the same for every rank. It must write its failure to the file of
            :mod:`fullshard.program.launch.failure`.
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
        ProcessGroupError: There are GPUs, but fewer than ranks; no rank was started.
    """
    if 0 < (gpus := gpu_count()) < nproc:  # fullshard.init() refuses it too, but tokenizing comes before it
        raise ProcessGroupError(
            f"Two ranks cannot share a GPU: {nproc} ranks were asked for (nproc), and this machine has {gpus} GPUs. "
            'Set nproc to at most that, or compute on the CPU (CUDA_VISIBLE_DEVICES="").'
        )
    with scratch_directory() as scratch, tempfile.TemporaryDirectory(prefix="fullshard-") as failure_files:
        ranks = Ranks(Interpreters(command, _environment(nproc, scratch)), Path(failure_files))

        def look() -> None:
            if notice.file is not None and notice.file.exists():
                say(f"{notice.file} is there: the run stops")
                ranks.hear(signal.SIGUSR1)

        with listening(ranks):
            try:
                return run_attempts(ranks, nproc, Restarts(max_restarts, scratch), look=look)
            except StopAsked:
                return _stopped(ranks, str(scratch), notice.grace_s, saves=saves)
            finally:
                ranks.asked = True  # a request that comes now is too late
                ranks.stop()


def run_attempts(
    ranks: Ranks,
    nproc: int,
    restarts: Restarts,
    *,
    address: str = "127.0.0.1",
    port: int = 0,
    look: Callable[[], None] = lambda: None,
) -> Failure | None:
    """Start the ranks, again after each failure that may pass, until they succeed or are not started again.

    Args:
        ranks: The ranks.
        nproc: Their number.
        restarts: Decides about further starts.
        address: Where rank 0 listens, on this machine.
        port: The port there; 0: a free one for each attempt.
        look: Called twice a second while ranks run or are waited for; may raise.

    Returns:
        None on success, otherwise the failure to report.

    Raises:
        StopAsked: The run was asked to stop.
        UnreadOutputError: See :func:`launch`.
    """
    while True:
        common = {
            ATTEMPT_VARIABLE: restarts.done,
            RESTARTS_VARIABLE: restarts.most - restarts.done,
            "WORLD_SIZE": nproc,
            "LOCAL_WORLD_SIZE": nproc,
            "GROUP_RANK": 0,
            "GROUP_WORLD_SIZE": 1,
            "ROLE_NAME": "default",
            "ROLE_WORLD_SIZE": nproc,
            "MASTER_ADDR": address,
            "MASTER_PORT": port or _free_port(),
            "TORCHELASTIC_RESTART_COUNT": restarts.done,
            "TORCHELASTIC_MAX_RESTARTS": restarts.most,
            "TORCHELASTIC_RUN_ID": "none",
        }
        own = [dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), rank) for rank in range(nproc)]
        mark_started(restarts.directory)
        ranks.start([{name: str(value) for name, value in {**common, **numbers}.items()} for numbers in own])
        ranks.wait_for_end(look)
        if ranks.any_failed():
            mark_lost(restarts.directory)
        failure = _result(ranks, ranks.codes)
        then = None if failure is None else restarts.after(failure)
        if then is None or isinstance(then, Failure):
            return then
        deadline = time.monotonic() + then
        while (left := deadline - time.monotonic()) > 0:
            look()
            time.sleep(min(0.1, left))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def _result(ranks: Ranks, codes: Sequence[int]) -> Failure | None:
    """End the ranks and return why they ended; ``codes`` are those of the ranks that ended by themselves."""
    ranks.stop()
    if ranks.reports and UNREAD_EXIT_CODE in codes:
        raise UnreadOutputError
    return next(iter(ranks.failures()), None)


def _stopped(ranks: Ranks, scratch: str, grace_s: float | None, *, saves: bool) -> Failure | None:
    """Let the ranks save, and return how the run ended.

    Raises:
        KeyboardInterrupt: The ranks were not training, or there was a second request.
    """
    if ranks.running and ranks.ending:  # one had failed before
        return _result(ranks, [])
    began = ranks.running and bool(ranks.numbers)
    in_time = ranks.ask(signal.SIGTERM, grace_s=math.inf if grace_s is None else grace_s)
    codes = ranks.codes
    reached = last_note(scratch) or Reached(0)
    if ranks.insisted:
        raise KeyboardInterrupt
    if not in_time:
        where = "where it began" if reached.path is None else f"{reached.path}, saved after step {reached.saved:,}"
        text = f"The ranks did not save in the time of --grace and were ended. The same command resumes from {where}."
        stopped = {"stopped": True, "step": reached.saved, "checkpoint": reached.path}
        return Failure(0, "RunStopped", text, None, STOPPED_EXIT_CODE, time.time(), stopped)
    # Without ranks, or if one was not training yet, or not any more.
    if not began or {-signal.SIGTERM, -signal.SIGUSR1, INTERRUPTED_EXIT_CODE} & set(codes):
        if saves:
            step = in_memory(scratch)
            lost = f"; step {step:,} was in memory only and is lost" if step > reached.saved else ""
            say(f"no step was being trained, so this stop saved no checkpoint and deleted none{lost}")
        raise KeyboardInterrupt
    return _result(ranks, codes)


def _environment(nproc: int, scratch: Path) -> dict[str, str]:
    """Return the variables of fullshard's programs, without those of one rank."""
    return {
        # glibc asks for huge pages: until its first step was done a rank took 24,500 page faults in place of 176,000,
        # and a recovery 0.3 s less. Later steps take as long as before.
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        **os.environ,
        **default_variables(nproc),
        SCRATCH_VARIABLE: str(scratch),
        LAUNCHER_VARIABLE: str(os.getpid()),
    }


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


def rank_command(module: str, arguments: Sequence[str]) -> list[str]:
    """Return the command that runs a module of this installation, with a function ``main(arguments)``, as a rank."""
    return [sys.executable, "-m", module, *arguments]
