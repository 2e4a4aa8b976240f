"""Stage ``speed``: steps of large models with the ways of ``fullshard.program.speed``, beside FSDP2 with the same ways.

A case is one model with one list of ways, alone in new processes, so that an error or a lack of memory costs that case
only. The sharded model of eight ranks is that of rank 0, over a simulated link; see ``wire.py``.
"""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from ranks import RankFailed

from benchmarks.gpu.engines import Entry, Racer
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.overlap import cycles_per_s
from benchmarks.gpu.races import Contest, flops_of, prepare, rates, settled
from benchmarks.gpu.record import Case, Lacking
from benchmarks.gpu.shapes import SHAPES, TINY, Method
from benchmarks.gpu.wire import LINKS, TimedComm, Wire, join
from fullshard.core.comm import Comm, shutdown
from fullshard.program.speed import WAYS, Facts, apply_ways

ENGINES = ("fullshard", "fsdp2")
WARM, TIMED = 2, 3
LIMIT_S, COMPILE_LIMIT_S = 120.0, 240.0
T5_WAYS = ("t5_attention+compile", "compile", "", "t5_attention", "bias_sdpa+compile", "liger")
LLAMA_WAYS = ("compile", "", "liger", "flex+compile")
"""Lists of ways, what tells most first."""
BESIDE = 2
"""How many of a model's lists FSDP2 is measured with too."""


@dataclass(frozen=True)
class Run:
    """A model, how it is trained, on how many ranks, and the lists of ways that are tried."""

    shape: str
    method: Method
    world: int
    ways: tuple[str, ...]


ORDER = (
    Run("t5-3b", Method(checkpointing=True), 1, T5_WAYS),
    Run("llama-3-8b", Method(lora=True, checkpointing=True), 1, LLAMA_WAYS),
    Run("t5-large", Method(), 1, T5_WAYS),
    Run("llama-3-8b", Method(checkpointing=True), 8, LLAMA_WAYS),
    Run("t5-3b", Method(), 1, T5_WAYS),
    Run("llama-3-8b", Method(lora=True), 1, LLAMA_WAYS),
)
DRY = (
    Run("t5-large", Method(), 1, ("", "bias_sdpa", "liger", "varlen")),
    Run("llama-3-8b", Method(lora=True, checkpointing=True), 1, ("", "liger", "varlen")),
    Run("llama-3-8b", Method(checkpointing=True), 8, ("", "compile")),
)


def cases(machine: Machine) -> list[Case]:
    """Return a case for each model and list of ways: every model's first list, then every model's second, …"""
    runs = DRY if machine.dry else ORDER
    shapes = TINY if machine.dry else SHAPES
    longest = max(len(run.ways) for run in runs)
    turns = [(run, turn) for turn in range(longest) for run in runs if turn < len(run.ways)]
    found = []
    for run, turn in turns:
        ways = run.ways[turn]
        where = f"rank 0 of {run.world}" if run.world > 1 else "1 rank"
        name = f"{shapes[run.shape].name}, {run.method}, {where}: {ways or 'plain'}"
        contest = Contest(shapes[run.shape], run.method, 1)
        names = tuple(filter(None, ways.split("+")))
        engines = ENGINES if turn < BESIDE else ENGINES[:1]
        work = partial(_measured, machine, contest, run.world, names, engines)
        found.append(Case(name, work, limit_s=COMPILE_LIMIT_S if "compile" in names else LIMIT_S))
    return found


def _measured(
    machine: Machine, contest: Contest, world: int, ways: tuple[str, ...], engines: Sequence[str], limit_s: float
) -> dict[str, Any]:
    """Measure each engine; the figures of one stay if the other fails.

    Raises:
        Lacking: No way of the list applies, or a library is missing.
    """
    if world == 1:
        contest = contest.here(machine)
    end = time.monotonic() + limit_s
    figures: dict[str, Any] = {"engines": {}}
    failures = []
    for engine in engines:
        left = end - time.monotonic()
        given = (contest, ways, engine, machine.facts["devices"], left)
        try:
            if world > 1:
                figures["engines"][engine] = machine.alone(_as_rank_0, world, *given, limit_s=left)
            else:
                figures["engines"][engine] = machine.together(1, _on_rank, *given, limit_s=left)[0]
        except RankFailed as error:
            if f"{Lacking.__name__}: " in str(error):
                raise
            failures.append(f"{engine}: {error}")
    return figures | ({"failed": "; ".join(failures)} if failures else {})


def _as_rank_0(world: int, *given: Any) -> dict[str, Any]:
    devices = given[-2]
    device = torch.device("cuda", 0) if devices else torch.device("cpu")
    wire = Wire(device, world, cycles_per_s(device))
    join(wire)
    wire.link = LINKS[0]
    try:
        return _on_rank(TimedComm(wire), *given)
    finally:
        shutdown()


def _on_rank(
    comm: Comm | TimedComm, contest: Contest, ways: tuple[str, ...], engine: str, devices: int, limit_s: float
) -> dict[str, Any]:
    """Return the time of a step, tokens a second, the share of the peak, memory, and how long compiling took.

    Ways that do not apply are left out, and why is among the figures.

    Raises:
        Lacking: No way of the list applies.
    """
    device, shape = comm.device, contest.shape
    prepare(device, 1, devices, limit_s)
    model: Any = contest.method.model(shape, device)
    facts = Facts(device, torch.bfloat16, packing=False, longest=shape.source + shape.target)
    reasons = {name: WAYS[name].misfit(model, facts) if name in WAYS else "there is no such way" for name in ways}
    left_out = {name: reason for name, reason in reasons.items() if reason is not None}
    if ways and len(left_out) == len(ways):
        raise Lacking("; ".join(f"{name}: {reason}" for name, reason in left_out.items()))
    flops = flops_of(model, comm, devices)
    apply_ways(model, [name for name in ways if name not in left_out], facts)
    racer = Racer(Entry(engine), model, shape.inputs(0, device), comm, shape.block)
    seconds, losses = [], []
    for _ in range(WARM + TIMED):
        settled(comm)
        began = time.perf_counter()
        losses.append(racer.step())
        settled(comm)
        seconds.append(time.perf_counter() - began)
    values = [float(loss) for loss in losses]
    if not all(math.isfinite(value) for value in values):
        raise RuntimeError(f"losses are {values}: such a step's time says nothing")
    step_s = statistics.median(seconds[WARM:])
    cuda = device.type == "cuda"
    return {
        "left_out": left_out,
        "step_s": round(step_s, 6),
        "least_s": round(min(seconds[WARM:]), 6),
        "compile_s": round(max(sum(seconds[:WARM]) - WARM * step_s, 0.0), 1),
        "reserved_bytes": torch.cuda.max_memory_reserved(device) if cuda else 0,
        "losses": [round(value, 5) for value in values],
        **rates(contest, step_s, flops),
    }
