"""Searches among plans: the fewest blocks to recompute, the fastest settings that fit, and settings that need less."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import attrgetter
from statistics import median
from typing import Any

from fullshard.core.policy import ShardingStrategy
from fullshard.errors import ConfigError, UserError
from fullshard.planner import Hardware, work_limit
from fullshard.program.config import RunConfig, options
from fullshard.program.config.section import Searched
from fullshard.program.train.run_plan import (
    ACCUMULATE,
    AUTO_SHARE,
    BLOCKS,
    RunPlan,
    needed_bytes,
    plan_in,
    plan_prepared,
)
from fullshard.program.train.setup.devices import (
    Choice,
    Devices,
    may_accumulate_unsharded,
    with_precision,
    with_unsharded,
)
from fullshard.program.train.setup.prepare import Prepared, prepare
from fullshard.program.train.setup.tuned import measured_step, on_machines
from fullshard.sizes import format_bytes

MOST_PLANS = 12
"""Plans of a search: both ends, three along a line, and halvings of what is then left of up to 128 blocks."""


def fewest_blocks(missing: Callable[[int], float], blocks: int) -> int:
    """Return the fewest blocks to recompute so that a plan fits; if none does, so that it needs as little as it can.

    What it returns has been planned. The next number to plan is where a line through the needs of two others meets the
    limit, as each block frees about the same; later the range is halved.

    ``missing`` returns the bytes that a plan with so many of the model's ``blocks`` recomputed is too large by, at most
    0 if it fits; infinite if there is none. Without one for all blocks, the answer is 0.
    """
    if not blocks or (lacks := missing(0)) <= 0:
        return 0
    few, many = 0, blocks
    spare = -missing(blocks)
    least = max(-spare, 0)  # where not even all blocks are enough, what else does not depend on them decides
    lacks, spare = lacks - least, spare + least
    if not lacks > 0:
        return 0
    for turn in range(MOST_PLANS - 2):
        if many - few == 1:
            break
        on_line = turn < 3 and math.isfinite(lacks)
        step = math.ceil((many - few) * lacks / (lacks + spare)) if on_line else (many - few) // 2
        guess = min(max(few + step, few + 1), many - 1)
        found = missing(guess) - least
        if found <= 0:
            many, spare = guess, -found
        else:
            few, lacks = guess, found
    return many


def value_of(number: int, blocks: int) -> int | bool:
    """Return the setting's value for so many of a model's blocks."""
    return number if 0 < number < blocks else number > 0


def override_of(number: int, blocks: int) -> str:
    """Return the same as an override."""
    return f"{BLOCKS}={str(value_of(number, blocks)).lower()}"


def blocks_choice(number: int, blocks: int, why: str = "") -> Choice:
    """Return the choice of so many of a model's blocks."""
    return Choice(BLOCKS, str(value_of(number, blocks)).lower(), f"{number} of {blocks} blocks: {why}")


def plan_chosen(
    memory_bytes: int | None,
    config: RunConfig,
    data: Prepared,
    world_size: int,
    device: Hardware | None = None,
    **how: Any,
) -> tuple[RunPlan, RunConfig]:
    """Return the plan of a run as it would choose by so much memory of each rank, and the settings with its choices.

    Without ``memory_bytes`` nothing is chosen by it. The rest is as in
    :func:`~fullshard.program.train.run_plan.plan_prepared`.

    Raises:
        UserError: See :func:`~fullshard.program.train.run_plan.plan_prepared`.
    """
    first = plan_prepared(config, data, world_size, device, **how)
    if memory_bytes is None:
        return first, config
    plan, chosen, plans = first, [], {0: first}
    if config.training.gradient_checkpointing == "auto":
        limit = memory_bytes if device is None else AUTO_SHARE * (memory_bytes - device.outside_bytes)

        def needs(plan: RunPlan) -> int:
            return plan.needed_bytes if device is None else needed_bytes(plan, "cuda")

        def missing(number: int) -> float:
            if number not in plans:
                try:
                    tried = with_blocks(config, number, first.blocks)
                    plans[number] = plan_prepared(tried, data, world_size, device, **how)
                except UserError:  # the model or its adapter does not support it
                    return math.inf
            return needs(plans[number]) - limit

        number = fewest_blocks(missing, first.blocks)
        why = "the run fits without" if missing(0) <= 0 else "recomputing more does not need less"
        why = f"a rank needs {format_bytes(needs(first))} without" if number else why
        plan, config = plans[number], with_blocks(config, number, first.blocks)
        chosen.append(blocks_choice(number, first.blocks, why))
    plan = plan_in(memory_bytes, config, data, world_size, device, sharded=plan, **how)
    if config.training.accumulate == "auto" and plan.accumulate is not None:
        may = "unsharded does not fit" if may_accumulate_unsharded(config, world_size) else "unsharded sends no less"
        why = "it sends less and fits" if plan.accumulate == "unsharded" else may
        chosen.append(Choice(ACCUMULATE, plan.accumulate, why))
        config = with_unsharded(config) if plan.accumulate == "unsharded" else config
    return replace(plan, chosen=(*plan.chosen, *chosen)), config


