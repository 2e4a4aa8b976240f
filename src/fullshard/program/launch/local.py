"""The launcher of ``fullshard train``: N ranks as processes of this machine, with torchrun's environment variables.

The launcher starts every rank, waits until one fails or all have ended, and leaves no process running
(:mod:`fullshard.program.launch.ranks`). After a failure that may pass it restarts the ranks if allowed (``attempts``).
It does so without torch's elastic agent, whose import takes as long as the ranks' own, and with forks of one process
that has imported what they need (:mod:`fullshard.program.launch.processes`).

A request to stop is passed to the ranks as SIGTERM. They save a checkpoint and exit with ``STOPPED_EXIT_CODE``; ranks
outside of training just end. This may take as long as their step and the disk need, or the grace time.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
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
from fullshard.program.launch.processes import (
    INTERRUPTED_EXIT_CODE,
    LAUNCHER_VARIABLE,
    ForkServer,
    ForkServerError,
    Interpreters,
    Starter,
)
from fullshard.program.launch.ranks import STOPPED_EXIT_CODE, Ranks, StopAsked, listening, silent_failure
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
        ProcessGroupError: There are GPUs, but fewer than ranks; no rank was started.
    """
    if 0 < (gpus := gpu_count()) < nproc:  # fullshard.init() refuses it too, but tokenizing comes before it
        raise ProcessGroupError(
            f"Two ranks cannot share a GPU: {nproc} ranks were asked for (nproc), and this machine has {gpus} GPUs. "
            'Set nproc to at most that, or compute on the CPU (CUDA_VISIBLE_DEVICES="").'
        )
    with (
        scratch_directory() as scratch,
        tempfile.TemporaryDirectory(prefix="fullshard-") as failure_files,
        contextlib.closing(_starter(command, nproc, scratch)) as starter,
    ):
        ranks = Ranks(starter, Path(failure_files))

        def look() -> None:
            if notice.file is not None and notice.file.exists():
                say(f"{notice.file} is there: the run stops")
                ranks.hear(signal.SIGUSR1)

        with listening(ranks):
            try:
                return _run(ranks, nproc, Restarts(max_restarts, scratch), max_restarts, str(scratch), look)
            except StopAsked:
                return _stopped(ranks, str(scratch), notice.grace_s, saves=saves)
            finally:
                ranks.asked = True  # a request that comes now is too late
                ranks.stop()


def _run(
    ranks: Ranks, nproc: int, restarts: Restarts, most: int, scratch: str, look: Callable[[], None]
) -> Failure | None:
    """Start the ranks, again after each failure that may pass, until they succeed or are not started again."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]  # free now
        common = {
            ATTEMPT_VARIABLE: str(restarts.done),
            RESTARTS_VARIABLE: str(most - restarts.done),
            "WORLD_SIZE": str(nproc),
            "LOCAL_WORLD_SIZE": str(nproc),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        failure = _attempt(ranks, common, nproc, scratch, look)
        then = None if failure is None else restarts.after(failure)
        if then is None or isinstance(then, Failure):
            return then
        deadline = time.monotonic() + then
        while (left := deadline - time.monotonic()) > 0:
            look()
            time.sleep(min(0.1, left))


def _attempt(
    ranks: Ranks, common: Mapping[str, str], nproc: int, scratch: str, look: Callable[[], None]
) -> Failure | None:
    """Start the ranks and wait until one has failed or all have ended."""
    mark_started(scratch)
    try:
        ranks.start([{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(nproc)], look)
    except ForkServerError as error:
        look()
        mark_lost(scratch)
        return silent_failure(None, error.args[0], time.time(), reports=True)
    ranks.wait_for_end(look)
    if ranks.any_failed():
        mark_lost(scratch)
    return _result(ranks, ranks.codes)


def _result(ranks: Ranks, codes: Sequence[int]) -> Failure | None:
    """End the ranks and return why they ended; ``codes`` are those of the ranks that ended by themselves."""
    ranks.stop()
    if UNREAD_EXIT_CODE in codes:
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


def _starter(command: Sequence[str], nproc: int, scratch: Path) -> Starter:
    """Return how to start ranks: as forks on Linux, unless there may be a GPU.

    A fork of a process that has initialised a GPU cannot use it, and it is unverified that no import does so.
    """
    environment = {
        # glibc asks for huge pages: until its first step was done a rank took 24,500 page faults in place of 176,000,
        # and a recovery 0.3 s less. Later steps take as long as before.
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        **os.environ,
        **default_variables(nproc),
        SCRATCH_VARIABLE: str(scratch),
        LAUNCHER_VARIABLE: str(os.getpid()),
    }
    if command[1] == "-m" and sys.platform == "linux" and not _has_gpu_driver():
        return ForkServer(command, environment)
    return Interpreters(command, environment)


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
