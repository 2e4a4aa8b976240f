"""The elastic agent of torchrun over our own processes, and how machines meet.

The agent is torch's: it brings the machines together, numbers the ranks and restarts them. The processes are ours, and
what torch's agent leaves open: who is missing, and that a machine ends with a reason when another one fails or is gone.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from fullshard.errors import ProcessGroupError
from fullshard.launch.failure import Failure
from fullshard.launch.machines import STATIC, Plan
from fullshard.launch.meeting import meet
from fullshard.launch.network import address_towards, is_here, port_is_free
from fullshard.launch.output import Output
from fullshard.launch.watch import (
    DOUBT_SECONDS,
    MachineEnded,
    Verdict,
    Watch,
    brief,
    lost_connection,
)
from fullshard.launch.workers import Workers

_STORE_TIME = timedelta(seconds=60)
"""How long one answer of the store may take."""

_LOOK_SECONDS = 0.1


class StaticRendezvous(RendezvousHandler):
    """Machines with numbers of their own meet at machine 0; several rounds, if ranks are restarted."""

    def __init__(self, plan: Plan, timeout_s: float) -> None:
        """Meet as ``plan`` says, within ``timeout_s`` seconds each time."""
        self._plan = plan
        self._timeout_s = timeout_s
        self._store: TCPStore | None = None
        self._round = 0
        self.machines: list[str] = []

    def get_backend(self) -> str:
        """See torch's RendezvousHandler."""
        return STATIC

    @property
    def use_agent_store(self) -> bool:
        """Ranks use this store too: its port is taken already, so nobody else can take it."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until all machines are there.

        Raises:
            ProcessGroupError: They are not, or they do not fit together.
        """
        deadline = time.monotonic() + self._timeout_s
        if self._store is None:
            self._store = _host_store(self._plan) if self._plan.node_rank == 0 else _join_store(self._plan, deadline)
        former = self._round_store() if self._round else None
        if former is not None:
            former.set("next", "1")
        self._round += 1
        store = self._round_store()
        self.machines = meet(store, self._plan, self._timeout_s, former)
        place = RendezvousStoreInfo(self._plan.host, self._store.port)
        return RendezvousInfo(store, self._plan.node_rank, self._plan.nnodes.most, place)

    def _round_store(self) -> PrefixStore:
        assert self._store is not None
        return PrefixStore(f"fullshard/{self._round}", self._store)

    def is_closed(self) -> bool:
        """See torch's RendezvousHandler."""
        return False

    def set_closed(self) -> None:
        """See torch's RendezvousHandler: nothing, machines end by what they tell each other."""

    def num_nodes_waiting(self) -> int:
        """See torch's RendezvousHandler; the agent asks its :class:`Watch`."""
        return 0

    def get_run_id(self) -> str:
        """See torch's RendezvousHandler."""
        return self._plan.run_id

    def shutdown(self) -> bool:
        """See torch's RendezvousHandler."""
        return True


def _host_store(plan: Plan) -> TCPStore:
    """The store of all machines, on this one.

    Raises:
        ProcessGroupError: The port is taken.
    """
    try:
        with socket.create_server(("", plan.port)):
            pass  # torch would say it in the log of its own
        # Connects to itself by the loopback: the way to its own name may lead around, or nowhere.
        return TCPStore("127.0.0.1", plan.port, is_master=True, timeout=_STORE_TIME, wait_for_workers=False)
    except (OSError, RuntimeError) as error:
        raise ProcessGroupError(
            f"Port {plan.port} of this machine cannot be used to meet at {plan.place}: {_reason(error)}. Another run "
            f"may be there; give all machines another port: --rdzv_endpoint {plan.host}:{plan.port + 1}."
        ) from error


def _join_store(plan: Plan, deadline: float) -> TCPStore:
    """The store on the machine of ``plan.host``, as soon as it is there.

    Raises:
        ProcessGroupError: It never is.
    """
    timeout_s = deadline - time.monotonic()
    while True:
        try:
            with socket.create_connection((plan.host, plan.port), 2.0):
                break
        except OSError as error:
            if time.monotonic() > deadline:
                raise ProcessGroupError(
                    f"Nobody answered at {plan.place} within {timeout_s:.0f} s ({_reason(error)}): of {plan.nnodes} "
                    f"machines only this one ({socket.gethostname()}, --node_rank {plan.node_rank}) is known to be "
                    "there. Start --node_rank 0 on that machine, and see that its port is open to this one."
                ) from error
        time.sleep(_LOOK_SECONDS)
    try:
        return TCPStore(plan.host, plan.port, is_master=False, timeout=_STORE_TIME, wait_for_workers=False)
    except RuntimeError as error:
        raise ProcessGroupError(
            f"What answers at {plan.place} is not `fullshard launch` ({_reason(error)}). Is the port of "
            "--rdzv_endpoint another program's?"
        ) from error


