"""One search over plans: what a run chooses by its memory, the fastest settings that fit, and those that need less."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from operator import attrgetter
from typing import Any

from fullshard.core.comm import demands, lacking
from fullshard.core.policy import ShardingStrategy
from fullshard.errors import ConfigError, UserError
from fullshard.planner import Hardware, work_limit
from fullshard.planner.plan import needed_on
from fullshard.program.config import RunConfig, options
from fullshard.program.config.section import Searched
from fullshard.program.train.first_numbers import first_numbers
from fullshard.program.train.run_plan import ACCUMULATE, AUTO_SHARE, BLOCKS, RunPlan, needed_bytes, plan_prepared
from fullshard.program.train.setup.devices import (
    KEPT,
    Choice,
    Devices,
    for_devices,
    may_accumulate_unsharded,
    with_precision,
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


@dataclass(frozen=True)
class RankPlan:
    """A rank's plan, or why there is none, and the bytes that it may take of each pool of memory."""

    plan: RunPlan | str
    free: Mapping[str, int]

    @property
    def unplanned(self) -> tuple[str, ...] | None:
        """The phases that were too much work to plan; None without a plan."""
        return None if isinstance(self.plan, str) else tuple(self.plan.unplanned)

    def snapshots(self) -> int:
        """Return the bytes of its snapshots for restarts."""
        return 0 if isinstance(self.plan, str) else self.plan.host.get("snapshots", 0)


