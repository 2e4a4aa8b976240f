"""``speed.ways: auto``: the ways that a run takes by itself, by its model, its devices and its planned steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from fullshard.program.config import RunConfig
from fullshard.program.models import base_of, resolve_adapter, saved_adapter
from fullshard.program.speed import WAYS, biased_layers
from fullshard.program.train.setup.devices import Choice, Devices
from fullshard.program.train.setup.model import outline_model, speed_facts
from fullshard.program.train.setup.prepare import Prepared, collate_spec
from fullshard.program.train.setup.steps import learning_rate_schedule, make_plan, training_batches

WAYS_SETTING = "speed.ways"

STEPS_A_SHAPE = 500
"""Steps for each shape from which on a run's blocks are compiled. On an H200 a shape of T5-large takes about 40 s to
compile and saves 74 of 260 ms a step: 540 steps."""


def with_ways(config: RunConfig, ways: Sequence[str]) -> RunConfig:
    """Return the settings with these ways."""
    return config.model_copy(update={"speed": config.speed.model_copy(update={"ways": tuple(ways)})})


def ways_choice(
    config: RunConfig,
    data: Prepared,
    world_size: int,
    devices: Devices,
    device: torch.device | None = None,
    *,
    counted: bool = True,
) -> tuple[RunConfig, tuple[Choice, ...]]:
    """Return the settings with ``speed.ways: auto`` resolved, and the choice; unchanged and empty if it is not set.

    It counts steps and shapes and reads no clock, so every rank and a resumed run find the same. Any rank, alone.

    Args:
        config: With the precision chosen.
        data: Of the run.
        world_size: Number of ranks.
        devices: Those of the ranks.
        device: This rank's; None: a GPU of a data sheet, which has all that kernels need.
        counted: Whether ``data`` says how many steps there are; if not, blocks are not compiled.

    Raises:
        UserError: The model cannot be built, or the settings do not match it.
    """
    if config.speed.ways != "auto":
        return config, ()
    if not devices.gpu:
        return with_ways(config, ()), (Choice(WAYS_SETTING, "[]", "ranks compute on CPUs"),)
    config = with_ways(config, ())
    # Without the adapter: peft makes some from weights, which are not read here, and ways are of the base's layers.
    bare = config.model_copy(update={"model": config.model.model_copy(update={"adapter": None, "quantization": None})})
    model = outline_model(bare, data.tokenizer)
    kernel = _why_no_kernel(config, model, devices, device)
    unknown = False, "blocks are not compiled: the number of steps is not known"
    compiles, why = _compile(config, model, data, world_size) if counted else unknown
    ways = [*([] if kernel else ["t5_attention"]), *(["compile"] if compiles else [])]
    biased = bool(biased_layers(base_of(model)))
    whys = [f"no t5_attention: {kernel}" if kernel else "T5's bias, masks and dropout in one kernel"] if biased else []
    whys.append(why)
    return with_ways(config, ways), (Choice(WAYS_SETTING, f"[{', '.join(ways)}]", "; ".join(whys)),)


def _why_no_kernel(config: RunConfig, model: nn.Module, devices: Devices, device: torch.device | None) -> str | None:
    if config.model.attn_implementation is not None:
        return f"model.attn_implementation is {config.model.attn_implementation}"
    adapter = config.model.adapter
    if adapter is not None:
        kind = adapter.type if adapter.path is None else saved_adapter(resolve_adapter(adapter.path))[0]
        if kind == "prefix":
            return "a prefix adapter is a key-value cache"
    if device is None and not devices.bf16:
        return f"Triton compiles for GPUs with bfloat16, and {devices.name} has none"
    facts = replace(speed_facts(config, device or torch.device("cuda")), assumed=device is None)
    return WAYS["t5_attention"].misfit(cast("Any", model), facts)


def _compile(config: RunConfig, model: nn.Module, data: Prepared, world_size: int) -> tuple[bool, str]:
    """Return whether blocks are compiled, and why; a run that says ``torch_compile`` is left as it is."""
    training = config.training
    if "torch_compile" in training.model_fields_set:
        return False, "training.torch_compile is set"
    others = {
        "model.quantization": config.model.quantization is not None,
        "sharding.sequence_parallel": config.sharding.sequence_parallel > 1,
        "training.activation_offload": training.activation_offload,
    }
    if found := [name for name, is_set in others.items() if is_set]:
        return False, f"blocks are not compiled: compiled, {found[0]} has not run on a GPU"
    facts = speed_facts(config, torch.device("cpu"))
    if (reason := WAYS["compile"].misfit(cast("Any", model), facts)) is not None:
        return False, reason
    plan = make_plan(config, data.train_set, world_size, causal=data.causal)
    steps = learning_rate_schedule(config, plan.num_steps).total_steps
    spec = collate_spec(data.tokenizer, causal=data.causal)
    shapes = len(training_batches(with_ways(config, ["compile"]), spec, plan, data.train_set).shapes)
    needed = STEPS_A_SHAPE * shapes
    counts = f"{steps:,} steps of {shapes} shape{'s' if shapes > 1 else ''}, and {needed:,} repay compiling"
    return steps >= needed, f"{'compiled' if steps >= needed else 'blocks are not compiled'}: {counts}"
