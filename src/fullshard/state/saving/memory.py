"""Snapshots: checkpoints in the memory of a machine, from which ranks that are started again continue.

Files, checksums and loading are those of checkpoints on a disk. Only where they are differs, and that each rank saves
what it holds as a checkpoint of its own: ranks of other machines do not see its directory. So the ranks agree on what
is complete. Whenever ranks are killed, there is a moment of which all have a snapshot: the one before is given up only
after every rank has completed the newest.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import platform
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from fullshard.core.comm import Mesh, free_memory, lacking, together_in_background
from fullshard.core.engine import mesh_of
from fullshard.core.optim.average import ExponentialMovingAverage
from fullshard.errors import CheckpointError
from fullshard.sizes import format_bytes
from fullshard.state.saving.parameter_state import Stepping
from fullshard.state.saving.pieces import copied, frozen_digest, index_of, plan_save, require_between_steps, rng_piece
from fullshard.state.saving.scratch import ScratchDirectory
from fullshard.state.storage import (
    Keep,
    Part,
    Place,
    Save,
    SaveJob,
    SavePlan,
    backend_of,
    begin,
    find_completions,
    mapped_file,
    shard_name,
    specs_of,
    verify,
)

_log = logging.getLogger("fullshard")

Every = int | Literal["auto"]

SHARE = 0.01
"""Share of the training time that snapshots may cost with ``every="auto"``, while failures are rare."""

FIRST_GAP = 4
"""Steps between the first snapshots, until the cost of one without new memory is known."""

_COSTS = 9
"""Snapshots whose median cost decides the interval."""

_KEPT = 2
"""Snapshots of a rank that are there at the same time."""

_MEMORY_SHARE = 0.5
"""Share of the free memory that the snapshots of a machine may take."""

_TIMEOUT_S = 120.0
"""Longest time without progress of a snapshot, in seconds."""


class InMemory:
    """The snapshots of a run; every rank has one object, and writes its own in a thread.

    Attributes:
        every: Current number of steps from one snapshot to the next; the same on every rank.
        costs: Seconds of training that each snapshot has cost this rank, including the first ones.
        attempt: Number of this attempt, from 0.
    """

    def __init__(self, ranks: Mesh, scratch: ScratchDirectory, every: Every) -> None:
        """Prepare snapshots every ``every`` steps, or as often as costs ``SHARE`` of the time; every rank calls it.

        If failures follow each other so fast that more time is lost by them, the interval that loses least is used.
        """
        self.every = FIRST_GAP if every == "auto" else every
        self.costs: list[float] = []
        # A machine that takes a lost one's place counts its own attempts: ranks must not decide by different numbers.
        told = ranks.all_gather_object((scratch.attempt, scratch.last))
        self.attempt = max(attempt for attempt, _ in told)
        self._off = any(last for _, last in told)
        self._ranks = ranks
        self._scratch = scratch
        self._directory = scratch.directory / f"rank-{ranks.rank:05d}"
        self._measured = every == "auto"
        self._life_s = scratch.mean_life_s()
        self._save: Save | None = None
        self._stall_s = 0.0  # of the last snapshot
        self._written_s = 0.0  # how long its thread took
        self._next: int | None = None
        self._problem: str | None = None
        self._continued = False  # whether the snapshots that are there are those that this attempt goes on from
        self._ticked: float | None = None
        self._steps_s: list[float] = []
        self._made: str | None = None
        self._frozen: str | None = None  # digest that replaces frozen parameters; None: these are kept

    @property
    def nbytes(self) -> int:
        """Bytes of the file of the last snapshot, which this process maps as tensors until the next one."""
        pieces = () if self._save is None else self._save.job.plan.pieces
        storages = [piece.tensor.untyped_storage() for piece in pieces]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

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
        self._made = frozen_digest(model) if any(not param.requires_grad for param in model.parameters()) else None

    def leave_out_made(self, model: nn.Module) -> None:
        """Leave frozen parameters out of snapshots if they are as recorded; every rank calls it before the first step.

        A later attempt makes them the same way. It compares their digest before it continues.
        """
        same = self._made is not None and frozen_digest(model) == self._made
        self._frozen = self._made if all(self._ranks.all_gather_object(same)) else None

    def due(self, step: int) -> bool:
        """Return whether a snapshot follows step ``step``; the same on every rank, without communication."""
        return not self._off and (self._next is None or step >= self._next)

    def tick(self) -> None:
        """Record the end of a step, to measure the time of steps; every rank calls it after each step."""
        now = time.monotonic()
        if self._ticked is not None:
            self._steps_s.append(now - self._ticked)
        self._ticked = now

    def take(
        self,
        model: nn.Module,
        optimizer: Stepping | None,
        *,
        step: int,
        values: Mapping[str, Any],
        average: ExponentialMovingAverage | None = None,
    ) -> bool:
        """Copy this rank's state, and return while a thread completes the snapshot; every rank calls it between steps.

        Failures here never end the run: without snapshots it continues from its checkpoints. They are reported once.

        Args:
            model: The sharded model.
            optimizer: Over its parameters; None: none is saved.
            step: Optimizer steps taken.
            values: This rank's own values, as JSON holds them.
            average: The moving average of the model's weights; None: none is saved.

        Returns:
            True if a snapshot is being written; False after a failure.
        """
        if self._off:
            return False
        started = time.monotonic()
        if not self._continued:
            self._forget()
        self._join()
        job: SaveJob | None = None
        try:
            job = self._job(model, optimizer, step, values, average)
        except CheckpointError as error:
            self._problem = str(error)
        self._agree(SavePlan() if job is None else job.plan)
        if self._off or job is None:
            return False
        self._next = step + self.every
        try:
            begin(job, lambda directory: None)
            self._save = Save(self._copied(job))
        except (CheckpointError, OSError) as error:
            self._problem = f"rank {job.rank} could not write to {self._directory}: {error}"
            with contextlib.suppress(OSError):
                backend_of(self._directory).remove(job.temporary)
        self._ticked = time.monotonic()
        self._stall_s = self._ticked - started
        return True

    def wait(self) -> None:
        """Return when this rank's last snapshot is complete, or has failed; no communication."""
        while self._save is not None and self._save.poll(_TIMEOUT_S) is None:
            pass

    def newest(self) -> Place | None:
        """Return this rank's part of the newest moment of which every rank has a snapshot; every rank calls it.

        Damaged ones count as missing. Later ones are deleted: no other attempt's may be mixed with them.
        """
        self.wait()
        self._continued = True
        rank, size = self._ranks.rank, self._ranks.size
        listed = together_in_background(self._ranks, lambda: find_completions(self._directory))
        # Of a world size: the name of the rank's file has it.
        found = {(done.serial, done.step): path for done, path in listed if shard_name(rank, size) in done.files}
        chosen = None
        for moment in sorted(set.intersection(*self._ranks.all_gather_object(set(found))), reverse=True):
            sound = together_in_background(self._ranks, lambda path=found[moment]: verify(path).problems == 0)
            if all(self._ranks.all_gather_object(sound)):
                chosen = moment
                break
        for done, path in listed:
            if chosen is None or (done.serial, done.step) > chosen:
                with contextlib.suppress(OSError):
                    backend_of(path).remove(path)
        if chosen is None:
            return None
        self._next = chosen[1] + self.every
        return found[chosen]

    def _job(
        self,
        model: nn.Module,
        optimizer: Stepping | None,
        step: int,
        values: Mapping[str, Any],
        average: ExponentialMovingAverage | None,
    ) -> SaveJob:
        """Describe this rank's snapshot.

        Raises:
            CheckpointError: The state cannot be saved as it is, or the file system refused.
        """
        require_between_steps(self._ranks, model, step)
        plan = plan_rank(model, optimizer, average, self._ranks.device, frozen=self._frozen is None)
        keep = Keep(last=_KEPT)
        index = index_of(model, step, values, None, keep)
        index = replace(index, part=Part(self._ranks.rank, self._frozen))
        try:
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise CheckpointError(f"{self._directory} cannot be made: {error}.") from error
        name = f"{self.attempt}-{step}"
        return SaveJob(
            self._directory, name, self._ranks.rank, index, plan, keep, lambda: None, _TIMEOUT_S, lambda: None
        )

    def _copied(self, job: SaveJob) -> SaveJob:
        """Return the job with its pieces copied to the memory of their file, that of a snapshot which is not needed.

        Every rank has completed the newest snapshot when this is called. One of the same step is about to be replaced,
        so that the one before it is needed.
        """
        before = [path for _, path in find_completions(self._directory) if path.name != job.final.name]
        file = Path(str(job.temporary), shard_name(job.rank, job.index.world_size))
        for path in before[:-1]:
            with contextlib.suppress(OSError):  # new memory then
                os.link(str(path / file.name), file)
            backend_of(path).remove(path)
        room = mapped_file(file, list(specs_of(job.plan.pieces).values()))
        pairs = [(room[piece.name], piece.tensor) for piece in job.plan.pieces]
        return replace(copied(self._ranks, job, pairs), mapped=True)

    def _forget(self) -> None:
        """Delete what earlier attempts left, of which this one has not asked: moments of two must not be mixed."""
        self._continued = True
        with contextlib.suppress(OSError, CheckpointError):
            for _, path in find_completions(self._directory):
                backend_of(path).remove(path)

    def _join(self) -> None:
        """Wait for the previous snapshot, and record its cost."""
        save, waited = self._save, time.monotonic()
        if save is None:
            return
        self.wait()
        self._save = None
        problem = save.poll(0.0)
        if problem:
            self._problem = problem
            save.cancel()
        self._written_s = save.seconds
        # CPU ranks compute on the cores that the thread takes; GPU ranks have cores to spare.
        busy_s = save.busy_seconds if self._ranks.device.type == "cpu" else 0.0
        self.costs.append(self._stall_s + busy_s + time.monotonic() - waited)

    def _agree(self, plan: SavePlan) -> None:
        """Exchange problems and costs; afterwards every rank has completed the snapshot before.

        Sets ``every``, or disables snapshots, on all ranks alike.
        """
        room = (needed_bytes(plan), self._free()) if self._next is None else None
        step_s = statistics.median(self._steps_s) if self._steps_s else 0.0
        # One snapshot of several costs twice as much as the others, and would double the interval.
        cost_s = statistics.median(self.costs[_KEPT:][-_COSTS:] or [0.0])
        self._steps_s.clear()
        everyone = self._ranks.all_gather_object((self._problem, room, cost_s, self._written_s, step_s, self._life_s))
        problems = [problem for problem, *_ in everyone if problem is not None]
        rooms = [room for _, room, *_ in everyone if room is not None]
        short = lacking(rooms, _MEMORY_SHARE)
        if short is not None:
            pool, needed, there = short
            problems.append(
                f"the ranks of a {pool.partition(':')[0]} would take {format_bytes(needed)}, and it has "
                f"{format_bytes(there)} free, of which they may take {_MEMORY_SHARE:.0%}"
            )
        if problems:
            self._off = True
            if self._ranks.rank == 0:
                _log.warning(
                    "No snapshots are kept in memory: %s. After a failure the newest checkpoint is used.",
                    problems[0].rstrip("."),
                )
            return
        if rooms and self._ranks.rank == 0:
            most = max(nbytes for nbytes, _ in rooms)
            _log.info("snapshots in %s: %s for each rank", self._scratch.directory, format_bytes(most))
        _, _, costs_s, written_s, steps_s, lives_s = zip(*everyone, strict=True)
        if self._measured and max(steps_s) and len(self.costs) > _KEPT:
            life_s = min((one for one in lives_s if one is not None), default=math.inf)
            self.every = _interval(max(costs_s), max(written_s), max(steps_s), life_s)

    def _free(self) -> Mapping[str, int]:
        """Return the bytes that snapshots may still take, by pool: memory, and the file system that they are in.

        A container's /dev/shm often has 64 MB, which loaders' workers and NCCL need too.
        """
        pools, top = free_memory(torch.device("cpu")), self._scratch.directory.parent
        with contextlib.suppress(OSError):
            found = os.statvfs(top)
            pools |= {f"file system ({top}): {platform.node()}": found.f_bavail * found.f_frsize}
        return pools