@dataclass
class Chooser:
    """What a run chooses by the plans of its ranks; each rank calls each method alike, or one process all of them.

    Attributes:
        config: The run's settings.
        world_size: Number of ranks.
        make: Plans each rank with these choices; called once for each.
        needs: Returns the bytes that the rank of a plan needs.
        share: Share of the free memory that a run with recomputed blocks may fill.
        before: Returns what the run that continues chose at its start for a setting; None if there is none.
        snapshots: Whether snapshots count against full gradients and evaluations that gather once.
    """

    config: RunConfig
    world_size: int
    make: Callable[[Sequence[Choice]], list[RankPlan]]
    needs: Callable[[RunPlan], int]
    share: float
    before: Callable[[str], Any] = lambda setting: None
    snapshots: bool = False
    _made: dict[tuple[str, ...], list[RankPlan]] = field(default_factory=dict)

    def of(self, chosen: Sequence[Choice]) -> list[RankPlan]:
        """Return the plans with these choices."""
        key = tuple(one.override for one in chosen if one.value not in ("false", "sharded"))  # auto's in a plan
        if key not in self._made:
            self._made[key] = self.make(chosen)
        return self._made[key]

    def needs_of(self, rank: RankPlan) -> int:
        """Return what a rank needs, 0 without a plan."""
        return 0 if isinstance(rank.plan, str) else self.needs(rank.plan)

    def shortage(
        self, ranks: Sequence[RankPlan], *, snapshots: bool = False, share: float = 1.0
    ) -> tuple[str, int, int] | None:
        """Return a pool too small for its ranks, what they need and what it has; None if a ``share`` is enough."""
        return lacking([(self.needs_of(rank) + snapshots * rank.snapshots(), rank.free) for rank in ranks], share)

    def choose(self) -> list[Choice]:
        """Return how many blocks are recomputed, and how gradients add up, where the run asks for it and has plans."""
        training = self.config.training
        several = training.accumulate == "auto" and training.gradient_accumulation_steps > 1
        recomputes = training.gradient_checkpointing == "auto"
        if several and recomputes and (full := self._with_room()):
            return full
        blocks = self._blocks() if recomputes else None
        chosen = [] if blocks is None else [blocks]
        return [*chosen, self._accumulation(chosen)] if several and self._is_planned(chosen) else chosen

    def gathering_once(self, everyone: list[RankPlan]) -> list[RankPlan]:
        """Return plans whose evaluations gather all units once, if that fits or no rank needs more."""
        plans = [rank.plan.gathering_once() for rank in everyone if isinstance(rank.plan, RunPlan)]
        if len(plans) < len(everyone) or not all(plan.gathers_once for plan in plans):
            return everyone
        once = [RankPlan(plan, rank.free) for plan, rank in zip(plans, everyone, strict=True)]
        fits = self.shortage(once, snapshots=self.snapshots, share=AUTO_SHARE) is None
        needs_no_more = all(self.needs_of(a) <= self.needs_of(b) for a, b in zip(once, everyone, strict=True))
        return once if (fits and all(rank.free for rank in once)) or needs_no_more else everyone

    def _with_room(self) -> list[Choice]:
        """Return the choices of a run that fits with full gradients, by no other plan; empty if it does not."""
        if not may_accumulate_unsharded(self.config, self.world_size) or self.before(BLOCKS):
            return []
        adding = self._accumulation(())
        if adding.value != "unsharded":
            return []
        plan = self.of((adding,))[0].plan
        assert isinstance(plan, RunPlan), "it fits"
        return [blocks_choice(0, plan.blocks, "the run fits without"), adding]

    def _blocks(self) -> Choice | None:
        """Choose the fewest blocks to recompute with which all ranks fit; None without a plan."""
        if not self._is_planned(()):
            return None
        first: RunPlan = self.of(())[0].plan  # type: ignore[assignment]

        def missing(number: int) -> float:
            tried = (blocks_choice(number, first.blocks),) if number else ()
            if not self._is_planned(tried):
                return math.inf
            pools = demands([(self.needs_of(rank), rank.free) for rank in self.of(tried)])
            return max((needed - self.share * there for _, needed, there in pools), default=0)

        before = self.before(BLOCKS)
        kept = before * first.blocks if isinstance(before, bool) else min(before or 0, first.blocks)
        if kept and missing(kept) <= 0:
            return blocks_choice(kept, first.blocks, KEPT)
        number = fewest_blocks(missing, first.blocks)
        if not number:
            why = "the run fits without" if missing(0) <= 0 else "recomputing more does not need less"
            return blocks_choice(0, first.blocks, why)
        chosen = (blocks_choice(number, first.blocks),)
        without, needs = (max(map(self.needs_of, self.of(one))) for one in ((), chosen))
        there = int(self.share * min(limit_of(self.of(()), rank) for rank in range(len(self.of(())))))
        sizes = f"{format_bytes(without)} without, {format_bytes(needs)} with it, and may take {format_bytes(there)}"
        return blocks_choice(number, first.blocks, f"a rank needs {sizes}")

    def _accumulation(self, chosen: Sequence[Choice]) -> Choice:
        """Choose full gradients where they send less and fit; in a run that continues, if they fit at all."""
        if not may_accumulate_unsharded(self.config, self.world_size):
            return Choice(ACCUMULATE, "sharded", "unsharded sends no less")
        before = self.before(ACCUMULATE)
        if before == "sharded":
            return Choice(ACCUMULATE, before, KEPT)
        unsharded = Choice(ACCUMULATE, "unsharded", "")
        everyone = self.of([*chosen, unsharded])
        if not self._is_planned([*chosen, unsharded]):
            return Choice(ACCUMULATE, "sharded", "unsharded could not be planned")
        if not all(rank.free for rank in everyone):
            return Choice(ACCUMULATE, "sharded", "the system does not report its free memory")
        share = 1.0 if before == "unsharded" else AUTO_SHARE
        short = self.shortage(everyone, snapshots=self.snapshots, share=share)
        if short is None:
            why = KEPT if share == 1.0 else f"it sends less, and its plan fits in {share:.0%} of the free memory"
            return replace(unsharded, why=why)
        pool, needed, there = short
        limit = f"{share:.0%} of the {format_bytes(there)} that are free in its {pool.partition(':')[0]}"
        return Choice(ACCUMULATE, "sharded", f"unsharded needs {format_bytes(needed)}, more than {limit}")

    def _is_planned(self, chosen: Sequence[Choice]) -> bool:
        """Return whether all ranks have a plan, whole or of the phases that there are without choices."""
        phases = [rank.unplanned for rank in self.of(chosen)]
        if None in phases:
            return False
        return not any(phases) or phases == [rank.unplanned for rank in self.of(())]  # others cannot be compared


