"""Ranks as processes: the implementation of the protocol on ``torch.distributed``."""

from __future__ import annotations

import datetime
import functools
import logging
import os
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from fullshard.core.comm.calls import gather_in_one_call
from fullshard.core.comm.flight_recorder import FlightRecorder
from fullshard.core.comm.gloo import GlooComm
from fullshard.core.comm.heartbeat import HeartbeatMonitor, end_process
from fullshard.core.comm.protocol import DONE, Comm, ReduceOp, Work
from fullshard.core.comm.rank_gpus import all_have_gpus, gpu_of_rank
from fullshard.core.comm.store_posts import StorePosts
from fullshard.core.comm.watchdog import WATCHDOG
from fullshard.errors import ProcessGroupError

# torch 2.13 renamed the flat collectives; older releases only have the old names.
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
TIMEOUT_S = 600.0
"""Default number of seconds after which a collective that other ranks never joined is an error."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.5
"""Shortest and longest pause between attempts to reach rank 0's store, in seconds: thousands of ranks try at once."""

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


_RECORDERS: dict[int, FlightRecorder] = {}
"""The recorder of all collectives of this process's comms, by its rank in the default group."""


class ProcessComm:
    """A NCCL group: torch's flat collectives run in place on the caller's buffers."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Communicate with the ranks of ``group`` with tensors on ``device``."""
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.device = device
        self.recorder = _RECORDERS.setdefault(dist.get_rank(), FlightRecorder(dist.get_rank()))
        self._announced = ""

    def announce(self, what: str) -> None:
        """See :meth:`Comm.announce`: part of this rank's beats; NCCL's own watchdog compares collectives."""
        self._announced = what

    def _note(self, kind: str, about: torch.Tensor) -> None:
        """Record a collective for this rank's beats."""
        self.recorder.issue(kind, about.numel(), about.dtype, self._announced, bound=True)

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> Work:
        """See :meth:`Comm.all_gather`."""
        self._note("all-gather", full)
        return _all_gather_flat(full, shard, group=self.group, async_op=True)  # type: ignore[return-value]

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor) -> Work:
        """See :meth:`Comm.reduce_scatter`; if ``shard`` is wider, values are sent narrow and added wide."""
        self._note("reduce-scatter", full)
        if shard.dtype != full.dtype:
            received = torch.empty_like(full)
            return _SumWork(dist.all_to_all_single(received, full, group=self.group, async_op=True), received, shard)
        return _reduce_scatter_flat(shard, full, group=self.group, async_op=True)  # type: ignore[return-value]

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        """See :meth:`Comm.all_reduce`."""
        self._note("all-reduce", tensor)
        return dist.all_reduce(tensor, _OPS[op], group=self.group, async_op=True)  # type: ignore[return-value]

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> Work:
        """See :meth:`Comm.broadcast`."""
        self._note("broadcast", tensor)
        return dist.broadcast(tensor, group=self.group, group_src=source, async_op=True)  # type: ignore[return-value]

    def gather(self, shard: torch.Tensor, full: torch.Tensor | None, target: int = 0) -> Work:
        """See :meth:`Comm.gather`; point to point, so that other ranks allocate nothing."""
        self._note("gather", shard)
        if full is None:
            return dist.isend(shard, group=self.group, group_dst=target)  # type: ignore[return-value]
        slices = full.view(self.size, -1)
        slices[self.rank].copy_(shard)
        others = [r for r in range(self.size) if r != self.rank]
        return Works([dist.irecv(slices[r], group=self.group, group_src=r) for r in others])

    def exchange(self, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> Work:
        """See :meth:`Comm.exchange`."""
        self._note("exchange", sent[self.rank])
        return dist.all_to_all(list(received), list(sent), group=self.group, async_op=True)  # type: ignore[return-value]

    def all_gather_object(self, value: Any) -> list[Any]:
        """See :meth:`Comm.all_gather_object`."""

        def gather(mine: Any) -> list[Any]:
            values: list[Any] = [None] * self.size
            dist.all_gather_object(values, mine, group=self.group)
            return values

        return gather_in_one_call(value, gather)

    def host_sum(self) -> HostSum | None:
        """See :meth:`fullshard.core.comm.mesh.Mesh.host_sum`, for this group."""
        return host_sum_of(self.group, datetime.timedelta(seconds=TIMEOUT_S))

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
        """See :meth:`fullshard.core.comm.protocol.Work.wait`."""
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

    def host_sum(self) -> HostSum | None:
        """See :meth:`ProcessComm.host_sum`: the result if all ranks had equal values."""

        def add(tensor: torch.Tensor) -> None:
            tensor.mul_(self.size)

        return add

    def all_gather_object(self, value: Any) -> list[Any]:
        """See :meth:`Comm.all_gather_object`: this rank's value for every rank."""
        return [value] * self.size


class TorchComm(ProcessComm):
    """A group of any other backend (MPI, UCC, a plug-in, torch's threaded test group), with torch's collectives.

    It needs only ``all_gather_into_tensor``, ``reduce_scatter_tensor``, ``all_reduce``, ``broadcast`` and
    ``all_to_all_single`` of a backend. Nothing here knows what the other ranks are doing, so ranks that diverge
    wait until the backend times out.
    """

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> Work:
        """See :meth:`Comm.all_gather`; copies ``shard`` first, because MPI forbids it to be part of ``full``."""
        sent = shard.clone()
        return _CopyWork(super().all_gather(full, sent), sent)

    def host_sum(self) -> HostSum | None:
        """See :meth:`ProcessComm.host_sum`: None, as other backends may not have gloo beside them."""
        return None

    def gather(self, shard: torch.Tensor, full: torch.Tensor | None, target: int = 0) -> Work:
        """See :meth:`Comm.gather`; ranks other than the target allocate nothing."""
        sizes = [shard.numel() if r == target else 0 for r in range(self.size)]
        received = shard.new_empty(0) if full is None else full.view(-1)
        return self._all_to_all(received, [received.numel() // self.size] * self.size, shard.view(-1), sizes)

    def exchange(self, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> Work:
        """See :meth:`Comm.exchange`; copies what is sent and received, because gloo and others take no lists here."""
        out = torch.cat([part.reshape(-1) for part in sent])
        sizes = [part.numel() for part in received]
        into = out.new_empty(sum(sizes))
        work = self._all_to_all(into, sizes, out, [part.numel() for part in sent])
        return _CopyWork(work, out, list(zip(received, into.split(sizes), strict=True)))

    def _all_to_all(self, into: torch.Tensor, sizes: list[int], sent: torch.Tensor, sent_sizes: list[int]) -> Work:
        return dist.all_to_all_single(into, sent, sizes, sent_sizes, group=self.group, async_op=True)  # type: ignore[return-value]


class _CopyWork:
    """A collective on copies: keeps what it sends, and copies what it received to its place."""

    def __init__(
        self, work: Work, sent: torch.Tensor, received: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
    ) -> None:
        """Keep ``sent`` until ``work`` is done; then copy to the first of each pair of ``received`` the second."""
        self.work: Work | None = work
        self.sent: torch.Tensor | None = sent
        self.received = received

    def wait(self) -> None:
        """See :meth:`fullshard.core.comm.protocol.Work.wait`."""
        if self.work is not None:
            self.work.wait()
            for target, source in self.received:
                target.view(-1).copy_(source)
        self.work, self.sent, self.received = None, None, ()


_MONITORS: weakref.WeakKeyDictionary[dist.ProcessGroup, HeartbeatMonitor] = weakref.WeakKeyDictionary()


def start_heartbeat(comm: ProcessComm) -> None:
    """Start this process's beats if ``comm`` has all ranks. Its waits cannot be interrupted: a dead rank ends it."""
    group = comm.group
    if group is dist.group.WORLD and comm.size > 1 and group not in _MONITORS:
        # A connection of its own, like the watchdog's for a gloo group.
        store_posts = StorePosts(group.get_group_store().clone(), comm.rank, comm.size)  # type: ignore[attr-defined]
        _MONITORS[group] = HeartbeatMonitor(comm.recorder, store_posts, end_process)
        WATCHDOG.add(_MONITORS[group])


def comm_of_group(group: dist.ProcessGroup, device: torch.device | None) -> Comm:
    """Return the :class:`Comm` of a process group, by the backend that carries tensors of ``device``.

    Backends other than NCCL, gloo and torch's fake one use torch's collectives; rank 0 logs what is missing.

    Args:
        group: The group; this process belongs to it.
        device: Device of the tensors; None: the current accelerator if a backend of the group is made for it, else CPU.

    Raises:
        ProcessGroupError: The backend is gloo, and ``device`` is not the CPU.
    """
    backends = dict(part.split(":", 1) for part in str(dist.get_backend_config(group)).split(","))
    device = device or _device_for(backends)
    backend = backends.get(device.type) or next(iter(backends.values()))
    if backend == "nccl":
        comm = ProcessComm(group, device)
        start_heartbeat(comm)
        return comm
    if backend == "fake":  # a dry run: one process is rank 0 of a large world, nothing is sent
        return FakeComm(group, device)
    if backend != "gloo":
        if dist.get_rank() == 0:
            _warn_of(backend)
        return TorchComm(group, device)
    return _over_gloo(group, device)


def _over_gloo(group: dist.ProcessGroup, device: torch.device) -> Comm:
    """Return the Comm of a gloo group; tests whose ranks share a GPU replace this function."""
    if device.type != "cpu":
        raise ProcessGroupError(
            f"A gloo group sends tensors in host memory, and the model is to compute on {device}. Join with "
            'fullshard.init() or init_process_group("nccl"), or leave out device= to compute on the CPU.'
        )
    return GlooComm(group)


def _device_for(backends: dict[str, str]) -> torch.device:
    """Return the device of collectives if none is given; ``backends`` maps a device's type to a backend."""
    # A build of torch for CUDA names it on a machine without a GPU too, unless asked to check for one.
    found = torch.accelerator.current_accelerator(check_available=True)
    # gloo uses host memory, MPI often cannot access device memory, and a fake group is for dry runs.
    if found is not None and backends.get(found.type) not in (None, "gloo", "mpi", "fake"):
        return torch.device(found.type, torch.accelerator.current_device_index())
    return torch.device("cpu")


@functools.cache
def _warn_of(backend: str) -> None:
    """Log what a group of a backend lacks, once for each backend."""
    logging.getLogger("fullshard").warning(
        "The process group's backend is %s, so fullshard uses torch's own collectives on it. There is no watchdog: "
        "when a rank ends or runs other code, no error names it, and the others wait until the backend times out. "
        "Direct messages between ranks are missing too, so exchanges and all-gathers copy what they send. Under NCCL "
        "or gloo (torch.distributed.init_process_group) you have both.",
        backend,
    )


def init_from_env(*, timeout_s: float = TIMEOUT_S) -> Comm:
    """Join the group that torchrun's environment describes, or the one that this process has; on every rank.

    A default process group that this process already has, as under Ray Train, is used as it is: with the device of its
    backend, and with its own timeout. Otherwise the group is made.

    Reads ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT``. Where every rank has a GPU of
    its own the backend is NCCL. Where a rank sees no GPU (there is none, or ``CUDA_VISIBLE_DEVICES`` is empty) all
    ranks compute on the CPU, over gloo.

    Args:
        timeout_s: Seconds after which a collective that other ranks never joined is an error, in a group made here.

    Returns:
        The :class:`Comm` of all ranks.

    Raises:
        ProcessGroupError: There is no group, and a variable is missing in the environment, or two ranks have the same
            GPU, as where a machine has more ranks than GPUs; on every rank.
    """
    if dist.is_initialized():
        return comm_of_group(_world(), None)
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ProcessGroupError(
            f"There is no process group to join: {', '.join(missing)} not set. "
            "Start the script with `fullshard launch` or torchrun."
        )
    return _join(datetime.timedelta(seconds=timeout_s))


def _join(timeout: datetime.timedelta) -> Comm:
    """Meet the other ranks, agree on where all compute, and make the process group."""
    if os.environ["RANK"] != "0":
        _await_store(timeout.total_seconds())
    store, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
    store.set_timeout(timeout)
    gpu = gpu_of_rank()
    # The prefix that torch uses for a rendezvous of its own.
    meeting: dict[str, Any] = {"store": PrefixStore("default_pg", store), "rank": rank, "world_size": size}
    if not all_have_gpus(store, rank, size, gpu):
        dist.init_process_group("gloo", timeout=timeout, **meeting)
        return comm_of_group(_world(), torch.device("cpu"))
    assert gpu is not None
    torch.cuda.set_device(gpu)
    dist.init_process_group("nccl", timeout=timeout, device_id=gpu, **meeting)
    return comm_of_group(_world(), gpu)


def _await_store(seconds: float) -> None:
    """Wait until rank 0's store accepts connections, for ``seconds`` at most; torch then reports what is wrong.

    torch tries a refused connection again only after 0.3 to 0.6 s, which was a fifth of a recovery.
    """
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    deadline, pause_s = time.monotonic() + seconds, _FIRST_PAUSE_S
    while time.monotonic() < deadline:
        try:
            socket.create_connection(address, _LONGEST_PAUSE_S).close()
        except ConnectionRefusedError:
            time.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, 1.5 * pause_s)
        except OSError:  # another machine whose name or network is not there yet
            return
        else:
            return


def join_alone(device: torch.device) -> Comm:
    """Return the default process group; if there is none, create one with this process only. Any rank.

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


HostSum = Callable[[torch.Tensor], None]
"""Adds up an int64 host tensor over the ranks of a group, in place."""


def host_sum_of(group: dist.ProcessGroup, timeout: datetime.timedelta) -> HostSum | None:
    """Make a gloo group of the ranks of ``group``, and return what adds up over it; every rank of the group calls it.

    For ranks that compute on GPUs: such a sum waits for other ranks' Python, and for no device.
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
