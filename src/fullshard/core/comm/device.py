"""What the engine needs of an accelerator besides collectives: memory on the right stream, side streams, host copies.

The *compute stream* is the one that forward, backward and the optimizer run on: CUDA's current stream wherever the
engine is called. Unit buffers are allocated and released there and nowhere else, so that the allocator may reuse
released memory at once; what other streams do with a buffer is ordered by events before it is released.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from fullshard.core.comm.labels import labelled
from fullshard.core.comm.protocol import Work
from fullshard.errors import ConfigError

T = TypeVar("T")

HUGE_PAGE_BYTES = 2 << 20
HUGE_FROM_BYTES = 4 << 20
"""Smallest buffer for which huge pages are requested; smaller ones hardly contain a complete huge page.

Fresh memory from glibc's heap below this size is recycled and gains nothing."""

_HOST_COPIES = "offload"
_SENT = "sent"
_MADV_HUGEPAGE = 14

if sys.platform == "linux":
    _madvise = ctypes.CDLL(None).madvise
    _madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Device:
    """A rank's device; one for each sharded model, never called by two threads at a time.

    As written here it is the CPU, where operations run in the order of issue; also the meta device, where nothing runs.

    Attributes:
        device: Where units compute; a CUDA device with its index.
        reduces_behind: Reduce-scatters that may still be under way when the next unit's gradients need memory. Each
            costs the memory of a unit's gradients. One hides it behind the next unit's backward. 0 on the CPU, and 1
            where messages travel meanwhile (:func:`fullshard.core.comm.hides_messages`).
    """

    reduces_behind = 0

    def __init__(self, device: torch.device) -> None:
        """Compute on ``device``."""
        self.device = device

    def allocate(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Give ``nbytes`` of memory, with undefined content, to a storage that has none; on the compute stream."""
        storage.resize_(nbytes)
        # A fresh buffer costs a page fault for every 4 KiB when first written, longer than the copy into it:
        # allocating, writing and releasing 66 MB took 22 ms with small pages, 10 ms with huge ones.
        if storage.device.type == "cpu":
            _ask_for_huge_pages(storage.data_ptr(), nbytes)

    def release(self, storage: torch.UntypedStorage) -> None:
        """Free a storage's memory, on the compute stream; other streams' uses of it were waited for."""
        storage.resize_(0)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a new flat buffer with undefined content, on the compute stream, as with :meth:`allocate`."""
        buffer = torch.empty(numel, dtype=dtype, device=self.device)
        if self.device.type == "cpu":
            _ask_for_huge_pages(buffer.data_ptr(), buffer.nbytes)
        return buffer

    def trim(self) -> None:
        """Return memory that the allocator keeps and nothing uses to the device; waits for it."""

    def on_side_stream(self, name: str, work: Callable[[], None]) -> Work:
        """Run ``work`` on the side stream ``name``, after everything issued to the compute stream so far.

        Tensors that ``work`` holds stay alive until the result was waited for. One that it drops earlier, such as by
        setting an attribute to None, may lose its memory while the side stream still reads it.

        Args:
            name: Name of the stream; calls with one name run one after the other. ``"offload"`` is for copies to host
                memory, see :meth:`host_ready`.
            work: Issues operations on the current stream. It is called in this thread, at once or when the result is
                waited for.

        Returns:
            ``wait()`` makes the compute stream wait for it.
        """
        return _DeferredWork(work)  # so that no collective is waited for earlier

    @property
    def queues(self) -> bool:
        """True if operations are queued, so that reading a number waits for everything issued before it."""
        return False

    def from_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a host tensor on the device, for the compute stream, without waiting for it."""
        return tensor.to(self.device)

    def send(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        """Start copying host tensors to the device, beside the compute stream; for a thread that works ahead.

        Only that thread calls this object. The host tensors may be dropped at once.

        Returns:
            A function for the thread that computes, which makes the compute stream wait for the copies and returns
            them; they may be dropped like any tensor of the compute stream.
        """
        copies = [tensor.to(self.device) for tensor in tensors]
        return lambda: copies

    def host_ready(self) -> None:
        """Return when the CPU may read what ``on_side_stream("offload", …)`` has copied to host memory."""

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor``, in host memory, copied to page-locked memory, from which copies overlap with compute."""
        return tensor

    def empty_host(self, numel: int, dtype: torch.dtype, *, pinned: bool) -> torch.Tensor:
        """Return a new flat host buffer with undefined content; ``pinned``: page-locked, if the device supports it."""
        return self.empty(numel, dtype)

    def copy_to_host(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
        """Copy tensors to host memory, with their values after everything issued to the compute stream so far.

        Args:
            pairs: ``(target, source)`` of one dtype and shape; targets in host memory, page-locked to overlap with
                compute. Sources may be changed by operations that are issued later.

        Returns:
            A function for another thread that waits until the targets may be read; sources keep their current values
            until then.
        """
        with labelled("copy_to_host", str(self.device)):
            for target, source in pairs:
                target.copy_(source)
        return lambda: None

    def read_later(self, work: Work, numbers: torch.Tensor) -> Callable[[], list[int]]:
        """Copy a collective's result to host memory, behind the collective and nothing issued after it.

        Args:
            work: The collective, just issued.
            numbers: Its result, flat.

        Returns:
            A function that waits until the copy has arrived, not for later operations, and returns the numbers.
        """

        def read() -> list[int]:
            work.wait()
            return numbers.tolist()

        return read

    def for_thread(self, work: Callable[[], T]) -> Callable[[], T]:
        """Wrap ``work`` for another thread to call, while this one issues nothing and waits for it.

        Another thread would issue on the default stream of the first device, which no event orders. The wrapper waits,
        on the CPU, for everything issued to the compute stream so far, because ``work`` may write to host memory that
        copies under way still read; what it issues goes to that compute stream, before everything that this thread
        issues afterwards.
        """
        return work

    def supports_bf16(self) -> tuple[bool, str]:
        """Return whether the device computes bfloat16 in hardware, and a sentence about it for users."""
        found = torch.cpu.get_capabilities()
        units = [name for name in ("amx_bf16", "avx512_bf16", "sve_bf16", "bf16") if found.get(name, False)]
        if units:
            return True, f"This CPU computes bfloat16 in hardware ({', '.join(units)})."
        return False, "This CPU has no bfloat16 arithmetic: it is emulated, which is slower than float32."

    def supports_fp8(self) -> bool:
        """Return whether the device multiplies matrices of float8 in hardware."""
        return False


class _DeferredWork:
    """A function that runs when it is waited for."""

    def __init__(self, work: Callable[[], None]) -> None:
        """Keep ``work`` for the first :meth:`wait`, which calls it."""
        self._work: Callable[[], None] | None = work

    def wait(self) -> None:
        """See :meth:`fullshard.core.comm.protocol.Work.wait`."""
        work, self._work = self._work, None
        if work is not None:
            work()


def _ask_for_huge_pages(address: int, nbytes: int) -> None:
    """Request huge pages for the part of ``nbytes`` at ``address`` that consists of complete ones.

    It is advice to Linux: if it cannot be followed (no contiguous memory, huge pages disabled), pages are small.
    """
    if sys.platform == "linux" and nbytes >= HUGE_FROM_BYTES:
        first = -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        past = (address + nbytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        if first < past:
            _madvise(first, past - first, _MADV_HUGEPAGE)


class CudaDevice(Device):
    """One CUDA device."""

    reduces_behind = 1

    def __init__(self, device: torch.device) -> None:
        """Compute on ``device``; without an index, on the current one."""
        self.device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
        self._streams: dict[str, torch.cuda.Stream] = {}

    def trim(self) -> None:
        """See :meth:`Device.trim`."""
        torch.cuda.empty_cache()

    def on_side_stream(self, name: str, work: Callable[[], None]) -> _SideWork:
        """See :meth:`Device.on_side_stream`."""
        if name not in self._streams:
            self._streams[name] = torch.cuda.Stream(self.device)
        side = self._streams[name]
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            work()
        done = torch.cuda.Event()
        done.record(side)
        return _SideWork(self.device, done, work)

    @property
    def queues(self) -> bool:
        """See :meth:`Device.queues`."""
        return True

    def from_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """See :meth:`Device.from_host`."""
        # The allocator of page-locked memory keeps this copy until the stream has read it.
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def send(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        """See :meth:`Device.send`."""
        if _SENT not in self._streams:
            self._streams[_SENT] = torch.cuda.Stream(self.device)
        side, done = self._streams[_SENT], torch.cuda.Event()
        # A new thread's current device is the first one. Nothing is waited for: no other stream knows these tensors.
        with torch.cuda.device(self.device), torch.cuda.stream(side):
            copies = [self.from_host(tensor) for tensor in tensors]
            done.record(side)

        def arrived() -> list[torch.Tensor]:
            compute = torch.cuda.current_stream(self.device)
            compute.wait_event(done)
            for copy in copies:
                # Their memory is the side stream's, which must not reuse it before the compute stream has read it.
                copy.record_stream(compute)
            return copies

        return arrived

    def host_ready(self) -> None:
        """See :meth:`Device.host_ready`."""
        if _HOST_COPIES in self._streams:
            self._streams[_HOST_COPIES].synchronize()

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """See :meth:`Device.pin`."""
        return tensor.pin_memory()

    def empty_host(self, numel: int, dtype: torch.dtype, *, pinned: bool) -> torch.Tensor:
        """See :meth:`Device.empty_host`."""
        return torch.empty(numel, dtype=dtype, pin_memory=pinned)

    def copy_to_host(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
        """See :meth:`Device.copy_to_host`."""
        with labelled("copy_to_host", str(self.device)):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self.device))
        return done.synchronize

    def read_later(self, work: Work, numbers: torch.Tensor) -> Callable[[], list[int]]:
        """See :meth:`Device.read_later`."""
        target = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)

        def copy() -> None:
            work.wait()  # on the side stream, so that the compute stream continues
            target.copy_(numbers, non_blocking=True)

        copied = self.on_side_stream("numbers", copy)

        def read() -> list[int]:
            copied.synchronize()
            return target.tolist()

        return read

    def for_thread(self, work: Callable[[], T]) -> Callable[[], T]:
        """See :meth:`Device.for_thread`."""
        stream = torch.cuda.current_stream(self.device)
        settled = torch.cuda.Event()
        settled.record(stream)

        def there() -> T:
            settled.synchronize()
            with torch.cuda.device(self.device), torch.cuda.stream(stream):
                return work()

        return there

    def supports_bf16(self) -> tuple[bool, str]:
        """See :meth:`Device.supports_bf16`."""
        with torch.cuda.device(self.device):
            native = torch.cuda.is_bf16_supported(including_emulation=False)
        major, minor = torch.cuda.get_device_capability(self.device)
        name = f"{torch.cuda.get_device_name(self.device)} (compute capability {major}.{minor})"
        if native:
            return True, f"{name} computes bfloat16 in hardware."
        return False, f"{name} has no bfloat16 arithmetic, which needs compute capability 8.0."

    def supports_fp8(self) -> bool:
        """See :meth:`Device.supports_fp8`."""
        return torch.cuda.get_device_capability(self.device) >= (8, 9)


class _SideWork:
    """Operations under way on a side stream."""

    def __init__(self, device: torch.device, done: torch.cuda.Event, work: Callable[[], None]) -> None:
        """Complete when ``done`` is; ``work`` keeps its tensors alive, which were allocated on the compute stream."""
        self._device = device
        self._done = done
        self._work: Callable[[], None] | None = work

    def wait(self) -> None:
        """See :meth:`fullshard.core.comm.protocol.Work.wait`."""
        torch.cuda.current_stream(self._device).wait_event(self._done)
        self._work = None

    def synchronize(self) -> None:
        """Return when the operations are complete; the CPU waits."""
        self._done.synchronize()
        self._work = None


def device_of(device: torch.device) -> Device:
    """Return the :class:`Device` for ``device``.

    Raises:
        ConfigError: It is neither the CPU, the meta device nor a CUDA device.
    """
    if device.type == "cuda":
        return CudaDevice(device)
    if device.type in ("cpu", "meta"):
        return Device(device)
    raise ConfigError(f"A model can be sharded on 'cuda', 'cpu' or 'meta'; got device {str(device)!r}.")


def add_rows(table: torch.Tensor, indices: torch.Tensor, rows: torch.Tensor) -> None:
    """Add each of ``rows``, (lookups, width), to the row of ``table``, (height, width), that ``indices`` names.

    The same call gives the same bits, also on CUDA, where ``index_add_`` adds rows of one index in any order.
    ``index_put_`` is deterministic too, but took 23 ms for 8,192 and 2,048 rows of 1,024 numbers on an H100.
    """
    if table.is_cuda:
        add_rows_of_groups(table, indices, rows)
    else:
        table.index_add_(0, indices, rows)


def add_rows_of_groups(table: torch.Tensor, indices: torch.Tensor, rows: torch.Tensor) -> None:
    """Add rows as :func:`add_rows` does, but first sum the rows of each index, then add each sum once.

    No temporary has the table's size, and the CPU waits for nothing: the number of distinct indices is not read.
    """
    lookups = len(indices)
    if not lookups:
        return
    in_order, order = indices.sort(stable=True)
    starts = in_order.new_zeros(lookups)
    starts[1:] = in_order[1:] != in_order[:-1]
    group_in_order = starts.cumsum(0)
    group = torch.empty_like(order)
    group[order] = group_in_order
    sums = torch.ops.aten.embedding_dense_backward(rows, group, lookups, padding_idx=-1, scale_grad_by_freq=False)
    # Groups that do not exist have a sum of zeros, which may be added anywhere.
    places = torch.arange(lookups, device=table.device) % len(table)
    places.scatter_(0, group_in_order, in_order)
    table.index_add_(0, places, sums)
