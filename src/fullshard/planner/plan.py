"""``fullshard.plan``: what a step will hold and send, before there is memory or a second rank for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from fullshard.comm import Comm
from fullshard.comm.machine_axes import axes_of
from fullshard.engine import fully_shard
from fullshard.engine.registry import runtime_of
from fullshard.errors import ConfigError
from fullshard.planner.hollow import HollowMode
from fullshard.planner.meter import Meter
from fullshard.planner.ranks import Ledger
from fullshard.planner.rehearsal import PARTS, Rehearsal, Rehearsed, rehearse
from fullshard.sizes import format_bytes

MARGIN = 0.01
"""Share of a peak that must be free in addition: a plan does not see every small buffer, such as random states."""

_ALL_RANKS = 4
"""World sizes up to which every rank is planned to find the fullest."""

_LABELS = {
    "shards": "shards",
    "optimizer_state": "optimizer state",
    "gathered_units": "gathered units",
    "gradient_buffers": "unsharded gradients",
    "gradient_shards": "gradients of the shards",
    "buffers_and_batch": "buffers and batch",
    "activations_and_temporaries": "activations and temporaries",
}

_PHASES = {
    "before_first_step": "peak before the first step",
    "forward": "peak in forward",
    "backward": "peak in backward",
    "optimizer": "peak in the optimizer step",
    "evaluation": "peak in evaluation (loss)",
}


@dataclass(frozen=True)
class Plan:
    """What one rank will hold and send; ``str()`` is for people. Sizes are bytes of tensors on the rank's device.

    Attributes:
        world_size: Number of ranks.
        rank: The planned rank.
        parameters: Elements of parameters that it holds, without padding.
        peak_bytes: Most bytes alive at once in a step.
        parts: What they consist of, by kind: ``shards``, ``optimizer_state``, ``gathered_units``,
            ``gradient_buffers`` (unsharded gradients that wait to be reduced), ``gradient_shards``,
            ``buffers_and_batch`` (everything else that is held between steps) and ``activations_and_temporaries``.
        phase_peaks: Most bytes alive at once ``before_first_step`` (while the model is built and sharded), and in a
            step's ``forward``, ``backward`` and ``optimizer``; of a run that evaluates its loss also in ``evaluation``.
        account: Peaks of the engine's own buffers: ``shards``, ``gathered``, ``gradients``, and their ``total``.
        sent_bytes: Bytes sent to other ranks in a step, by kind of collective.
        collectives: Number of collectives in a step, by kind.
    """

    world_size: int
    rank: int
    parameters: int
    peak_bytes: int
    parts: Mapping[str, int]
    phase_peaks: Mapping[str, int]
    account: Mapping[str, int]
    sent_bytes: Mapping[str, int]
    collectives: Mapping[str, int]

    @property
    def highest_bytes(self) -> int:
        """The most bytes alive at once, in a step or before the first one."""
        return max(self.phase_peaks.values())

    @property
    def needed_bytes(self) -> int:
        """The memory that a device must have for :meth:`fits`: the highest peak and 1 % more."""
        return math.ceil(self.highest_bytes * (1 + MARGIN))

    def fits(self, memory_bytes: int) -> bool:
        """Return whether a device of ``memory_bytes`` has room for the highest peak and 1 % more."""
        return self.needed_bytes <= memory_bytes

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-able values."""
        return {**asdict(self), "highest_bytes": self.highest_bytes, "needed_bytes": self.needed_bytes}

    def __str__(self) -> str:
        """Return the plan as a table."""
        sizes = [(_LABELS[part], self.parts[part]) for part in PARTS]
        sizes += [("peak of a step", self.peak_bytes)]
        lines = [f"rank {self.rank} of {self.world_size}, which holds {self.parameters:,} elements of parameters", ""]
        lines += [f"{label:<28}{format_bytes(size):>12}" for label, size in sizes]
        lines += ["", *(f"{_PHASES[phase]:<28}{format_bytes(size):>12}" for phase, size in self.phase_peaks.items())]
        sent = (f"{kind} {count} x, {format_bytes(self.sent_bytes[kind])}" for kind, count in self.collectives.items())
        return "\n".join([*lines, "", f"sent a step: {'; '.join(sent) or 'nothing'}"])


