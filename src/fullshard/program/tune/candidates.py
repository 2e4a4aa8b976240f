"""The candidates of a tuning: ways, recomputed blocks and rows of a micro-batch, as far as the run file leaves open."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import get_args

from fullshard.planner import Hardware, work_limit
from fullshard.program.config import RunConfig
from fullshard.program.speed import WAYS
from fullshard.program.speed.way import Part
from fullshard.program.train.fit import Load, fewest_blocks, value_of
from fullshard.program.train.run_plan import AUTO_SHARE, RunPlan, needed_bytes, plan_in
from fullshard.program.train.setup.prepare import Prepared
from fullshard.program.train.setup.tuned import (
    Setting,
    compile_is_open,
    recompute_is_open,
    rows_are_open,
    ways_are_open,
)

MOST_OPERATORS = 2_000_000
"""Limit on the work of one plan: a minute or so of processor time."""


@dataclass(frozen=True)
class Candidate:
    """One combination, by its value on each axis."""

    attention: str = ""  # the way of this part; empty: the plain one
    kernels: str = ""
    blocks: str = ""
    recompute: str = "none"  # none, fewest or all; as in the file: its value in JSON
    rows: int | None = None  # of a micro-batch; None: micro-batches are cut by tokens
    times: int = 1

    @property
    def ways(self) -> tuple[str, ...]:
        """Names of its ways, in the order in which they are applied."""
        return tuple(name for part in get_args(Part) if (name := getattr(self, part)))

    def axes(self) -> Mapping[str, object]:
        """Return its value on each axis."""
        names = ("attention", "kernels", "blocks", "recompute", "rows")
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        rows = "" if self.rows is None else f", {self.rows} row{'s' if self.rows > 1 else ''} a micro-batch"
        return f"{named(self.ways)}, recompute {self.recompute}{rows}"


def named(ways: Sequence[str]) -> str:
    """Return the ways in words."""
    return " + ".join(ways) or "plain"


def candidates(config: RunConfig, fitting: Sequence[str]) -> list[Candidate]:
    """Return all candidates, the plain ways first, of them the ones with the largest micro-batches; any rank.

    ``fitting`` are names of ways that apply to the model.
    """
    parts: dict[str, list[str]] = {part: [""] for part in get_args(Part)}
    for name in fitting if ways_are_open(config) else ():
        if name not in config.ways and (name != "compile" or compile_is_open(config)):
            parts[WAYS[name].part].append(name)
    for name in config.ways:  # by hand
        parts[WAYS[name].part] = [name]
    asked = config.training.gradient_checkpointing
    recompute = ["none", "fewest", "all"] if recompute_is_open(config) else [json.dumps(asked)]
    found = [
        Candidate(**dict(zip(parts, ways, strict=True)), recompute=blocks, rows=rows, times=times)
        for ways in product(*parts.values())
        if not {"liger", "compile"} <= {*ways}  # refused in a run file
        for rows, times in _micro_batches(config)
        for blocks in recompute
    ]
    return sorted(found, key=lambda one: len(one.ways))


def _micro_batches(config: RunConfig) -> Iterator[tuple[int | None, int]]:
    """Yield rows of a micro-batch, the most first, and micro-batches of a step, with the same rows of a step."""
    training = config.training
    each, times = training.per_device_train_batch_size, training.gradient_accumulation_steps
    if training.per_device_train_batch_tokens is not None:
        yield None, times
    elif not rows_are_open(config):
        yield each, times
    else:
        total = each * times
        yield from ((rows, total // rows) for rows in range(total, 0, -1) if total % rows == 0)


class Memory:
    """The memory plans of candidates, made when they are asked for; one process."""

    def __init__(self, load: Load, data: Prepared, world_size: int, device: Hardware | None, limit: int | None) -> None:
        """Plan for ranks on ``device`` (a data sheet, or None) that may take ``limit`` bytes each; None: unknown."""
        self._load, self._data, self._world_size, self._device, self._limit = load, data, world_size, device, limit
        self._plans: dict[Setting, RunPlan | None] = {}

    def settled(self, candidate: Candidate, blocks: int) -> Setting | str:
        """Return a candidate's setting, of a model with so many blocks; or why it is left out.

        Without a plan, as for a step that depends on values, a candidate counts as fitting.
        """
        asked = candidate.recompute

        def setting(number: int) -> Setting:
            return Setting(candidate.ways, json.dumps(value_of(number, blocks)), candidate.rows, candidate.times)

        if asked not in ("none", "fewest", "all"):
            found = Setting(candidate.ways, asked, candidate.rows, candidate.times)
        elif asked == "fewest":
            number = fewest_blocks(lambda number: self._missing(setting(number)), blocks)
            if number in (0, blocks):
                return SAME
            found = setting(number)
        else:
            found = setting(blocks if asked == "all" else 0)
            if asked == "all" and not blocks:
                return SAME
        missing = self._missing(found)
        return found if missing <= 0 else "its memory plan does not fit"

    def accumulate(self, setting: Setting) -> str | None:
        """Return ``training.accumulate`` as a run with this setting would choose it; None: it has no choice."""
        plan = self._plan(setting)
        return None if plan is None else plan.accumulate

    def _missing(self, setting: Setting) -> float:
        plan = self._plan(setting)
        if plan is None or self._limit is None:
            return -math.inf
        on_card = self._device is not None
        return needed_bytes(plan, "cuda" if on_card else "cpu") - (AUTO_SHARE if on_card else 1) * self._limit

    def _plan(self, setting: Setting) -> RunPlan | None:
        if setting not in self._plans:
            try:
                with work_limit(MOST_OPERATORS):
                    config = self._load(setting.overrides)
                    run = (self._data, self._world_size, self._device)
                    self._plans[setting] = plan_in(self._limit, config, *run, roughly=0)
            except Exception:  # as at a run's start: a failing plan must not prevent what may work
                self._plans[setting] = None
        return self._plans[setting]


SAME = "as another candidate"
"""Why a candidate is left out that is the same as another one; that is not told."""
