"""Stage ``switches``: what bf16, prefetching and offload to the host change, each against its opposite."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.gpu.engines import Entry
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.races import Contest, measure_alone, race
from benchmarks.gpu.record import Case
from benchmarks.gpu.shapes import SHAPES, TINY, Method

PRECISIONS = tuple(
    Entry(engine, f"{engine} {'bf16' if bf16 else 'fp32'}", bf16=bf16)
    for engine in ("fullshard", "fsdp2")
    for bf16 in (True, False)
)
PREFETCHES = (Entry("fullshard", "fullshard prefetch"), Entry("fullshard", "fullshard no prefetch", prefetch=False))
OFFLOADS = tuple(
    Entry(engine, f"{engine} {'offloaded' if offload else 'on the device'}", offload=offload)
    for engine in ("fullshard", "fsdp2")
    for offload in (False, True)
)


def cases(machine: Machine) -> list[Case]:
    """Return the comparisons; a T5 of 0.7 billion parameters unless memory is the point."""
    shapes = TINY if machine.dry else SHAPES
    small, large = shapes["t5-large"], shapes["t5-large" if machine.dry else "t5-3b"]
    checkpointed = Method(checkpointing=True)
    listed: Sequence[tuple[str, Contest]] = (
        ("bf16 and fp32", Contest(small, entries=PRECISIONS)),
        ("prefetch", Contest(small, world=2, entries=PREFETCHES)),
        ("offload", Contest(large, checkpointed, entries=OFFLOADS, rounds=4)),
        ("prefetch, one rank", Contest(small, entries=PREFETCHES)),
    )
    return [Case(name, partial(_run, machine, contest)) for name, contest in listed]


def _run(machine: Machine, contest: Contest, limit_s: float) -> dict[str, Any]:
    """Time the entries against each other, then measure each alone."""
    times = race(machine, contest, limit_s / 2)
    alone = measure_alone(machine, contest, limit_s / 2)
    failed = [part.pop("failed") for part in (times, alone) if "failed" in part]
    figures = {"what": contest.name, "times": times, "alone": alone}
    return figures | ({"failed": "; ".join(failed)} if failed else {})
