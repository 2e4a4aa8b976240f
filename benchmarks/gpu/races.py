"""Engines against each other: times in one process group, in turn; memory and counts alone, each in new processes."""

import faulthandler
import gc
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from measure import interleaved, slowest, summary
from ranks import RankFailed, teller
from step import entered
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.engines import ENTRIES, Entry, Racer
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.record import Lacking
from benchmarks.gpu.shapes import Method, Shape, check_lora, flops_module
from fullshard.core.comm import Comm, MemoryMeter

SHARE_OF_MEMORY = 0.7
"""Contenders are all alive at once if their state takes at most this share of the device; activations need the rest."""
PLACES = 5
DUMP_BEFORE_S = 5.0


@dataclass(frozen=True)
class Contest:
    """What is measured: a model, how it is trained, on how many ranks, by which engines.

    Attributes:
        rounds: Timed steps of each engine.
    """

    shape: Shape
    method: Method = Method()  # noqa: RUF009 (frozen)
    world: int = 1
    entries: Sequence[Entry] = ENTRIES
    rounds: int = 8

    @property
    def name(self) -> str:
        """The case's name."""
        return f"{self.shape.name}, {self.method}, {self.world} rank{'s' * (self.world > 1)}"

    def here(self, machine: Machine) -> "Contest":
        """Return the contest that this machine can hold.

        Raises:
            Lacking: A library is missing, the devices are too small, or no engine can run.
        """
        if self.method.lora:
            check_lora()
        state = self.shape.state_bytes(lora=self.method.lora)
        memory = machine.facts["memory_bytes"] * max(1, min(machine.facts["devices"], self.world))
        if machine.cuda and state > memory:
            raise Lacking(
                f"parameters, gradients and AdamW's moments take {state / 1e9:.0f} GB, and there are {memory / 1e9:.0f}"
            )
        if machine.devices_suffice(self.world):
            return self
        ours = [entry for entry in self.entries if entry.engine == "fullshard"]  # torch's need NCCL, a device a rank
        return Contest(self.shape, self.method, self.world, ours, self.rounds)


def race(machine: Machine, contest: Contest, limit_s: float) -> dict[str, Any]:
    """Time a step of each engine; interleaved if all fit into the device's memory, else one after the other, twice."""
    contest = contest.here(machine)
    state = contest.shape.state_bytes(lora=contest.method.lora) * len(contest.entries)
    fits = state <= SHARE_OF_MEMORY * machine.facts["memory_bytes"]
    turns = [contest.entries] if fits else [[entry] for entry in (*contest.entries, *contest.entries)]
    rounds = contest.rounds if fits else -(-contest.rounds // 2)
    end = time.monotonic() + limit_s
    seconds: dict[str, list[float]] = {}
    figures: dict[str, Any] = {"interleaved": fits, "engines": {}, "failures": {}}
    for entries in turns:
        if any(entry.name in figures["failures"] for entry in entries):
            continue
        part = Contest(contest.shape, contest.method, contest.world, entries, rounds)
        left = end - time.monotonic()
        try:
            ranks = machine.together(contest.world, _race_on_rank, part, machine.facts["devices"], left, limit_s=left)
        except RankFailed as error:
            if not fits and Lacking.__name__ not in str(error):  # the others have processes of their own
                figures["failures"][entries[0].name] = str(error)
                continue
            raise
        figures["failures"] |= ranks[0]["failures"]
        figures["losses"] = figures.get("losses", {}) | ranks[0]["losses"]
        for name in ranks[0]["seconds"]:
            seconds.setdefault(name, []).extend(slowest(rank["seconds"][name] for rank in ranks))
        figures["flops"] = ranks[0]["flops"]
    for name, values in seconds.items():
        figures["engines"][name] = summary(values) | rates(contest, min(values), ranks[0]["flops"])
    return _marked(figures, len(contest.entries))


def rates(contest: Contest, best: float, flops: dict[str, Any]) -> dict[str, Any]:
    """Return tokens a second and the share of the peak, of a step of ``best`` seconds."""
    shape = contest.shape
    found: dict[str, Any] = {"tokens_per_s": round(shape.tokens * contest.world / best, 1), "mfu": None}
    if flops["peak"]:
        needed = flops_module().Flops(**flops)
        targets = shape.batch * shape.target * contest.world
        used = needed.utilisation(tokens=shape.tokens * contest.world, target_tokens=targets, seconds=best)
        found["mfu"] = round(used, 4)
    return found


def _marked(figures: dict[str, Any], engines: int) -> dict[str, Any]:
    """Return the figures, with a text under ``failed`` if an engine has none."""
    if figures["failures"]:
        told = "; ".join(f"{name}: {why}" for name, why in figures["failures"].items())
        figures["failed"] = f"{len(figures['failures'])} of {engines} engines: {told}"
    return figures


def _race_on_rank(comm: Comm, contest: Contest, devices: int, limit_s: float) -> dict[str, Any]:
    prepare(comm.device, comm.size, devices, limit_s)
    tell = teller(contest.name, time.time(), speaks=comm.rank == 0)
    flops: dict[str, Any] = {}

    def make(name: str) -> Racer:
        gc.collect()
        if comm.device.type == "cuda":
            torch.cuda.empty_cache()  # of one that failed
        model = contest.method.model(contest.shape, comm.device)
        flops.update(flops_of(model, comm, devices))
        entry = next(entry for entry in contest.entries if entry.name == name)
        return Racer(entry, model, contest.shape.inputs(comm.rank, comm.device), comm, contest.shape.block)

    contenders, first, failures = entered([entry.name for entry in contest.entries], make, comm, tell)
    record = timed(contenders, contest.rounds, comm, tell) if contenders else {}
    return {
        "seconds": {name: taken["seconds"] for name, taken in record.items()},
        "losses": {n: [round(float(loss), 5) for loss in [first[n], *taken["losses"]]] for n, taken in record.items()},
        "failures": failures,
        "flops": flops,
    }


def timed(contenders: list[Any], rounds: int, comm: Any, tell: Callable[[str], None]) -> dict[str, Any]:
    """Run :func:`measure.interleaved` over training steps; a step ends when the device has finished it."""
    barrier = partial(settled, comm)
    return interleaved(contenders, rounds, work=Racer.step, tidy=_nothing, barrier=barrier, progress=tell)


def settled(comm: Any) -> None:
    """Return when all ranks' devices have nothing left to do."""
    if comm.device.type == "cuda":
        torch.cuda.synchronize(comm.device)
    if comm.size > 1:
        comm.barrier()
        if comm.device.type == "cuda":
            torch.cuda.synchronize(comm.device)


def prepare(device: torch.device, size: int, devices: int, limit_s: float) -> None:
    """Set this process up to measure; shortly before the limit it prints where each thread is.

    Raises:
        Lacking: There are GPUs, and ``fullshard.init()`` did not use them.
    """
    faulthandler.dump_traceback_later(max(1.0, limit_s - DUMP_BEFORE_S))
    if devices and device.type != "cuda":
        raise Lacking(f"fullshard.init() put {size} ranks on the CPU: nothing stages them over {devices} device(s)")
    if devices:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))  # offloaded optimizers step on the CPU


