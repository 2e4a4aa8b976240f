"""Dry run: the sharding of a run's model over any number of ranks, without the ranks and without its memory."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any

import torch

from fullshard.core.comm import free_memory, planned_memory, whole_memory_bytes
from fullshard.core.engine import UnitTable, units
from fullshard.errors import ConfigError, ModelError, UserError
from fullshard.planner import Hardware, TooMuchWorkError, UnplannedStepError, work_limit
from fullshard.program.config import RunConfig
from fullshard.program.data import padding_share
from fullshard.program.models import require_fp16_fit
from fullshard.program.models.hub import known_kind
from fullshard.program.train.auto import gpu_sheet, precision_before, simulated_settings
from fullshard.program.train.first_numbers import laid_out, lay_out, numbers_of
from fullshard.program.train.reporting.trackers import tracker_sinks
from fullshard.program.train.run.assemble import make_evaluation
from fullshard.program.train.run_plan import ACCUMULATE, BLOCKS, try_step
from fullshard.program.train.search import Load, plan_chosen
from fullshard.program.train.setup.choices import advice, choices
from fullshard.program.train.setup.devices import (
    Choice,
    Devices,
    for_devices,
    precision_choice,
    precision_of,
    with_precision,
)
from fullshard.program.train.setup.float8 import float8_notes, require_float8
from fullshard.program.train.setup.frozen import frozen_notes
from fullshard.program.train.setup.model import outline_model, own_loss, refuses_fp16
from fullshard.program.train.setup.prepare import Prepared, Progress, collate_spec, prepare, prepare_tokenizer
from fullshard.program.train.setup.quantization import quantization_notes, require_kernels
from fullshard.program.train.setup.sequence import sharing_notes
from fullshard.program.train.setup.steps import (
    learning_rate_schedule,
    make_plan,
    mixture_notes,
    schedule_notes,
    training_batches,
)
from fullshard.program.train.setup.ways import ways_choice
from fullshard.sizes import format_bytes
from fullshard.state.saving.full import check_saving
from fullshard.state.storage import file_system

DRY_RUN_OPERATORS = 500_000
"""Operators that the plans of a dry run may take: some twenty seconds of processor time."""

_MANY_STEPS = 10**9
"""Steps of an epoch where the data is not read: no schedule is too long for it."""


def inspect_units(config: RunConfig, world_size: int) -> UnitTable:
    """Lay out a run's model over ``world_size`` ranks and return its unit table; one process, no process group.

    The model is built on the meta device, without reading the weights of ``model.path``. The data is read only if a
    tokenizer must be trained, because its size is the vocabulary size.

    Raises:
        UserError: Data, tokenizer, model or wrapping cannot be used.
    """
    return units(lay_out(config, prepare_tokenizer(config), world_size))


def check_kind(config: RunConfig) -> None:
    """Raise the errors of a run that depend only on its settings and the model's kind; any process, without a network.

    Raises:
        ConfigError: bitsandbytes is missing or too old for ``model.quantization``, or the schedule cannot be used.
        ModelError: The model is known to overflow in the precision.
    """
    require_kernels(config)
    learning_rate_schedule(config, _MANY_STEPS)
    source = config.model.path or config.model.config
    kind = None if source is None else known_kind(source)
    if kind is not None and refuses_fp16(config):
        require_fp16_fit(kind)


@dataclass(frozen=True)
class DryRun:
    """Facts about a run before its first step; ``str()`` formats them."""

    train_rows: int  # rows trained on
    validation_rows: int  # rows held out
    steps_per_epoch: int  # optimizer steps of one epoch
    total_steps: int  # optimizer steps of the run
    padding_share: float  # share of padding among all positions of an epoch's batches
    table: UnitTable  # the unit table
    parameters: int  # bytes of each rank's shards of the parameters
    gradients: int  # bytes of each rank's gradients, from backward to the next step
    optimizer: int  # bytes of optimizer state on rank 0; about the same on other ranks
    gathered: int  # bytes of the largest unit while it is gathered
    notes: tuple[str, ...]  # notes on data and model for the user
    chosen: tuple[Choice, ...] = ()  # what the run chooses by itself, and why

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-able values."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        chosen = [asdict(one) for one in self.chosen]
        return {**plain, "table": self.table.as_dict(), "notes": list(self.notes), "chosen": chosen}

    def __str__(self) -> str:
        held = ("parameters", "gradients", "optimizer", "gathered")
        memory = ", ".join(f"{name} {format_bytes(getattr(self, name))}" for name in held)
        lines = [
            str(self.table),
            *self.notes,
            "chosen:",
            *(f"  {one}" for one in self.chosen),
            f"{self.total_steps:,} steps, {self.steps_per_epoch:,} an epoch",
            f"memory of each rank, before activations, which depend on the batch: {memory}",
            "no problem found: ready for the first step",
        ]
        return "\n".join(lines)


def dry_run(
    config: RunConfig,
    world_size: int,
    progress: Progress = lambda what, done, total: None,
    *,
    load: Load | None = None,
    device: Hardware | None = None,
    gpus: int = 0,
) -> DryRun:
    """Do everything that a run does before its first step, take the step, and save; without ranks, weights or files.

    ``load`` reads the run file with further overrides, which ``sharding: auto`` needs; None: it is not searched.
    ``device`` is the GPU of each rank; None: this machine's, of which there are ``gpus``; 0: ranks compute on its CPU.
    ``progress`` is called while data is read.

    Raises:
        UserError: Data, tokenizer, model or settings cannot be used.
    """
    devices = Devices.of_machine(gpus) if device is None else Devices.of_sheet(device)
    memory = whole_memory_bytes(torch.device("cuda")) if gpus else None
    with planned_memory(memory if device is None else device.memory_bytes):
        data, notes = prepare(config, progress=progress), []
        sheet = gpu_sheet(torch.device("cuda")) if gpus and device is None else device
        if load is not None:
            config = load(simulated_settings(load, data, world_size, sheet, notes.append))
        config = data.settled(config)
        planned = load is not None and not (gpus and sheet is None)
        by_plan = partial(_by_plan, config, data, world_size, sheet) if planned else tuple
        return _dry_run(config, data, world_size, devices, notes, by_plan)


def _by_plan(config: RunConfig, data: Prepared, world_size: int, device: Hardware | None) -> tuple[Choice, ...]:
    """Return what the run would choose by its memory: that of ``device``, or what is free on this machine now."""
    free = free_memory(torch.device("cpu")).values()
    limit = device.memory_bytes if device is not None else min(free) // world_size if free else None
    try:
        with work_limit(DRY_RUN_OPERATORS):
            plan, _ = plan_chosen(limit, config, data, world_size, device, roughly=0)
    except TooMuchWorkError:
        why = f"decided at the start: its plan takes more than {DRY_RUN_OPERATORS:,} operators, `fullshard plan` tells"
        asks = {BLOCKS: config.training.gradient_checkpointing, ACCUMULATE: config.training.accumulate}
        return tuple(Choice(setting, "auto", why) for setting, value in asks.items() if value == "auto")
    return tuple(one for one in plan.chosen if one.setting in (BLOCKS, ACCUMULATE))


def _dry_run(
    config: RunConfig,
    data: Prepared,
    world_size: int,
    devices: Devices,
    found: Sequence[str],
    by_plan: Callable[[], Sequence[Choice]],
) -> DryRun:
    before = precision_before(config) if config.training.precision == "auto" else None
    precision = precision_choice(config, devices, before)
    if precision.value == "bf16" and devices.gpu and not devices.bf16:
        raise ConfigError(f"training.precision is bf16, but {precision_of(devices)[1]}. Set it to fp16 or fp32.")
    require_float8(config, devices)
    asked, ways = ways_choice(with_precision(config, devices, precision.value), data, world_size, devices)
    config = for_devices(asked, devices)
    plan = make_plan(config, data.train_set, world_size, causal=data.causal)
    batches = training_batches(config, collate_spec(data.tokenizer, causal=data.causal), plan, data.train_set)
    schedule = learning_rate_schedule(config, plan.num_steps)
    make_evaluation(config, data)
    tracker_sinks(config)
    if config.training.checkpoints_to is not None:
        file_system(config.training.checkpoints_to)  # checks for its package; the store itself is not contacted
    model = outline_model(config, data.tokenizer)
    frozen = frozen_notes(model, config)
    numbers = numbers_of(laid_out(model, config, world_size), config, gpu=devices.gpu)
    untried = _tried(config, data, world_size)
    check_saving(model, data.tokenizer)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    average = format_bytes(sum(4 * parameter.numel() for parameter in trainable))
    averaged = [f"training.ema_decay: the average of the weights takes {average} more on each rank"]
    averaged = [] if config.training.ema_decay is None else averaged
    return DryRun(
        train_rows=data.train_set.examples,
        validation_rows=0 if data.held_out_set is None else data.held_out_set.examples,
        steps_per_epoch=plan.num_steps,
        total_steps=schedule.total_steps,
        padding_share=padding_share(plan, data.train_set, batches),
        table=numbers.table,
        parameters=numbers.shards,
        gradients=numbers.gradients,
        optimizer=numbers.optimizer_state,
        gathered=numbers.gathered,
        notes=(
            *found,
            *data.notes,
            *mixture_notes(config, data),
            *own_loss(model, config)[1],
            *quantization_notes(config),
            *frozen,
            *averaged,
            *schedule_notes(config, schedule),
            *sharing_notes(config, world_size, data.held_out_set),
            *float8_notes(model, config),
            *advice(config, data, plan, world_size),
            *untried,
        ),
        chosen=choices(asked, devices, model, before=[precision, *ways, *by_plan()]),
    )


def _tried(config: RunConfig, data: Prepared, world_size: int) -> tuple[str, ...]:
    """Take the run's first step without memory; return a note if it cannot be taken that way.

    Raises:
        UserError: The step would fail.
    """
    try:
        try_step(config, data, world_size)
    except UnplannedStepError as error:
        return (f"the first step was not tried: {error}",)
    except UserError:
        raise
    except Exception as error:  # whatever transformers, peft or the user's model raise in a forward
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{frame.filename}:{frame.lineno}"
        raise ModelError(
            f"The first step would fail in {where}: {type(error).__name__}: {error}. Change the settings that lead "
            "there, such as the adapter's options, or use another model."
        ) from error
    return ()
