"""Placement of a run's ranks: on a GPU each, on shared GPUs, or on the CPU; all ranks decide alike."""

from __future__ import annotations

import collections
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch


@dataclass
class Shared:
    """This process's knowledge of shared GPUs.

    Attributes:
        gpu: This rank's GPU if ranks share GPUs; gloo groups use it unless a device is given.
        ranks: Number of ranks on the GPU with the most.
    """

    gpu: torch.device | None = None
    ranks: int = 1


SHARED = Shared()
"""Set when the ranks join."""


@dataclass(frozen=True)
class Placement:
    """Where the ranks compute, the same on every rank.

    Attributes:
        kind: ``"own"``: each on a GPU of its own. ``"shared"``: on GPUs of which some have several ranks, which NCCL
            refuses. ``"cpu"``: all on the CPU.
        ranks: Number of ranks on the GPU with the most; 1 on the CPU.
        note: One sentence for the user; may be empty.
    """

    kind: Literal["own", "shared", "cpu"]
    ranks: int = 1
    note: str = ""


def gpu_of_rank() -> torch.device | None:
    """Return this rank's GPU: the one of its local rank, modulo the number of GPUs; None if it sees none."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    return torch.device("cuda", local_rank % count) if count else None


def agree(store: Any, rank: int, size: int, gpu: torch.device | None) -> Placement:
    """Exchange each rank's GPU through the store of the rendezvous, and return the resulting placement.

    Ranks of one machine may see different GPUs under one number, and machines may have different numbers of GPUs. Only
    the GPUs' own identifiers tell whether two ranks have the same one.
    """
    keys = [f"fullshard/gpu/{number}" for number in range(size)]
    # Its index among the GPUs that this rank sees, and an identifier that is the same in every process.
    card = "" if gpu is None else f"{gpu.index} {torch.cuda.get_device_properties(gpu).uuid}"
    store.set(keys[rank], card)
    store.wait(keys)
    return placement_of([value.decode() for value in store.multi_get(keys)])


def placement_of(cards: Sequence[str]) -> Placement:
    """Return the placement for ranks with these GPUs, in rank order: index and identifier, empty for none."""
    without = cards.count("")
    if without:
        note = "" if without == len(cards) else f"{without} of {len(cards)} ranks see no GPU, so all use the CPU."
        return Placement("cpu", note=note)
    ranks = collections.Counter(card.partition(" ")[2] for card in cards)
    most = max(ranks.values())
    if most == 1:
        return Placement("own")
    which = f"GPU {cards[0].partition(' ')[0]}" if len(ranks) == 1 else f"{len(ranks)} GPUs"
    return Placement(
        "shared",
        most,
        f"{len(cards)} ranks share {which}: collectives go through host memory, which is slow and meant for testing.",
    )
