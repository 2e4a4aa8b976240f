"""The static rendezvous: each machine writes its card to a shared store and waits for those of the others."""

from __future__ import annotations

import json
import secrets
import socket
import time
from typing import Any

from fullshard.errors import ProcessGroupError
from fullshard.launch.failure import Failure
from fullshard.launch.messages import say
from fullshard.launch.script import peers
from fullshard.launch.script.machines import MachinePlan
from fullshard.launch.script.network import is_here
from fullshard.launch.script.peers import KeyValueStore, MachineEnded, RunFailure, post_failure, read_failure

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


def was_in(store: KeyValueStore, plan: MachinePlan, card: Card) -> bool:
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


def _beats(store: KeyValueStore, number: int) -> bool:
    """Return True if the machine with a number sends heartbeats after it has shown its card."""
    seconds = _ALIVE_BEATS * peers.BEAT_SECONDS
    say(f"a launcher with --node_rank {number} was here before; waiting {seconds:g} s to see if it still runs")
    key = f"beat/{number}"
    first = store.get(key) if store.check([key]) else b""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
        if store.check([key]) and store.get(key) != first:
            return True
    return False


def meet(
    store: KeyValueStore, plan: MachinePlan, card: Card, timeout_s: float, former: KeyValueStore | None = None
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


def _missing(store: KeyValueStore, plan: MachinePlan) -> list[int]:
    """Return the numbers of the machines that have not shown their cards."""
    return [number for number in range(plan.nnodes.most) if not store.check([f"card/{number}"])]


def _cards(
    store: KeyValueStore, plan: MachinePlan, timeout_s: float, former: KeyValueStore | None
) -> list[Card] | None:
    """Wait for the cards of all machines; return them by number, or None if the next rendezvous has begun."""
    started = beaten = time.monotonic()
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
            store.set(f"beat/{plan.node_rank}", f"waits {now}")
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
