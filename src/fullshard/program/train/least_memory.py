"""The memory that a run needs at least, by arithmetic on its model's layout: a fraction of a second at any size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import nn

from fullshard.core.comm import Comm, lacking
from fullshard.core.engine import UnitTable, units
from fullshard.core.engine.registry import runtime_of
from fullshard.core.engine.setup.wrap import ROOT_NAME
from fullshard.core.policy import ShardingStrategy
from fullshard.errors import MemoryLimitError
from fullshard.planner.plan import LABELS
from fullshard.program.config import RunConfig
from fullshard.program.models import base_of
from fullshard.program.train.dry_run import lay_out
from fullshard.program.train.fit import Load
from fullshard.program.train.plan import uncompiled
from fullshard.program.train.setup.optimizers import expected_state_bytes
from fullshard.program.train.setup.prepare import Prepared
from fullshard.sizes import format_bytes

_TABLES = {"Embedding", "Linear"}
"""Classes of units outside the blocks, which tokens may travel to: then they are not gathered."""


@dataclass(frozen=True)
class Least:
    """The tensors of a rank at one moment of a step, without activations, buffers and batch; a step needs more."""

    parts: Mapping[str, int]  # bytes by kind, as a plan names them
    unit: str  # the gathered unit

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())


def least_memory(config: RunConfig, data: Prepared, world_size: int, rank: int, kind: str) -> Least:
    """Return what a rank holds at least at the fullest moment of a step; any process, alone.

    That is the larger of two moments: in the optimizer's step, with all gradients; and in the backward of the last of
    the largest units to have one, which is gathered beside the gradients of the others.

    Args:
        config: The run's settings.
        data: The run's data.
        world_size: Number of ranks.
        rank: The rank.
        kind: Type of the device that it computes on.

    Raises:
        UserError: The model cannot be built, or the settings do not match it.
    """
    frozen = "shard" if config.sharding.frozen == "auto" else config.sharding.frozen  # whichever needs less
    sharding = config.sharding.model_copy(update={"frozen": frozen})
    config = uncompiled(config.model_copy(update={"sharding": sharding}))  # the compiler's imports take seconds
    model = lay_out(config, data.tokenizer, world_size, rank)
    table = units(model)
    at_home = kind == "cpu" and config.sharding.tables != "gather"
    training = config.training
    full = training.accumulate == "unsharded" and training.gradient_accumulation_steps > 1 and not at_home
    gradients = _gradients(model, table, full=full)
    state = expected_state_bytes(model, config)
    if getattr(base_of(model).config, "sub_configs", None):  # parts for images and sound, which texts may not reach
        gradients, state = dict.fromkeys(gradients, 0), 0
    gathered, beside, unit = max(_moments(table, gradients, at_home=at_home), default=(0, 0, ""))
    if config.sharding.cpu_offload and kind != "cpu":  # the rest is in the host's memory
        return Least({"gathered_units": max((row.gathered_bytes for row in table.rows), default=0)}, unit)
    kept = {"shards": sum(row.shard_bytes for row in table.rows), "optimizer_state": state}
    every, made = sum(gradients.values()), "gradient_buffers" if full else "gradient_shards"
    if every >= gathered + beside:
        return Least({**kept, made: every}, "")
    return Least({**kept, made: beside, "gathered_units": gathered}, unit)


def _gradients(model: nn.Module, table: UnitTable, *, full: bool) -> dict[str, int]:
    """Return the bytes of this rank's gradients by unit: of its rows, or ``full`` ones, which accumulate unsharded."""
    made = dict.fromkeys((row.unit for row in table.rows), 0)
    for unit in runtime_of(model).units:
        for param in unit.params:
            start, stop = (0, param.numel) if full else param.meta.element_range
            made[unit.name] += 4 * (stop - start) * param.trainable
    return made


