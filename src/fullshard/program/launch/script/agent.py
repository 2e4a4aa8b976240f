"""Torchrun's elastic agent with fullshard's own processes.

Torch's agent runs the rendezvous, numbers the ranks and restarts them. Processes are fullshard's, and so is what
torch's agent lacks: it names missing machines, and ends a machine with a reason if another one fails or is lost.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed import DistError, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError, RendezvousTimeoutError

from fullshard.errors import ProcessGroupError
from fullshard.program.launch.attempts import last_note, pause_s
from fullshard.program.launch.failure import Failure, brief
from fullshard.program.launch.local import NOTICES, STOP_SIGNALS
from fullshard.program.launch.script.machines import MachinePlan
from fullshard.program.launch.script.output import Output
from fullshard.program.launch.script.peers import DOUBT_SECONDS, MachineEnded, PeerMonitor, RunFailure, lost_connection
from fullshard.program.launch.script.rendezvous import (
    STORE_TIME,
    Rendezvous,
    StaticRendezvous,
    address_towards,
    first_line,
    make_rendezvous,
)
from fullshard.program.launch.script.workers import Workers
from fullshard.variables import ATTEMPT_VARIABLE, RESTARTS_VARIABLE

_LOOK_SECONDS = 0.1


class ScriptAgent(SimpleElasticAgent):
    """Torch's agent with fullshard's workers.

    Attributes:
        run_failure: The failure that ended the run, reported by another machine or by this one to the others.
    """

    def __init__(self, spec: WorkerSpec, workers: Workers, output: Output, *, hosts: bool) -> None:
        """Run ``workers`` as set in ``spec``; ``hosts``: the store of all machines runs in this process."""
        super().__init__(spec)
        self.run_failure: RunFailure | None = None
        self._own = workers
        self._output = output
        self._failed_times = 0
        self._starts = 0
        self._hosts = hosts
        self._monitor: PeerMonitor | None = None
        self._rank_store: TCPStore | None = None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        spec = worker_group.spec
        store: Any = worker_group.store
        machine: Any = worker_group.group_rank
        machines: Any = worker_group.group_world_size
        attempt = self._attempt(store, machine, machines)
        common = {
            "GROUP_RANK": machine,
            "GROUP_WORLD_SIZE": machines,
            "LOCAL_WORLD_SIZE": spec.local_world_size,
            "ROLE_NAME": spec.role,
            "MASTER_ADDR": worker_group.master_addr,
            "MASTER_PORT": self._port(worker_group, attempt),
            "TORCHELASTIC_RESTART_COUNT": attempt,
            "TORCHELASTIC_MAX_RESTARTS": spec.max_restarts,
            "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": spec.rdzv_handler.use_agent_store,
            ATTEMPT_VARIABLE: attempt,
        }
        if machines == 1:  # of several, each counts the restarts after failures of its own
            common[RESTARTS_VARIABLE] = self._remaining_restarts
        environments = {
            worker.local_rank: {name: str(value) for name, value in common.items()}
            | {
                "RANK": str(worker.global_rank),
                "LOCAL_RANK": str(worker.local_rank),
                "WORLD_SIZE": str(worker.world_size),
                "ROLE_RANK": str(worker.role_rank),
                "ROLE_WORLD_SIZE": str(worker.role_world_size),
            }
            for worker in worker_group.workers
        }
        if machines > 1:
            self._monitor = PeerMonitor(store, machine, self._machines(machines), hosts=self._hosts)
        return self._own.start(environments)

    def _attempt(self, store: Store, machine: int, machines: int) -> int:
        """Return how often ranks were started before; a machine that was itself started again learns it from others."""
        store.set(f"starts/{machine}", str(self._starts))
        attempt = max(int(store.get(f"starts/{number}")) for number in range(machines))
        self._starts = attempt + 1
        return attempt

    def _port(self, worker_group: WorkerGroup, attempt: int) -> int:
        """Return the port of the ranks' store; a new one after a restart, since the old store has stale entries."""
        store: Any = worker_group.store
        port: Any = worker_group.master_port
        if attempt == 0:
            return port
        if worker_group.group_rank == 0:
            # The old store stays, because the machines still use it.
            self._rank_store = TCPStore("127.0.0.1", 0, is_master=True, timeout=STORE_TIME, wait_for_workers=False)
            store.set("port", str(self._rank_store.port))
        return int(store.get("port"))

    def _machines(self, count: int) -> list[str]:
        handler = self._worker_group.spec.rdzv_handler
        return handler.machines if isinstance(handler, StaticRendezvous) else [f"machine {n}" for n in range(count)]

    def _stop_workers(self, worker_group: WorkerGroup, **_: Any) -> None:
        self._own.stop()

    def _shutdown(self, death_sig: signal.Signals | None = None, **_: Any) -> None:
        """End the ranks; ``death_sig`` is the signal that this launcher received, which lets them save."""
        if death_sig is None:
            self._own.stop()
        else:
            self._own.stop(death_sig, saves=True)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self._own.stop()
        if self._monitor is not None:
            self._monitor.stop()
            self._monitor = None
        time.sleep(pause_s(self._failed_times))  # machines whose ranks have not failed wait for this one
        super()._restart_workers(worker_group)  # type: ignore[call-arg]  # torch decorates it without types

    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        while True:
            try:
                super()._initialize_workers(worker_group)  # type: ignore[call-arg]  # torch decorates it without types
                return
            except DistError as error:  # a machine was lost after all had met
                if self._failed_times >= worker_group.spec.max_restarts:
                    raise
                self._failed_times += 1
                self._remaining_restarts -= 1  # torch's own count, which ends the run
                self._print_restart(Failure.of(error))

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._own.any_failed():
            return self._failed()
        if self._own.all_ended():
            if self._monitor is None or self._monitor.over:
                return RunResult(WorkerState.SUCCEEDED, return_values=dict.fromkeys(self._own.ranks))
            self._monitor.done()  # keep running: the ranks' store may be on this machine, and others still need it
        failed = None if self._monitor is None else self._monitor.failure()
        if failed is not None:
            self._raise_or_restart(failed)
            return RunResult(WorkerState.UNHEALTHY)
        if self._monitor is not None and self._monitor.restart_requested:
            self._restart_workers(worker_group)
        return RunResult(WorkerState.HEALTHY)

    def _failed(self) -> RunResult:
        """End the other ranks after one of this machine failed; if there is no restart, the other machines too.

        A rank that was stopped and has saved ends the run: whoever stopped it wants the machine. So does an error of
        fullshard's programs that would come again.
        """
        self._own.stop()
        failure = self._own.failures()[0]
        if not failure.may_pass:
            self._remaining_restarts = 0  # torch's agent restarts while some remain
            if self._monitor is not None:
                self.run_failure = self._post(self._monitor, failure)
            return RunResult(WorkerState.FAILED)
        self._failed_times += 1
        if self._failed_times <= self._worker_group.spec.max_restarts:
            self._print_restart(failure)
        elif self._monitor is not None:
            self.run_failure = self._post(self._monitor, failure)
        return RunResult(WorkerState.FAILED)

    def _print_restart(self, failure: Failure) -> None:
        most = self._worker_group.spec.max_restarts
        self._output.say(f"fullshard: {brief(failure)}; restart {self._failed_times} of {most}")

    def _post(self, monitor: PeerMonitor, failure: Failure) -> RunFailure:
        """Report a failure to the other machines, unless one of them was first and this rank only lost it."""
        deadline = time.monotonic() + (2 * DOUBT_SECONDS if lost_connection(failure) else 0.0)
        while time.monotonic() < deadline:
            failed = monitor.failure(DOUBT_SECONDS)
            if failed is not None:
                return failed
            time.sleep(_LOOK_SECONDS)
        return monitor.post(RunFailure(failure, monitor.here))

    def _raise_or_restart(self, failed: RunFailure) -> None:
        """End this machine after another one failed, or restart the ranks if that one was only lost."""
        lost = failed.failure.rank is None
        if not lost or self._failed_times >= self._worker_group.spec.max_restarts:
            self.run_failure = failed
            raise MachineEnded(failed)
        self._failed_times += 1
        self._print_restart(failed.failure)

    def _exit_barrier(self) -> None:
        """Do nothing: ranks count as ended when those of all machines have."""

    def leave(self) -> None:
        """Let the other machines read how the run ended."""
        if self._monitor is not None:
            self._monitor.leave()

    def interrupted(self, number: signal.Signals) -> None:
        """Report to the other machines that a signal ended this one, or that its ranks have saved and stopped."""
        if self._monitor is not None:
            saved = next((failure for failure in self._own.failures()[:1] if failure.stopped is not None), None)
            if saved is not None:
                self._monitor.post(RunFailure(saved, self._monitor.here))
                return
            message = f"{self._monitor.here} was stopped by {number.name}."
            failure = Failure(None, "Interrupted", message, None, 128 + number, time.time())
            self._monitor.post(RunFailure(failure, self._monitor.here))


