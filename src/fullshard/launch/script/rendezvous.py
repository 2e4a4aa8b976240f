"""The rendezvous of machines: torch's c10d, and a static one for machines with fixed numbers."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from fullshard.errors import ProcessGroupError
from fullshard.launch.script.machines import STATIC, MachinePlan
from fullshard.launch.script.meet import meet
from fullshard.launch.script.network import address_towards, is_here, port_is_free

STORE_TIME = timedelta(seconds=60)
"""Timeout of one operation on the store."""

_LOOK_SECONDS = 0.1


class StaticRendezvous(RendezvousHandler):
    """Machines with fixed numbers meet at machine 0; one round per start of the ranks."""

    def __init__(self, plan: MachinePlan, timeout_s: float) -> None:
        """Meet as set in ``plan``, within ``timeout_s`` seconds per round."""
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
        """Return True: ranks use this store too, since its port is already bound."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for all machines.

        Raises:
            ProcessGroupError: Not all arrived, or their settings differ.
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
        """Do nothing: machines end by the failures that they exchange."""

    def num_nodes_waiting(self) -> int:
        """Return 0; the agent uses its :class:`PeerMonitor` instead."""
        return 0

    def get_run_id(self) -> str:
        """See torch's RendezvousHandler."""
        return self._plan.run_id

    def shutdown(self) -> bool:
        """See torch's RendezvousHandler."""
        return True


def _host_store(plan: MachinePlan) -> TCPStore:
    """Create the store of all machines on this one.

    Raises:
        ProcessGroupError: The port is in use.
    """
    try:
        with socket.create_server(("", plan.port)):
            pass  # torch would only log that the port is in use
        # The loopback, because this machine's own name may not resolve, or resolve to another address.
        return TCPStore("127.0.0.1", plan.port, is_master=True, timeout=STORE_TIME, wait_for_workers=False)
    except (OSError, RuntimeError) as error:
        raise ProcessGroupError(
            f"Port {plan.port} of this machine cannot be used to meet at {plan.place}: {first_line(error)}. Another "
            f"run may use it; give all machines another port: --rdzv_endpoint {plan.host}:{plan.port + 1}."
        ) from error


def _join_store(plan: MachinePlan, deadline: float) -> TCPStore:
    """Connect to the store on ``plan.host`` as soon as it exists.

    Raises:
        ProcessGroupError: It did not exist in time.
    """
    timeout_s = deadline - time.monotonic()
    while True:
        try:
            with socket.create_connection((plan.host, plan.port), 2.0):
                break
        except OSError as error:
            if time.monotonic() > deadline:
                raise ProcessGroupError(
                    f"No answer from {plan.place} within {timeout_s:.0f} s ({first_line(error)}): of {plan.nnodes} "
                    f"machines only this one ({socket.gethostname()}, --node_rank {plan.node_rank}) is known to be "
                    "running. Start --node_rank 0 on that machine, and check that this one can reach its port."
                ) from error
        time.sleep(_LOOK_SECONDS)
    try:
        return TCPStore(plan.host, plan.port, is_master=False, timeout=STORE_TIME, wait_for_workers=False)
    except RuntimeError as error:
        raise ProcessGroupError(
            f"The program at {plan.place} is not `fullshard launch` ({first_line(error)}). Does another program use "
            "the port of --rdzv_endpoint?"
        ) from error


def first_line(error: BaseException) -> str:
    """Return an error's first line."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


@dataclass(frozen=True)
class Rendezvous:
    """The rendezvous of a run's machines."""

    handler: RendezvousHandler  # torch's interface for the agent
    joined: Callable[[], int]  # returns how many machines have arrived so far
    hosts: bool  # whether the store runs in this process


def make_rendezvous(plan: MachinePlan, timeout_s: float) -> Rendezvous:
    """Return the rendezvous of a plan.

    Raises:
        ProcessGroupError: The c10d store can neither be created nor reached. The static store is created later, by the
            first round.
    """
    if plan.backend == STATIC:
        handler = StaticRendezvous(plan, timeout_s)
        return Rendezvous(handler, lambda: len(handler.machines), plan.node_rank == 0)
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
        return Rendezvous(create_handler(store, backend, parameters), lambda: store.add(key, 0), hosts)
    except (RendezvousError, ValueError, OSError) as error:
        raise ProcessGroupError(f"The machines cannot meet at {plan.place}: {first_line(error)}.") from error
