"""Ranks as processes: the implementation of the protocol on ``torch.distributed``."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from fullshard.comm.gloo import GlooComm
from fullshard.comm.protocol import DONE, Comm, ReduceOp, Work
from fullshard.errors import ProcessGroupError

# torch 2.13 renamed the flat collectives; older releases have the old names only.
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
TIMEOUT_S = 600.0
"""Default number of seconds after which a collective that other ranks never joined is an error."""

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class ProcessComm:
    """A ``torch.distributed`` process group whose backend has flat collectives: NCCL, and torch's fake backend."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Communicate with the ranks of ``group`` with tensors on ``device``."""
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.device = device

    def announce(self, what: str) -> None:
        """See :meth:`Comm.announce`: ignored; NCCL has its own watchdog and flight recorder."""

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> Work:
        """See :meth:`Comm.all_gather`."""
        return _all_gather_flat(full, shard, group=self.group, async_op=True)  # type: ignore[return-value]

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor) -> Work:
        """See :meth:`Comm.reduce_scatter`; if ``shard`` is wider, values are sent narrow and added wide."""
        if shard.dtype != full.dtype:
            received = torch.empty_like(full)
            return _SumWork(dist.all_to_all_single(received, full, group=self.group, async_op=True), received, shard)
        return _reduce_scatter_flat(shard, full, group=self.group, async_op=True)  # type: ignore[return-value]

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        """See :meth:`Comm.all_reduce`."""
        return dist.all_reduce(tensor, _OPS[op], group=self.group, async_op=True)  # type: ignore[return-value]

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> Work:
        """See :meth:`Comm.broadcast`."""
        return dist.broadcast(tensor, group=self.group, group_src=source, async_op=True)  # type: ignore[return-value]

    def gather(self, shard: torch.Tensor, full: torch.Tensor | None, target: int = 0) -> Work:
        """See :meth:`Comm.gather`; point to point, so that other ranks allocate nothing."""
        if full is None:
            return dist.isend(shard, group=self.group, group_dst=target)  # type: ignore[return-value]
        slices = full.view(self.size, -1)
        slices[self.rank].copy_(shard)
        others = [r for r in range(self.size) if r != self.rank]
        return Works([dist.irecv(slices[r], group=self.group, group_src=r) for r in others])

    def exchange(self, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> Work:
        """See :meth:`Comm.exchange`."""
        return dist.all_to_all(list(received), list(sent), group=self.group, async_op=True)  # type: ignore[return-value]

    def all_gather_object(self, value: Any) -> list[Any]:
        """See :meth:`Comm.all_gather_object`."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def barrier(self) -> None:
        """See :meth:`Comm.barrier`."""
        # An all-reduce instead of dist.barrier, which guesses a device under NCCL and warns.
        self.all_reduce(torch.zeros(1, device=self.device)).wait()


class Works:
    """Several messages that form one collective."""

    def __init__(self, parts: Sequence[Any]) -> None:
        """Wait for all of ``parts``."""
        self.parts = parts

    def wait(self) -> None:
        """Wait for every message."""
        for part in self.parts:
            part.wait()


class _SumWork:
    """An exchange of terms, and their sum in a wider dtype."""

    def __init__(self, exchange: Any, terms: torch.Tensor, total: torch.Tensor) -> None:
        """Sum ``terms``, (size * S,), into ``total``, (S,), when ``exchange`` is done."""
        self.exchange = exchange
        self.terms = terms
        self.total = total

    def wait(self) -> None:
        """See :meth:`fullshard.comm.protocol.Work.wait`."""
        self.exchange.wait()
        torch.sum(self.terms.view(-1, self.total.numel()), 0, dtype=self.total.dtype, out=self.total)


class FakeComm(ProcessComm):
    """A group of torch's fake backend, which sends nothing: the other ranks are assumed to hold the same values."""

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        """See :meth:`Comm.all_reduce`: the result if all ranks had equal values."""
        if op == "sum":
            tensor.mul_(self.size)
        return DONE

    def exchange(self, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> Work:
        """See :meth:`Comm.exchange`: this rank's own tensor, or zeros if it has another size."""
        for target in received:
            given = sent[self.rank]
            if given.numel() == target.numel():
                target.copy_(given)
            else:
                target.zero_()
        return DONE

    def all_gather_object(self, value: Any) -> list[Any]:
        """See :meth:`Comm.all_gather_object`: this rank's value for every rank."""
        return [value] * self.size


def comm_of_group(group: dist.ProcessGroup, device: torch.device | None) -> Comm:
    """Return the :class:`Comm` of a process group, by its backend.

    Args:
        group: The group; this process belongs to it.
        device: Device of the tensors; None: under NCCL the current one, else CPU.
    """
    backend = str(dist.get_backend(group))
    if "nccl" in backend:
        return ProcessComm(group, device or torch.device("cuda", torch.cuda.current_device()))
    if "fake" in backend:  # a dry run: one process is rank 0 of a large world, nothing is sent
        return FakeComm(group, device or torch.device("cpu"))
    return GlooComm(group)


def init_from_env(*, timeout_s: float = TIMEOUT_S) -> Comm:
    """Join the group that torchrun's environment describes; once per process, on every rank.

    Reads ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT``. With at least as many CUDA
    devices as ranks on this machine the backend is NCCL, one device for each rank; else gloo on CPU.

    Args:
        timeout_s: Seconds after which a collective that other ranks never joined is an error.

    Returns:
        The :class:`Comm` of all ranks.

    Raises:
        ProcessGroupError: A variable is missing in the environment.
    """
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ProcessGroupError(
            f"There is no process group to join: {', '.join(missing)} not set. "
            "Start the script with torchrun or `fullshard train`."
        )
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    timeout = datetime.timedelta(seconds=timeout_s)
    if torch.cuda.is_available() and torch.cuda.device_count() >= local_size:
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=timeout, device_id=device)
        return comm_of_group(_world(), device)
    dist.init_process_group("gloo", timeout=timeout)
    return comm_of_group(_world(), torch.device("cpu"))


def join_alone(device: torch.device) -> Comm:
    """Return the default process group; if there is none, initialize one of this process alone. Any rank.

    Args:
        device: Device of the collectives' tensors.
    """
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    return comm_of_group(_world(), device)


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def shutdown() -> None:
    """Destroy the default process group, if there is one; on every rank."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
