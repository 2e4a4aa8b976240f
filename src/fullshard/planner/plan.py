"""``fullshard.plan``: what a step will hold and send, before there is memory or a second rank for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from fullshard.core.comm import Comm, planned_memory
from fullshard.core.comm.device import CudaDevice
from fullshard.core.comm.mesh import axes_of
from fullshard.core.engine import fully_shard
from fullshard.core.engine.registry import runtime_of
from fullshard.errors import ConfigError
from fullshard.planner.fake_tensors import FakeMode
from fullshard.planner.memory_tracker import MemoryTracker
from fullshard.planner.ranks import Ledger
from fullshard.planner.simulation import OUTSIDE, PARTS, REST, PlannedStep, Simulation, simulate
from fullshard.planner.timing import Hardware, Timing, hardware, time_step
from fullshard.sizes import format_bytes

MARGIN = 0.01
"""Share of a peak that must be free in addition, because a plan misses small buffers such as random states."""

GPU_MARGIN = 0.05
"""The same on a GPU, whose operators have other temporaries, and whose allocator cannot use every gap."""

SIMULATED_RESERVE = (1.01, 1.23)
"""Least and most bytes that torch's allocator reserved for one of tensors in simulated steps of Llama-8B and T5-3B,
with expandable segments (``benchmarks/results/fragments.json``)."""

_ALL_RANKS = 4
"""World sizes up to which every rank is planned to find the fullest."""

LABELS = {
    "shards": "shards",
    "optimizer_state": "optimizer state",
    "gathered_units": "gathered units",
    "gradient_buffers": "unsharded gradients",
    "gradient_shards": "gradients of the shards",
    "buffers_and_batch": "buffers and batch",
    "activations_and_temporaries": "activations and temporaries",
}
"""Display names of the parts of a plan's peak."""

_BLOCK_LABELS = {OUTSIDE: "loss, rest of forward", REST: "backward and temporaries"}
"""Display names of activations that no block made."""

_LONGEST_BLOCK = 24
"""Last characters of a block's name that are shown."""

PHASE_LABELS = {
    "before_first_step": "peak before the first step",
    "forward": "peak in forward",
    "backward": "peak in backward",
    "optimizer": "peak in the optimizer step",
    "evaluation": "peak in evaluation (loss)",
    "generation": "peak in evaluation (text)",
    "saving": "peak in saving",
    "resuming": "peak in resuming",
}
"""Display names of a plan's phases."""

HOST_LABELS = {
    "checkpoint_copies": "host: copies being saved",
    "snapshots": "host: snapshots for restarts",
    "offloaded": "host: offloaded, at most",
}
"""Display names of what a plan keeps in host memory."""

_BEFORE_STEPS = ("before_first_step", "resuming")
"""Phases in which no checkpoint has been saved yet."""


