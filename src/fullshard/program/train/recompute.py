"""What a run chooses by its memory: the fewest blocks to recompute, and whether full gradients fit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fullshard.errors import UserError
from fullshard.planner import Hardware
from fullshard.program.config import RunConfig
from fullshard.program.train.plan import AUTO_SHARE, RunPlan, needed_bytes, plan_in, plan_prepared
from fullshard.program.train.setup.devices import Choice, may_accumulate_unsharded, with_unsharded
from fullshard.program.train.setup.prepare import Prepared
from fullshard.sizes import format_bytes

BLOCKS = "training.gradient_checkpointing"
ACCUMULATE = "training.accumulate"

MOST_PLANS = 12
"""Plans of a search: both ends, three along a line, and halvings of what is then left of up to 128 blocks."""


def fewest_blocks(missing: Callable[[int], float], blocks: int) -> int:
    """Return the fewest blocks to recompute so that a plan fits; if none does, so that it needs as little as it can.

    What it returns has been planned. The next number to plan is where a line through the needs of two others meets the
    limit, as each block frees about the same; later the range is halved.

    Args:
        missing: Returns the bytes that a plan with so many recomputed blocks is too large by, at most 0 if it fits;
            infinite if there is none. Without one for all blocks, the answer is 0.
        blocks: Blocks of the model.
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

    Args:
        memory_bytes: Memory of each rank; None: not known, so that nothing is chosen by it.
        config: The run's settings.
        data: See :func:`~fullshard.program.train.plan.plan_prepared`.
        world_size: Number of ranks.
        device: The GPU of each; None: CPU ranks.
        how: Further arguments of :func:`~fullshard.program.train.plan.plan_prepared`.

    Raises:
        UserError: See :func:`~fullshard.program.train.plan.plan_prepared`.
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
