"""Measurement of a run's operators and collectives on this machine, as rates for the time in a plan."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from fullshard import planner
from fullshard.core.comm import Comm, SoloComm
from fullshard.core.optim import ShardedGradScaler
from fullshard.planner import Rates, Rehearsed
from fullshard.program.config import RunConfig
from fullshard.program.data import Batch
from fullshard.program.models import AdaptedWeights
from fullshard.program.train.plan import middle_step, step_spec, uncompiled
from fullshard.program.train.run.step import issue_step
from fullshard.program.train.setup.data_plan import make_plan
from fullshard.program.train.setup.devices import Devices, for_devices, smallest_memory
from fullshard.program.train.setup.model import prepare_model, shard_model
from fullshard.program.train.setup.optimizers import make_optimizer
from fullshard.program.train.setup.prepare import Prepared


def measure_rates(
    config: RunConfig,
    data: Prepared,
    comm: Comm,
    world_size: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Rates:
    """Measure rates in steps of mean size; see :func:`fullshard.planner.measure_rates`.

    Raises:
        ConfigError: The settings cannot be planned.
        UserError: As for training.
    """
    config = uncompiled(config)
    epoch = make_plan(config, data.train_set, world_size, causal=data.causal)
    batches = middle_step(config, data, epoch)
    return planner.measure_rates(partial(_build, config, data, batches), comm, world_size, progress)


def _build(config: RunConfig, data: Prepared, batches: list[Batch], comm: Comm) -> Rehearsed:
    config = for_devices(config, Devices.of_ranks(comm))
    ready = prepare_model(config, data.tokenizer, memory_bytes=smallest_memory(comm))
    if isinstance(ready.weights, AdaptedWeights):  # all by this rank: the others may not be there
        ready.weights.compute_magnitudes(ready.model, SoloComm(torch.device("cpu")))
    shard_model(ready.model, config, comm, weights=ready.weights)
    model = ready.model.train()
    optimizer = make_optimizer(model, config)
    scaler = ShardedGradScaler(comm.device.type) if config.training.precision == "fp16" else None
    spec = step_spec(model, config, data)
    return Rehearsed(
        model, optimizer, lambda: issue_step(model, optimizer, batches, comm, spec, scaler, late=scaler is None)
    )
