"""A rank's training state as plain tensors and numbers, exactly as it holds it, for the same rank of a later attempt.

Unlike a checkpoint it is never cut anew: each rank writes and reads all that it holds, replicas included, alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, replace
from typing import Any

import torch
from torch import nn

from fullshard.core.comm import Mesh, together
from fullshard.core.engine import divided_by, local_tensors, mesh_of
from fullshard.core.layout import Block
from fullshard.core.optim.average import ExponentialMovingAverage
from fullshard.core.shards import on_rows
from fullshard.errors import CheckpointError
from fullshard.state.resilience import Every, OfOtherRanks, ScratchDirectory, Snapshot, Snapshots, checksums
from fullshard.state.saving.loading import Restored, Target, index_of_specs
from fullshard.state.saving.parameter_state import Stepping
from fullshard.state.saving.pieces import MODEL, plan_save, require_between_steps, restore_rng, rng_bytes, rng_name
from fullshard.state.storage import Piece, SavePlan, TensorSpec

RNG = "rng"

_RNG_BYTES = 1 << 15
"""The random state is padded to a multiple of this: its text varies in length, and a file of another length would
have to be mapped again."""


class InMemory(Snapshots):
    """The snapshots of a run's training state in the memory of its machines; every rank has one object.

    Attributes:
        attempt: Number of this attempt, from 0.
    """

    def __init__(self, ranks: Mesh, scratch: ScratchDirectory, every: Every) -> None:
        """Write nothing yet."""
        super().__init__(ranks, scratch, every)
        self.attempt = scratch.attempt
        self._made: list[int] | None = None
        self._frozen: list[int] | None = None  # checksums that replace frozen parameters; None: these are kept

    def begun(self) -> int:
        """Return the number of ranks that the run began on, if an earlier attempt passed its start somewhere, else 0.

        Every rank calls it.
        """
        return max(self._ranks.all_gather_object(self._scratch.begun()))

    def mark_begun(self, ranks: int) -> None:
        """Record that this attempt of a run that began on ``ranks`` ranks has passed its start; every rank calls it.

        Raises:
            OSError: The file system refused.
        """
        self._scratch.mark_begun(ranks)

    def note_made(self, model: nn.Module) -> None:
        """Record the frozen parameters as made from files or seeds, before a checkpoint is loaded; any rank."""
        self._made = frozen_sums(model) if any(not param.requires_grad for param in model.parameters()) else None

    def leave_out_made(self, model: nn.Module) -> None:
        """Leave frozen parameters out of snapshots if they are as recorded; every rank calls it before the first step.

        A later attempt makes them the same way. It compares their checksums before it continues.
        """
        # All ranks or none: snapshots of all ranks may be made into one checkpoint for other ranks.
        same = self._made is not None and frozen_sums(model) == self._made
        self._frozen = self._made if all(self._ranks.all_gather_object(same)) else None

    def take(
        self,
        model: nn.Module,
        optimizer: Stepping | None,
        *,
        step: int,
        values: Mapping[str, Any],
        average: ExponentialMovingAverage | None = None,
    ) -> bool:
        """Take a snapshot, completed in the background; every rank calls it, between two steps.

        Args:
            model: The sharded model.
            optimizer: Over its parameters; None: none is saved.
            step: Optimizer steps taken.
            values: This rank's own values, as JSON holds them.
            average: The moving average of the model's weights; None: none is saved.

        Returns:
            True if a snapshot is taken; False after a failure, which was reported.
        """

        def state() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
            require_between_steps(self._ranks, model, step)
            return take(model, optimizer, average, self._ranks.device, self._frozen, cut=self.several)

        return self.write(state, step, values)

    def of_other_ranks(self) -> OfOtherRanks | None:
        """Return the newest complete snapshots of another number of ranks; every rank calls it."""
        found = super().of_other_ranks()
        if found is None:
            return None
        # An average of the weights is not cut. Frozen weights that are left out come from each rank, in the file of one
        # whose snapshot it passes on.
        left_out = found.described.plain["frozen"] is not None
        usable = all(one.described.plain["written"] is not None for one in found.mine) and bool(
            found.mine or not left_out
        )
        return found if all(self._ranks.all_gather_object(usable)) else None

    def load(
        self,
        snapshot: Snapshot,
        model: nn.Module,
        optimizer: Stepping | None,
        average: ExponentialMovingAverage | None = None,
    ) -> Restored:
        """Load the result of :meth:`newest`; every rank calls it.

        Raises:
            CheckpointError: It is of another model or optimizer; on every rank, with the same text.
        """
        described = snapshot.described
        together(self._ranks, lambda: put_back(model, optimizer, average, snapshot.tensors, described.plain))
        together(self._ranks, lambda: restore_rng(snapshot.tensors[RNG], self._ranks.device))
        where = (snapshot.directory, described.step, described.world_size)
        return Restored(*where, described.values, None, rng_restored=True)


@on_rows
def frozen_sums(model: nn.Module) -> list[int]:
    """Return checksums of the frozen parameters that this rank holds; no communication."""
    return checksums(local.tensor for local in local_tensors(model) if local.is_frozen)


@on_rows
def take(
    model: nn.Module,
    optimizer: Stepping | None,
    average: ExponentialMovingAverage | None,
    device: torch.device,
    frozen: list[int] | None = None,
    *,
    cut: bool = False,
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return this rank's state: flat views of the memory that training uses, and plain values; no communication.

    ``frozen`` are the checksums that replace frozen parameters; None: the parameters themselves are in the state.
    With ``cut``, what this rank would write to a checkpoint is recorded too, for :func:`checkpoint_plans`.

    Raises:
        CheckpointError: The optimizer has parameters of another model, or state that no file holds.
    """
    frozen_too = frozen is None
    plan = plan_save(model, optimizer, gradients=False, average=average, frozen=frozen_too, everything=True)
    plain: dict[str, Any] = {"groups": plan.groups, "scalars": plan.scalars, "frozen": frozen, "written": None}
    plain["pieces"] = {
        piece.name: [piece.shape, piece.start, piece.block and astuple(piece.block)] for piece in plan.pieces
    }
    plain["ranks"] = [mesh_of(model).rank, divided_by(model)]
    if cut and average is None:
        written = plan_save(model, optimizer, gradients=False, frozen=frozen_too)
        runs = [[piece.name, piece.start, piece.tensor.numel()] for piece in written.pieces]
        plain["written"] = {"pieces": runs, "scalars": written.scalars}
    tensors = {piece.name: piece.tensor for piece in plan.pieces}
    rng = rng_bytes(device)
    padded = torch.full((-(-rng.numel() // _RNG_BYTES) * _RNG_BYTES,), ord(" "), dtype=torch.uint8)
    padded[: rng.numel()] = rng
    return {**tensors, RNG: padded}, plain


def checkpoint_plans(others: OfOtherRanks, model: nn.Module, *, frozen: bool) -> dict[int, SavePlan]:
    """Return the plans for a checkpoint made from the snapshots of other ranks; no communication.

    Args:
        others: The snapshots that this rank passes on.
        model: Sharded over the current ranks; it provides frozen parameters that snapshots leave out.
        frozen: True if the checkpoint has frozen parameters.

    Returns:
        A plan for each rank whose snapshot this one passes on.
    """
    plans = {}
    for one in others.mine:
        plain, rng = one.described.plain, one.tensors[RNG]
        held = _held(one.tensors, plain)
        pieces = []
        for name, start, numel in plain["written"]["pieces"]:
            at = start - held[name].start
            pieces.append(replace(held[name], start=start, tensor=held[name].tensor[at : at + numel]))
        pieces.append(Piece(rng_name(plain["ranks"][0]), tuple(rng.shape), 0, rng))
        plans[one.described.rank] = SavePlan(pieces, plain["groups"], plain["written"]["scalars"])
    if frozen and others.described.plain["frozen"] is not None:
        names = {MODEL + local.name for local in local_tensors(model) if local.is_frozen}
        made = [piece for piece in plan_save(model, None, gradients=False).pieces if piece.name in names]
        plans[others.mine[0].described.rank].pieces.extend(made)
    return plans


@on_rows
@torch.no_grad()
def put_back(
    model: nn.Module,
    optimizer: Stepping | None,
    average: ExponentialMovingAverage | None,
    tensors: Mapping[str, torch.Tensor],
    plain: Mapping[str, Any],
) -> None:
    """Restore the result of :func:`take` in the model, the optimizer and the average; no communication.

    Raises:
        CheckpointError: It is of another model or optimizer; nothing has changed.
    """
    if plain["frozen"] is not None and frozen_sums(model) != plain["frozen"]:
        raise CheckpointError(
            "The frozen weights differ from those that the snapshot was taken with: the files of the model have "
            "changed since. Restore them, and give the command again: it resumes from the newest checkpoint."
        )
    held = _held(tensors, plain)
    specs = [TensorSpec(name, piece.shape, piece.tensor.dtype) for name, piece in held.items()]
    index = index_of_specs(specs, plain["groups"], plain["scalars"])
    target = Target(model, optimizer, index, average, source="snapshot", frozen=plain["frozen"] is None)

    def stored(piece: Piece) -> torch.Tensor:
        found = held[piece.name]
        if found.tensor.dtype != piece.tensor.dtype:
            raise CheckpointError(
                f"The snapshot does not fit the model: {piece.name} is {piece.tensor.dtype} on this rank, and the "
                f"snapshot has {found.tensor.dtype}. Build the model with the dtypes of before."
            )
        if found.block != piece.block or not found.start <= piece.start <= piece.stop <= found.stop:
            here, there = (
                f"{one.start:,} to {one.stop:,}{'' if one.block is None else f' of {one.block}'}"
                for one in (piece, found)
            )
            raise CheckpointError(
                f"The snapshot does not fit the model: this rank holds elements {here} of {piece.name}, and the "
                f"snapshot has {there}. Shard the model as before."
            )
        return found.tensor[piece.start - found.start :][: piece.tensor.numel()]

    for piece, _ in target.plan.constants:
        piece.tensor.copy_(stored(piece))
    target.plan.compare()
    for piece, source in [(piece, stored(piece)) for piece in target.plan.pieces]:
        piece.tensor.copy_(source)
    target.finish()


def _held(tensors: Mapping[str, torch.Tensor], plain: Mapping[str, Any]) -> dict[str, Piece]:
    """Return what the rank held, by name."""
    return {
        name: Piece(name, tuple(shape), start, tensors[name], None if block is None else Block(*block))
        for name, (shape, start, block) in plain["pieces"].items()
    }
