"""A checker of stream order: fake streams with vector clocks over a real run of ranks as threads.

On CUDA, operations run on streams, side by side unless an event orders them. On CPU everything happens at once and in
order, so a missing wait does no harm and no comparison of numbers finds it. Here each rank keeps the clocks that the
same calls would have on CUDA. The compute stream runs every aten operation; each group of ranks has a stream for its
collectives, as NCCL has; each name passed to ``Device.on_side_stream`` has one. A collective waits for the stream it is
issued on, and the stream current at ``Work.wait()`` waits for the collective: nothing else orders anything. Found are:

- two accesses to the same bytes, one of them a write, on different streams, neither ordered before the other;
- memory given back, by ``Device.release`` or by the last reference, that another stream may still use;
- bytes read before anything was written there (after ``Device.take`` or ``torch.empty``);
- a read or write of released memory, which raises, because it may crash.

Memory that went through ``Device.pin`` is the host's: the CPU uses it without a stream, so that copies into it must be
waited for with ``Device.host_ready``. Copies from the host to the device are not looked at.
"""

import threading
import weakref
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fullshard.core.comm import DONE
from fullshard.core.comm.device import CudaDevice, Device
from support.parity import two_by_two

COMPUTE = "compute"
HOST = "host"

_UNDEFINED = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
_SHAPE_ONLY = _UNDEFINED | {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"}
_OVERWRITES = {"copy_", "fill_", "zero_", "normal_", "uniform_", "_foreach_copy_", "_foreach_zero_"}


class ReleasedMemoryError(Exception):
    """An operation would read or write memory that was released."""


# Clocks


class Clocks:
    """A vector clock for each stream of one rank.

    Attributes:
        current: The stream that operations are issued on.
        time: How many operations each stream was given.
        seen: For each stream, the times of other streams that it has waited for.
    """

    def __init__(self):
        self.current = COMPUTE
        self.time = defaultdict(int)
        self.seen = defaultdict(dict)

    def tick(self, stream):
        self.time[stream] += 1
        return self.time[stream]

    def mark(self, stream):
        """What an event recorded on ``stream`` now would order."""
        return {**self.seen[stream], stream: self.time[stream]}

    def wait(self, stream, mark):
        """``stream`` waits for an event."""
        seen = self.seen[stream]
        for other, time in mark.items():
            seen[other] = max(time, seen.get(other, 0))

    def ordered(self, before, time, after):
        """Whether what ``before`` did at ``time`` is over when ``after`` does its next operation."""
        return before == after or self.seen[after].get(before, 0) >= time


@dataclass
class Buffer:
    """One storage.

    Attributes:
        name: What it is, for people; ``made_by`` describes it until somebody knows better.
        home: The stream it was allocated on, which its memory goes back to; ``HOST`` for host memory.
        held: False between ``Device.release`` and ``Device.take``.
        undefined: Byte ranges that nothing was written to.
        accesses: The last one by each (stream, writes, low, high): its time and operation.
    """

    made_by: str
    home: str
    name: str = ""
    held: bool = True
    undefined: list = field(default_factory=list)
    accesses: dict = field(default_factory=dict)
    alive: object = None  # the weak reference whose callback tells of the end

    def __str__(self):
        return self.name or self.made_by


# What an operation does


@cache
def _arguments_of(func):
    """Of an aten operation: which arguments it reads and which it writes; None for views, which do neither."""
    schema = func._schema
    name = schema.name.removeprefix("aten::")
    written = [argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments]
    if not any(written) and any(result.alias_info is not None for result in schema.returns):
        return None
    roles = {}
    for place, (argument, writes) in enumerate(zip(schema.arguments, written, strict=True)):
        overwrites = writes and (argument.kwarg_only or name in _OVERWRITES)
        reads = name not in _SHAPE_ONLY and not overwrites
        roles[argument.name] = roles[place] = (reads, writes)
    return roles


def _tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def span(tensor):
    """Bytes of its storage that a tensor reaches: first and past-the-last."""
    if tensor.numel() == 0:
        return 0, 0
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    low = tensor.storage_offset() * tensor.itemsize
    return low, low + reach * tensor.itemsize


def _verb(writes):
    return "writes" if writes else "reads"


def _without(ranges, low, high):
    """``ranges`` less the bytes from ``low`` to ``high``."""
    left = []
    for first, past in ranges:
        left += [(a, b) for a, b in ((first, min(past, low)), (max(first, high), past)) if a < b]
    return left


# The checker


class StreamChecker:
    """Watches one rank. Enter it on the rank's thread; wrap the comms; read ``violations`` at the end."""

    def __init__(self, rank):
        self.rank = rank
        self.clocks = Clocks()
        self.device = CheckedDevice(self)
        self.violations = []
        self.operations = 0
        self.over = {}  # for streams that the CPU has waited for, the time up to which: memory may be freed
        self._buffers = {}
        self._units = ()
        self._silent = False

    def __enter__(self):
        _here.checker = self
        self._mode = _Operations(self)
        self._mode.__enter__()
        return self

    def __exit__(self, *error):
        self._mode.__exit__(*error)
        _here.checker = None

    def comm(self, inner, name="shard"):
        """``inner``, with its collectives on the stream ``name``."""
        return CheckedComm(self, inner, f"{name} group")

    def mesh(self, strategy, comm):
        """All ranks on one axis, or for the hybrid strategies 2 replicas of 2 ranks."""
        if not strategy.needs_two_axes:
            return self.comm(comm)
        replicate, shard = two_by_two(comm)
        return self.comm(replicate, "replicate"), self.comm(shard)

    def names_from(self, model):
        """Call the buffers of a sharded model by the names of its units."""
        self._units = model._fullshard_runtime.units

    def name_after(self, shard, full):
        """``shard`` receives what ranks' ``full`` add up to."""
        self._buffer(shard.untyped_storage(), shard).name = f"reduced {self._buffer(full.untyped_storage(), full)}"

    @contextmanager
    def silent(self):
        """What happens inside is not on the compute stream: it stands for a collective."""
        before, self._silent = self._silent, True
        try:
            yield
        finally:
            self._silent = before

    # Events

    def operation(self, func, args, kwargs):
        """An aten operation starts on the current stream; returns the storages of its arguments."""
        name, roles = func._schema.name.replace("::", "."), _arguments_of(func)
        known = set()
        stream = self.clocks.current
        time = self.clocks.tick(stream)
        for place, value in (*enumerate(args), *kwargs.items()):
            reads, writes = (False, False) if roles is None else roles[place]
            for tensor in _tensors(value):
                known.add(tensor.untyped_storage()._cdata)
                if reads:
                    self.access(tensor, span(tensor), name, stream, time, writes=False)
                if writes:
                    self.access(tensor, span(tensor), name, stream, time, writes=True)
        return known

    def results(self, func, known, result):
        """An operation is done: what it returned in new memory, it wrote."""
        name = func._schema.name.removeprefix("aten::")
        for tensor in _tensors(result):
            key = tensor.untyped_storage()._cdata
            if key in known or tensor.numel() == 0:
                continue
            buffer = self._buffer(tensor.untyped_storage(), tensor, f"aten.{name}")
            stream = self.clocks.current
            if name in _UNDEFINED:
                buffer.undefined = [(0, tensor.untyped_storage().nbytes())]
            else:
                self.access(tensor, span(tensor), f"aten.{name}", stream, self.clocks.time[stream], writes=True)

    def collective(self, stream, name, reads=(), writes=()):
        """A collective is issued; ``reads`` and ``writes`` are pairs of a tensor and a byte range of its storage.

        Returns:
            The mark that ``Work.wait()`` waits for.
        """
        self.clocks.wait(stream, self.clocks.mark(self.clocks.current))
        time = self.clocks.tick(stream)
        for writing, operands in ((False, reads), (True, writes)):
            for tensor, bounds in operands:
                self.access(tensor, bounds, name, stream, time, writes=writing)
        return self.clocks.mark(stream)

    def access(self, tensor, bounds, operation, stream, time, *, writes):
        """``operation`` reads or writes the bytes ``bounds`` of the storage of ``tensor``."""
        low, high = bounds
        if low == high:
            return
        self.operations += 1
        buffer = self._buffer(tensor.untyped_storage(), tensor)
        if not buffer.name and (stream != COMPUTE or not buffer.held or buffer.undefined):
            buffer.name = self._name_of(tensor.untyped_storage()._cdata)
        if buffer.home == HOST and stream == COMPUTE:
            stream, time = HOST, self.clocks.tick(HOST)
        does = f"{operation} on {stream} {_verb(writes)} {buffer}"
        if not buffer.held:
            self._report(f"{does}, which is released")
            raise ReleasedMemoryError(self.violations[-1])
        for (other, other_writes, first, past), (when, what) in buffer.accesses.items():
            conflict = (writes or other_writes) and first < high and low < past
            if conflict and not self.clocks.ordered(other, when, stream):
                self._report_unordered(does, stream, other, what, other_writes)
        if writes:
            buffer.undefined = _without(buffer.undefined, low, high)
        elif any(first < high and low < past for first, past in buffer.undefined):
            self._report(f"{does} before anything is written there")
            buffer.undefined = []
        buffer.accesses[stream, writes, low, high] = (time, operation)

    def take(self, storage):
        """Memory came to ``storage``."""
        buffer = self._buffer(storage)
        if self.clocks.current != COMPUTE:
            self._report(f"{buffer} is taken on {self.clocks.current}, not on {COMPUTE}")
        buffer.held, buffer.home = True, self.clocks.current
        buffer.undefined = [(0, storage.nbytes())]

    def release(self, storage):
        """The memory of ``storage`` is about to go."""
        buffer = self._buffer(storage)
        buffer.name = buffer.name or self._name_of(storage._cdata)
        self._check_free(buffer, "released")
        buffer.held = False
        buffer.accesses.clear()

    def pin(self, storage):
        """``storage`` is host memory."""
        buffer = self._buffer(storage)
        buffer.home, buffer.name = HOST, "host memory"

    # Buffers

    def _buffer(self, storage, tensor=None, made_by="given"):
        key = storage._cdata
        buffer = self._buffers.get(key)
        if buffer is None:
            what = "storage" if tensor is None else f"{tensor.dtype}{list(tensor.shape)}".removeprefix("torch.")
            buffer = self._buffers[key] = Buffer(f"{what} ({made_by})", self.clocks.current)
            buffer.alive = weakref.ref(storage, partial(self._gone, key))
        return buffer

    def _gone(self, key, _reference):
        """The last reference to a storage is gone; called by whichever thread dropped it."""
        buffer = self._buffers.pop(key)
        if buffer.held:
            self._check_free(buffer, "freed")

    def _check_free(self, buffer, freed):
        for (stream, writes, _, _), (time, operation) in buffer.accesses.items():
            if time > self.over.get(stream, 0) and not self.clocks.ordered(stream, time, buffer.home):
                does = f"{buffer} is {freed} on {buffer.home}"
                self._report_unordered(does, buffer.home, stream, operation, writes)

    def _name_of(self, key):
        for unit in self._units:
            for lane in unit.lanes:
                tensors = {
                    "gathered parameters": lane.full.tensor,
                    "shard": lane.shard,
                    "gradient": lane.gradient,
                    "partial gradient": lane.partial,
                }
                for what, tensor in tensors.items():
                    if tensor is not None and tensor.untyped_storage()._cdata == key:
                        return f"{what} of {unit.name}"
        return ""

    def _report_unordered(self, does, stream, other, operation, writes):
        self._report(f"{does} while {operation} on {other} {_verb(writes)} it: {stream} has not waited for {other}")

    def _report(self, violation):
        violation = f"rank {self.rank}: {violation}"
        if violation not in self.violations:
            self.violations.append(violation)


_here = threading.local()


def install(monkeypatch):
    """Let the engine use the device of the checker that its thread has entered; once a test, on any thread."""
    monkeypatch.setattr("fullshard.core.engine.setup.api.device_of", lambda _device: _here.checker.device)
    for name in ("tolist", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, _host_read(getattr(torch.Tensor, name)))


def _host_read(method):
    """A method that reads memory without an operation; on CUDA it copies to the host on the current stream."""

    def read(tensor, *args, **kwargs):
        checker = getattr(_here, "checker", None)
        if checker is not None and not checker._silent:
            stream = checker.clocks.current
            time = checker.clocks.tick(stream)
            checker.access(tensor, span(tensor), f"Tensor.{method.__name__}", stream, time, writes=False)
        return method(tensor, *args, **kwargs)

    return read


class _Operations(TorchDispatchMode):
    """Shows a checker every aten operation of its thread, backward included."""

    def __init__(self, checker):
        super().__init__()
        self.checker = checker

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.checker._silent:
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            known = self.checker.operation(func, args, kwargs)
            result = func(*args, **kwargs)
            self.checker.results(func, known, result)
        return result


class CheckedWork:
    """A collective, or work on a side stream, under way; ``name`` is the collective's or the stream's."""

    def __init__(self, checker, name, mark, inner, keep=None):
        self.checker = checker
        self.name = name
        self.mark = mark
        self.inner = inner
        self.keep = keep  # alive until waited for

    def wait(self):
        self.inner.wait()
        self.checker.clocks.wait(self.checker.clocks.current, self.mark)
        self.keep = None


class CheckedDevice:
    """A :class:`~fullshard.core.comm.device.Device` with CUDA's streams for a checker, and the CPU's memory."""

    reduces_behind = CudaDevice.reduces_behind

    def __init__(self, checker):
        self.checker = checker
        self.inner = Device(torch.device("cpu"))
        self.device = self.inner.device

    def allocate(self, storage, nbytes):
        self.inner.allocate(storage, nbytes)
        self.checker.take(storage)

    def release(self, storage):
        self.checker.release(storage)
        self.inner.release(storage)

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def on_side_stream(self, name, work):
        clocks, side = self.checker.clocks, f"{name} stream"
        before = clocks.current
        clocks.wait(side, clocks.mark(before))
        clocks.current = side
        try:
            work()
        finally:
            clocks.current = before
        return CheckedWork(self.checker, side, clocks.mark(side), DONE, keep=work)

    def read_later(self, work, numbers):
        target = self.empty_host(len(numbers), numbers.dtype, pinned=True)

        def copy():
            work.wait()
            target.copy_(numbers)

        copied = self.on_side_stream("numbers", copy)

        def read():
            self.checker.clocks.wait(HOST, copied.mark)
            copied.wait()  # what the host issues from now on comes later
            with self.checker.silent():
                return target.tolist()

        return read

    def host_ready(self):
        self.checker.clocks.wait(HOST, self.checker.clocks.mark("offload stream"))
        self.inner.host_ready()

    def pin(self, tensor):
        self.checker.pin(tensor.untyped_storage())
        return self.inner.pin(tensor)

    def empty_host(self, numel, dtype, *, pinned):
        host = self.inner.empty_host(numel, dtype, pinned=pinned)
        self.checker.pin(host.untyped_storage())
        return host


class ShownComm:
    """Passes collectives on to ``inner``; ``_run`` is shown what each reads and writes, as tensors with byte ranges."""

    def __init__(self, checker, inner):
        self.checker, self.inner = checker, inner
        self.rank, self.size, self.device = inner.rank, inner.size, inner.device

    def announce(self, what):
        self.inner.announce(what)

    def all_gather(self, full, shard):
        # In place, this rank's own slice of the result is read and not written.
        (low, high), mine = span(full), span(shard)
        in_place = shard.untyped_storage()._cdata == full.untyped_storage()._cdata
        written = _without([(low, high)], *mine) if in_place else [(low, high)]
        writes = [(full, bounds) for bounds in written]
        return self._run("all-gather", lambda: self.inner.all_gather(full, shard), [(shard, mine)], writes)

    def reduce_scatter(self, shard, full):
        operands = [(full, span(full))], [(shard, span(shard))]
        return self._run("reduce-scatter", lambda: self.inner.reduce_scatter(shard, full), *operands)

    def exchange(self, received, sent):
        reads, writes = [(part, span(part)) for part in sent], [(part, span(part)) for part in received]
        return self._run("exchange", lambda: self.inner.exchange(received, sent), reads, writes)

    def all_reduce(self, tensor, op="sum"):
        operand = [(tensor, span(tensor))]
        return self._run("all-reduce", lambda: self.inner.all_reduce(tensor, op), operand, operand)

    def broadcast(self, tensor, source=0):
        operand = [(tensor, span(tensor))]
        operands = (operand, []) if self.rank == source else ([], operand)
        return self._run("broadcast", lambda: self.inner.broadcast(tensor, source), *operands)

    def gather(self, shard, full, target=0):
        writes = [] if full is None else [(full, span(full))]
        return self._run("gather", lambda: self.inner.gather(shard, full, target), [(shard, span(shard))], writes)

    def all_gather_object(self, value):
        with self.checker.silent():
            return self.inner.all_gather_object(value)

    def barrier(self):
        with self.checker.silent():
            self.inner.barrier()


class CheckedComm(ShownComm):
    """Shows collectives to a checker, on a stream of their own."""

    def __init__(self, checker, inner, stream):
        super().__init__(checker, inner)
        self.stream = stream

    def _run(self, name, issue, reads, writes):
        mark = self.checker.collective(self.stream, name, reads, writes)
        with self.checker.silent():
            return CheckedWork(self.checker, name, mark, issue())

    def reduce_scatter(self, shard, full):
        work = super().reduce_scatter(shard, full)
        self.checker.name_after(shard, full)
        return work