@contextlib.contextmanager
def raised_signals(workers: Workers) -> Iterator[None]:
    """Raise torch's SignalException on Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 inside; on a second one kill the ranks.

    Notices (:data:`~fullshard.program.launch.local.NOTICES`) count neither as first nor as second.
    While ranks are being started, the exception is raised when all have been.
    """
    raised, counted = False, 0

    def handle(number: int, _frame: object) -> None:
        nonlocal raised, counted
        counted += number not in NOTICES
        if raised:
            if counted > 1:
                workers.kill()
            return
        raised = True
        error = SignalException(f"received {signal.Signals(number).name}", signal.Signals(number))
        if not workers.hold(error):
            raise error

    before: dict[int, Any] = {}
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # ignored under nohup, for example
            before[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class AgentEnd:
    """How a run ended on this machine, in addition to the failures of its ranks."""

    ranks: list[int]  # numbers of the ranks of this machine
    # the failure shared by several machines; None if there was none, or there is one machine
    failed: RunFailure | None = None
    signal: signal.Signals | None = None  # the signal that ended this launcher, or None


def run_agent(
    plan: MachinePlan, workers: Workers, output: Output, kept: Path, *, max_restarts: int, timeout_s: float
) -> AgentEnd:
    """Run a script's ranks on this machine until they end.

    Args:
        plan: The machines.
        workers: The ranks.
        output: Prints the launcher's messages.
        kept: The directory that outlives the ranks, where rank 0 notes what it has saved.
        max_restarts: How many times to restart all ranks after one has failed.
        timeout_s: Seconds to wait for all machines.

    Raises:
        ProcessGroupError: Not all machines arrived, or the connection to their store was lost.
    """
    agent: ScriptAgent | None = None
    with raised_signals(workers):
        try:
            rendezvous = make_rendezvous(plan, timeout_s, partial(_saved, kept))
            spec = WorkerSpec(
                role="default",
                local_world_size=plan.nproc,
                entrypoint="fullshard launch",
                rdzv_handler=rendezvous.handler,
                max_restarts=max_restarts,
                monitor_interval=_LOOK_SECONDS,
                local_addr=address_towards(plan.host, plan.port),
            )
            agent = ScriptAgent(spec, workers, output, hosts=rendezvous.hosts)
            try:
                agent.run()
            except (RendezvousError, DistError) as error:
                raise ProcessGroupError(_rendezvous_error(plan, error, rendezvous, timeout_s)) from error
            agent.leave()
            rendezvous.handler.shutdown()
        except MachineEnded as ended:
            if agent is not None:
                agent.leave()
            return AgentEnd(workers.ranks, ended.failed)
        except SignalException as received:
            if agent is not None:
                agent.interrupted(received.sigval)
                agent.leave()
            return AgentEnd(workers.ranks, None, received.sigval)
    return AgentEnd(workers.ranks, agent.run_failure)


def _saved(kept: Path) -> int | None:
    """Return the step of the newest checkpoint that rank 0 recorded on this machine; None if there is no record."""
    noted = last_note(kept)
    return None if noted is None else noted.saved


def _rendezvous_error(plan: MachinePlan, error: Exception, rendezvous: Rendezvous, timeout_s: float) -> str:
    """Return the message for a rendezvous that failed, or whose store was lost."""
    if isinstance(error, RendezvousTimeoutError):
        with contextlib.suppress(RuntimeError):
            return (
                f"{rendezvous.joined()} of {plan.nnodes} machines arrived at {plan.place} within {timeout_s:.0f} s. "
                "Start `fullshard launch` on the others with the same --rdzv_endpoint and --rdzv_id, or wait longer "
                "with --rdzv_timeout."
            )
    if isinstance(error, RendezvousClosedError):
        return f"The run {plan.run_id!r} at {plan.place} is over: start it again with another --rdzv_id."
    return f"{plan.place}, where the machines meet, no longer answers ({first_line(error)}). See that machine's output."
