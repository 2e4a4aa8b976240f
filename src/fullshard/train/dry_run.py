"""How a run's model would be sharded over any number of ranks, found out without ranks and without its memory."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fullshard.comm import Work
from fullshard.config import RunConfig
from fullshard.data import padding_share
from fullshard.engine import UnitTable, units
from fullshard.errors import InvariantError
from fullshard.models import require_fp16_fit
from fullshard.models.kind import known_kind
from fullshard.sizes import format_bytes
from fullshard.train.reporting.trackers import tracker_sinks
from fullshard.train.run.assemble import make_evaluation
from fullshard.train.setup.data_plan import make_plan
from fullshard.train.setup.learning_rate import make_schedule
from fullshard.train.setup.model import outline_model, refuses_fp16, shard_model
from fullshard.train.setup.optimizers import expected_state_bytes
from fullshard.train.setup.prepare import Progress, prepare, prepare_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class AloneComm:
    """Rank 0 of ranks that are not there: what all of them would say is what this one says, and no tensor moves."""

    def __init__(self, size: int) -> None:
        """Pretend that there are ``size`` ranks, with the meta device."""
        self.rank = 0
        self.size = size
        self.device = torch.device("meta")

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank holds the same model, so every rank gives the same value."""
        return [value] * self.size

    def split(self, groups: list[list[int]]) -> AloneComm:
        """Rank 0 of the first group."""
        return AloneComm(len(groups[0]))

    def announce(self, what: str) -> None:
        """No collective follows."""

    def barrier(self) -> None:
        """Nobody to wait for."""

    def _refuse(self, *_args: object, **_kwargs: object) -> Work:
        """Refuse to move tensors.

        Raises:
            InvariantError: Always: laying out a model needs no collective.
        """
        raise InvariantError("A model that is only inspected asked for a collective.")

    all_gather = reduce_scatter = all_reduce = broadcast = gather = exchange = _refuse


def inspect_units(config: RunConfig, world_size: int) -> UnitTable:
    """Lay out a run's model over ``world_size`` ranks; one process, no process group.

    The model is built on the meta device: of ``model.path`` no weights are read, nor need there be any. Only a
    tokenizer that is trained needs the data: its size is the vocabulary's.

    Args:
        config: The run's settings.
        world_size: Number of ranks to lay out for.

    Returns:
        The unit table that the run would print.

    Raises:
        UserError: Data, tokenizer, model or wrapping do not work out.
    """
    return units(_lay_out(config, prepare_tokenizer(config), world_size))


def check_kind(config: RunConfig) -> None:
    """Refuse what a run would refuse and the model's configuration alone tells; any process, alone, without a network.

    Raises:
        ModelError: The model is known not to fit in the precision.
    """
    source = config.model.path or config.model.config
    kind = None if source is None else known_kind(source)
    if kind is not None and refuses_fp16(config):
        require_fp16_fit(kind)


@dataclass(frozen=True)
class DryRun:
    """What a run is known to be before its first step; ``str()`` is for people.

    Attributes:
        train_rows: Rows trained on.
        validation_rows: Rows held out.
        steps_per_epoch: Optimizer steps of one epoch.
        total_steps: Optimizer steps of the run.
        padding_share: Padding among all positions of an epoch's batches.
        table: The units over the ranks.
        parameters: Bytes of parameters that each rank keeps.
        gradients: Bytes of gradients that each rank keeps from a backward to the next step.
        optimizer: Bytes of the optimizer's state that rank 0 keeps; others keep about as many.
        gathered: Most bytes of gathered parameters at once: the root and the two largest units.
        notes: What is worth knowing about data and model.
    """

    train_rows: int
    validation_rows: int
    steps_per_epoch: int
    total_steps: int
    padding_share: float
    table: UnitTable
    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**plain, "table": self.table.as_dict(), "notes": list(self.notes)}

    def __str__(self) -> str:
        """As a run prints it, and what each rank will hold."""
        held = ("parameters", "gradients", "optimizer", "gathered")
        memory = ", ".join(f"{name} {format_bytes(getattr(self, name))}" for name in held)
        lines = [
            str(self.table),
            *self.notes,
            f"{self.total_steps:,} steps, {self.steps_per_epoch:,} an epoch",
            f"each rank holds: {memory} at most; activations come on top and depend on the batch",
            "all is ready for the first step",
        ]
        return "\n".join(lines)


def dry_run(config: RunConfig, world_size: int, progress: Progress = lambda what, done, total: None) -> DryRun:
    """Do all that comes before a run's first step, without ranks and without weights; one process.

    Args:
        config: The run's settings.
        world_size: Number of ranks to lay out for.
        progress: Told how far tokenizing is.

    Raises:
        UserError: Data, tokenizer, model or settings do not work out.
    """
    data = prepare(config, progress=progress)
    plan = make_plan(config, data.train_set, world_size, causal=data.causal)
    schedule = make_schedule(config, plan.num_steps)
    make_evaluation(config, data)
    tracker_sinks(config)
    model = _lay_out(config, data.tokenizer, world_size)
    table = units(model)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    root, *blocks = table.rows
    largest = sorted((row.gathered_bytes for row in blocks), reverse=True)[:2]
    return DryRun(
        train_rows=len(data.train_set),
        validation_rows=len(data.held_out),
        steps_per_epoch=plan.num_steps,
        total_steps=schedule.total_steps,
        padding_share=padding_share(plan, data.train_set, causal=data.causal, packed=config.training.packing),
        table=table,
        parameters=sum(row.shard_bytes for row in table.rows),
        gradients=sum(parameter.numel() * parameter.element_size() for parameter in trainable),
        optimizer=expected_state_bytes(model, config),
        gathered=root.gathered_bytes + sum(largest),
        notes=data.notes,
    )


def _lay_out(config: RunConfig, tokenizer: PreTrainedTokenizerBase, world_size: int) -> nn.Module:
    model = outline_model(config, tokenizer)
    shard_model(model, config, AloneComm(world_size))
    return model