@dataclass(frozen=True)
class Plan:
    """What one rank will hold and send; ``str()`` is for people. Sizes are bytes of tensors on the rank's device.

    Attributes:
        world_size: Number of ranks.
        rank: The planned rank.
        parameters: Elements of parameters that it holds, without padding.
        peak_bytes: Most bytes alive at once in a step.
        parts: The same bytes by kind: ``shards``, ``optimizer_state``, ``gathered_units``,
            ``gradient_buffers`` (unsharded gradients that wait to be reduced), ``gradient_shards``,
            ``buffers_and_batch`` (everything else that is held between steps) and ``activations_and_temporaries``.
        activations: What ``activations_and_temporaries`` consist of: what the forward of each block made, by the
            block's name with ``*`` for numbers; ``other_forward``, such as the loss; ``backward_and_temporaries``.
        phase_peaks: Most bytes alive at once ``before_first_step`` (while the model is built and sharded), and in a
            step's ``forward``, ``backward`` and ``optimizer``. Of a run file also in ``evaluation`` (of the loss),
            ``generation`` (of text), ``saving`` (a checkpoint and the full model) and ``resuming``.
        account: Peaks of the engine's own buffers: ``shards``, ``gathered``, ``gradients``, and their ``total``.
        sent_bytes: Bytes sent to other ranks in a step, by kind of collective.
        collectives: Number of collectives in a step, by kind.
        device: The planned GPU; None: CPU ranks.
        timing: The time of a step by the GPU's data sheet; None on CPU ranks.
        host: What a rank keeps in host memory besides. Of a run file ``checkpoint_copies``, from the first checkpoint
            that is written while training continues, and ``snapshots``, from which a lost rank is started again. On
            GPUs also ``offloaded``: the peak of offloaded shards, their gradients, the optimizer's state, activations.
        unplanned: Phases after the steps left out because of the limit on a plan's work.
    """

    world_size: int
    rank: int
    parameters: int
    peak_bytes: int
    parts: Mapping[str, int]
    activations: Mapping[str, int]
    phase_peaks: Mapping[str, int]
    account: Mapping[str, int]
    sent_bytes: Mapping[str, int]
    collectives: Mapping[str, int]
    device: Hardware | None = None
    timing: Timing | None = None
    host: Mapping[str, int] = field(default_factory=dict)
    unplanned: tuple[str, ...] = ()

    @property
    def highest_bytes(self) -> int:
        """The most bytes alive at once on the rank's device, in any phase; on CPU ranks including the host's."""
        return max(self.bytes_in(phase) for phase in self.phase_peaks)

    def bytes_in(self, phase: str, *, snapshots: bool = True) -> int:
        """Return the most bytes alive at once on the rank's device in a phase; on CPU ranks including the host's.

        Args:
            phase: One of ``phase_peaks``.
            snapshots: Whether snapshots for restarts count.
        """
        kept = dict(self.host) if self.device is None else {}
        if phase in _BEFORE_STEPS:
            kept.pop("checkpoint_copies", None)
        if not snapshots:
            kept.pop("snapshots", None)
        return self.phase_peaks[phase] + sum(kept.values())

    @property
    def needed_bytes(self) -> int:
        """The memory that a device must have for :meth:`fits`.

        It is the highest peak plus 1 %. On a GPU it is the peak and the workspaces of matrix products, plus 5 %, plus
        the memory outside of torch's allocator.
        """
        if self.device is None:
            return math.ceil(self.highest_bytes * (1 + MARGIN))
        return needed_on(self.device, self.highest_bytes)

    def fits(self, memory_bytes: int | None = None) -> bool:
        """Return whether a device has room for :attr:`needed_bytes`.

        Args:
            memory_bytes: Its memory; None: that of the planned GPU.

        Raises:
            ConfigError: Neither is known.
        """
        if memory_bytes is None:
            if self.device is None:
                raise ConfigError("fits() compares with a device's memory: pass memory_bytes, or plan with gpu=.")
            memory_bytes = self.device.memory_bytes
        return self.needed_bytes <= memory_bytes

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-able values."""
        values = {
            **asdict(self),
            "unplanned": list(self.unplanned),
            "highest_bytes": self.highest_bytes,
            "needed_bytes": self.needed_bytes,
        }
        return {**values, "device": None if self.device is None else self.device.name}

    def __str__(self) -> str:
        """Return the plan as a table."""
        sizes = [(LABELS[part], self.parts[part]) for part in PARTS]
        sizes += [*self._blocks(), ("peak of a step", self.peak_bytes)]
        lines = [f"rank {self.rank} of {self.world_size}, which holds {self.parameters:,} elements of parameters", ""]
        lines += [f"{label:<28}{format_bytes(size):>12}" for label, size in sizes]
        lines += [
            "",
            *(f"{PHASE_LABELS[phase]:<28}{format_bytes(size):>12}" for phase, size in self.phase_peaks.items()),
            *(f"{HOST_LABELS[kind]:<28}{format_bytes(size):>12}" for kind, size in self.host.items()),
        ]
        lines += ["", *self._on_gpu()] if self.device is not None else []
        lines += ["", *self._times()] if self.timing is not None else []
        sent = (f"{kind} {count} x, {format_bytes(self.sent_bytes[kind])}" for kind, count in self.collectives.items())
        return "\n".join([*lines, "", f"sent a step: {'; '.join(sent) or 'nothing'}"])

    def _blocks(self) -> list[tuple[str, int]]:
        """Return the lines about activations: those of at least 1 %, the largest first, and all others together."""
        least = self.parts["activations_and_temporaries"] / 100
        shown = sorted((one for one in self.activations.items() if one[1] > least), key=lambda one: -one[1])
        if len(shown) < 2:
            return []
        others = self.parts["activations_and_temporaries"] - sum(nbytes for _, nbytes in shown)
        lines = [(_BLOCK_LABELS.get(name, name), nbytes) for name, nbytes in shown]
        lines += [("others", others)] if others else []
        short = (name if len(name) <= _LONGEST_BLOCK else f"…{name[1 - _LONGEST_BLOCK :]}" for name, _ in lines)
        return [(f"  {name}", nbytes) for name, (_, nbytes) in zip(short, lines, strict=True)]

    def _on_gpu(self) -> list[str]:
        """Return the lines about a GPU's memory."""
        assert self.device is not None
        sizes = {
            "workspaces of products": self.device.workspace_bytes,
            "context, kernels, NCCL": self.device.outside_bytes,
            "needed, with 5 % to spare": self.needed_bytes,
            f"memory of the {self.device.name}": self.device.memory_bytes,
        }
        least, most = SIMULATED_RESERVE
        reserve = (
            f"its allocator may reserve more: {least} to {most} times the tensors in simulated steps of large models"
        )
        return [*(f"{label:<28}{format_bytes(size):>12}" for label, size in sizes.items()), reserve]

    def _times(self) -> list[str]:
        """Return the lines about a step's time."""
        assert self.timing is not None
        parts = {
            "forward and backward": self.timing.compute_s,
            "optimizer": self.timing.optimizer_s,
            "waiting for other ranks": self.timing.exposed_s,
            "waiting for the CPU": self.timing.issue_s,
            "a step": self.timing.step_s,
        }
        digits = 0 if self.timing.step_s >= 1 else 1
        return [f"{label:<28}{1000 * seconds:>9,.{digits}f} ms" for label, seconds in parts.items()]


