"""The static rendezvous: each machine writes its card to a shared store and waits for those of the others."""

from __future__ import annotations

import json
import os
import socket
import time
from typing import Any

from fullshard.errors import ProcessGroupError
from fullshard.launch.failure import Failure
from fullshard.launch.script.machines import MachinePlan
from fullshard.launch.script.network import is_here
from fullshard.launch.script.peers import KeyValueStore, MachineEnded, RunFailure, post_failure, read_failure

_LOOK_SECONDS = 0.1

_LINGER_SECONDS = 1.0
"""Time that the machine with the store stays up after an error, so that the others can read it."""


def meet(store: KeyValueStore, plan: MachinePlan, timeout_s: float, former: KeyValueStore | None = None) -> list[str]:
    """Write this machine's card and wait for those of the others; every machine calls it.

    Args:
        store: The store of this rendezvous.
        plan: The machines, which have fixed numbers.
        timeout_s: Seconds to wait.
        former: The store of the previous rendezvous, where a machine that has failed for good reports it.

    Returns:
        The names of all machines.

    Raises:
        ProcessGroupError: Not all machines arrived, or their settings differ.
        MachineEnded: Another machine has reported a failure.
    """
    here = socket.gethostname()
    card = {"nnodes": str(plan.nnodes), "rdzv_id": plan.run_id, "host": here, "pid": os.getpid()}
    try:
        _write_card(store, plan, card)
        cards = _cards(store, plan, timeout_s, former)
        _compare(plan, card, cards)
    except ProcessGroupError as error:
        post_failure(store, RunFailure(Failure.of(error), here))
        if plan.node_rank == 0 and plan.several:
            time.sleep(_LINGER_SECONDS)
        raise
    return [f"machine {number} ({other['host']})" for number, other in enumerate(cards)]


def _write_card(store: KeyValueStore, plan: MachinePlan, card: dict[str, Any]) -> None:
    """Write this machine's card, unless another machine has the same number."""
    text = json.dumps(card)
    shown = store.compare_set(f"card/{plan.node_rank}", "", text).decode()
    if shown != text:
        raise ProcessGroupError(
            f"Each machine needs a number of its own, and two have --node_rank {plan.node_rank}: "
            f"{card['host']} and {json.loads(shown)['host']}. Give one of them another."
        )


def _cards(
    store: KeyValueStore, plan: MachinePlan, timeout_s: float, former: KeyValueStore | None
) -> list[dict[str, Any]]:
    """Wait for the cards of all machines; return them by number."""
    deadline = time.monotonic() + timeout_s
    numbers = range(plan.nnodes.most)
    while missing := [number for number in numbers if not store.check([f"card/{number}"])]:
        failed = read_failure(store)
        before = None if former is None else read_failure(former)
        if before is not None and before.failure.rank is not None:  # without a rank it is only a lost machine
            failed = failed or before
        if failed is not None:
            raise MachineEnded(failed)
        if time.monotonic() > deadline:
            raise ProcessGroupError(_missing_text(plan, missing, timeout_s))
        time.sleep(_LOOK_SECONDS)
    return [json.loads(store.get(f"card/{number}")) for number in numbers]


def _compare(plan: MachinePlan, card: dict[str, Any], cards: list[dict[str, Any]]) -> None:
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
