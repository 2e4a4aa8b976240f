"""The first numbers of a plan: what a rank holds by its layout alone, known before anything is simulated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import nn

from fullshard.core.engine import UnitTable, units
from fullshard.core.engine.registry import runtime_of
from fullshard.core.engine.setup.wrap import ROOT_NAME
from fullshard.planner.ranks import Ledger
from fullshard.program.config import RunConfig
from fullshard.program.models import base_of
from fullshard.program.speed import WAYS
from fullshard.program.train.setup.model import UnreadWeights, outline_model, shard_model
from fullshard.program.train.setup.optimizers import expected_state_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GPU_KERNELS = ("flex", "varlen")
"""Ways of attention that no CPU can train with."""

_TABLES = {"Embedding", "Linear"}
"""Classes of units outside the blocks, which tokens may travel to: then they are not gathered."""


@dataclass(frozen=True)
class FirstNumbers:
    """Bytes of a rank without activations, buffers and batch; a step needs more.

    Attributes:
        table: The unit table.
        shards: Shards of the parameters.
        gradients: Gradients of a step, as micro-batches leave them.
        optimizer_state: The optimizer's state after a step with all gradients.
        least: What is held on the rank's device at the fullest moment of a step, by kind, as a plan names them: in the
            optimizer's step, or while the last of the largest units is gathered in backward, beside the gradients of
            the others.
    """

    table: UnitTable
    shards: int
    gradients: int
    optimizer_state: int
    least: Mapping[str, int]

    @property
    def nbytes(self) -> int:
        """The least bytes that a step needs on the rank's device."""
        return sum(self.least.values())

    @property
    def gathered(self) -> int:
        """Bytes of the largest unit while it is gathered."""
        return max((row.gathered_bytes for row in self.table.rows), default=0)


def first_numbers(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, world_size: int, rank: int = 0, *, gpu: bool
) -> FirstNumbers:
    """Return the first numbers of a run's plan; any process, alone. ``gpu``: whether ranks compute on GPUs.

    Raises:
        UserError: The model cannot be built, or the settings do not match it.
    """
    frozen = "shard" if config.sharding.frozen == "auto" else config.sharding.frozen  # whichever needs less
    sharding = config.sharding.model_copy(update={"frozen": frozen})
    config = uncompiled(config.model_copy(update={"sharding": sharding}))  # the compiler's imports take seconds
    return numbers_of(lay_out(config, tokenizer, world_size, rank), config, gpu=gpu)


def numbers_of(model: nn.Module, config: RunConfig, *, gpu: bool) -> FirstNumbers:
    """Return the first numbers of a model that is laid out."""
    table, training = units(model), config.training
    at_home = not gpu and config.sharding.tables != "gather"
    full = training.accumulate == "unsharded" and training.gradient_accumulation_steps > 1 and not at_home
    gradients = _gradients(model, full=full)
    every, state = sum(gradients.values()), expected_state_bytes(model, config)
    shards = sum(row.shard_bytes for row in table.rows)
    reached, kept = gradients, {"shards": shards, "optimizer_state": state}
    if getattr(base_of(model).config, "sub_configs", None):  # parts for images and sound, which texts may not reach
        reached, kept = dict.fromkeys(gradients, 0), {**kept, "optimizer_state": 0}
    gathered, beside = max(_moments(table, reached, at_home=at_home), default=(0, 0))
    made = "gradient_buffers" if full else "gradient_shards"
    if config.sharding.cpu_offload and gpu:  # the rest is in the host's memory
        least = {"gathered_units": max((row.gathered_bytes for row in table.rows), default=0)}
    elif sum(reached.values()) >= gathered + beside:
        least = {**kept, made: sum(reached.values())}
    else:
        least = {**kept, made: beside, "gathered_units": gathered}
    return FirstNumbers(table, shards, every, state, least)


def _gradients(model: nn.Module, *, full: bool) -> dict[str, int]:
    """Return the bytes of this rank's gradients by unit: of its rows, or ``full`` ones, which accumulate unsharded."""
    made = dict[str, int]()
    for unit in runtime_of(model).units:
        made[unit.name] = 0
        for param in unit.params:
            start, stop = (0, param.numel) if full else param.meta.element_range
            made[unit.name] += 4 * (stop - start) * param.trainable
    return made


def _moments(table: UnitTable, gradients: Mapping[str, int], *, at_home: bool) -> Iterator[tuple[int, int]]:
    """Yield bytes of a gathered unit and of the gradients that are there with it, for the largest units.

    Of the n largest units, the last one in backward is at least as large as the n-th, and the others have gradients.
    """
    rows = [row for row in table.rows if not at_home or not (row.unit == ROOT_NAME or row.kind in _TABLES)]
    rows = sorted(rows, key=lambda row: -row.gathered_bytes)
    sums = accumulate(gradients[row.unit] for row in rows)
    most = accumulate((gradients[row.unit] for row in rows), max)
    for row, total, own in zip(rows, sums, most, strict=True):
        yield row.gathered_bytes, total - own


def lay_out(config: RunConfig, tokenizer: PreTrainedTokenizerBase, world_size: int, rank: int = 0) -> nn.Module:
    """Return the run's model, sharded as ``rank`` of simulated ranks, on the meta device; any process, alone.

    Raises:
        UserError: The model cannot be built, or the settings do not match it.
    """
    return laid_out(outline_model(config, tokenizer), config, world_size, rank)


def laid_out(model: nn.Module, config: RunConfig, world_size: int, rank: int = 0) -> nn.Module:
    """Return an outlined model, sharded as :func:`lay_out` does."""
    ranks = Ledger(rank, world_size, torch.device("meta")).world
    weights = None if config.model.path is None else UnreadWeights()
    shard_model(model, uncompiled(config, attention=False), ranks, weights)
    return model


def uncompiled(config: RunConfig, *, attention: bool = True) -> RunConfig:
    """Return the settings without ways that a plan cannot follow: those of graphs, and of kernels for GPUs only.

    ``attention``: False leaves out every way of attention, for a model that only shows where its parameters lie.
    """
    named = () if config.speed.ways == "auto" else config.speed.ways
    ways = tuple(name for name in named if name not in ("compile", "liger", *GPU_KERNELS))
    ways = tuple(name for name in ways if attention or WAYS[name].part != "attention")
    training = config.training.model_copy(update={"torch_compile": False})
    return config.model_copy(update={"training": training, "speed": config.speed.model_copy(update={"ways": ways})})
