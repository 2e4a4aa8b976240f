"""Stage ``step``: time of a training step, fullshard next to FSDP2 and FSDP1."""

from functools import partial

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.races import Contest, race
from benchmarks.gpu.record import Case
from benchmarks.gpu.shapes import SHAPES, TINY, Method

_FULL, _LORA = Method(), Method(lora=True)
ORDER = (
    ("t5-large", _FULL, 1),
    ("t5-3b", Method(checkpointing=True), 1),
    ("llama-3-8b", Method(lora=True, checkpointing=True), 1),
    ("t5-large", Method(backend="inductor"), 1),
    ("t5-large", _FULL, 2),
    ("llama-3-8b", Method(checkpointing=True), 1),
    ("t5-large", _LORA, 1),
    ("t5-large", Method(checkpointing=True), 1),
    ("t5-3b", _FULL, 1),
    ("t5-3b", Method(checkpointing=True), 2),
    ("llama-3-8b", _LORA, 1),
    ("llama-3-8b", Method(lora=True, checkpointing=True), 2),
    ("t5-large", Method(checkpointing=True, backend="inductor"), 1),
    ("t5-3b", Method(backend="inductor"), 1),
    ("llama-3-8b", Method(lora=True, checkpointing=True, backend="inductor"), 1),
    ("t5-3b", _LORA, 1),
    ("t5-3b", Method(lora=True, checkpointing=True), 1),
    ("t5-large", _LORA, 2),
    ("llama-3-8b", _FULL, 1),
)
"""Shape, method and ranks, what tells most first; on one device 2 ranks are staged over it."""
DRY = (
    ("t5-large", _FULL, 1),
    ("t5-large", Method(checkpointing=True), 2),
    ("t5-large", _LORA, 1),
    ("llama-3-8b", Method(lora=True, checkpointing=True), 2),
    ("llama-3-8b", Method(backend="aot_eager"), 1),
)


def contests(machine: Machine) -> list[Contest]:
    """Return the contests, in order."""
    if machine.dry:
        return [Contest(TINY[shape], method, world, rounds=2) for shape, method, world in DRY]
    return [Contest(SHAPES[shape], method, world) for shape, method, world in ORDER]


def cases(machine: Machine) -> list[Case]:
    """Return a race for each contest."""
    return [Case(c.name, partial(race, machine, c), limit_s=limit_s(c)) for c in contests(machine)]


def limit_s(contest: Contest) -> float:
    """Return the most that a contest gets; compiling takes a while."""
    return 300.0 if contest.method.backend else 180.0