def needed_on(device: Hardware, nbytes: int) -> int:
    """Return the memory that a GPU must have for so many bytes of tensors; see :attr:`Plan.needed_bytes`."""
    return math.ceil((nbytes + device.workspace_bytes) * (1 + GPU_MARGIN)) + device.outside_bytes


def plan(  # noqa: PLR0913 (what is trained, on how many ranks, on what)
    model_fn: Callable[[], nn.Module],
    batch_fn: Callable[[], Any],
    *,
    world_size: int,
    rank: int | None = None,
    ranks_each: int | None = None,
    gpu: str | Hardware | None = None,
    optimizer_fn: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    loss_fn: Callable[[nn.Module, Any], torch.Tensor] | None = None,
    **options: Any,
) -> Plan:
    """Plan the training of a model over ``world_size`` ranks, in one process and without its memory.

    The real model, engine and optimizer run three steps on tensors without memory, with the CPU's operators; no process
    group is needed, and none is used.

    Args:
        model_fn: Returns the model, unsharded.
        batch_fn: Returns one rank's batch: the largest in training. The model may depend on its whole numbers; other
            values are never read.
        world_size: Number of ranks.
        rank: The rank to plan; None: the fullest, of all up to four ranks, else of the first, the last and the one with
            most elements of parameters.
        ranks_each: Ranks of each machine, for the hybrid strategies, which shard inside a machine.
        gpu: The GPU of each rank, by the name of its data sheet (an unknown one is refused with
            all names), or a description: adds what it holds besides
            tensors and how long a step takes, from its data sheet. None: CPU ranks, no time.
        optimizer_fn: Makes the optimizer from the sharded model; None: torch's fused AdamW over all parameters.
        loss_fn: Returns the loss of the model on a batch; None: ``model(**batch).loss``.
        options: Those of :func:`fullshard.fully_shard` but ``mesh``, ``weights``, ``first_values`` and ``device``. On
            CPU ranks ``offload_policy`` changes nothing.

    Raises:
        ConfigError: A number or an option is not possible here.
        ModelError: The step depends on computed values.
        UserError: Those of :func:`fullshard.fully_shard`.
    """
    _check(world_size, rank, ranks_each, options)

    def sharded(comm: Comm) -> nn.Module:
        return fully_shard(model_fn(), comm if ranks_each is None else axes_of(comm, ranks_each), **options)

    def build(comm: Comm) -> PlannedStep:
        model = sharded(comm)
        optimizer = optimizer_fn(model) if optimizer_fn else torch.optim.AdamW(model.parameters(), fused=True)
        batch = batch_fn()

        def step() -> None:
            optimizer.zero_grad()
            (model(**batch).loss if loss_fn is None else loss_fn(model, batch)).backward()
            optimizer.step()

        return PlannedStep(model, optimizer, step)

    ranks = candidates(sharded, world_size) if rank is None else [rank]
    device = hardware(gpu) if isinstance(gpu, str) else gpu
    return highest(build, ranks, world_size, device)