def flops_of(model: Any, comm: Any, devices: int) -> dict[str, Any]:
    """Return FLOPs of a source and of a target token, and the peak of the devices of all ranks; None if unknown."""
    counting = flops_module()
    source, target = counting.count_flops(model)
    peak = counting.peak_flops(comm.device, "bf16")
    return {"source_token": source, "target_token": target, "peak": peak and peak * min(comm.size, devices)}


def _nothing(contender: Any) -> None:
    """Do nothing: a step leaves nothing to clean up."""


def measure_alone(machine: Machine, contest: Contest, limit_s: float) -> dict[str, Any]:
    """Measure memory, waits and launches of each engine, alone in new processes."""
    contest = contest.here(machine)
    end = time.monotonic() + limit_s
    figures: dict[str, Any] = {"engines": {}, "failures": {}}
    for entry in contest.entries:
        left = end - time.monotonic()
        arguments = (contest, entry, machine.facts["devices"], left)
        try:
            ranks = machine.together(contest.world, _alone_on_rank, *arguments, limit_s=left)
        except RankFailed as error:
            if Lacking.__name__ in str(error):
                raise
            figures["failures"][entry.name] = str(error)
            continue
        figures["engines"][entry.name] = {
            key: max(rank[key] for rank in ranks) if isinstance(value, int) else value
            for key, value in ranks[0].items()
        }
    return _marked(figures, len(contest.entries))


def _alone_on_rank(comm: Comm, contest: Contest, entry: Entry, devices: int, limit_s: float) -> dict[str, Any]:
    """Take two warm-up steps, then one for memory, one for waits and one for launches."""
    prepare(comm.device, comm.size, devices, limit_s)
    cuda = comm.device.type == "cuda"
    model = contest.method.model(contest.shape, comm.device)
    racer = Racer(entry, model, contest.shape.inputs(comm.rank, comm.device), comm, contest.shape.block)
    for _ in range(2):
        racer.step()
    settled(comm)
    gc.collect()
    with MemoryMeter(comm.device) as meter:
        racer.step()
    stats = torch.cuda.memory_stats(comm.device) if cuda else {}
    settled(comm)
    with host_waits(comm.device) as places:
        racer.step()
    settled(comm)
    found = {"peak_bytes": meter.peak_bytes, "before_step_bytes": meter.start_bytes}
    found |= {"reserved_peak_bytes": stats.get("reserved_bytes.all.peak", 0)}
    found |= {"alloc_retries": stats.get("num_alloc_retries", 0), "host_waits": places.total()}
    return found | {"waits_at": dict(places.most_common(PLACES))} | _launches(racer, comm.device)


@contextmanager
def host_waits(device: torch.device) -> Iterator[Counter[str]]:
    """Count the places where the CPU waits for the GPU, as torch's sync debug mode warns of them."""
    places: Counter[str] = Counter()
    if device.type != "cuda":
        yield places
        return
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield places
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for warning in caught:
        if "synchronizing CUDA operation" in str(warning.message):
            places[f"{'/'.join(warning.filename.split('/')[-3:])}:{warning.lineno}"] += 1


def _launches(racer: Racer, device: torch.device) -> dict[str, int]:
    """Return how many kernels, copies and fills a step puts on the device, and how many operators it calls."""
    cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda) as profiled:
        racer.step()
        if cuda:
            torch.cuda.synchronize(device)
    results: Any = profiled.profiler
    events = results.kineto_results.events()
    on_cpu = Counter(event.name() for event in events if event.device_type() == torch.autograd.DeviceType.CPU)
    # What record_function names is shown on the device's timeline too, under the name that it has on the CPU.
    on_device = [e.name() for e in events if e.device_type() == torch.autograd.DeviceType.CUDA]
    launched = [name for name in on_device if name not in on_cpu]
    moved = sum(name.startswith(("Memcpy", "Memset")) for name in launched)
    operators = sum(count for name, count in on_cpu.items() if name.startswith("aten::"))
    return {"kernels": len(launched) - moved, "copies_and_fills": moved, "operators": operators}