def plan(
    model_fn: Callable[[], nn.Module],
    batch_fn: Callable[[], Any],
    *,
    world_size: int,
    rank: int | None = None,
    ranks_each: int | None = None,
    optimizer_fn: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    loss_fn: Callable[[nn.Module, Any], torch.Tensor] | None = None,
    **options: Any,
) -> Plan:
    """Plan the training of a model over ``world_size`` ranks, in one process and without its memory.

    The real model, engine and optimizer run three steps on tensors without memory. The figures are those of a rank on
    the CPU; no process group is needed, and none is used.

    Args:
        model_fn: Returns the model, unsharded.
        batch_fn: Returns one rank's batch: the largest that training will have. Whole numbers may decide what the model
            does; other values are never read.
        world_size: Number of ranks.
        rank: The rank to plan; None: the fullest, of all up to four ranks, else of the first, the last and the one with
            most elements of parameters.
        ranks_each: Ranks of each machine, for the hybrid strategies, which shard inside a machine.
        optimizer_fn: Makes the optimizer from the sharded model; None: torch's fused AdamW over all parameters.
        loss_fn: Returns the loss of the model on a batch; None: ``model(**batch).loss``.
        options: Those of :func:`fullshard.fully_shard` but ``mesh``, ``weights``, ``first_values``, ``device`` and
            ``offload_policy``.

    Raises:
        ConfigError: A number or an option is not possible here.
        ModelError: The step depends on values that only a computation gives.
        UserError: Those of :func:`fullshard.fully_shard`.
    """
    _check(world_size, rank, options)

    def sharded(comm: Comm) -> nn.Module:
        ranks = comm if ranks_each is None else _axes(comm, ranks_each)
        return fully_shard(model_fn(), ranks, **options)

    def build(comm: Comm) -> Rehearsed:
        model = sharded(comm)
        optimizer = (optimizer_fn or _adamw)(model)
        return Rehearsed(model, optimizer, partial(_step, model, optimizer, batch_fn(), loss_fn or _own_loss))

    ranks = candidates(sharded, world_size) if rank is None else [rank]
    return highest(build, ranks, world_size)


def highest(build: Callable[[Comm], Rehearsed], ranks: Sequence[int], world_size: int) -> Plan:
    """Return the plan of the one of ``ranks`` that has the highest peak; see :func:`rehearse`."""
    plans = (planned(rehearse(build, rank, world_size), rank, world_size) for rank in ranks)
    return max(plans, key=lambda plan: plan.peak_bytes)


def planned(found: Rehearsal, rank: int, world_size: int) -> Plan:
    """Return the plan of ``rank`` from its rehearsal."""
    return Plan(
        world_size=world_size,
        rank=rank,
        parameters=found.elements,
        peak_bytes=sum(found.parts.values()),
        parts=found.parts,
        phase_peaks=found.peaks,
        account=found.account,
        sent_bytes={kind: sent for kind, (_, sent) in found.sent.items()},
        collectives={kind: count for kind, (count, _) in found.sent.items()},
    )


def candidates(sharded: Callable[[Comm], nn.Module], world_size: int) -> list[int]:
    """Return the ranks of which one is the fullest: all of up to four, else the first, the last, and the one with most.

    Shards have one size, but optimizers hold state for the rows, and Muon's ranks orthogonalise different matrices.

    Args:
        sharded: Makes the model and shards it.
        world_size: Number of ranks.
    """
    if world_size <= _ALL_RANKS:
        return list(range(world_size))
    with HollowMode(Meter()):
        runtime = runtime_of(sharded(Ledger(0, world_size).world))
        lanes = [lane for unit in runtime.units for lane in unit.lanes]
    group = runtime.mesh.shard_group.size
    held = [0] * group
    for layout in (lane.layout for lane in lanes if lane.layout.world_size == group):
        for placement in layout.placements:
            for owner in layout.owners(placement):
                start, stop = layout.local_range(placement, owner)
                held[owner] += stop - start
    return sorted({0, held.index(max(held)), world_size - 1})


def _check(world_size: int, rank: int | None, options: Mapping[str, Any]) -> None:
    if world_size < 1:
        raise ConfigError(f"world_size is a number of ranks, at least 1; got {world_size}.")
    if rank is not None and not 0 <= rank < world_size:
        raise ConfigError(f"rank is one of 0 to {world_size - 1}; got {rank}.")
    for name in ("mesh", "weights", "first_values", "device", "offload_policy"):
        if options.get(name) is not None:
            raise ConfigError(
                f"A plan does not support {name}= yet: it counts the memory of one device per rank, on ranks that it "
                "makes itself. Leave it out."
            )


def _axes(comm: Any, ranks_each: int) -> tuple[Comm, Comm]:
    if ranks_each < 1 or comm.size % ranks_each:
        raise ConfigError(f"ranks_each divides world_size ({comm.size}); got {ranks_each}.")
    return axes_of(comm, ranks_each)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), fused=True)


def _own_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(**batch).loss


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, loss_of: Callable[[nn.Module, Any], torch.Tensor]
) -> None:
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    optimizer.step()