def highest(
    build: Callable[[Comm], PlannedStep],
    ranks: Sequence[int],
    world_size: int,
    device: Hardware | None = None,
    *,
    timed: bool = True,
) -> Plan:
    """Return the plan of the fullest of ``ranks`` in any phase; of equal ones, of the fullest in a step.

    See :func:`simulate`; without a time unless ``timed`` and on a device.
    """
    timed = timed and device is not None
    runs = ((rank, simulate_on(build, rank, world_size, device, timed=timed)) for rank in ranks)
    found = (planned(run, rank, world_size, device, timed=timed) for rank, run in runs)
    return max(found, key=lambda plan: (plan.highest_bytes, plan.peak_bytes))


def simulate_on(
    build: Callable[[Comm], PlannedStep],
    rank: int,
    world_size: int,
    device: Hardware | None,
    *,
    draws: bool = False,
    timed: bool = True,
) -> Simulation:
    """Return the simulation of ``rank`` by the rules of CUDA's streams, without a GPU by those of the CPU.

    CPU ranks are on one machine.
    """
    behind = 0 if device is None else CudaDevice.reduces_behind
    has_host = device is not None and device.has_host
    with planned_memory(None if device is None else device.memory_bytes):
        return simulate(build, rank, world_size, reduces_behind=behind, draws=draws, has_host=has_host, timed=timed)


def planned(found: Simulation, rank: int, world_size: int, device: Hardware | None = None, *, timed: bool) -> Plan:
    """Return the plan of ``rank`` from its simulation, with the time on ``device`` if ``timed``.

    Raises:
        ConfigError: The device has no figure for a dtype of the step.
    """
    return Plan(
        world_size=world_size,
        rank=rank,
        parameters=found.elements,
        peak_bytes=sum(found.parts.values()),
        parts=found.parts,
        activations=found.activations,
        phase_peaks=found.peaks,
        account=found.account,
        sent_bytes={kind: sent for kind, (_, sent) in found.sent.items()},
        collectives={kind: count for kind, (count, _) in found.sent.items()},
        device=device,
        timing=time_step(found.work, device, found.times) if timed and device is not None else None,
        host=found.host,
        unplanned=found.unplanned,
    )


def candidates(sharded: Callable[[Comm], nn.Module], world_size: int) -> list[int]:
    """Return ranks that include the fullest: all of up to four, else the first, the last, and the one with most.

    Shards have one size, but optimizers hold state for the rows, and Muon's ranks orthogonalise different matrices.

    Args:
        sharded: Makes the model and shards it.
        world_size: Number of ranks.
    """
    if world_size <= _ALL_RANKS:
        return list(range(world_size))
    with FakeMode(MemoryTracker()):
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


def _check(world_size: int, rank: int | None, ranks_each: int | None, options: Mapping[str, Any]) -> None:
    if world_size < 1:
        raise ConfigError(f"world_size must be at least 1; got {world_size}.")
    if rank is not None and not 0 <= rank < world_size:
        raise ConfigError(f"rank must be from 0 to {world_size - 1}; got {rank}.")
    if ranks_each is not None and (ranks_each < 1 or world_size % ranks_each):
        raise ConfigError(f"ranks_each must divide world_size ({world_size}); got {ranks_each}.")
    for name in ("mesh", "weights", "first_values", "device"):
        if options.get(name) is not None:
            raise ConfigError(
                f"A plan does not support {name}= yet: it counts the memory of one device per rank, on ranks that it "
                "makes itself. Leave it out."
            )
