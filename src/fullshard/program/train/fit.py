"""Searches among plans: the fewest blocks to recompute, the fastest settings that fit, and settings that need less."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import attrgetter
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
from fullshard.sizes import format_bytes, format_duration

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
    """

    overrides: tuple[str, ...]
    plan: RunPlan | None
    why: str = ""

    @property
    def step_s(self) -> float:
        """Seconds of a step; infinite if the setting does not fit."""
        return float("inf") if self.why or self.plan is None or self.plan.timing is None else self.plan.timing.step_s

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-able values."""
        return {"overrides": list(self.overrides), "why": self.why, "plan": self.plan and self.plan.as_dict()}


class Watch:
    """Is told of a search; this one ignores it."""

    def begins(self, place: str, overrides: Sequence[str]) -> None:
        """Hear that a setting is planned; ``place`` says how far the search is, such as ``2 of at most 12``."""

    def ends(self, tried: Tried, best: Tried | None) -> None:
        """Hear what was found, and the fastest so far that fits."""


class Telling(Watch):
    """Tells a search by lines for the user."""

    def __init__(self, tell: Callable[[str], None], *, timed: bool = True) -> None:
        """``tell`` receives each line; ``timed``: with the seconds of a step."""
        self._tell, self._timed = tell, timed

    def begins(self, place: str, overrides: Sequence[str]) -> None:
        """See :meth:`Watch.begins`."""
        self._tell(f"candidate {place}: planning {_named(overrides)}")

    def ends(self, tried: Tried, best: Tried | None) -> None:
        """See :meth:`Watch.ends`."""
        found = tried.why or (f"{format_duration(tried.step_s)} a step" if self._timed else "fits")
        if best is tried:
            found += ", the best so far"
        elif best is not None:
            found += f"; the best so far: {_named(best.overrides)}"
        self._tell(f"{_named(tried.overrides)}: {found}")


def _named(overrides: Sequence[str]) -> str:
    return " ".join(overrides) or "as it is"


def search(
    load: Load, world_size: int, device: Hardware, data: Prepared | None = None, watch: Watch | None = None
) -> list[Tried]:
    """Return the settings that were tried: those that fit first, the fastest first; one process.

    Open are, unless the run file or an override sets them, the options that are ``searched``; and micro-batches of
    fewer rows and more of them, so that a step has the same rows. Of blocks to recompute, all are tried, and then the
    fewest with which it fits. Settings of the least memory come first; others are left out if what they compute, as
    was planned for the first, takes as long as the fastest that fits. Settings are compared by the steps of one rank
    with at most two micro-batches, whose gradients accumulate sharded; the fastest is then planned exactly, with
    evaluations, saving and resuming, also with ``training.accumulate`` as a run would choose it. Where nothing fits,
    all of them are tried once more with the options of scope ``last`` (``sharding.cpu_offload``), on a device that has
    a host: the copies between the two are not timed.

    Without ``data``, the run's own is read.

    Raises:
        UserError: Data, tokenizer, model or settings cannot be used.
    """
    config = load(())
    made = Search(load, data or prepare(config), world_size, device, watch or Watch())
    for offload in _product(config, "last") if device.has_host else [{}]:
        *faster, least = _product(config, "all")
        owns = _product(config, "rank")
        made.most += (len(faster) + 1) * len(owns)
        made.try_rank(offload | least, owns)
        for shared in faster:
            # What needs more where nothing fits: once, as a model of one unit may be an exception.
            made.try_rank(offload | shared, owns if made.fits else owns[-1:], like=offload | least)
        if made.fits:
            break
    return made.ordered()


def _product(config: RunConfig, scope: str) -> list[dict[str, Any]]:
    """Return all combinations of the open settings of a scope, fastest first; what has no effect is left out."""
    known = {name: one.searched for name, one in options().items() if one.searched}
    free = {
        name: searched.values
        for name, searched in known.items()
        if searched.scope == scope and _is_open(config, name, searched)
    }
    given, found = config.as_flat(), list[dict[str, Any]]()
    for values in product(*free.values()):
        chosen = dict(zip(free, values, strict=True))
        for name in free:
            idle = known[name].idle
            if idle is not None and ({**given, **chosen}[idle[0]]) == idle[1]:
                del chosen[name]
        if chosen not in found:
            found.append(chosen)
    return found


def _is_open(config: RunConfig, setting: str, searched: Searched) -> bool:
    section, name = setting.split(".")
    if searched.needs is not None and attrgetter(searched.needs)(config) is None:
        return False
    settings = getattr(config, section)
    return name not in settings.model_fields_set or getattr(settings, name) == "auto"


WORTH = 0.98
"""Share of the fastest step so far that another setting must be able to reach: predictions are no better."""


class Search:
    """Plans settings, and remembers what was tried."""

    def __init__(self, load: Load, data: Prepared, world_size: int, device: Hardware, watch: Watch) -> None:
        self._load, self._data, self._world_size, self._device = load, data, world_size, device
        self._watch = watch
        self.most = self._begun = 0  # combinations to try at most, without their micro-batches, and those begun
        self._found: dict[frozenset[tuple[str, str]], Tried] = {}
        self._tried: list[Tried] = []

    @property
    def fits(self) -> bool:
        """True if something that was tried fits."""
        return self._best() is not None

    def try_rank(
        self, shared: dict[str, Any], owns: Sequence[dict[str, Any]], like: dict[str, Any] | None = None
    ) -> None:
        """Try settings of a rank with ``shared`` ones, until one fits without smaller micro-batches.

        ``like`` are other shared ones that were tried before and compute the same: what they show to be slower than the
        best is left out.
        """
        for number, own in enumerate(owns, 1):
            self._begun += 1
            if like is not None and self._is_slower(like | own):
                self._begun += len(owns) - number
                break  # settings of a rank come fastest first
            last = self.fit_rows(shared | own)
            if number == 1 and last.why and not self._may_be_best(last):
                self._begun += len(owns) - number
                break
            if not last.why and own.get(BLOCKS) is True:
                self.fewer_blocks(last)
            kept = last.plan is not None and _keeps_too_much(last.plan, self._device)
            original = not any(one.startswith(ROWS) for one in last.overrides)
            # Settings of a rank do not change what it keeps, and smaller micro-batches are slower.
            if kept or (not last.why and original):
                self._begun += len(owns) - number
                break

    def fit_rows(self, values: dict[str, Any]) -> Tried:
        """Try the largest micro-batches, then the most rows that should fit, until no larger ones do.

        How many should is read off a line, first that of the activations, then through the last two.

        Returns:
            The last setting that was tried, or the one that fits.
        """
        tried, rows = self._try(values), self._load(()).training.per_device_train_batch_size
        if not tried.why or tried.plan is None or _keeps_too_much(tried.plan, self._device):
            return tried
        each = tried.plan.parts.get("activations_and_temporaries", 0) / rows
        # Smaller micro-batches are slower than these.
        sizes = micro_batches(self._load(())) if self._may_be_best(tried) else []
        fitting = None
        while sizes and tried.plan is not None:
            before, most = tried.plan, rows + (self._device.memory_bytes - tried.plan.needed_bytes) / max(each, 1)
            size = next((one for one in sizes if one[ROWS] <= most), None if fitting else sizes[-1])
            if size is None:
                break
            tried = self._try({**values, **size})
            fitting = fitting if tried.why else tried
            if tried.plan is not None:
                each = (before.needed_bytes - tried.plan.needed_bytes) / (rows - size[ROWS])
            rows = size[ROWS]
            sizes = [one for one in sizes if (one[ROWS] < rows if tried.why else one[ROWS] > rows)]
        return fitting or tried

    def fewer_blocks(self, fitting: Tried) -> None:
        """Try the fewest recomputed blocks, otherwise with the settings of one that recomputes all of them and fits."""
        assert fitting.plan is not None, "it fits"
        others, blocks = [one for one in fitting.overrides if one != override_of(1, 1)], fitting.plan.blocks
        tried = {blocks: fitting}

        def missing(number: int) -> float:
            if number not in tried:
                overrides = (*others, override_of(number, blocks))
                self._watch.begins(self._place, overrides)
                tried[number] = self._plan(overrides, 0)
            plan = tried[number].plan
            return math.inf if plan is None else plan.needed_bytes - self._device.memory_bytes

        number = fewest_blocks(missing, blocks)
        if 0 < number < blocks:
            self._note(tried[number])

    def ordered(self) -> list[Tried]:
        """Return the settings tried: the fastest that fits first, planned exactly; then those that do not fit."""
        found = sorted(self._tried, key=lambda tried: tried.step_s)
        for place, tried in enumerate(found):
            if tried.why:
                break
            self._watch.begins("the next" if place else "the fastest, in full", tried.overrides)
            found[place] = self._plan(tried.overrides, None, self._device.memory_bytes)
            if not found[place].why:
                break
        return sorted(found, key=lambda tried: tried.step_s)

    def _best(self) -> Tried | None:
        fitting = [tried for tried in self._tried if not tried.why]
        return min(fitting, key=lambda tried: tried.step_s, default=None)

    def _may_be_best(self, tried: Tried) -> bool:
        """Return whether a setting that does not fit would be faster than the best that does."""
        best, timing = self._best(), None if tried.plan is None else tried.plan.timing
        if best is None or timing is None:
            return True
        return timing.step_s < WORTH * best.step_s

    def _is_slower(self, values: dict[str, Any]) -> bool:
        """Return whether what settings compute takes so long that, without any wait, they are not faster than the best.

        Settings that were not planned yet are, with their largest micro-batches: that needs less than several plans.
        """
        best = self._best()
        if best is None:
            return False
        plan = self._try(values).plan
        return plan is not None and plan.timing is not None and plan.timing.compute_s >= WORTH * best.step_s

    def _try(self, values: dict[str, Any]) -> Tried:
        typed = {name: str(value).lower() for name, value in values.items()}
        if (found := self._found.get(frozenset(typed.items()))) is not None:
            return found
        given = self._load(()).as_flat()
        overrides = tuple(f"{name}={typed[name]}" for name, value in values.items() if given[name] != value)
        self._watch.begins(self._place, overrides)
        tried = self._plan(overrides, 0)
        # What is chosen where a setting is auto is known by both names.
        chosen = {} if tried.plan is None else {one.setting: one.value for one in tried.plan.chosen}
        for names in (typed, {name: chosen.get(name, value) for name, value in typed.items()}):
            self._found[frozenset(names.items())] = tried
        return self._note(tried)

    @property
    def _place(self) -> str:
        return f"{self._begun} of at most {self.most}"

    def _note(self, tried: Tried) -> Tried:
        self._tried.append(tried)
        self._watch.ends(tried, self._best())
        return tried

    def _plan(self, overrides: tuple[str, ...], roughly: int | None, memory_bytes: int | None = None) -> Tried:
        run = self._data, self._world_size, self._device
        try:
            config = self._load(overrides)
            plan = plan_in(memory_bytes, config, *run, roughly=roughly, around=roughly is None)
        except ConfigError as error:
            return Tried(overrides, None, str(error))
        missing = plan.needed_bytes - self._device.memory_bytes
        least = "" if roughly is None else "at least "  # as planned without what is around the steps
        return Tried(overrides, plan, "" if missing <= 0 else f"{least}{format_bytes(missing)} too large")


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
