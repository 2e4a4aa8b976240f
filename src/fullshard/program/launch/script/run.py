"""Runs a user's script as ranks on this machine, alone or together with other machines."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from fullshard.program.launch.attempts import Restarts, scratch_directory
from fullshard.program.launch.local import default_variables, run_attempts
from fullshard.program.launch.output import Output, Stream, terminal_columns
from fullshard.program.launch.processes import LAUNCHER_VARIABLE, Interpreters
from fullshard.program.launch.ranks import Ranks, StopAsked, heard_signals, listening
from fullshard.program.launch.script.machines import MachinePlan
from fullshard.program.launch.script.network import interface_to
from fullshard.program.launch.script.outcome import Ended, Outcome, outcome_of, print_outcome
from fullshard.variables import RESTARTS_VARIABLE, SCRATCH_VARIABLE

CHILD = Path(__file__).with_name("child.py")

_ELASTIC = "fullshard.program.launch.script.elastic"

_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"

_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Variable by which torch's c10d rendezvous gives the ranks of each start a store of their own."""


@dataclass(frozen=True)
class Job:
    """A script and how to run it."""

    arguments: Sequence[str]  # ``script`` or ``module``, its path or name, and its arguments
    plan: MachinePlan  # the machines
    environment: Mapping[str, str] = field(default_factory=dict)  # variables of every rank, overriding this process's
    max_restarts: int = 0  # how many times to restart all ranks after one has failed
    timeout_s: float = 600.0  # seconds to wait for all machines
    as_json: bool = False  # write the ranks' standard output to standard error


def run_script(job: Job) -> Outcome:
    """Run a script as this machine's ranks; called once, in the main thread of its own process.

    The first failure is printed once, at the end. On one machine the ranks' output is printed line by line; on several
    the ranks inherit this process's.

    Raises:
        ProcessGroupError: Not all machines arrived in time.
    """
    started = time.monotonic()
    standard: Mapping[Stream, Any] = {
        "stdout": sys.stderr.buffer if job.as_json else sys.stdout.buffer,
        "stderr": sys.stderr.buffer,
    }
    output = Output(standard, columns=terminal_columns(sys.stderr.buffer))
    with (
        _handlers_restored(),  # by then files are removed, which a signal would cut short
        tempfile.TemporaryDirectory(prefix="fullshard-") as directory,
        scratch_directory() as scratch,
    ):
        environment = {
            **default_variables(job.plan.nproc),
            **job.environment,
            SCRATCH_VARIABLE: str(scratch),
            LAUNCHER_VARIABLE: str(os.getpid()),
        }
        if job.plan.several:
            ended = _on_machines(job, environment, Path(directory))
        else:
            ended = _here(job, environment, Path(directory), scratch, output)
    outcome = outcome_of(ended, time.monotonic() - started)
    print_outcome(outcome, ended.failures, output)
    return outcome


@contextmanager
def _handlers_restored() -> Iterator[None]:
    """Context after which the signals that ask to stop have the handlers of before."""
    before = {number: signal.getsignal(number) for number in heard_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _here(job: Job, environment: Mapping[str, str], directory: Path, scratch: Path, output: Output) -> Ended:
    """Run the ranks on this machine alone, without torch in this process."""
    command = [sys.executable, str(CHILD), *job.arguments]
    ranks = Ranks(Interpreters(command, {**os.environ, **environment}, piped=True), directory, output)
    restarts = Restarts(job.max_restarts, scratch, records=False)
    plan, stop, failure = job.plan, None, None
    with listening(ranks):
        try:
            failure = run_attempts(ranks, plan.nproc, restarts, address=plan.host, port=plan.port)
        except StopAsked as asked:
            stop = asked.number
            ranks.ask(stop)
        finally:
            ranks.asked = True  # a request that comes now is too late
            ranks.stop()
    found = ranks.failures()
    first = [failure] if failure is not None else found[:1]
    return Ended(ranks.numbers, [*first, *found[1:]], stop)


def _on_machines(job: Job, environment: Mapping[str, str], directory: Path) -> Ended:
    """Run the ranks of this machine under torch's elastic agent, which gives them the variables of this process."""
    plan = job.plan
    # Otherwise ranks that start again share a store with those before, and a machine that joins them waits for it.
    os.environ.update(environment, **{_OWN_STORE: "1", RESTARTS_VARIABLE: str(job.max_restarts)})
    interface = interface_to(plan.host, plan.port)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    logged = os.environ[_LOG_LEVEL]
    os.environ[_LOG_LEVEL] = "FATAL"  # read on import: torch's store logs stacks in C++ before it raises an error
    elastic = import_module(_ELASTIC)  # imports torch, which one machine does without
    os.environ[_LOG_LEVEL] = logged
    own = os.dup(1)
    if job.as_json:
        os.dup2(2, 1)
    try:
        ended: Ended = elastic.run_elastic(
            plan, [str(CHILD), *job.arguments], directory, max_restarts=job.max_restarts, timeout_s=job.timeout_s
        )
    finally:
        os.dup2(own, 1)
        os.close(own)
    return ended
