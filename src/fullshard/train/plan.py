"""The plan of a run's step: the program's own model, data, optimizer and step, rehearsed without memory or ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fullshard.comm import Comm
from fullshard.config import RunConfig
from fullshard.data import Batch, RowRef, TokenizedSet, collate
from fullshard.engine.setup.source import WantedTensor
from fullshard.errors import ConfigError
from fullshard.models import Objective
from fullshard.planner import Plan, Rehearsed, candidates, highest
from fullshard.train.run.step import StepSpec, issue_step
from fullshard.train.setup.model import outline_model, own_loss, prepare_model, shard_model
from fullshard.train.setup.optimizers import make_optimizer
from fullshard.train.setup.prepare import Prepared, Progress, collate_spec, prepare


def plan_run(config: RunConfig, world_size: int, progress: Progress = lambda what, done, total: None) -> Plan:
    """Return what the fullest of ``world_size`` ranks holds and sends in a step; one process, without weights.

    The batch is the longest that the data can give: the longest source and the longest target together.

    Raises:
        ConfigError: A setting cannot be planned.
        ModelError: The step depends on values.
        UserError: Data, tokenizer, model or settings cannot be used.
    """
    _refuse(config)
    data = prepare(config, progress=progress)
    batch = longest_batch(config, data)

    def sharded(comm: Comm) -> Any:
        if config.model.path is None:
            model, weights = prepare_model(config, data.tokenizer).model, None
        else:
            model, weights = outline_model(config, data.tokenizer), _UnreadWeights()
        shard_model(model, config, comm, weights=weights)
        return model.train()

    def build(comm: Comm) -> Rehearsed:
        model = sharded(comm)
        optimizer = make_optimizer(model, config)
        batches = [batch] * config.training.gradient_accumulation_steps
        spec = _step_spec(model, config, data)

        def step() -> None:
            # Late: otherwise it reads the loss and the norm, which a plan does not know.
            issue_step(model, optimizer, batches, comm, spec, late=True)

        return Rehearsed(model, optimizer, step)

    return highest(build, candidates(sharded, world_size), world_size)


def longest_batch(config: RunConfig, data: Prepared) -> Batch:
    """Return a micro-batch that is at least as large as any of the run, of rows of the data; any process, alone."""
    rows = longest_rows(data.train_set, config.training.per_device_train_batch_size, causal=data.causal)
    return collate([RowRef(row) for row in rows], data.train_set, collate_spec(data.tokenizer, causal=data.causal))


def longest_rows(rows: TokenizedSet, count: int, *, causal: bool) -> Sequence[int]:
    """Return the indices of ``count`` rows that need most: the longest source and target, then the longest rows.

    A set with fewer rows gives all of them.
    """
    sources, targets = np.asarray(rows.source_ids.lengths), np.asarray(rows.target_ids.lengths)
    by_length = np.argsort(-(sources + targets), kind="stable").tolist()
    first = [] if causal or count < 2 else [int(sources.argmax()), int(targets.argmax())]
    return list(dict.fromkeys([*first, *by_length]))[:count]


def _refuse(config: RunConfig) -> None:
    """Raise if the plan would be wrong or impossible."""
    training = config.training
    problems = {
        "model.adapter": (config.model.adapter is not None, "an adapter's first values are read when it is added"),
        "sharding.cpu_offload": (config.sharding.cpu_offload, "it counts the memory of one device"),
        "training.precision: fp16": (training.precision == "fp16", "whether a step is skipped depends on values"),
        "training.fused_cross_entropy": (training.fused_cross_entropy, "its backward reads a value"),
        "training.packing": (training.packing, "how many sequences the rows of a batch make differs between batches"),
        "training.torch_compile": (training.torch_compile, "compiled blocks allocate memory that it does not see"),
        "training.per_device_train_batch_tokens": (
            training.per_device_train_batch_tokens is not None,
            "the largest batch of all epochs is not known in advance; set per_device_train_batch_size to plan",
        ),
    }
    for name, (is_set, reason) in problems.items():
        if is_set:
            raise ConfigError(f"A plan does not support {name} yet: {reason}. Plan the run without it.")


def _step_spec(model: Any, config: RunConfig, data: Prepared) -> StepSpec:
    settings = config.training
    return StepSpec(
        step=1,
        epoch=0.0,
        learning_rate=settings.learning_rate or 0.0,
        max_grad_norm=settings.max_grad_norm,
        causal=data.causal,
        objective=Objective(settings.label_smoothing_factor, settings.z_loss),
        router_loss=own_loss(model, config)[0],
        precision=settings.precision,
    )


class _UnreadWeights:
    """Weights of a model's directory that are not read: shards get their memory as if they were."""

    def open(self, model: torch.nn.Module, wanted: list[WantedTensor]) -> _UnreadWeights:
        """See :meth:`WeightSource.open`: every tensor is said to fit."""
        self._buffers = {name for one in wanted if one.buffer for name in one.names}
        return self

    def has(self, name: str) -> bool:
        """See :meth:`WeightReader.has`: buffers need memory of their own, parameters have it in the shards."""
        return name in self._buffers

    def read(self, name: str, start: int, out: torch.Tensor) -> None:
        """See :meth:`WeightReader.read`: nothing."""
