"""Collectives of device tensors through host memory: tests of several ranks on one GPU, which NCCL refuses.

A collective returns at once and runs in a thread of its group: it copies the tensors to host memory piece by piece,
runs the same collective of a CPU group, and copies the result back. The program sees the behaviour of a NCCL
collective: it starts after everything issued on the program's stream, and ``Work.wait()`` makes that stream wait for
the last copy. But ``wait()`` also blocks the CPU until that copy is issued.

A group holds two host buffers of :data:`STAGE_BYTES` each, however large the tensors are.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

import fullshard
from fullshard.core.comm import Comm, GlooComm, Work, process, settle
from fullshard.core.comm.protocol import ReduceOp

STAGE_BYTES = 16 << 20
"""Size of each of the two host buffers of a group; a larger tensor takes several collectives."""

Copies = Iterable[tuple[torch.Tensor, torch.Tensor]]
"""Pairs of a target and a source."""


class Job:
    """A function that another thread calls, with its completion and its error."""

    def __init__(self, work: Callable[[], None]) -> None:
        """Call ``work``, once."""
        self._work: Callable[[], None] | None = work
        self._over = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Call the function; an error is raised by :meth:`wait`."""
        assert self._work is not None
        try:
            # Buffers may have been created under inference mode, which allows changing them only in that mode.
            with torch.inference_mode():
                self._work()
        except BaseException as error:
            self._error = error
        finally:
            self._over.set()

    def drop(self) -> None:
        """Release the function and the tensors that it uses."""
        self._work = None

    def wait(self) -> None:
        """Wait until the function has returned; raise its error."""
        self._over.wait()
        if self._error is not None:
            raise self._error


class JobThread:
    """Runs the jobs of one group, one after the other, in the order of their submission; ends with this object."""

    def __init__(self, settle: Callable[[], None]) -> None:
        """Call ``settle`` after each job, before its tensors are released."""
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        thread = threading.Thread(target=_serve, args=(self._jobs, settle), name="fullshard collectives", daemon=True)
        thread.start()
        weakref.finalize(self, self._jobs.put, None)

    def submit(self, work: Callable[[], None]) -> Job:
        """Run ``work`` after everything that was submitted before."""
        job = Job(work)
        self._jobs.put(job)
        return job


