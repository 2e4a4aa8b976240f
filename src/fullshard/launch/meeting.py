"""How machines with numbers of their own come together: each shows a card, and waits for those of the others."""

from __future__ import annotations

import json
import os
import socket
import time
from typing import Any

from fullshard.errors import ProcessGroupError
from fullshard.launch.failure import Failure
from fullshard.launch.machines import Plan
from fullshard.launch.network import is_here
from fullshard.launch.watch import MachineEnded, MeetingPlace, Verdict, post_verdict, read_verdict

_LOOK_SECONDS = 0.1


_LINGER_SECONDS = 1.0
"""How long the machine with the store stays when they do not fit together: the others look ten times in it."""


def meet(store: MeetingPlace, plan: Plan, timeout_s: float, former: MeetingPlace | None = None) -> list[str]:
    """Show this machine's card and wait for those of the others; on every machine.

    Args:
        store: Where they meet, for this once.
        plan: The machines; their numbers are known.
        timeout_s: How long to wait.
        former: Where they met before; a machine that has failed for good says so there, and does not come again.

    Returns:
        The names of all machines.

    Raises:
        ProcessGroupError: Not all came, or they do not fit together.
        MachineEnded: Another machine has said so.
    """
    here = socket.gethostname()
    card = {"nnodes": str(plan.nnodes), "rdzv_id": plan.run_id, "host": here, "pid": os.getpid()}
    try:
        _show(store, plan, card)
        cards = _cards(store, plan, timeout_s, former)
        _compare(plan, card, cards)
    except ProcessGroupError as error:
        post_verdict(store, Verdict(Failure.of(error), here))
        if plan.node_rank == 0 and plan.several:
            time.sleep(_LINGER_SECONDS)
        raise
    return [f"machine {number} ({other['host']})" for number, other in enumerate(cards)]


def _show(store: MeetingPlace, plan: Plan, card: dict[str, Any]) -> None:
    """Take this machine's number, if nobody has."""
    text = json.dumps(card)
    shown = store.compare_set(f"card/{plan.node_rank}", "", text).decode()
    if shown != text:
        raise ProcessGroupError(
            f"Each machine needs a number of its own, and two say --node_rank {plan.node_rank}: {card['host']} and "
            f"{json.loads(shown)['host']}. Give one of them another."
        )


def _cards(store: MeetingPlace, plan: Plan, timeout_s: float, former: MeetingPlace | None) -> list[dict[str, Any]]:
    """The cards of all machines, by number."""
    deadline = time.monotonic() + timeout_s
    numbers = range(plan.nnodes.most)
    while missing := [number for number in numbers if not store.check([f"card/{number}"])]:
        verdict = read_verdict(store)
        said = None if former is None else read_verdict(former)
        if said is not None and said.failure.rank is not None:  # of a machine that is only gone others say so
            verdict = verdict or said
        if verdict is not None:
            raise MachineEnded(verdict)
        if time.monotonic() > deadline:
            raise ProcessGroupError(_missing_text(plan, missing, timeout_s))
        time.sleep(_LOOK_SECONDS)
    return [json.loads(store.get(f"card/{number}")) for number in numbers]


def _compare(plan: Plan, card: dict[str, Any], cards: list[dict[str, Any]]) -> None:
    for number, other in enumerate(cards):
        for option in ("nnodes", "rdzv_id"):
            if other[option] != card[option]:
                raise ProcessGroupError(
                    f"All machines need the same --{option}: machine {plan.node_rank} ({card['host']}) says "
                    f"{card[option]}, machine {number} ({other['host']}) says {other[option]}."
                )


def _missing_text(plan: Plan, missing: list[int], timeout_s: float) -> str:
    """Who did not come."""
    there = plan.nnodes.most - len(missing)
    text = (
        f"{there} of {plan.nnodes} machines came to {plan.place} within {timeout_s:.0f} s; missing: --node_rank "
        f"{', '.join(map(str, missing))}. Start `fullshard launch` there too, with the same --rdzv_endpoint, or wait "
        "longer with --rdzv_timeout."
    )
    if plan.node_rank == 0 and not is_here(plan.host):
        text += f" {plan.host} is no address of this machine ({socket.gethostname()}), which says --node_rank 0."
    return text
