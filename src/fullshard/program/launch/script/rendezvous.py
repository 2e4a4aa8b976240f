"""The rendezvous of machines: torch's c10d, and a static one for machines with fixed numbers.

In the static one each machine writes its card to a shared store and waits for those of the others. Both have rounds,
one for each start of the ranks.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import secrets
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from fullshard.core.comm.store_posts import Heartbeats
from fullshard.errors import ProcessGroupError
from fullshard.program.launch.failure import Failure
from fullshard.program.launch.messages import say
from fullshard.program.launch.script import peers
from fullshard.program.launch.script.machines import STATIC, MachinePlan
from fullshard.program.launch.script.peers import MachineEnded, RunFailure, post_failure, read_failure

_SIOCGIFADDR = 0x8915  # linux/sockios.h


def interface_to(host: str, port: int) -> str | None:
    """Return the network interface that reaches ``host``, such as ``eth0``; nothing is sent.

    Without it gloo uses the interface of the machine's own name, which on many systems is the loopback.

    Args:
        host: Name or IPv4 address.
        port: A port there.

    Returns:
        None if it cannot be determined, or if it is the loopback.
    """
    if sys.platform != "linux":
        return None
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port or 1))
            address = probe.getsockname()[0]
            names = [name for _, name in socket.if_nameindex() if name != "lo"]
            return next((name for name in names if _address_of(probe, name) == address), None)
    except OSError:
        return None


def _address_of(probe: socket.socket, interface: str) -> str | None:
    """Return the IPv4 address of an interface, or None."""
    try:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, interface.encode()[:15].ljust(256, b"\0"))
    except OSError:
        return None
    return socket.inet_ntoa(answer[20:24])


def is_here(host: str) -> bool:
    """Return whether a name or address is this machine's."""
    try:
        kind, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(kind, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def port_is_free(port: int) -> bool:
    """Return whether a TCP port of this machine is free; 0 always is."""
    with contextlib.suppress(OSError), socket.create_server(("", port)):
        return True
    return False


def address_towards(host: str, port: int) -> str | None:
    """Return this machine's address as seen from ``host``'s network; None if it cannot be determined."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port or 1))
        return probe.getsockname()[0]
    return None


_LOOK_SECONDS = 0.1

_LINGER_SECONDS = 1.0
"""Time that the machine with the store stays up after an error, so that the others can read it."""

_ALIVE_BEATS = 4
"""Missed heartbeats after which a machine counts as lost when another one comes with its number."""

Card = dict[str, Any]
"""Values that a machine shows the others."""


def make_card(plan: MachinePlan) -> Card:
    """Return this machine's card; it is unique to the launcher, even if another one has the same number."""
    return {
        "nnodes": str(plan.nnodes),
        "rdzv_id": plan.run_id,
        "host": socket.gethostname(),
        "launcher": secrets.token_hex(8),
    }


def was_in(store: Store, plan: MachinePlan, card: Card) -> bool:
    """Return True if this machine, or a lost one with its number, has been in the rendezvous of ``store``.

    Raises:
        ProcessGroupError: Another machine with the same number is in it.
    """
    key = f"card/{plan.node_rank}"
    if not store.check([key]):
        return False
    shown = json.loads(store.get(key))
    if shown["launcher"] != card["launcher"] and _beats(store, plan.node_rank):
        error = ProcessGroupError(
            f"Each machine needs a number of its own, and two have --node_rank {plan.node_rank}: "
            f"{card['host']} and {shown['host']}. Give one of them another."
        )
        if _missing(store, plan):  # a surplus machine must not end a run that continues
            post_failure(store, RunFailure(Failure.of(error), card["host"]))
        raise error
    return True


def _beats(store: Store, number: int) -> bool:
    """Return True if the machine with a number sends heartbeats after it has shown its card."""
    seconds = _ALIVE_BEATS * peers.BEAT_SECONDS
    say(f"a launcher with --node_rank {number} was here before; waiting {seconds:g} s to see if it still runs")
    heartbeats = Heartbeats(store, number, now := time.monotonic())
    heartbeats.listen([number], now)
    first, deadline = heartbeats.texts.get(number), now + seconds
    while (now := time.monotonic()) < deadline:
        time.sleep(_LOOK_SECONDS)
        heartbeats.listen([number], now)
        if heartbeats.texts.get(number) != first:
            return True
    return False


def meet(
    store: Store, plan: MachinePlan, card: Card, timeout_s: float, former: Store | None = None
) -> list[str] | None:
    """Write this machine's card and wait for those of the others; every machine calls it.

    Args:
        store: The store of this rendezvous.
        plan: The machines, which have fixed numbers.
        card: This machine's card.
        timeout_s: Seconds to wait.
        former: The store of the previous rendezvous, where a machine that failed permanently reports it.

    Returns:
        The names of all machines; None if some machine has gone on to the next rendezvous, or had this one's number.

    Raises:
        ProcessGroupError: Not all machines arrived, or their settings differ.
        MachineEnded: Another machine has reported a failure.
    """
    text = json.dumps(card)
    if store.compare_set(f"card/{plan.node_rank}", "", text).decode() != text:
        return None
    try:
        cards = _cards(store, plan, timeout_s, former)
        if cards is None:
            return None
        _compare(plan, card, cards)
    except ProcessGroupError as error:
        post_failure(store, RunFailure(Failure.of(error), card["host"]))
        if plan.node_rank == 0 and plan.several:
            time.sleep(_LINGER_SECONDS)
        raise
    return [f"machine {number} ({other['host']})" for number, other in enumerate(cards)]


def _missing(store: Store, plan: MachinePlan) -> list[int]:
    """Return the numbers of the machines that have not shown their cards."""
    return [number for number in range(plan.nnodes.most) if not store.check([f"card/{number}"])]


def _cards(store: Store, plan: MachinePlan, timeout_s: float, former: Store | None) -> list[Card] | None:
    """Wait for the cards of all machines; return them by number, or None if the next rendezvous has begun."""
    started = beaten = time.monotonic()
    heartbeats = Heartbeats(store, plan.node_rank, started)
    while missing := _missing(store, plan):
        if store.check(["next"]):
            return None
        failed = read_failure(store)
        before = None if former is None else read_failure(former)
        if before is not None and before.failure.rank is not None:  # without a rank it is only a lost machine
            failed = failed or before
        if failed is not None:
            raise MachineEnded(failed)
        now = time.monotonic()
        if now - started > timeout_s:
            raise ProcessGroupError(_missing_text(plan, missing, timeout_s))
        if now - beaten >= peers.BEAT_SECONDS:
            beaten = now
            heartbeats.beat(f"waits {now}")
        time.sleep(_LOOK_SECONDS)
    return [json.loads(store.get(f"card/{number}")) for number in range(plan.nnodes.most)]


def _compare(plan: MachinePlan, card: Card, cards: list[Card]) -> None:
    for number, other in enumerate(cards):
        for option in ("nnodes", "rdzv_id"):
            if other[option] != card[option]:
                raise ProcessGroupError(
                    f"All machines need the same --{option}: machine {plan.node_rank} ({card['host']}) has "
                    f"{card[option]}, machine {number} ({other['host']}) has {other[option]}."
                )


def _missing_text(plan: MachinePlan, missing: list[int], timeout_s: float) -> str:
    """Return the message that names the missing machines."""
    there = plan.nnodes.most - len(missing)
    text = (
        f"{there} of {plan.nnodes} machines arrived at {plan.place} within {timeout_s:.0f} s; missing: --node_rank "
        f"{', '.join(map(str, missing))}. Start `fullshard launch` there too, with the same --rdzv_endpoint, or wait "
        "longer with --rdzv_timeout."
    )
    if plan.node_rank == 0 and not is_here(plan.host):
        text += f" {plan.host} is not an address of this machine ({socket.gethostname()}), which has --node_rank 0."
    return text


STORE_TIME = timedelta(seconds=60)
"""Timeout of one operation on the store."""


class Round(NamedTuple):
    """The machines that start ranks together."""

    store: Store  # of this round
    machine: int  # number of this machine
    names: list[str]  # of all machines, for messages
    address: str  # of machine 0
    port: int  # there, of the ranks' store
    shares_store: bool = True  # whether a launcher runs the ranks' store


class StaticRendezvous:
    """Machines with fixed numbers meet at machine 0.

    The store counts the rounds: a machine that is started again, or whose store was lost with machine 0, joins the
    newest one. Ranks use the store too, since its port is already bound.

    Attributes:
        hosts: True if the store runs in this process.
    """

    def __init__(self, plan: MachinePlan, timeout_s: float) -> None:
        """Meet as set in ``plan``, within ``timeout_s`` seconds per round."""
        self.hosts = plan.node_rank == 0
        self._plan = plan
        self._timeout_s = timeout_s
        self._rounds: TCPStore | None = None
        self._card = make_card(plan)
        self._names: list[str] = []

    def next_round(self) -> Round:
        """Wait for all machines.

        Raises:
            ProcessGroupError: Not all arrived, or their settings differ.
        """
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                return self._meet(deadline)
            except DistError:  # machine 0 was lost meanwhile, or cut off
                if self.hosts or time.monotonic() > deadline:
                    raise

    def _meet(self, deadline: float) -> Round:
        if not self.hosts:
            # Connected anew: machine 0 may be another one by now, and a connection that was cut may be dead.
            self._rounds = _join_store(self._plan, deadline)
        elif self._rounds is None:
            self._rounds = _host_store(self._plan)
        assert self._rounds is not None
        self._names, store = meet_newest(self._rounds, self._plan, self._card, deadline)
        return Round(store, self._plan.node_rank, self._names, self._plan.host, self._rounds.port)

    def joined(self) -> int:
        """Return how many machines have arrived."""
        return len(self._names)

    def waiting(self) -> int:
        """Return how many machines to admit now: none, as their number is fixed."""
        return 0

    def close(self) -> None:
        """Do nothing: machines end by what they tell each other."""


def meet_newest(store: Store, plan: MachinePlan, card: Card, deadline: float) -> tuple[list[str], Store]:
    """Meet in the newest round, or begin one that ends it; every machine calls it.

    Args:
        store: The store of all rounds.
        plan: The machines.
        card: This machine's card.
        deadline: When to give up, on the monotonic clock.

    Returns:
        The names of all machines, and the store of their round.

    Raises:
        ProcessGroupError, MachineEnded: See :func:`~fullshard.program.launch.script.rendezvous.meet`.
    """
    machines = None
    while machines is None:
        number = int(store.compare_set("fullshard/round", "", "1"))
        while was_in(_round(store, number), plan, card):
            # Another machine may have counted it already.
            number = int(store.compare_set("fullshard/round", str(number), str(number + 1)))
        former = _round(store, number - 1) if number > 1 else None
        if former is not None:
            former.set("next", "1")
        machines = meet(_round(store, number), plan, card, deadline - time.monotonic(), former)
    return machines, _round(store, number)


def _round(store: Store, number: int) -> PrefixStore:
    return PrefixStore(f"fullshard/{number}", store)


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


class DynamicRendezvous:
    """Torch's c10d rendezvous, in which machines that arrive during a round wait for a save of the run.

    Attributes:
        hosts: True if the store runs in this process.
    """

    def __init__(
        self,
        handler: RendezvousHandler,
        saved: Callable[[], int | None],
        joined: Callable[[], int] = lambda: 0,
        *,
        hosts: bool = False,
    ) -> None:
        """Meet by ``handler``.

        Args:
            handler: Torch's rendezvous.
            saved: Returns the step of the newest checkpoint, None if none is recorded on this machine.
            joined: Returns how many machines have arrived.
            hosts: Whether the store runs in this process.
        """
        self.hosts = hosts
        self.joined = joined
        self._handler = handler
        self._saved = saved
        self._round: Round | None = None
        self._arrived_at: int | None = None

    def next_round(self) -> Round:
        """Tell the machines of this round that it is over, and wait for those of the next."""
        if self._round is not None:
            self._round.store.set("next", "1")
        self._arrived_at = None
        info = self._handler.next_rendezvous()
        # Torch's handler says the address of rank 0 in its own first round, and keeps it: machines that are new in this
        # round wait for it, and others have that of a machine that may be lost.
        place = info.bootstrap_store_info
        assert place is not None, "torch's handler makes one for each round"
        place = RendezvousStoreInfo.build(info.rank, info.store, place.master_addr, place.master_port)
        names = [f"machine {number}" for number in range(info.world_size)]
        shares = self._handler.use_agent_store
        self._round = Round(info.store, info.rank, names, place.master_addr, place.master_port, shares)
        return self._round

    def waiting(self) -> int:
        """Return how many machines to admit now; if there are any, the next round begins.

        Machine 0 decides, where rank 0 notes what it has saved: after the next checkpoint, so that no step is lost. A
        script that notes nothing is restarted at once. The other machines follow.
        """
        waiting = self._handler.num_nodes_waiting()
        if not waiting or self._round is None or self._round.machine != 0:
            return 0
        saved = self._saved()
        if saved is None:
            return waiting
        if self._arrived_at is None:
            self._arrived_at = saved
            say(f"another machine has arrived; it is taken in after the next checkpoint (the newest: step {saved:,})")
        return waiting if saved > self._arrived_at else 0

    def close(self) -> None:
        """Tell machines that come later that the run is over."""
        self._handler.shutdown()


def make_rendezvous(
    plan: MachinePlan, timeout_s: float, saved: Callable[[], int | None]
) -> StaticRendezvous | DynamicRendezvous:
    """Return the rendezvous of a plan; ``saved`` is that of :class:`DynamicRendezvous`.

    Raises:
        ProcessGroupError: The c10d store can neither be created nor reached. The static store is created later, by the
            first round.
    """
    if plan.backend == STATIC:
        return StaticRendezvous(plan, timeout_s)
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
        return DynamicRendezvous(
            create_handler(store, backend, parameters), saved, lambda: store.add(key, 0), hosts=hosts
        )
    except (RendezvousError, ValueError, OSError) as error:
        raise ProcessGroupError(f"The machines cannot meet at {plan.place}: {first_line(error)}.") from error
