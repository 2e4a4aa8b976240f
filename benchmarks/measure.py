"""Clocks and counters, the same for every contender."""

import gc
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contenders import Contender
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

WARM_ROUNDS = 1
"""Untimed rounds before the timed ones, in addition to the step that each contender runs when it is built."""
SETTLE_S = 0.005
"""Time for gloo's threads to release a finished collective's buffers."""


def interleaved(
    contenders: list[Contender],
    rounds: int,
    *,
    work: Callable[[Contender], float],
    tidy: Callable[[Contender], None],
    barrier: Callable[[], Any],
    progress: Callable[[str], None],
) -> dict[str, dict[str, list[float]]]:
    """Run ``work`` of every contender in turn, ``rounds`` times; each round starts with the next contender.

    Seconds run from a barrier to a barrier: until every rank is done. The garbage collector runs between steps only.

    Returns:
        For each name its ``seconds`` and ``losses``, one a timed round.
    """
    record: dict[str, dict[str, list[float]]] = {c.name: {"seconds": [], "losses": []} for c in contenders}
    gc.disable()
    for number in range(WARM_ROUNDS + rounds):
        if number <= WARM_ROUNDS:
            gc.collect()
            gc.freeze()  # objects that live from here on are not scanned again before each step
        progress(f"round {number + 1} of {WARM_ROUNDS + rounds}")
        turn = number % len(contenders)
        for contender in contenders[turn:] + contenders[:turn]:
            gc.collect()
            barrier()
            start = time.perf_counter()
            loss = work(contender)
            barrier()
            seconds = time.perf_counter() - start
            tidy(contender)
            if number >= WARM_ROUNDS:
                record[contender.name]["seconds"].append(seconds)
                record[contender.name]["losses"].append(loss)
    gc.enable()
    gc.unfreeze()
    return record


def summary(seconds: list[float]) -> dict[str, Any]:
    """Return the median, the minimum and all values."""
    rounded = [round(s, 5) for s in seconds]
    return {"median_s": round(statistics.median(seconds), 5), "min_s": min(rounded), "all_s": rounded}


def slowest(per_rank: Iterable[list[float]]) -> list[float]:
    """Return the slowest rank's time of each round."""
    return [max(times) for times in zip(*per_rank, strict=True)]


def reset_resident_peak() -> None:
    """Reset VmHWM to the currently resident memory."""
    Path("/proc/self/clear_refs").write_text("5")


def resident_peak_bytes() -> int:
    """Return VmHWM of this process: the peak resident memory since the last reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM line: peak resident memory can be read on Linux only.")


def loopback_sent_bytes() -> int:
    """Return the bytes sent on the loopback device, headers included."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    raise RuntimeError("/proc/net/dev has no loopback device: bytes on the wire can be read on Linux only.")


class TensorMeter:
    """Counts every tensor byte that the training thread allocates and frees, from before the model is built.

    fullshard.core.comm.MemoryMeter can start in the middle of a run, but then it misses memory held only by C++ (DDP's
    buckets) and releases of earlier allocations (FSDP1's gradient shards). The profiler slows steps down.

    Only releases in the training thread are counted. gloo's threads hold a collective's buffers until just after it
    is done, so waits last slightly longer here to make the training thread the last holder.

    Attributes:
        stretches: For each name given to :meth:`stretch`, the bytes live at its ``start`` and ``end`` and their
            ``peak`` in between; set on exit.
    """

    def __init__(self) -> None:
        """Start without stretches; counting starts when the context is entered."""
        self.stretches: dict[str, dict[str, int]] = {}
        self._names: list[str] = []

    def stretch(self, name: str) -> record_function:
        """Return a context whose memory is reported as ``name``."""
        self._names.append(name)
        return record_function(name)

    def __enter__(self) -> "TensorMeter":
        """Start counting from zero."""
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        with silenced():
            self._profile.__enter__()
        self._settling = _settling_waits()
        self._settling.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop counting and compute the stretches."""
        self._settling.__exit__(*error)
        with silenced():
            self._profile.__exit__(*error)
        profiler: Any = self._profile.profiler
        events = profiler.kineto_results.events()
        changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
        spans = {e.name(): (e.start_ns(), e.end_ns()) for e in events if e.name() in self._names}
        for name, (start, end) in spans.items():
            before = sum(size for at, size in changes if at < start)
            live = peak = before
            for size in (size for at, size in changes if start <= at <= end):
                live += size
                peak = max(peak, live)
            self.stretches[name] = {"start": before, "end": live, "peak": peak}


@contextmanager
def _settling_waits() -> Iterator[None]:
    plain = dist.Work.wait

    def wait(work: dist.Work, *args: Any, **kwargs: Any) -> bool:
        done = plain(work, *args, **kwargs)
        time.sleep(SETTLE_S)
        return done

    dist.Work.wait = wait  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        dist.Work.wait = plain


@contextmanager
def silenced() -> Iterator[None]:
    """Suppress what the profiler's library prints on stderr when it starts and stops."""
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


# The tensor that each copying operator writes: its first argument, its out= argument, or its result.
_COPIES_INTO_FIRST = {"aten.copy_.default", "aten._foreach_copy_.default"}
_COPIES_INTO_OUT = {
    "aten.cat.out",
    "aten.stack.out",
    "aten.mul.out",  # DDP scales a gradient into its bucket with it
    "aten.div.out",
    "aten.split_with_sizes_copy.out",
    "aten._chunk_cat.out",
    "fsdp.split_with_sizes_copy.default",
    "fsdp.chunk_cat.default",
}
_COPIES_INTO_RESULT = {
    "aten._to_copy.default",
    "aten.clone.default",
    "aten.cat.default",
    "aten.stack.default",
    "aten.constant_pad_nd.default",
    "aten.split_with_sizes_copy.default",
    "aten._chunk_cat.default",
}


class OperatorCounter(TorchDispatchMode):
    """Counts the copying operators and the collectives that the training thread calls.

    Attributes:
        copied_bytes: For each copying operator, the bytes that it wrote.
        collectives: For each of c10d's operators, how often it was called.
    """

    def __init__(self) -> None:
        """Start from zero."""
        super().__init__()
        self.copied_bytes: Counter[str] = Counter()
        self.collectives: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operator and count it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = str(func)
        written = None
        if name in _COPIES_INTO_FIRST:
            written = args[0]
        elif name in _COPIES_INTO_OUT:
            written = kwargs["out"]
        elif name in _COPIES_INTO_RESULT:
            written = result
        elif name == "fsdp.all_gather_copy_in.default":
            written = result[0]  # this rank's slice; result[1] is the full buffer, not written yet
        elif name.startswith("c10d."):
            self.collectives[name] += 1
        if written is not None:
            self.copied_bytes[name] += sum(tensor.nbytes for tensor in _tensors(written))
        return result


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for item in value:
            yield from _tensors(item)
