"""Exponential moving averages of a sharded model's weights, shard by shard."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from fullshard.core.optim.guard import refuse_equal_names
from fullshard.core.optim.shards import meta_of
from fullshard.core.shards import on_rows, rows_of
from fullshard.errors import CheckpointError, ConfigError, ShardingError


class ExponentialMovingAverage:
    """``average = decay * average + (1 - decay) * weights`` after every step; each rank averages its own rows.

    Equal to ``torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))`` on the unsharded
    model: the first update copies the weights. Averages are float32 (float64 for float64 shards), 4 bytes for each
    element of this rank, on the device of the shards::

        average = ExponentialMovingAverage(model, 0.999)
        for batch in batches:
            ...
            optimizer.step()
            average.update()
        with average.applied():
            evaluate(model)

    It covers the parameters that are sharded and trainable when it is made; other parameters and buffers are not
    averaged. No method communicates; every rank calls each of them.

    Attributes:
        averages: The average of this rank's rows by the parameter's first name, in the shard's shape.
        updates: Number of calls of ``update()``.
    """

    @on_rows
    def __init__(self, model: nn.Module, decay: float) -> None:
        """Start from the current weights; every rank, after ``fully_shard``.

        Args:
            model: The sharded model.
            decay: Weight of the old average, from 0 (no averaging) to below 1.

        Raises:
            ConfigError: ``decay`` is out of range, the model has no sharded trainable parameters, or it contains
                several sharded models whose parameters have the same names.
        """
        if not 0 <= decay < 1:
            raise ConfigError(f"decay must be at least 0 and below 1; got {decay}.")
        self.decay = decay
        self.updates = 0
        self._model = model
        self._params = [p for p in model.parameters() if p.requires_grad and hasattr(p, "shard_meta")]
        if not self._params:
            raise ConfigError(
                "ExponentialMovingAverage found no sharded trainable parameters: call fully_shard(model) first, and "
                "construct it outside of unsharded(model)."
            )
        refuse_equal_names(self._params)
        self._applied = False
        self._of: dict[nn.Parameter, torch.Tensor] = {}
        self._follow()

    @property
    def averages(self) -> dict[str, torch.Tensor]:  # noqa: D102 (described in the class)
        return {meta_of(param).name: average for param, average in self._of.items()}  # modules may have been renamed

    @torch.no_grad()
    @on_rows
    def update(self) -> None:
        """Include the current weights; after ``optimizer.step()``, or after a backward that steps.

        Raises:
            ShardingError: Called inside ``applied()``.
        """
        if self._applied:
            raise ShardingError("update() inside applied() would average the averages. Call it after the block.")
        self._follow()
        same: list[tuple[torch.Tensor, torch.Tensor]] = []
        for param, average in self._of.items():
            weights = _local(param)
            if self.updates == 0:
                average.copy_(weights)
            elif average.dtype == weights.dtype:
                same.append((average, weights))
            else:  # one by one: together, wide copies of all weights would be in memory
                average.lerp_(weights.to(average.dtype), 1 - self.decay)
        if same:
            averages, current = map(list, zip(*same, strict=True))
            get_ema_multi_avg_fn(self.decay)(averages, current, 0)
        self.updates += 1

    @contextmanager
    def applied(self) -> Generator[None]:
        """Give the model the averaged weights, to evaluate or save it; the weights are restored after the block.

        Needs memory for another copy of this rank's shards. Changes made to the weights inside the block are lost.

        Raises:
            ShardingError: The averages are applied already, or the model has its full parameters
                (``unsharded(model)``).
        """
        registered = {id(param) for param in self._model.parameters()}
        if self._applied or not all(id(param) in registered for param in self._params):
            raise ShardingError(
                "applied() writes the averages into the shards. Enter it once, outside of unsharded(model); call "
                "unsharded(model) inside of it."
            )
        kept = [_local(param).clone() for param in self._params]
        self._applied = True
        try:
            with torch.no_grad():
                for param in self._params:
                    _local(param).copy_(self._of[param])
            yield
        finally:
            with torch.no_grad():
                for param, weights in zip(self._params, kept, strict=True):
                    _local(param).copy_(weights)
            self._applied = False

    def state_dict(self) -> dict[str, Any]:
        """Return ``{"updates": count, "averages": {name: tensor}}`` of this rank's rows; the tensors are not copied."""
        return {"updates": self.updates, "averages": self.averages}

    @torch.no_grad()
    @on_rows
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what ``state_dict()`` returned on the same rank of a world of the same size.

        Raises:
            CheckpointError: The state is of other parameters or other rows; nothing has changed then.
        """
        given: Mapping[str, torch.Tensor] = state["averages"]
        shapes = {name: tuple(average.shape) for name, average in self.averages.items()}
        found = {name: tuple(average.shape) for name, average in given.items()}
        if shapes != found:
            name = sorted(name for name in shapes | found if shapes.get(name) != found.get(name))[0]
            raise CheckpointError(
                f"The state is not of this rank's rows: {name} has shape {shapes.get(name, 'none')} here and "
                f"{found.get(name, 'none')} in the state. Load what state_dict() returned on this rank, with the same "
                "model and number of ranks."
            )
        for name, average in self.averages.items():
            average.copy_(given[name])
        self.updates = state["updates"]

    def _follow(self) -> None:
        """Make the averages, or move them to the device and width that the weights have now."""
        for param in self._params:
            weights = _local(param)
            wide = torch.promote_types(weights.dtype, torch.float32)
            known = self._of.get(param)
            self._of[param] = (weights if known is None else known).to(weights.device, wide, copy=known is None)


def _local(param: torch.Tensor) -> torch.Tensor:
    """Return a parameter's rows on this rank as a plain tensor."""
    return rows_of(param).as_subclass(torch.Tensor)
