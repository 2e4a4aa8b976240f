"""The exponential moving average of a sharded model's weights, shard by shard."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fullshard.errors import CheckpointError, ConfigError, ShardingError
from fullshard.optim.guard.guard import refuse_equal_names
from fullshard.optim.lane.runs import Run, find_runs, local, parts


class ExponentialMovingAverage:
    """``average = decay * average + (1 - decay) * weights`` after every step, each rank of its own rows.

    The averages of ``torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))`` on the
    unsharded model: the first update takes the weights as they are. They are kept in float32 (float64 of float64
    shards), 4 bytes for each of this rank's elements, where the shards are::

        average = ExponentialMovingAverage(model, 0.999)
        for batch in batches:
            ...
            optimizer.step()
            average.update()
        with average.applied():
            evaluate(model)

    It is of the parameters that are sharded and trainable when it is made; others, and buffers, are the model's own.
    No method communicates; what is said of each holds on every rank.

    Attributes:
        averages: By the parameter's first name, of this rank's rows, in the shard's shape.
        updates: How often ``update()`` was called.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        """Begin with the weights as they are; every rank, after ``fully_shard``.

        Args:
            model: The sharded model.
            decay: Weight of the past, from 0 (the weights themselves) to below 1.

        Raises:
            ConfigError: ``decay`` is out of range, or the model has no sharded trainable parameters, or several sharded
                models are in it whose parameters have the same names.
        """
        if not 0 <= decay < 1:
            raise ConfigError(f"decay is at least 0 and below 1; got {decay}.")
        self.decay = decay
        self.updates = 0
        self._model = model
        self._params = [p for p in model.parameters() if p.requires_grad and hasattr(p, "shard_meta")]
        if not self._params:
            raise ConfigError(
                "ExponentialMovingAverage found no sharded trainable parameters: call fully_shard(model) first, and "
                "make it outside of unsharded(model)."
            )
        refuse_equal_names(self._params)
        self._applied = False
        self.averages: dict[str, torch.Tensor] = {}
        self._follow()

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights as they are now; after ``optimizer.step()``, or after a backward that steps.

        Raises:
            ShardingError: Called inside ``applied()``.
        """
        if self._applied:
            raise ShardingError("update() inside applied() would average the averages: call it after the block.")
        if [local(param).data_ptr() for param in self._params] != self._addresses:
            self._follow()
        for run, average in self._runs:
            weights = run.flat().to(average.dtype)
            if self.updates == 0:
                average.copy_(weights)
            else:
                average.lerp_(weights, 1 - self.decay)
        self.updates += 1

    @contextmanager
    def applied(self) -> Generator[None]:
        """The model with the averaged weights, to evaluate or save it; the weights are back after the block.

        Needs memory for another copy of this rank's shards. What the block changes of the weights is lost.

        Raises:
            ShardingError: It is applied already, or the model shows its full parameters (``unsharded(model)``).
        """
        shown = {id(param) for param in self._model.parameters()}
        if self._applied or not all(id(param) in shown for param in self._params):
            raise ShardingError(
                "applied() puts the averages into the shards; enter it once, and outside of unsharded(model): gather "
                "inside of it."
            )
        kept = [local(param).clone() for param in self._params]
        self._applied = True
        try:
            with torch.no_grad():
                for param in self._params:
                    local(param).copy_(self.averages[_name(param)])
            yield
        finally:
            with torch.no_grad():
                for param, weights in zip(self._params, kept, strict=True):
                    local(param).copy_(weights)
            self._applied = False

    def state_dict(self) -> dict[str, Any]:
        """``{"updates": count, "averages": {name: tensor}}`` of this rank's rows; the tensors are those in use."""
        return {"updates": self.updates, "averages": dict(self.averages)}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict()`` gave on the same rank of a world of the same size.

        Raises:
            CheckpointError: It is of other parameters, or of other rows of them; nothing has changed then.
        """
        given: Mapping[str, torch.Tensor] = state["averages"]
        shapes = {name: tuple(average.shape) for name, average in self.averages.items()}
        found = {name: tuple(average.shape) for name, average in given.items()}
        if shapes != found:
            name = sorted(name for name in shapes | found if shapes.get(name) != found.get(name))[0]
            raise CheckpointError(
                f"The averages are not of this rank's rows: {name} has shape {shapes.get(name, 'no place')} here and "
                f"{found.get(name, 'none')} there. Load what state_dict() gave on this rank, with the same model and "
                "as many ranks."
            )
        for name, average in self.averages.items():
            average.copy_(given[name])
        self.updates = state["updates"]

    def _follow(self) -> None:
        """Have the averages lie as the weights do now, of which neighbours are taken as one tensor."""
        old, self.averages = self.averages, {}
        self._addresses = [local(param).data_ptr() for param in self._params]
        self._runs: list[tuple[Run, torch.Tensor]] = []
        of_param: dict[nn.Parameter, torch.Tensor] = {}
        for run in find_runs(self._params):
            weights = run.flat()
            average = weights.to(torch.promote_types(weights.dtype, torch.float32), copy=True)
            self._runs.append((run, average))
            of_param |= parts(run, average)
        for param in self._params:
            name, weights = _name(param), local(param)
            wide = torch.promote_types(weights.dtype, torch.float32)
            self.averages[name] = of_param[param] if param in of_param else weights.to(wide, copy=True)
            if name in old:
                self.averages[name].copy_(old[name])


def _name(param: nn.Parameter) -> str:
    return param.shard_meta.name  # type: ignore[attr-defined, no-any-return]
