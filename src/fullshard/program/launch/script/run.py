"""Runs a user's script as ranks on this machine, alone or together with other machines."""

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

from fullshard.program.launch.attempts import scratch_directory
from fullshard.program.launch.failure import Failure, brief, in_words
from fullshard.program.launch.local import default_variables
from fullshard.program.launch.output import Output, Stream, terminal_columns
from fullshard.program.launch.processes import LAUNCHER_VARIABLE, Interpreters
from fullshard.program.launch.ranks import Ranks, listening
from fullshard.program.launch.script.agent import Agent
from fullshard.program.launch.script.machines import MachinePlan
from fullshard.program.launch.script.rendezvous import interface_to
from fullshard.variables import RESTARTS_VARIABLE, SCRATCH_VARIABLE

CHILD = Path(__file__).with_name("child.py")

_NAMED = 3
"""Number of ranks that failed after the first and are reported by name."""

_LEVEL_ERROR = 2


@dataclass(frozen=True)
class Job:
    """A script and how to run it."""

    arguments: Sequence[str]  # ``script`` or ``module``, its path or name, and its arguments
    plan: MachinePlan  # the machines
    environment: Mapping[str, str] = field(default_factory=dict)  # variables of every rank, overriding this process's
    max_restarts: int = 0  # how many times to restart all ranks after one has failed
    timeout_s: float = 600.0  # seconds to wait for all machines
    as_json: bool = False  # write the ranks' standard output to standard error


@dataclass(frozen=True)
class Outcome:
    """How a script ended on this machine."""

    ranks: Sequence[int]  # the ranks of this machine
    exit_code: int  # exit code of the command
    duration_s: float  # seconds from start to end
    failure: Failure | None = None  # the failure that ended it, or None
    machine: str | None = None  # the machine of the failure, if it is another one
    signal: str | None = None  # the signal that ended it, or None

    def as_dict(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints."""
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
    """Run a script as this machine's ranks; called once, in the main thread of its own process.

    The ranks' output is printed line by line; the first failure is printed once, at the end.

    Raises:
        ProcessGroupError: Not all machines arrived in time.
    """
    _silence_torch()
    started = time.monotonic()
    standard: Mapping[Stream, Any] = {
        "stdout": sys.stderr.buffer if job.as_json else sys.stdout.buffer,
        "stderr": sys.stderr.buffer,
    }
    output = Output(standard, columns=terminal_columns(sys.stderr.buffer))
    environment = _defaults(job.plan) | dict(job.environment)
    with tempfile.TemporaryDirectory(prefix="fullshard-") as failure_files, scratch_directory() as scratch:
        environment |= {SCRATCH_VARIABLE: str(scratch), RESTARTS_VARIABLE: str(job.max_restarts)}
        environment = {**os.environ, **environment, LAUNCHER_VARIABLE: str(os.getpid())}
        command = [sys.executable, str(CHILD), *job.arguments]
        ranks = Ranks(Interpreters(command, environment, piped=True), Path(failure_files), output)
        agent = Agent(job.plan, ranks, output, scratch, max_restarts=job.max_restarts, timeout_s=job.timeout_s)
        with listening(ranks):
            agent.run()
        failures = ranks.failures()
    outcome = _outcome(agent, ranks.numbers, failures, time.monotonic() - started)
    _print_outcome(outcome, failures, output)
    return outcome


def _silence_torch() -> None:
    """Silence the logs of torch's agent and store, whose errors are reported here instead."""
    logger = logging.getLogger("torch.distributed.elastic")
    logger.addHandler(logging.NullHandler())  # without a handler Python prints warnings
    logger.propagate = False
    if "TORCH_CPP_LOG_LEVEL" not in os.environ:
        # torch has read the variable on import; if this symbol does not exist, warnings just stay visible.
        with contextlib.suppress(OSError, ValueError):
            library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
            ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level").value = _LEVEL_ERROR


def _defaults(plan: MachinePlan) -> dict[str, str]:
    """Return default variables of the ranks, without those that the user has set."""
    defaults = default_variables(plan.nproc)
    interface = interface_to(plan.host, plan.port) if plan.several else None
    if interface is not None and "GLOO_SOCKET_IFNAME" not in os.environ:
        defaults["GLOO_SOCKET_IFNAME"] = interface
    return defaults


def _outcome(agent: Agent, ranks: Sequence[int], failures: Sequence[Failure], duration_s: float) -> Outcome:
    failure = failures[0] if failures else None
    if agent.signal is not None:
        saved = failure if failure is not None and failure.stopped is not None else None
        code = 128 + agent.signal if saved is None else saved.exit_code
        return Outcome(ranks, code, duration_s, saved, signal=agent.signal.name)
    machine = None
    if agent.failed is not None:
        failure = agent.failed.failure
        machine = None if failure.rank in ranks else agent.failed.machine
    return Outcome(ranks, 0 if failure is None else failure.exit_code, duration_s, failure, machine)


def _print_outcome(outcome: Outcome, failures: Sequence[Failure], output: Output) -> None:
    """Print why the run ended; the cause comes last, where a terminal shows it."""
    if outcome.signal is not None:
        for failed in filter(_is_exit_message, failures):
            _print_as_rank(failed, output)
        output.say(f"fullshard: stopped by {outcome.signal}; nothing is left running.")
    failure = outcome.failure
    if failure is None:
        return
    same = (failure.kind, failure.message) if _is_exit_message(failure) else None
    others = [other for other in failures if other.rank != failure.rank and (other.kind, other.message) != same]
    others = [other for other in others if other.stopped is None]
    for other in others[:_NAMED]:
        output.say(f"fullshard: then {brief(other)}")
    if len(others) > _NAMED:
        output.say(f"fullshard: then {len(others) - _NAMED} more ranks failed")
    if outcome.machine is not None and failure.rank is not None:
        output.say(f"fullshard: ended by {outcome.machine}, where rank {failure.rank} runs; its output is there")
    if _is_exit_message(failure):
        _print_as_rank(failure, output)
    else:
        output.say(failure.text() if failure.trace is not None else f"fullshard: {in_words(failure)}")


def _is_exit_message(failure: Failure) -> bool:
    """Return whether the script ended with ``sys.exit("reason")``, which Python prints without a traceback."""
    return failure.kind == SystemExit.__name__ and not failure.message.startswith(f"rank {failure.rank} ended with ")


def _print_as_rank(failure: Failure, output: Output) -> None:
    output.feed(failure.rank or 0, "stderr", f"{failure.message}\n".encode(errors="replace"))