def _serve(jobs: queue.SimpleQueue[Job | None], settle: Callable[[], None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()
        # The program may have dropped the work without waiting for it, so the copies' tensors must outlive them. An
        # error of the device is raised by its next user.
        with contextlib.suppress(RuntimeError):
            settle()
        job.drop()
        del job  # otherwise kept until the next one arrives


class Stage:
    """A group's resources on its device: the staging stream, the thread that runs collectives, and host buffers.

    Attributes:
        staging: Copies from and to the device.
        jobs: Runs the group's collectives.
    """

    def __init__(self, staging: CudaStaging, jobs: JobThread | None = None) -> None:
        """Copy with ``staging``; without ``jobs``, start a thread."""
        self.staging = staging
        self.jobs = jobs or JobThread(staging.settle)
        self._buffers: dict[str, torch.Tensor] = {}

    def buffer(self, name: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a host buffer, (numel,), of at most STAGE_BYTES; it reuses the memory of the last one of this name."""
        if name not in self._buffers:
            self._buffers[name] = self.staging.empty_host(STAGE_BYTES)
        return self._buffers[name][: numel * dtype.itemsize].view(dtype)

    def buffers(self, name: str, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return host buffers of the sizes of ``parts``, one after the other in the memory of the name."""
        sizes = [part.numel() for part in parts]
        return list(self.buffer(name, sum(sizes), parts[0].dtype).split(sizes))

    def fetch(self, copies: Copies) -> None:
        """Copy from the device; return when the CPU may use all host buffers."""
        self.bring(copies)
        self.staging.settle()

    def bring(self, copies: Copies) -> None:
        """Start copying to the device."""
        for target, source in copies:
            if target.numel():
                self.staging.copy(target, source)


class StagedWork:
    """A collective under way in host memory."""

    def __init__(self, staging: CudaStaging, job: Job, marks: list[Any]) -> None:
        """Complete when ``job`` and its copies are; ``job`` appends the mark of its copies to ``marks``."""
        self._staging = staging
        self._job: Job | None = job
        self._marks = marks

    def wait(self) -> None:
        """See :meth:`fullshard.core.comm.protocol.Work.wait`; raises what the group on the CPU raises."""
        if self._job is not None:
            self._job.wait()
            self._staging.wait(self._marks[0])
            self._job = None


class StagedComm:
    """A group of ranks whose collectives of device tensors run in host memory.

    Attributes:
        inner: The group's :class:`Comm` for tensors in host memory. Only jobs use it, or the program while none runs:
            a group's collectives are numbered in the order of its calls.
    """

    def __init__(self, inner: Comm, stage: Stage) -> None:
        """Run the collectives of ``inner`` for tensors on the device of ``stage``, which only this group uses."""
        self.inner = inner
        self.rank, self.size, self.device = inner.rank, inner.size, stage.staging.device
        self._stage = stage
        self._announced = ""

    @property
    def group(self) -> Any:
        """The process group."""
        return self.inner.group  # type: ignore[attr-defined]

    def announce(self, what: str) -> None:
        """See :meth:`Comm.announce`."""
        self._announced = what

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> Work:
        """See :meth:`Comm.all_gather`."""
        slices, mine = full.data.view(self.size, -1), shard.data.reshape(-1)
        in_place = slices[self.rank].data_ptr() == mine.data_ptr()
        arrive = [rank for rank in range(self.size) if rank != self.rank or not in_place]

        def work(stage: Stage) -> None:
            for low, high in self._pieces(mine, self.size):
                host = stage.buffer("full", self.size * (high - low), mine.dtype).view(self.size, -1)
                stage.fetch([(host[self.rank], mine[low:high])])
                _finish(self.inner.all_gather(host.view(-1), host[self.rank]))
                stage.bring((slices[rank, low:high], host[rank]) for rank in arrive)

        return self._submit(work)

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor) -> Work:
        """See :meth:`Comm.reduce_scatter`."""
        slices, mine = full.data.view(self.size, -1), shard.data.view(-1)

        def work(stage: Stage) -> None:
            for low, high in self._pieces(mine, self.size):
                host = stage.buffer("full", self.size * (high - low), full.dtype).view(self.size, -1)
                total = stage.buffer("part", high - low, mine.dtype)
                stage.fetch(zip(host, slices[:, low:high], strict=True))
                _finish(self.inner.reduce_scatter(total, host.view(-1)))
                stage.bring([(mine[low:high], total)])

        return self._submit(work)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        """See :meth:`Comm.all_reduce`."""
        flat = tensor.data.view(-1)

        def work(stage: Stage) -> None:
            for low, high in self._pieces(flat, 1):
                host = stage.buffer("full", high - low, flat.dtype)
                stage.fetch([(host, flat[low:high])])
                _finish(self.inner.all_reduce(host, op))
                stage.bring([(flat[low:high], host)])

        return self._submit(work)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> Work:
        """See :meth:`Comm.broadcast`."""
        flat, gives = tensor.data.view(-1), self.rank == source

        def work(stage: Stage) -> None:
            for low, high in self._pieces(flat, 1):
                host = stage.buffer("full", high - low, flat.dtype)
                stage.fetch([(host, flat[low:high])] if gives else [])
                _finish(self.inner.broadcast(host, source))
                stage.bring([] if gives else [(flat[low:high], host)])

        return self._submit(work)

    def gather(self, shard: torch.Tensor, full: torch.Tensor | None, target: int = 0) -> Work:
        """See :meth:`Comm.gather`."""
        slices = None if full is None else full.data.view(self.size, -1)
        mine = shard.data.reshape(-1)

        def work(stage: Stage) -> None:
            for low, high in self._pieces(mine, self.size):
                part = stage.buffer("part", high - low, mine.dtype)
                host = None if slices is None else stage.buffer("full", self.size * (high - low), mine.dtype)
                stage.fetch([(part, mine[low:high])])
                _finish(self.inner.gather(part, host, target))
                if host is not None and slices is not None:
                    stage.bring(zip(slices[:, low:high], host.view(self.size, -1), strict=True))

        return self._submit(work)

    def exchange(self, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> Work:
        """See :meth:`Comm.exchange`; a small additional all-reduce finds the number of pieces of the largest part."""
        to, out = [part.data.view(-1) for part in received], [part.data.reshape(-1) for part in sent]
        dtype = sent[self.rank].dtype
        each = self._numel_of_piece(dtype, self.size)

        def work(stage: Stage) -> None:
            stage.bring([(to[self.rank], out[self.rank])])
            to[self.rank], out[self.rank] = to[self.rank][:0], out[self.rank][:0]
            rounds = torch.tensor([-(-max(part.numel() for part in (*to, *out)) // each)])
            _finish(self.inner.all_reduce(rounds, "max"))
            for low in range(0, int(rounds) * each, each):
                targets, sources = ([part[low : low + each] for part in parts] for parts in (to, out))
                arrives, leaves = stage.buffers("full", targets), stage.buffers("part", sources)
                stage.fetch(zip(leaves, sources, strict=True))
                _finish(self.inner.exchange(arrives, leaves))
                stage.bring(zip(targets, arrives, strict=True))

        return self._submit(work)

    def all_gather_object(self, value: Any) -> list[Any]:
        """See :meth:`Comm.all_gather_object`."""
        self._drain()
        return self.inner.all_gather_object(value)

    def barrier(self) -> None:
        """See :meth:`Comm.barrier`."""
        self._drain()
        self.inner.barrier()

    def _submit(self, work: Callable[[Stage], None]) -> Work:
        """Run ``work`` after everything issued to the current stream so far."""
        staging, what = self._stage.staging, self._announced
        before, marks = staging.issued(), []

        def job() -> None:
            self.inner.announce(what)
            staging.begin(before)
            work(self._stage)
            marks.append(staging.copied())

        return StagedWork(staging, self._stage.jobs.submit(job), marks)

    def _drain(self) -> None:
        """Wait until no job runs, so that the program may call ``inner`` itself."""
        self._stage.jobs.submit(lambda: None).wait()
        self.inner.announce(self._announced)

    def _numel_of_piece(self, dtype: torch.dtype, ranks: int) -> int:
        return max(1, STAGE_BYTES // (ranks * dtype.itemsize))

    def _pieces(self, tensor: torch.Tensor, ranks: int) -> Iterator[tuple[int, int]]:
        """Yield the bounds of pieces of ``tensor`` such that ``ranks`` of them fit into a host buffer; at least one."""
        step = self._numel_of_piece(tensor.dtype, ranks)
        for low in range(0, max(1, tensor.numel()), step):
            yield low, min(low + step, tensor.numel())


def _finish(work: Work) -> None:
    """Wait until a collective in host memory is complete and other ranks have read this one's data."""
    work.wait()
    settle(work)


class CudaStaging:
    """Copies between a CUDA device and page-locked host memory, on a stream of their own. Marks are opaque.

    ``issued`` and ``wait`` are called by the rank's program and concern its current stream. The others are called by
    the thread that runs collectives and concern the staging stream, which runs copies in order.
    """

    def __init__(self, device: torch.device) -> None:
        """Copy from and to ``device``; without an index, the current one."""
        self.device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
        self._side = torch.cuda.Stream(self.device)

    def issued(self) -> torch.cuda.Event:
        """Return a mark of everything issued to the current stream so far."""
        return self._mark(torch.cuda.current_stream(self.device))

    def begin(self, mark: torch.cuda.Event) -> None:
        """Make later copies start after ``mark``."""
        self._side.wait_event(mark)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Start copying between tensors of one dtype and size; host tensors come from :meth:`empty_host`."""
        with torch.cuda.device(self.device), torch.cuda.stream(self._side):
            target.copy_(source, non_blocking=True)

    def settle(self) -> None:
        """Wait until all copies so far are complete and the CPU may use their host memory."""
        self._side.synchronize()

    def copied(self) -> torch.cuda.Event:
        """Return an event that is reached when all copies issued so far are complete."""
        return self._mark(self._side)

    def wait(self, mark: torch.cuda.Event) -> None:
        """Make the current stream wait for the event ``mark``."""
        torch.cuda.current_stream(self.device).wait_event(mark)

    def empty_host(self, nbytes: int) -> torch.Tensor:
        """Return ``nbytes`` of page-locked host memory with undefined content."""
        # Page-locking uses a device: a thread's default is the first one, on which this rank may have nothing.
        with torch.cuda.device(self.device):
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def _mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(stream)
        return event


class HostStaging:
    """The CPU as a device whose copies are made at once."""

    device = torch.device("cpu")

    def issued(self):
        return None

    def begin(self, mark):
        pass

    def copy(self, target, source):
        target.copy_(source)

    def settle(self):
        pass

    def copied(self):
        return None

    def wait(self, mark):
        pass

    def empty_host(self, nbytes):
        return torch.empty(nbytes, dtype=torch.uint8)


class SocketComm(GlooComm):
    """A gloo group that uses sockets: a driver may not let a process read another one's page-locked memory."""

    def _peer_memory(self):
        return None


_STAGES: weakref.WeakKeyDictionary[Any, Stage] = weakref.WeakKeyDictionary()
"""Comms of one group share a thread for their collectives."""


def _over_gloo(group: Any, device: torch.device) -> Comm:
    """Return what ``process._over_gloo`` does, and for a GPU the group through host memory."""
    if device.type == "cpu":
        return GlooComm(group)
    if group not in _STAGES:
        _STAGES[group] = Stage(CudaStaging(device))
    return StagedComm(SocketComm(group), _STAGES[group])


def init(timeout_s: float = 100.0) -> Comm:
    """Join as ``fullshard.init()`` does, or, where ranks are more than GPUs, share the first GPU; every rank."""
    if not 0 < torch.cuda.device_count() < int(os.environ["WORLD_SIZE"]):
        return fullshard.init(timeout_s=timeout_s)
    gpu = torch.device("cuda", 0)
    torch.cuda.set_device(gpu)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout_s))
    process._over_gloo = _over_gloo
    return process.comm_of_group(dist.group.WORLD, gpu)