def _reason(error: BaseException) -> str:
    """An error's first line."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


@dataclass(frozen=True)
class Meeting:
    """How the machines meet.

    Attributes:
        handler: What the agent asks.
        joined: Tells how many machines have come so far.
        hosts: Whether the store lives in this process.
    """

    handler: RendezvousHandler
    joined: Callable[[], int]
    hosts: bool


def meeting_of(plan: Plan, timeout_s: float) -> Meeting:
    """How the machines of a plan meet.

    Raises:
        ProcessGroupError: The c10d store can neither be made nor reached; the static one is made by the first round.
    """
    if plan.backend == STATIC:
        handler = StaticRendezvous(plan, timeout_s)
        return Meeting(handler, lambda: len(handler.machines), plan.node_rank == 0)
    seconds = max(1, int(timeout_s))
    hosts = is_here(plan.host) and port_is_free(plan.port)
    if not hosts:
        _join_store(plan, time.monotonic() + timeout_s)
    parameters = RendezvousParameters(
        "c10d",
        plan.place,
        plan.run_id,
        plan.nnodes.least,
        plan.nnodes.most,
        local_addr=address_towards(plan.host, plan.port),
        is_host=hosts,
        join_timeout=seconds,
        last_call_timeout=min(30, seconds),
    )
    try:
        backend, store = create_backend(parameters)
        key = f"fullshard/{plan.run_id}/came"
        store.add(key, 1)
        return Meeting(create_handler(store, backend, parameters), lambda: store.add(key, 0), hosts)
    except (RendezvousError, ValueError, OSError) as error:
        raise ProcessGroupError(f"The machines cannot meet at {plan.place}: {_reason(error)}.") from error


class ScriptAgent(SimpleElasticAgent):
    """The agent of torch, whose workers are ours.

    Attributes:
        verdict: Why the run ended, where another machine said it or this one told the others.
    """

    def __init__(self, spec: WorkerSpec, workers: Workers, output: Output, *, hosts: bool) -> None:
        """Run ``workers`` as ``spec`` says; ``hosts``: the store of all machines lives in this process."""
        super().__init__(spec)
        self.verdict: Verdict | None = None
        self._own = workers
        self._output = output
        self._failed_times = 0
        self._starts = 0
        self._hosts = hosts
        self._watch: Watch | None = None
        self._rank_store: TCPStore | None = None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        spec = worker_group.spec
        store: Any = worker_group.store
        machine: Any = worker_group.group_rank
        machines: Any = worker_group.group_world_size
        attempt = self._attempt(store, machine)
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
        }
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
            self._watch = Watch(store, machine, self._machines(machines), hosts=self._hosts)
        return self._own.start(environments)

    def _attempt(self, store: Store, group_rank: int) -> int:
        """How often ranks were started before, as machine 0 counts."""
        if group_rank == 0:
            store.set("attempt", str(self._starts))
        self._starts += 1
        return int(store.get("attempt"))

    def _port(self, worker_group: WorkerGroup, attempt: int) -> int:
        """Where ranks meet: what ranks of an earlier start have left in their store would lead these astray."""
        store: Any = worker_group.store
        port: Any = worker_group.master_port
        if attempt == 0:
            return port
        if worker_group.group_rank == 0:
            # A new one on a free port; the old one stays where it is, for the machines.
            self._rank_store = TCPStore("127.0.0.1", 0, is_master=True, timeout=_STORE_TIME, wait_for_workers=False)
            store.set("port", str(self._rank_store.port))
        return int(store.get("port"))

    def _machines(self, count: int) -> list[str]:
        handler = self._worker_group.spec.rdzv_handler
        return handler.machines if isinstance(handler, StaticRendezvous) else [f"machine {n}" for n in range(count)]

    def _stop_workers(self, worker_group: WorkerGroup, **_: Any) -> None:
        self._shutdown()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, **_: Any) -> None:
        self._own.stop(death_sig)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self._own.stop()
        if self._watch is not None:
            self._watch.leave()
            self._watch = None
        super()._restart_workers(worker_group)  # type: ignore[call-arg]  # torch decorates it without types

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._output.closed:
            raise SignalException("nobody reads the output any more", signal.SIGPIPE)
        if self._own.any_failed():
            return self._failed()
        if self._own.all_ended():
            if self._watch is None or self._watch.over:
                return RunResult(WorkerState.SUCCEEDED, return_values=dict.fromkeys(self._own.ranks))
            self._watch.done()  # the store of the ranks may be on this machine: others still need it
        verdict = None if self._watch is None else self._watch.verdict()
        if verdict is not None:
            self._raise_or_restart(verdict)
            return RunResult(WorkerState.UNHEALTHY)
        if self._watch is not None and self._watch.somebody_waits:
            self._restart_workers(worker_group)
        return RunResult(WorkerState.HEALTHY)

    def _failed(self) -> RunResult:
        """A rank of this machine has failed: end the others; and the other machines, if it is not started anew."""
        self._own.stop()
        failure = self._own.failures()[0]
        self._failed_times += 1
        if self._failed_times <= self._worker_group.spec.max_restarts:
            self._say_restart(failure)
        elif self._watch is not None:
            self.verdict = self._agree(self._watch, failure)
        return RunResult(WorkerState.FAILED)

    def _say_restart(self, failure: Failure) -> None:
        most = self._worker_group.spec.max_restarts
        self._output.say(f"fullshard: {brief(failure)}; restart {self._failed_times} of {most}")

    def _agree(self, watch: Watch, failure: Failure) -> Verdict:
        """Tell the other machines, unless one of them was first: a rank may only have lost the connection to it."""
        deadline = time.monotonic() + (2 * DOUBT_SECONDS if lost_connection(failure) else 0.0)
        while time.monotonic() < deadline:
            verdict = watch.verdict(DOUBT_SECONDS)
            if verdict is not None:
                return verdict
            time.sleep(_LOOK_SECONDS)
        return watch.post(Verdict(failure, watch.here))

    def _raise_or_restart(self, verdict: Verdict) -> None:
        """Another machine has ended: so does this one, unless it is only gone and ranks may be started anew."""
        gone = verdict.failure.rank is None and self._failed_times < self._worker_group.spec.max_restarts
        if not gone:
            self.verdict = verdict
            raise MachineEnded(verdict)
        self._failed_times += 1
        self._say_restart(verdict.failure)

    def _exit_barrier(self) -> None:
        """Nothing: ranks count as ended when those of all machines have."""

    def leave(self) -> None:
        """The run is over: let the other machines read what was said last."""
        if self._watch is not None:
            self._watch.leave()

    def interrupted(self, number: signal.Signals) -> None:
        """Tell the other machines that this one was told to end."""
        if self._watch is not None:
            message = f"{self._watch.here} was stopped by {number.name}."
            failure = Failure(None, "Interrupted", message, None, 128 + number, time.time())
            self._watch.post(Verdict(failure, self._watch.here))


@contextlib.contextmanager
def raised_signals(workers: Workers) -> Iterator[None]:
    """While entered, Ctrl-C, SIGTERM and SIGHUP raise torch's SignalException; a second one kills the ranks at once."""
    said = False

    def handle(number: int, _frame: object) -> None:
        nonlocal said
        if said:
            workers.kill()
            return
        said = True
        raise SignalException(f"told to end by {signal.Signals(number).name}", signal.Signals(number))

    before: dict[int, Any] = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            before[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class AgentEnd:
    """How a run ended on this machine, beside what its ranks say.

    Attributes:
        ranks: Numbers of the ranks of this machine.
        verdict: Why, where several machines agreed on it; None: all ended well, or there is one machine.
        signal: What told this launcher to end; None: nothing.
    """

    ranks: list[int]
    verdict: Verdict | None = None
    signal: signal.Signals | None = None


def run_agent(plan: Plan, workers: Workers, output: Output, *, max_restarts: int, timeout_s: float) -> AgentEnd:
    """Run a script's ranks of this machine to their end.

    Args:
        plan: The machines.
        workers: The ranks.
        output: Where the launcher itself speaks.
        max_restarts: How often all ranks are started anew after one has failed.
        timeout_s: Seconds that the machines have to come together.

    Raises:
        ProcessGroupError: They did not, or their meeting place is gone.
    """
    agent: ScriptAgent | None = None
    with raised_signals(workers):
        try:
            meeting = meeting_of(plan, timeout_s)
            spec = WorkerSpec(
                role="default",
                local_world_size=plan.nproc,
                entrypoint="fullshard launch",
                rdzv_handler=meeting.handler,
                max_restarts=max_restarts,
                monitor_interval=_LOOK_SECONDS,
                local_addr=address_towards(plan.host, plan.port),
            )
            agent = ScriptAgent(spec, workers, output, hosts=meeting.hosts)
            try:
                agent.run()
            except (RendezvousError, DistError) as error:
                raise ProcessGroupError(_lost_text(plan, error, meeting, timeout_s)) from error
            agent.leave()
            meeting.handler.shutdown()
        except MachineEnded as ended:
            if agent is not None:
                agent.leave()
            return AgentEnd(workers.ranks, ended.verdict)
        except SignalException as told:
            if agent is not None:
                agent.interrupted(told.sigval)
                agent.leave()
            return AgentEnd(workers.ranks, None, told.sigval)
    return AgentEnd(workers.ranks, agent.verdict)


def _lost_text(plan: Plan, error: Exception, meeting: Meeting, timeout_s: float) -> str:
    """What went wrong while machines met, or with the place where they meet."""
    if isinstance(error, RendezvousTimeoutError):
        with contextlib.suppress(RuntimeError):
            return (
                f"{meeting.joined()} of {plan.nnodes} machines came to {plan.place} within {timeout_s:.0f} s. Start "
                "`fullshard launch` on the others too, with the same --rdzv_endpoint and --rdzv_id, or wait longer "
                "with --rdzv_timeout."
            )
    if isinstance(error, RendezvousClosedError):
        return f"The run {plan.run_id!r} at {plan.place} is over: start it anew, with another --rdzv_id."
    return f"The meeting place {plan.place} does not answer any more ({_reason(error)}). Look at that machine's output."
