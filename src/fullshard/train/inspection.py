"""How a run's model would be sharded over any number of ranks, found out without ranks and without its memory."""

from __future__ import annotations

from typing import Any

import torch

from fullshard.comm import Work
from fullshard.config import RunConfig
from fullshard.engine import UnitTable, units
from fullshard.errors import InvariantError
from fullshard.train.assemble import make_model, make_tokenizer, read_train_rows, shard_model


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

    all_gather = reduce_scatter = all_reduce = broadcast = gather = _refuse


def inspect_units(config: RunConfig, world_size: int) -> UnitTable:
    """Lay out a run's model over ``world_size`` ranks; one process, no process group.

    The model is built on the meta device: of ``model.path`` no weights are read, nor need there be any.

    Args:
        config: The run's settings.
        world_size: Number of ranks to lay out for.

    Returns:
        The unit table that the run would print.

    Raises:
        UserError: Data, tokenizer, model or wrapping do not work out.
    """
    # Only a tokenizer that is trained needs the data: its size is the vocabulary's.
    rows = [] if config.model.path is not None else read_train_rows(config)
    tokenizer = make_tokenizer(config, rows)
    with torch.device("meta"):
        model = make_model(config, tokenizer)
    shard_model(model, config, AloneComm(world_size))
    return units(model)
