"""Resuming from a sharded checkpoint, whatever ranks wrote it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.core.comm import device_of, together, together_in_background
from fullshard.core.engine import LocalTensor, divided_by, local_tensors, mesh_of, require_one_state
from fullshard.core.optim.average import ExponentialMovingAverage
from fullshard.core.optim.shards import holds_rows
from fullshard.core.shards import rows_of
from fullshard.errors import CheckpointError
from fullshard.state.saving.load_plan import LoadPlan
from fullshard.state.saving.parameter_state import ParameterState, Stepping, stepped, take_options
from fullshard.state.saving.pieces import (
    AVERAGE,
    GRADIENT,
    MODEL,
    OPTIMIZER,
    UPDATES,
    frozen_digest,
    plan_save,
    restore_rng,
    rng_name,
    split_state_name,
)
from fullshard.state.storage import (
    CheckpointReader,
    Index,
    ObjectPath,
    Piece,
    PieceEntry,
    Place,
    TensorEntry,
    TensorSpec,
    as_place,
    dtype_of,
    read_index,
)


@dataclass(frozen=True)
class Restored:
    """The contents of a loaded checkpoint other than tensors.

    Attributes:
        path: Its directory.
        step: Optimizer steps taken.
        world_size: Number of ranks that wrote it.
        values: The ``values`` that ``save`` was given.
        metric: The ``metric`` that ``save`` was given.
        rng_restored: Whether each rank's random state was set; not at another world size, or if tensor parallelism
            divides the model over another number of ranks.
    """

    path: Place
    step: int
    world_size: int
    values: Mapping[str, Any]
    metric: float | None
    rng_restored: bool


def load_checkpoint(
    model: nn.Module,
    optimizer: Stepping | None,
    path: str | Path | ObjectPath,
    *,
    average: ExponentialMovingAverage | None = None,
) -> Restored:
    """Load a checkpoint of any world size and strategy; every rank calls it.

    Each rank reads the element ranges it holds and verifies the checksum of every block it touches. In addition to the
    training state it needs the memory of one block.

    Args:
        model: The sharded model; its shards and persistent buffers are filled in place.
        optimizer: Its state and options are set; None: they are left unchanged.
        path: The checkpoint's directory, or its URL in an object store.
        average: The moving average of the model's weights, filled in place; None: it is not read.

    Returns:
        The contents of the checkpoint other than tensors.

    Raises:
        CheckpointError: The checkpoint is damaged or of another model; on every rank, with the same text. If it does
            not fit, nothing has changed; if a file turns out to be damaged, part of the model has changed.
    """
    ranks, path = mesh_of(model), as_place(path)
    index = together_in_background(ranks, lambda: read_index(path))
    if index.part is None:
        require_one_state(model)
    together(ranks, lambda: _require_own(index, ranks.rank, ranks.size, path))
    target = together(ranks, lambda: Target(model, optimizer, index, average))
    device = device_of(ranks.device)
    together_in_background(ranks, device.for_thread(lambda: target.compare(CheckpointReader(path, index))))
    # Ranks that divide a layer draw alike: random states of another division would be wrong, not only others.
    same_ranks = (index.world_size, index.divided_by) == (ranks.size, divided_by(model))

    def read() -> torch.Tensor | None:
        reader = CheckpointReader(path, index)
        reader.read(*sorted(target.plan.pieces, key=lambda piece: (piece.name, piece.start)))
        if not same_ranks:
            return None
        name = rng_name(ranks.rank)
        rng = torch.empty(reader.entry(name).shape, dtype=torch.uint8)
        reader.read(Piece(name, tuple(rng.shape), 0, rng))
        return rng

    rng = together_in_background(ranks, device.for_thread(read))
    target.finish()
    if rng is not None:
        together(ranks, lambda: restore_rng(rng, ranks.device))
    return Restored(path, index.step, index.world_size, index.values, index.metric, rng_restored=rng is not None)


def _require_own(index: Index, rank: int, size: int, path: Place) -> None:
    """Refuse what another rank, or one of another number of ranks, wrote alone."""
    if index.part is not None and (index.part.rank, index.world_size) != (rank, size):
        raise CheckpointError(
            f"{path} is what rank {index.part.rank} of {index.world_size} wrote alone, and this is rank {rank} of "
            f"{size}. Load a checkpoint of all ranks."
        )


class _Unread(CheckpointReader):
    """A reader of a checkpoint without files, which allocates the memory that reading takes."""

    def _file(self, name: str) -> Any:
        return None

    def _read_block(self, name: str, stored: PieceEntry, number: int, out: torch.Tensor) -> None:
        pass


def resume_unread(model: nn.Module, optimizer: Stepping) -> Callable[[], None]:
    """Return a function that allocates the memory of a resume without reading, for plans; any rank.

    Gradients and the optimizer's state are dropped first, because a run that resumes has none. The assumed checkpoint
    was written by another number of ranks, so that blocks are cut.
    """
    plan = plan_save(model, optimizer, gradients=False, everything=True)
    specs = [TensorSpec(piece.name, piece.shape, piece.tensor.dtype) for piece in plan.pieces]
    index = index_of_specs(specs, plan.groups, plan.scalars)
    del plan
    for one in stepped(local_tensors(model), optimizer):
        one.state.clear()
        one.param.grad = None

    def read() -> None:
        target = Target(model, optimizer, index, None)
        _Unread(Path(), index).read(*target.plan.pieces)
        target.finish()

    return read


def index_of_specs(
    specs: Iterable[TensorSpec], groups: Sequence[Mapping[str, Any]], scalars: Mapping[str, Mapping[str, Any]]
) -> Index:
    """Return the index of a training state that is in no files, for :class:`Target`."""
    tensors = {
        spec.name: TensorEntry(str(spec.dtype).removeprefix("torch."), spec.shape, (PieceEntry("", 0, spec.numel, ()),))
        for spec in specs
    }
    return Index(0, 0, None, {}, groups, scalars, {}, (), tensors)


class Target:
    """The training state of one rank that a checkpoint is loaded into.

    Attributes:
        plan: The pieces to read.
    """

    def __init__(
        self, model: nn.Module, optimizer: Stepping | None, index: Index, average: ExponentialMovingAverage | None
    ) -> None:
        """Plan what will be read; changes nothing yet.

        Raises:
            CheckpointError: Names or shapes do not fit, the optimizer's state or the average of the weights is to be
                loaded and was not saved, or frozen parameters that were left out are others now.
        """
        self.index, self.plan = index, LoadPlan()
        left_out = None if index.part is None else index.part.frozen
        if left_out is not None and frozen_digest(model) != left_out:
            raise CheckpointError(
                "The frozen weights differ from those that the snapshot was taken with: the files of the model have "
                "changed since. Restore them, and give the command again: it resumes from the newest checkpoint."
            )
        self._specs = {name: TensorSpec(name, e.shape, dtype_of(e)) for name, e in index.tensors.items()}
        self._own: list[ParameterState] = []
        self._gradients: list[tuple[nn.Parameter, torch.Tensor | None]] = []
        self._average, self._updates = average, torch.zeros(1, dtype=torch.int64)
        held = [_as_saved(local, index) for local in local_tensors(model)]
        kept = [local for local in held if left_out is None or not local.is_frozen]
        stored = {name.removeprefix(MODEL): spec for name, spec in self._specs.items() if name.startswith(MODEL)}
        self.plan.add_model(kept, stored, "The checkpoint", index.base)
        for local in kept:
            if local.param is not None:
                self._gradients.append((local.param, self._gradient(local, local.param)))
        if optimizer is not None:
            self._own = stepped(held, optimizer)
            self._add_optimizer()
        if average is not None:
            self._add_average(average, held)

    def compare(self, reader: CheckpointReader) -> None:
        """Read and compare the optimizer's constants; called on every rank before anything is read into place.

        Raises:
            CheckpointError: The values differ from this optimizer's, or the file is damaged.
        """
        for piece, _ in self.plan.constants:
            reader.read(piece)
        self.plan.compare()

    def finish(self) -> None:
        """Set everything that was read and is not in place yet."""
        self.plan.finish()
        # Not through load_state_dict, which would cast states to the parameter's dtype and change the resumed run.
        for one, (state, options) in zip(self._own, self.plan.loaded, strict=True):
            one.state.clear()
            one.state.update(state)
            take_options(one.group, options)
        for param, gradient in self._gradients:
            param.grad = gradient
        if self._average is not None:
            self._average.updates = int(self._updates)

    def _gradient(self, local: LocalTensor, param: nn.Parameter) -> torch.Tensor | None:
        if GRADIENT + local.name not in self._specs:
            return None
        gradient = torch.empty_like(rows_of(param))  # also on a rank without rows, as after backward
        if holds_rows(param):
            run = (local.shape, local.start, gradient.view(-1), local.block)
            self.plan.pieces.append(Piece(GRADIENT + local.name, *run))
        return gradient

    def _add_optimizer(self) -> None:
        # A rank without rows of any parameter has no optimizers of step_in_backward, and its own part no groups.
        if self._own and not self.index.groups:
            raise CheckpointError("The checkpoint was saved without an optimizer: load it with optimizer=None.")
        states: dict[str, dict[str, Any]] = {name: dict(values) for name, values in self.index.scalars.items()}
        known = {name for group in self.index.groups for name in group["params"]}
        for name, spec in self._specs.items():
            if name.startswith(OPTIMIZER):
                parameter, key = split_state_name(name, known)
                states.setdefault(parameter, {})[key] = spec
        self.plan.add_optimizer(self._own, states, self.index.groups)

    def _add_average(self, average: ExponentialMovingAverage, held: Sequence[LocalTensor]) -> None:
        if UPDATES not in self._specs:
            raise CheckpointError(
                "The checkpoint was saved without an average of the weights: load it without average."
            )
        self.plan.pieces.append(Piece(UPDATES, (), 0, self._updates))
        names = {name: local for local in held for name in (local.name, *local.aliases)}
        for name, tensor in average.averages.items():
            local = names[name]
            if not tensor.numel():
                continue
            if AVERAGE + local.name not in self._specs:
                raise CheckpointError(
                    f"The saved average of the weights does not include {name}, which was frozen when it was saved. "
                    "Make the average over the parameters that were trainable at that time."
                )
            run = (local.shape, local.start, tensor.view(-1), local.block)
            self.plan.pieces.append(Piece(AVERAGE + local.name, *run))


def _as_saved(local: LocalTensor, index: Index) -> LocalTensor:
    """Return the same tensor with its name in the checkpoint as its first name."""
    names = (local.name, *local.aliases)
    stored = [name for name in names if MODEL + name in index.tensors]
    if len(stored) > 1:
        raise CheckpointError(
            f"The checkpoint has {len(stored)} tensors for one parameter: the model ties {' and '.join(stored)}. "
            "Their values may differ: load it into a model that does not tie them."
        )
    name = stored[0] if stored else local.name
    return replace(local, name=name, aliases=tuple(other for other in names if other != name))
