"""Runs somebody's script as ranks of this machine, alone or together with other machines."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fullshard.launch.elastic import AgentEnd, run_agent
from fullshard.launch.failure import Failure
from fullshard.launch.machines import Plan
from fullshard.launch.network import interface_to
from fullshard.launch.output import Output, Stream, terminal_columns
from fullshard.launch.watch import brief, in_words
from fullshard.launch.workers import Workers

_MANY = 3
"""So many of the ranks that failed after the first are told by name."""


_LEVEL_VARIABLE = "TORCH_CPP_LOG_LEVEL"
_LEVEL_ERROR = 2


@dataclass(frozen=True)
class Job:
    """What is to run, and how.

    Attributes:
        arguments: ``script`` or ``module``, its path or name, and what it is given.
        plan: The machines.
        environment: Variables of every rank, over this process's.
        max_restarts: How often all ranks are started anew after one has failed.
        timeout_s: Seconds that the machines have to come together.
        as_json: Keep standard output free: what ranks write there goes to standard error.
    """

    arguments: Sequence[str]
    plan: Plan
    environment: Mapping[str, str] = field(default_factory=dict)
    max_restarts: int = 0
    timeout_s: float = 600.0
    as_json: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a script ended on this machine.

    Attributes:
        ranks: The ranks of this machine.
        exit_code: What the command ends with.
        duration_s: Seconds from start to end.
        failure: Why, if it did not end well.
        machine: Where that happened, if on another machine.
        signal: The signal that ended it, or None.
    """

    ranks: Sequence[int]
    exit_code: int
    duration_s: float
    failure: Failure | None = None
    machine: str | None = None
    signal: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        failure = None
        if self.failure is not None:
            failure = {"kind": self.failure.kind, "message": self.failure.message, "rank": self.failure.rank}
            failure |= {"machine": self.machine, "traceback": self.failure.trace}
        return {
            "ranks": list(self.ranks),
            "exit_code": self.exit_code,
            "duration_s": round(self.duration_s, 3),
            "signal": self.signal,
            "failure": failure,
        }


def run_script(job: Job) -> Outcome:
    """Run a script on this machine's ranks; called once, in the main thread of a process of its own.

    What ranks print comes out line by line; the failure that came first is told once, at the end.

    Args:
        job: What is to run.

    Raises:
        ProcessGroupError: The machines did not come together.
    """
    _silence_torch()
    started = time.monotonic()
    standard: Mapping[Stream, Any] = {
        "stdout": sys.stderr.buffer if job.as_json else sys.stdout.buffer,
        "stderr": sys.stderr.buffer,
    }
    output = Output(standard, columns=terminal_columns(sys.stderr.buffer))
    environment = _defaults(job.plan) | dict(job.environment)
    with tempfile.TemporaryDirectory(prefix="fullshard-") as scratch:
        workers = Workers(job.arguments, environment, output, Path(scratch))
        try:
            end = run_agent(job.plan, workers, output, max_restarts=job.max_restarts, timeout_s=job.timeout_s)
            failures = workers.failures()
        finally:
            workers.stop(seconds=0.0)
    outcome = _outcome(end, failures, time.monotonic() - started)
    _tell(outcome, failures, output)
    return outcome


def _silence_torch() -> None:
    """What the agent and its store log is said here in other words; without a handler Python prints it."""
    logger = logging.getLogger("torch.distributed.elastic")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    if _LEVEL_VARIABLE not in os.environ:
        # torch has read the variable when it was imported; where this name is gone, warnings are only not silenced.
        with contextlib.suppress(OSError, ValueError):
            library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
            ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level").value = _LEVEL_ERROR


def _defaults(plan: Plan) -> dict[str, str]:
    """Variables of ranks that the user has not set."""
    defaults = {
        # Ranks that each start a thread for every core slow each other down many times over.
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // plan.nproc)),
        # The profiler that measures memory on the CPU talks on standard error otherwise; 6 is above all its levels.
        "KINETO_LOG_LEVEL": "6",
        _LEVEL_VARIABLE: "ERROR",
    }
    interface = interface_to(plan.host, plan.port) if plan.several else None
    if interface is not None:
        defaults["GLOO_SOCKET_IFNAME"] = interface
    return {name: value for name, value in defaults.items() if name not in os.environ}


def _outcome(end: AgentEnd, failures: Sequence[Failure], duration_s: float) -> Outcome:
    if end.signal is not None:
        return Outcome(end.ranks, 128 + end.signal, duration_s, signal=end.signal.name)
    failure = failures[0] if failures else None
    machine = None
    if end.verdict is not None:
        failure = end.verdict.failure
        machine = None if failure.rank in end.ranks else end.verdict.machine
    return Outcome(end.ranks, 0 if failure is None else failure.exit_code, duration_s, failure, machine)


def _tell(outcome: Outcome, failures: Sequence[Failure], output: Output) -> None:
    """Say why it ended, the cause last: a terminal shows the end."""
    if outcome.signal is not None:
        for told in filter(_is_own_word, failures):
            _say_as_rank(told, output)
        output.say(f"fullshard: stopped by {outcome.signal}; nothing is left running.")
    failure = outcome.failure
    if failure is None:
        return
    same = (failure.kind, failure.message) if _is_own_word(failure) else None
    others = [other for other in failures if other.rank != failure.rank and (other.kind, other.message) != same]
    for other in others[:_MANY]:
        output.say(f"fullshard: then {brief(other)}")
    if len(others) > _MANY:
        output.say(f"fullshard: then {len(others) - _MANY} more ranks failed")
    if outcome.machine is not None and failure.rank is not None:
        output.say(f"fullshard: ended by {outcome.machine}, where rank {failure.rank} runs; its output is there")
    if _is_own_word(failure):
        _say_as_rank(failure, output)
    else:
        output.say(failure.text() if failure.trace is not None else f"fullshard: {in_words(failure)}")


def _is_own_word(failure: Failure) -> bool:
    """Whether the script ended with words of its own, ``sys.exit("why")``, which Python shows without a traceback."""
    return failure.kind == SystemExit.__name__ and not failure.message.startswith(f"rank {failure.rank} ended with ")


def _say_as_rank(failure: Failure, output: Output) -> None:
    output.feed(failure.rank or 0, "stderr", f"{failure.message}\n".encode(errors="replace"))