def with_blocks(config: RunConfig, number: int, blocks: int) -> RunConfig:
    """Return the settings with so many recomputed blocks of ``blocks``."""
    training = config.training.model_copy(update={"gradient_checkpointing": value_of(number, blocks)})
    return config.model_copy(update={"training": training})


ROWS = "training.per_device_train_batch_size"

Load = Callable[[Sequence[str]], RunConfig]
"""Reads the run file with further overrides."""


@dataclass(frozen=True)
class Tried:
    """One setting of the search.

    Attributes:
        overrides: Overrides to type after the run file's name.
        plan: Its plan; None if it cannot be planned.
        why: Why it does not fit; empty if it does.
        measured_s: Seconds of a step that `fullshard tune` measured on this machine; None: they are predicted.
    """

    overrides: tuple[str, ...]
    plan: RunPlan | None
    why: str = ""
    measured_s: float | None = None

    @property
    def step_s(self) -> float:
        """Seconds of a step; infinite if the setting does not fit."""
        if not self.why and self.measured_s is not None:
            return self.measured_s
        return float("inf") if self.why or self.plan is None or self.plan.timing is None else self.plan.timing.step_s

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-able values."""
        own = {"overrides": list(self.overrides), "why": self.why, "measured_s": self.measured_s}
        return {**own, "plan": self.plan and self.plan.as_dict()}


def search(
    load: Load,
    world_size: int,
    device: Hardware,
    tell: Callable[[Tried], None] = lambda tried: None,
    data: Prepared | None = None,
) -> list[Tried]:
    """Return the settings that were tried: those that fit first, the fastest first; one process.

    Open are, unless the run file or an override sets them, the options that are ``searched``; and micro-batches of
    fewer rows and more of them, so that a step has the same rows. Of blocks to recompute, all are tried, and then the
    fewest with which it fits. Slower settings of a strategy are left out once a faster one fits. Settings are compared
    by plans of one rank with at most two micro-batches a step, whose gradients accumulate sharded; the fastest is then
    planned exactly, also with ``training.accumulate`` as a run would choose it. Where nothing fits, all of them are
    tried once more with the options of scope ``last`` (``sharding.cpu_offload``), on a device that has a host: the
    copies between the two are not timed.

    ``tell`` is called with each setting that was tried. Without ``data``, the run's own is read.

    Raises:
        UserError: Data, tokenizer, model or settings cannot be used.
    """
    config = load(())
    made = Search(load, data or prepare(config), world_size, device, tell)
    for offload in _product(config, "last") if device.has_host else ({},):
        for shared in _product(config, "all"):
            for own in _product(config, "rank"):
                last = made.fit_rows({**offload, **shared, **own})
                if not last.why and own.get(BLOCKS) is True:
                    made.fewer_blocks(last)
                if last.plan is not None and _keeps_too_much(last.plan, device):
                    break  # settings of a rank do not change that
                if not last.why and not any(one.startswith(ROWS) for one in last.overrides):
                    break  # it fits with the original micro-batches: smaller ones are slower
        if made.fits:
            break
    return made.ordered()


def _product(config: RunConfig, scope: str) -> Iterator[dict[str, Any]]:
    """Yield all combinations of the open settings of a scope, fastest first."""
    varied = {name: one.searched for name, one in options().items() if one.searched and one.searched.scope == scope}
    free = {name: searched.values for name, searched in varied.items() if _is_open(config, name, searched)}
    for chosen in product(*free.values()):
        yield dict(zip(free, chosen, strict=True))


def _is_open(config: RunConfig, setting: str, searched: Searched) -> bool:
    section, name = setting.split(".")
    if searched.needs is not None and attrgetter(searched.needs)(config) is None:
        return False
    settings = getattr(config, section)
    return name not in settings.model_fields_set or getattr(settings, name) == "auto"


class Search:
    """Plans settings, and remembers what was tried."""

    def __init__(
        self, load: Load, data: Prepared, world_size: int, device: Hardware, tell: Callable[[Tried], None]
    ) -> None:
        self._load, self._data, self._world_size, self._device = load, data, world_size, device
        self._tell = tell
        self._fullest: int | None = None
        self._tried: list[Tried] = []

    @property
    def fits(self) -> bool:
        """True if something that was tried fits."""
        return any(not tried.why for tried in self._tried)

    def fit_rows(self, values: dict[str, Any]) -> Tried:
        """Try the largest micro-batches, then a row, then the most rows that should fit by these two, until one does.

        Returns:
            The last setting that was tried.
        """
        largest = self._try(values)
        sizes = micro_batches(self._load(()))
        if not largest.why or largest.plan is None or not sizes or _keeps_too_much(largest.plan, self._device):
            return largest
        row = self._try({**values, **sizes[-1]})
        if row.why or row.plan is None:
            return row
        rows = self._load(()).training.per_device_train_batch_size
        each = (largest.plan.needed_bytes - row.plan.needed_bytes) / (rows - 1)
        most = 1 + (self._device.memory_bytes - row.plan.needed_bytes) / max(each, 1)
        for size in sizes[:-1]:
            if size[ROWS] <= most:
                tried = self._try({**values, **size})
                if not tried.why:
                    return tried
        return row

    def fewer_blocks(self, fitting: Tried) -> None:
        """Try the fewest recomputed blocks, otherwise with the settings of one that recomputes all of them and fits."""
        assert fitting.plan is not None, "it fits"
        others, blocks = [one for one in fitting.overrides if one != override_of(1, 1)], fitting.plan.blocks
        tried = {blocks: fitting}

        def missing(number: int) -> float:
            if number not in tried:
                tried[number] = self._plan((*others, override_of(number, blocks)), self._fullest)
            plan = tried[number].plan
            return math.inf if plan is None else plan.needed_bytes - self._device.memory_bytes

        number = fewest_blocks(missing, blocks)
        if 0 < number < blocks:
            self._note(tried[number])

    def ordered(self) -> list[Tried]:
        """Return the settings tried: the fastest that fits first, planned exactly; then those that do not fit."""
        off = _off(self._tried)

        def key(tried: Tried) -> float:
            return tried.step_s * (1.0 if tried.measured_s is not None else off)

        found = sorted(self._tried, key=key)
        for place, tried in enumerate(found):
            if not tried.why:
                found[place] = self._plan(tried.overrides, None, self._device.memory_bytes)
            if not found[place].why or tried.why:
                break
        return sorted(found, key=key)

    def _try(self, values: dict[str, Any]) -> Tried:
        config = self._load(())
        given = config.as_flat()
        changed = {name: value for name, value in values.items() if given[name] != value}
        tried = self._plan(tuple(f"{name}={str(value).lower()}" for name, value in changed.items()), self._fullest)
        if self._fullest is None and tried.plan is not None:
            self._fullest = tried.plan.rank  # of the first, which is planned exactly: rarely different for others
        return self._note(tried)

    def _note(self, tried: Tried) -> Tried:
        self._tell(tried)
        self._tried.append(tried)
        return tried

    def _plan(self, overrides: tuple[str, ...], roughly: int | None, memory_bytes: int | None = None) -> Tried:
        run = self._data, self._world_size, self._device
        try:
            config = self._load(overrides)
            plan = plan_in(memory_bytes, config, *run, roughly=roughly)
        except ConfigError as error:
            return Tried(overrides, None, str(error))
        missing = plan.needed_bytes - self._device.memory_bytes
        settled = with_precision(config, Devices.of_sheet(self._device))
        card = on_machines(self._device.name, math.ceil(self._world_size / self._device.devices_each))
        measured = measured_step(settled, self._data, self._world_size, card)
        return Tried(overrides, plan, "" if missing <= 0 else f"{format_bytes(missing)} too large", measured)


def _off(some: Sequence[Tried]) -> float:
    """Return how often a predicted step goes into a measured one, of settings that have both; 1 without any.

    A data sheet's rates are never reached: as it is, any predicted step is faster than one that was measured.
    """
    both = [(one.measured_s, one.plan.timing.step_s) for one in some if not one.why and one.plan and one.plan.timing]
    return median([measured / predicted for measured, predicted in both if measured is not None] or [1.0])


def _keeps_too_much(plan: RunPlan, device: Hardware) -> bool:
    """Return True if the part that does not depend on the batch is already too large."""
    kept = replace(plan, phase_peaks={"kept": plan.parts["shards"] + plan.parts["optimizer_state"]})
    return not kept.fits(device.memory_bytes)


def micro_batches(config: RunConfig) -> list[dict[str, int]]:
    """Return the sizes of smaller micro-batches that give a step the same rows, the largest first."""
    rows, times = config.training.per_device_train_batch_size, config.training.gradient_accumulation_steps
    if config.training.per_device_train_batch_tokens is not None:
        return []
    sizes = [size for size in range(rows - 1, 0, -1) if rows % size == 0]
    return [{ROWS: size, "training.gradient_accumulation_steps": times * (rows // size)} for size in sizes]


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
