"""Stage ``overlap``: one GPU as rank 0 of many; how much of the communication's time hides behind computation.

A step is timed with collectives that take no time, then with those of each link; see ``wire.py``. Hidden is the share
of the occupied time that does not lengthen the step.
"""

import time
from functools import partial
from typing import Any

import torch
from measure import summary
from ranks import teller

from benchmarks.gpu.doctor import SLEEP_CYCLES, seconds_of
from benchmarks.gpu.engines import Entry, Racer
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.races import prepare, settled, timed
from benchmarks.gpu.record import Case
from benchmarks.gpu.shapes import SHAPES, TINY, Method, Shape
from benchmarks.gpu.wire import LINKS, Link, TimedComm, Wire, join
from fullshard.core.comm import shutdown

ENGINES = ("fullshard", "fsdp2")
WORLDS = (8, 64, 512)
ROUNDS = 5


def cases(machine: Machine) -> list[Case]:
    """Return a case for each shape and number of ranks."""
    shapes = list(TINY.values()) if machine.dry else [SHAPES["llama-3-8b"], SHAPES["t5-large"]]
    worlds = WORLDS[:1] if machine.dry else WORLDS
    return [
        Case(f"{shape.name}, rank 0 of {world}", partial(_run, machine, shape, world))
        for world in worlds
        for shape in shapes
    ]


def _run(machine: Machine, shape: Shape, world: int, limit_s: float) -> dict[str, Any]:
    rounds = 1 if machine.dry else ROUNDS
    return machine.alone(_measure, shape, world, machine.facts["devices"], rounds, limit_s, limit_s=limit_s)


def _measure(shape: Shape, world: int, devices: int, rounds: int, limit_s: float) -> dict[str, Any]:
    device = torch.device("cuda", 0) if devices else torch.device("cpu")
    torch.set_flush_denormal(True)
    prepare(device, 1, devices, limit_s)
    tell = teller(f"{shape.name}, {world}", time.time(), speaks=True)
    wire = Wire(device, world, cycles_per_s(device))
    join(wire)
    comm = TimedComm(wire)
    racers = []
    for engine in ENGINES:
        tell(f"first step of {engine}")
        model = Method(checkpointing=True).model(shape, device)
        racers.append(Racer(Entry(engine), model, shape.inputs(0, device), comm, shape.block))
        racers[-1].step()
    figures: dict[str, Any] = {"tokens": shape.tokens, "cycles_per_s": round(wire.cycles_per_s), "links": {}}
    free = _times(racers, None, comm, rounds, tell)
    figures["links"]["none"] = {name: {"step": found} for name, found in free.items()}
    for link in LINKS if shape.target else LINKS[:-1]:  # the slowest takes a causal model's step to five seconds
        found = _times(racers, link, comm, rounds, tell)
        figures["links"][link.name] = {
            racer.name: _hidden(racer, comm, found[racer.name], free[racer.name]["median_s"]) for racer in racers
        }
    shutdown()
    return figures


def _times(racers: list[Racer], link: Link | None, comm: TimedComm, rounds: int, tell: Any) -> dict[str, Any]:
    comm.wire.link = link
    tell(link.name if link else "collectives that take no time")
    record = timed(racers, rounds, comm, lambda _text: None)
    comm.wire.clear()
    return {name: summary(taken["seconds"]) for name, taken in record.items()}


def _hidden(racer: Racer, comm: TimedComm, step: dict[str, Any], free_s: float) -> dict[str, Any]:
    """Return a step's time and what share of its communication was hidden; on a CPU nothing is, it is only counted."""
    wire = comm.wire
    settled(comm)
    wire.clear()
    racer.step()
    settled(comm)
    occupied = wire.occupied_s()
    exposed = max(0.0, step["median_s"] - free_s)
    return {
        "step": step,
        "collectives": wire.calls,
        "asked_s": round(wire.asked_s, 6),
        "occupied_s": occupied and round(occupied, 6),
        "hidden": round(1 - min(1.0, exposed / occupied), 4) if occupied else None,
    }


def cycles_per_s(device: torch.device) -> float:
    """Return the rate of the sleeping kernel's clock, while the device is busy: idle ones run slower."""
    if device.type != "cuda":
        return 1e9
    left = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    seconds_of(lambda: left @ left, cuda=True, repeat=50)
    return SLEEP_CYCLES / seconds_of(partial(torch.cuda._sleep, SLEEP_CYCLES), cuda=True)