def limit_of(everyone: Sequence[RankPlan], rank: int) -> int:
    """Return the bytes that a rank may take: an equal share of its fullest pool."""
    shares = [size // sum(pool in other.free for other in everyone) for pool, size in everyone[rank].free.items()]
    return min(shares, default=sys.maxsize)


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
    if memory_bytes is None:
        return plan_prepared(config, data, world_size, device, **how), config
    limit = memory_bytes if device is None else memory_bytes - device.outside_bytes

    def make(chosen: Sequence[Choice]) -> list[RankPlan]:
        try:
            plan = plan_prepared(with_choices(config, chosen), data, world_size, device, **how)
        except UserError as error:  # the model or its adapter does not support it
            if not chosen:
                raise
            return [RankPlan(str(error), {})]
        return [RankPlan(plan, {"memory of a rank": limit})]

    def needs(plan: RunPlan) -> int:
        return plan.needed_bytes if device is None else needed_bytes(plan, "cuda")

    chooser = Chooser(config, world_size, make, needs, 1.0 if device is None else AUTO_SHARE)
    chosen = chooser.choose()
    (found,) = chooser.gathering_once(chooser.of(chosen))
    assert isinstance(found.plan, RunPlan), "nothing is chosen that has no plan"
    return replace(found.plan, chosen=(*found.plan.chosen, *chosen)), with_choices(config, chosen)


def with_choices(config: RunConfig, chosen: Sequence[Choice]) -> RunConfig:
    """Return the settings with these choices in them."""
    for one in chosen:
        section, _, name = one.setting.partition(".")
        value = one.value if one.setting == ACCUMULATE else json.loads(one.value)
        config = config.model_copy(update={section: getattr(config, section).model_copy(update={name: value})})
    return config


ROWS = "training.per_device_train_batch_size"
TIMES = "training.gradient_accumulation_steps"

Load = Callable[[Sequence[str]], RunConfig]
"""Reads the run file with further overrides."""


@dataclass(frozen=True)
class Tried:
    """One setting of the search.

    Attributes:
        overrides: Overrides to type after the run file's name.
        plan: Its plan; None if it cannot be planned, or its first numbers are too large already.
        why: Why it does not fit; empty if it does.
        needed_bytes: What a GPU must have for it, by its plan or at least by its first numbers; None: not known.
    """

    overrides: tuple[str, ...]
    plan: RunPlan | None
    why: str = ""
    needed_bytes: int | None = None

    @property
    def step_s(self) -> float:
        """Seconds of a step; infinite if the setting does not fit."""
        return float("inf") if self.why or self.plan is None or self.plan.timing is None else self.plan.timing.step_s

    @property
    def is_refused(self) -> bool:
        """True if its first numbers do not fit: with no batch, however small, it would."""
        return self.plan is None and self.needed_bytes is not None

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-able values."""
        plan = self.plan and self.plan.as_dict()
        return {"overrides": list(self.overrides), "why": self.why, "needed_bytes": self.needed_bytes, "plan": plan}


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
    a host: the copies between the two are not timed. What is too large by its first numbers is not planned at all.

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
            last = self.fit_rows(shared | own, None if like is None else like | own)
            if number == 1 and last.why and not self._may_be_best(last):
                self._begun += len(owns) - number
                break
            if not last.why and own.get(BLOCKS) is True:
                self.fewer_blocks(last)
            original = not any(one.startswith(ROWS) for one in last.overrides)
            # Settings of a rank do not change what it keeps, and smaller micro-batches are slower.
            if last.is_refused or (not last.why and original):
                self._begun += len(owns) - number
                break

    def fit_rows(self, values: dict[str, Any], like: dict[str, Any] | None) -> Tried:
        """Try the largest micro-batches, then the most rows that should fit, until no larger ones do.

        How many should is read off a line, first that of the activations, then through the last two. The smallest come
        first where settings that keep less, ``like`` these, do not fit with the largest.

        Returns:
            The last setting that was tried, or the one that fits.
        """
        rows, sizes = self._load(()).training.per_device_train_batch_size, micro_batches(self._load(()))
        other = None if like is None else self._found.get(_key(like))
        if other is not None and other.why and other.needed_bytes is not None and sizes:
            *sizes, least = [{ROWS: rows, TIMES: self._load(()).training.gradient_accumulation_steps}, *sizes]
            tried, rows = self._try({**values, **least}), least[ROWS]
            if tried.why:
                return tried
            fitting = tried
        else:
            tried, fitting = self._try(values), None
            if not tried.why or tried.plan is None:
                return tried
            if not self._may_be_best(tried):
                return tried  # smaller micro-batches are slower than these
        assert tried.plan is not None, "it was planned"
        each = tried.plan.parts.get("activations_and_temporaries", 0) / rows
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
            found[place] = self._plan(tried.overrides, None)
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
        if (found := self._found.get(_key(values))) is not None:
            return found
        typed = dict(_key(values))
        given = self._load(()).as_flat()
        overrides = tuple(f"{name}={typed[name]}" for name, value in values.items() if given[name] != value)
        self._watch.begins(self._place, overrides)
        tried = self._plan(overrides, 0)
        # What is chosen where a setting is auto is known by both names.
        chosen = {} if tried.plan is None else {one.setting: one.value for one in tried.plan.chosen}
        for names in (typed, {name: chosen.get(name, value) for name, value in typed.items()}):
            self._found[_key(names)] = tried
        return self._note(tried)

    @property
    def _place(self) -> str:
        return f"{self._begun} of at most {self.most}"

    def _note(self, tried: Tried) -> Tried:
        self._tried.append(tried)
        self._watch.ends(tried, self._best())
        return tried

    def _plan(self, overrides: tuple[str, ...], roughly: int | None) -> Tried:
        """Plan settings, if their first numbers fit; unless ``roughly``, exactly and with what a run would choose."""
        run, memory = (self._data, self._world_size, self._device), self._device.memory_bytes
        try:
            config = self._load(overrides)
            if roughly is None:
                plan, _ = plan_chosen(memory, config, *run)
            else:
                least = self._least(config)
                if least > memory:
                    overrides = tuple(one for one in overrides if not one.startswith((ROWS, TIMES)))  # whatever these
                    return Tried(overrides, None, f"at least {format_bytes(least - memory)} too large", least)
                plan = plan_prepared(config, *run, roughly=roughly, around=False)
        except ConfigError as error:
            return Tried(overrides, None, str(error))
        missing = plan.needed_bytes - memory
        least = "" if roughly is None else "at least "  # as planned without what is around the steps
        why = "" if missing <= 0 else f"{least}{format_bytes(missing)} too large"
        return Tried(overrides, plan, why, plan.needed_bytes)

    def _least(self, config: RunConfig) -> int:
        """Return the memory that the device must have by the plan's first numbers, with any batch.

        Gradients may accumulate unsharded only where a step has several micro-batches, so that it is taken to have one.
        """
        training = config.training.model_copy(update={"gradient_accumulation_steps": 1})
        config = config.model_copy(update={"training": training})
        config = for_devices(config, Devices.of_sheet(self._device))  # as a plan does
        found = first_numbers(config, self._data.tokenizer, self._world_size, gpu=self._device.has_host)
        return needed_on(self._device, found.nbytes)


def _key(values: Mapping[str, Any]) -> frozenset[tuple[str, str]]:
    return frozenset((name, str(value).lower()) for name, value in values.items())


def micro_batches(config: RunConfig) -> list[dict[str, int]]:
    """Return the sizes of smaller micro-batches that give a step the same rows, the largest first."""
    rows, times = config.training.per_device_train_batch_size, config.training.gradient_accumulation_steps
    if config.training.per_device_train_batch_tokens is not None:
        return []
    sizes = [size for size in range(rows - 1, 0, -1) if rows % size == 0]
    return [{ROWS: size, TIMES: times * (rows // size)} for size in sizes]


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
        for overrides in dict.fromkeys(settings_that_need_less(begun)):
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


def settings_that_need_less(config: RunConfig) -> Iterator[tuple[str, ...]]:
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