def plan_rank(
    model: nn.Module,
    optimizer: Stepping | None,
    average: ExponentialMovingAverage | None,
    device: torch.device,
    *,
    frozen: bool,
) -> SavePlan:
    """Return what this rank's snapshot has: all that the rank holds, as views of the memory that training uses."""
    plan = plan_save(model, optimizer, gradients=False, average=average, frozen=frozen, everything=True)
    plan.pieces.append(rng_piece(mesh_of(model).rank, device))
    return plan


def needed_bytes(plan: SavePlan) -> int:
    """Return the bytes that a rank's snapshots take of its machine."""
    return _KEPT * sum(piece.tensor.nbytes for piece in plan.pieces)


def _interval(cost_s: float, written_s: float, step_s: float, life_s: float = math.inf) -> int:
    """Return the steps between snapshots: their cost within ``SHARE``, and one complete before the next begins.

    If attempts last ``life_s`` in the mean, half an interval is lost in each: the sum of that and of what snapshots
    cost is least with the square root (Young, 1974), rounded, since nothing is bounded by it.
    """
    rarest = math.ceil(cost_s / SHARE / step_s)
    best = round(min(rarest, math.sqrt(2 * cost_s * life_s) / step_s))
    return max(1, best, math.ceil(written_s / step_s))
