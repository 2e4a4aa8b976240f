"""The search for the fastest settings that fit, among those that a run file leaves open and that train the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import attrgetter
from typing import Any

from fullshard.errors import ConfigError
from fullshard.planner import Hardware
from fullshard.program.config import RunConfig, options
from fullshard.program.config.section import Searched
from fullshard.program.train.plan import RunPlan, plan_in, prepare_plan
from fullshard.program.train.recompute import BLOCKS, fewest_blocks, override_of
from fullshard.program.train.setup.prepare import Prepared
from fullshard.sizes import format_bytes

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

    Args:
        load: Reads the run file.
        world_size: Number of ranks.
        device: The GPU of each.
        tell: Called with each setting that was tried.
        data: Rows to plan with; None: the run's own, which are read.

    Raises:
        UserError: Data, tokenizer, model or settings cannot be used.
    """
    config = load(())
    made = Search(load, data or prepare_plan(config), world_size, device, tell)
    for offload in _product(config, "last") if device.has_host else ({},):
        for shared in _product(config, "all"):
            for own in _product(config, "rank"):
                last = made.fit_rows({**offload, **shared, **own})
                if not last.why and own.get(BLOCKS) is True:
                    made.fewer_blocks(last)
                if last.plan is not None and _keeps_too_much(last.plan, device):
                    break  # settings of a rank do not change that
                if not last.why and not _rows_of(last):
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
        """Start with nothing tried."""
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
        found = sorted(self._tried, key=lambda tried: tried.step_s)
        for place, tried in enumerate(found):
            if not tried.why:
                found[place] = self._plan(tried.overrides, None, self._device.memory_bytes)
            if not found[place].why or tried.why:
                break
        return sorted(found, key=lambda tried: tried.step_s)

    def _try(self, values: dict[str, Any]) -> Tried:
        config = self._load(())
        changed = {name: value for name, value in values.items() if _is_new(config, name, value)}
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
            plan = plan_in(memory_bytes, self._load(overrides), *run, roughly=roughly)
        except ConfigError as error:
            return Tried(overrides, None, str(error))
        missing = plan.needed_bytes - self._device.memory_bytes
        return Tried(overrides, plan, "" if missing <= 0 else f"{format_bytes(missing)} too large")


def _keeps_too_much(plan: RunPlan, device: Hardware) -> bool:
    """Return True if the part that does not depend on the batch is already too large."""
    kept = replace(plan, phase_peaks={"kept": plan.parts["shards"] + plan.parts["optimizer_state"]})
    return not kept.fits(device.memory_bytes)


def _rows_of(tried: Tried) -> bool:
    """Return True if micro-batches have fewer rows than in the run file."""
    return any(one.startswith(ROWS) for one in tried.overrides)


def micro_batches(config: RunConfig) -> list[dict[str, int]]:
    """Return the sizes of smaller micro-batches that give a step the same rows, the largest first."""
    rows, times = config.training.per_device_train_batch_size, config.training.gradient_accumulation_steps
    if config.training.per_device_train_batch_tokens is not None:
        return []
    sizes = [size for size in range(rows - 1, 0, -1) if rows % size == 0]
    return [{ROWS: size, "training.gradient_accumulation_steps": times * (rows // size)} for size in sizes]


def _is_new(config: RunConfig, setting: str, value: object) -> bool:
    section, name = setting.split(".")
    return getattr(getattr(config, section), name) != value
