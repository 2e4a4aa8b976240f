"""Settings with which a run needs less memory, planned one after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fullshard.core.policy import ShardingStrategy
from fullshard.errors import UserError
from fullshard.planner import Hardware, work_limit
from fullshard.program.config import RunConfig
from fullshard.program.train.fit import Load, micro_batches
from fullshard.program.train.plan import RunPlan, plan_prepared
from fullshard.program.train.recompute import fewest_blocks, override_of
from fullshard.program.train.setup.devices import Devices, with_precision
from fullshard.program.train.setup.prepare import Prepared
from fullshard.sizes import format_bytes

MOST = 3
"""Number of remedies to name."""

_ALL = override_of(1, 1)

OPERATORS = 600_000
"""Limit on the work of all of their plans: some twenty seconds of processor time."""


@dataclass(frozen=True)
class Remedy:
    """Settings that need less memory."""

    overrides: tuple[str, ...]  # overrides to type after the run file's name
    saved_bytes: int  # of what a rank needs
    fits: bool  # whether the run then fits

    def __str__(self) -> str:
        """Return a line."""
        return f"  {' '.join(self.overrides)}: {format_bytes(self.saved_bytes)} less"


@dataclass(frozen=True)
class Need:
    """The needs of a run, and its limit."""

    load: Load  # reads the run file with further overrides
    data: Prepared
    world_size: int
    rank: int  # the rank that is planned
    bytes_of: Callable[[RunPlan], int]  # bytes that a plan's rank needs
    before: int  # bytes needed with the run's own settings
    limit: int  # bytes that it may take
    device: Hardware | None = None


def find_remedies(need: Need) -> list[Remedy]:
    """Return the three cheapest settings with which a rank fits, or else the three that save most; any rank, alone.

    Settings are tried from those that cost least to those that change rounding, and plans that are too much work are
    left out.
    """
    found: list[Remedy] = []
    begun = with_precision(need.load(()), Devices.of_sheet(need.device))
    with work_limit(OPERATORS):
        for overrides in dict.fromkeys(_settings(begun)):
            try:
                config = need.load(overrides)
                plan = plan_prepared(config, need.data, need.world_size, need.device, roughly=need.rank)
            except UserError:
                continue
            needed = need.bytes_of(plan)
            if needed < need.before and not plan.unplanned:
                remedy = Remedy(overrides, need.before - needed, needed <= need.limit)
                found.append(_with_fewest(remedy, plan, need) if overrides == (_ALL,) and remedy.fits else remedy)
            if sum(remedy.fits for remedy in found) == MOST:
                break
    fitting = [remedy for remedy in found if remedy.fits]
    others = sorted((remedy for remedy in found if not remedy.fits), key=lambda remedy: -remedy.saved_bytes)
    return [*fitting, *others][:MOST]


def _with_fewest(remedy: Remedy, plan: RunPlan, need: Need) -> Remedy:
    """Return the remedy that recomputes no more blocks than it takes, of one that recomputes all of them."""
    # With none it needs at least what it needs now.
    needs = {0: need.before, plan.blocks: need.before - remedy.saved_bytes}

    def missing(number: int) -> float:
        if number not in needs:
            try:
                config = need.load((override_of(number, plan.blocks),))
                other = plan_prepared(config, need.data, need.world_size, need.device, roughly=need.rank)
            except UserError:
                return math.inf
            needs[number] = need.bytes_of(other)
        return needs[number] - need.limit

    number = fewest_blocks(missing, plan.blocks)
    return Remedy((override_of(number, plan.blocks),), need.before - needs[number], fits=True) if number else remedy


def _settings(config: RunConfig) -> Iterator[tuple[str, ...]]:
    """Yield overrides, the cheapest first: those that train the same, alone and together, then those that round."""
    training, same = config.training, []
    if training.fused_cross_entropy is not True:
        same.append("training.fused_cross_entropy=true")
    if training.accumulate == "unsharded":
        same.append("training.accumulate=sharded")
    strategy = ShardingStrategy(config.sharding.strategy)
    if not strategy.needs_two_axes and (strategy.keeps_after_forward or not strategy.shards):
        same.append("sharding.strategy=full_shard")
    if training.gradient_checkpointing is not True:
        same.append(_ALL)
    if training.eval_strategy != "no" and training.per_device_eval_batch_size > 1:
        same.append(f"training.per_device_eval_batch_size={training.per_device_eval_batch_size // 2}")
    smaller = [tuple(f"{name}={value}" for name, value in size.items()) for size in micro_batches(config)]
    half, least = (smaller[0], smaller[-1]) if smaller else ((), ())
    yield from (*((one,) for one in same), half, (*same, *half), (*same, *least))
    rounds = [] if training.precision != "fp32" else ["training.precision=bf16"]
    rounds += ["training.optimizer=adamw_8bit"] if training.optimizer == "adamw" else []
    yield from (*((one,) for one in rounds), (*same, *least, *rounds))
