"""The GPU of each rank, of which two ranks never share one; all ranks decide alike."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from fullshard.errors import ProcessGroupError


def gpu_of_rank() -> torch.device | None:
    """Return this rank's GPU: the one of its local rank, modulo the number of GPUs; None if it sees none."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    return torch.device("cuda", local_rank % count) if count else None


def all_have_gpus(store: Any, rank: int, size: int, gpu: torch.device | None) -> bool:
    """Exchange each rank's GPU through the store of the rendezvous; False: some have none, so all use the CPU.

    Ranks of one machine may see different GPUs under one number, and machines may have different numbers of GPUs. Only
    the GPUs' own identifiers tell whether two ranks have the same one.

    Raises:
        ProcessGroupError: Two ranks have the same GPU; on every rank, with the same text.
    """
    keys = [f"fullshard/gpu/{number}" for number in range(size)]
    # An identifier that is the same in every process.
    store.set(keys[rank], "" if gpu is None else str(torch.cuda.get_device_properties(gpu).uuid))
    store.wait(keys)
    cards = [value.decode() for value in store.multi_get(keys)]
    without = cards.count("")
    if without:
        if rank == 0 and without < size:
            logging.getLogger("fullshard").warning("%d of %d ranks see no GPU, so all use the CPU.", without, size)
        return False
    if len(set(cards)) < size:
        # Rank 0 may hold the store: it stays until all have read from it, so that all raise this error.
        read = [f"{key}/read" for key in keys]
        store.set(read[rank], "")
        if rank == 0:
            store.wait(read)
        raise ProcessGroupError(_why_not(cards))
    return True


def _why_not(cards: list[str]) -> str:
    shared = next(card for card in cards if cards.count(card) > 1)
    ranks = [str(rank) for rank, card in enumerate(cards) if card == shared]
    return (
        f"Two ranks cannot share a GPU: {len(cards)} ranks have {len(set(cards))} GPUs, and ranks {', '.join(ranks)} "
        "have the same one. Start at most one rank for each GPU of a machine (--nproc_per_node, in a run file nproc), "
        'or compute on the CPU (CUDA_VISIBLE_DEVICES="").'
    )
