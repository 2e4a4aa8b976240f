"""Sums of host tensors over ranks that compute on GPUs: they wait for other ranks' Python, and for no device."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable

import torch
import torch.distributed as dist

HostSum = Callable[[torch.Tensor], None]
"""Adds up an int64 host tensor over the ranks of a group, in place."""


def host_sum_of(group: dist.ProcessGroup, timeout: datetime.timedelta) -> HostSum | None:
    """Make a gloo group of the ranks of ``group``, and return what adds up over it; every rank of the group calls it.

    Not yet run beside NCCL (``tests/gpu/test_engine_gpu.py``).

    Args:
        group: The group.
        timeout: How long a rank waits for another one.

    Returns:
        None if this rank could not join, such as without a network interface for gloo.
    """
    ranks = dist.get_process_group_ranks(group)
    try:
        made = dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=True)
    except (RuntimeError, ValueError) as error:
        logging.getLogger("fullshard").warning("no gloo group for small sums, which then wait for the GPU: %s", error)
        return None

    def add(tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor, group=made)

    return add