def _moments(table: UnitTable, gradients: Mapping[str, int], *, at_home: bool) -> Iterator[tuple[int, int, str]]:
    """Yield bytes of a gathered unit, of the gradients that are there with it, and its name, for the largest units.

    Of the n largest units, the last one in backward is at least as large as the n-th, and the others have gradients.
    """
    rows = [row for row in table.rows if not at_home or not (row.unit == ROOT_NAME or row.kind in _TABLES)]
    rows = sorted(rows, key=lambda row: -row.gathered_bytes)
    sums = accumulate(gradients[row.unit] for row in rows)
    most = accumulate((gradients[row.unit] for row in rows), max)
    for row, total, own in zip(rows, sums, most, strict=True):
        yield row.gathered_bytes, total - own, row.unit


def require_least(load: Load, data: Prepared, comm: Comm, free: Mapping[str, int]) -> None:
    """Refuse a run whose ranks have too little memory even without activations; every rank calls it.

    Args:
        load: Reads the run file with further overrides.
        data: The run's data.
        comm: The ranks.
        free: Bytes of each pool that this rank may take, see :func:`~fullshard.core.comm.free_memory`.

    Raises:
        MemoryLimitError: It cannot fit; on every rank, with the same text.
    """
    everyone: list[tuple[Least | None, Mapping[str, int]]] = comm.all_gather_object((_tried(load, data, comm), free))
    short = lacking([(0 if least is None else least.nbytes, pools) for least, pools in everyone])
    if short is None:
        return
    fullest = max(range(comm.size), key=lambda rank: 0 if (one := everyone[rank][0]) is None else one.nbytes)
    text = _refusal(short, fullest, everyone, load, data, comm) if comm.rank == 0 else None
    raise MemoryLimitError(comm.all_gather_object(text)[0])


def _tried(load: Load, data: Prepared, comm: Comm, overrides: Sequence[str] = ()) -> Least | None:
    """Return what this rank needs at least; None if its model cannot be laid out without weights."""
    try:
        return least_memory(load(overrides), data, comm.size, comm.rank, comm.device.type)
    except Exception:
        return None


def _refusal(
    short: tuple[str, int, int],
    fullest: int,
    everyone: Sequence[tuple[Least | None, Mapping[str, int]]],
    load: Load,
    data: Prepared,
    comm: Comm,
) -> str:
    pool, needed, there = short
    least = everyone[fullest][0]
    assert least is not None, "it needs more than there is"
    kinds = sorted(least.parts.items(), key=lambda part: -part[1])
    lines = [f"  {LABELS[name]:<28}{format_bytes(size):>12}" for name, size in kinds if size]
    before, remedies = everyone[comm.rank][0], []
    for overrides in _settings(load(())):
        other = _tried(load, data, comm, overrides)
        if other is not None and before is not None and other.nbytes < before.nbytes:
            remedies.append(f"  {' '.join(overrides)}: {format_bytes(before.nbytes - other.nbytes)} less")
    return "\n".join([
        f"The run cannot fit, so it was not started: its ranks need at least {format_bytes(needed)} for tensors, even "
        f"without activations, and their {pool.partition(':')[0]} has {format_bytes(there)} left.",
        f"Rank {fullest} of {comm.size} needs at least {format_bytes(least.nbytes)}. At one moment of a step it holds:",
        *lines,
        *(["Settings that need less, to type after the run file:", *remedies] if remedies else []),
        "Use a smaller model, an adapter (model.adapter), or more memory: ranks on further GPUs or machines.",
        "--no-plan starts it anyway.",
    ])  # fmt: skip


def _settings(config: RunConfig) -> Iterator[tuple[str, ...]]:
    """Yield overrides that change what is counted here."""
    shards = ShardingStrategy(config.sharding.strategy).shards
    wide = config.training.optimizer == "adamw"
    own = ["training.accumulate=sharded"] if config.training.accumulate == "unsharded" else []
    own += (["sharding.strategy=full_shard"] if not shards else []) + (
        ["training.optimizer=adamw_8bit"] if wide else []
    )
    yield from dict.fromkeys((*((one,) for one in own), tuple(own))) if own else ()
