"""Snapshots of all ranks, two generations each: when one is due, and the newest that every rank has."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from fullshard.core.comm import Mesh, device_of, free_memory, together_in_background
from fullshard.errors import CheckpointError
from fullshard.sizes import format_bytes
from fullshard.state.resilience.peer_replicas import PeerReplicas
from fullshard.state.resilience.scratch import ScratchDirectory
from fullshard.state.resilience.snapshot_buffer import Snapshot, SnapshotHeader, nbytes_of
from fullshard.state.storage import as_json

_log = logging.getLogger("fullshard")

State = tuple[Mapping[str, torch.Tensor], Mapping[str, Any]]
"""One rank's tensors by name, and its state other than tensors."""

Key = tuple[int, int, int]

Every = int | Literal["auto"]


@dataclass(frozen=True)
class OfOtherRanks:
    """The snapshots of one moment of a run on another number of ranks, as one current rank holds them."""

    described: SnapshotHeader  # rank 0's description, the same on every rank
    mine: tuple[Snapshot, ...]  # those that this rank is to pass on; together the ranks have each once


SHARE = 0.01
"""Share of the training time that snapshots may cost with ``every="auto"``, while failures are rare."""

FIRST_GAP = 4
"""Steps between the first snapshots, until the cost of one without new memory is known."""

_COSTS = 9
"""Snapshots whose median cost decides the interval."""

_GENERATIONS = 2
_MEMORY_SHARE = 0.5
"""Share of the free memory that the snapshots of a machine may take."""


class Snapshots:
    """A run's snapshots; every rank makes one object and writes its own snapshots, alone, in a thread.

    A generation is overwritten only after every rank has completed the other one: whenever ranks are killed, there is a
    moment of which all have a snapshot.

    Attributes:
        every: Current number of steps from one snapshot to the next; the same on every rank.
        costs: Seconds of training that each snapshot has cost this rank, including the first ones.
    """

    def __init__(self, ranks: Mesh, scratch: ScratchDirectory, every: Every) -> None:
        """Prepare snapshots every ``every`` steps, or as often as costs ``SHARE`` of the time.

        If failures follow each other so fast that more time is lost by them, the interval that loses least is used.
        """
        self.every = FIRST_GAP if every == "auto" else every
        self.costs: list[float] = []
        self._ranks = ranks
        self._scratch = scratch
        self._measured = every == "auto"
        self._life_s = scratch.mean_life_s()
        self._pace: Sequence[float] | None = None  # see :class:`SnapshotHeader`; the same on every rank
        self._replicas = PeerReplicas(ranks, scratch.directory)
        self._buffers = [self._replicas.buffer_of(ranks.rank, number) for number in range(_GENERATIONS)]
        self._serial = 0
        self._next: int | None = None
        self._thread: threading.Thread | None = None
        self._busy_s = 0.0  # processor time of the last snapshot's thread
        self._written_s = 0.0  # its wall time
        self._stall_s: float | None = None  # None: none written in this attempt
        self._problem: str | None = None
        self._off = scratch.last
        self._ticked: float | None = None
        self._steps_s: list[float] = []

    @property
    def nbytes(self) -> int:
        """Bytes of snapshots that this process maps as tensors."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def due(self, step: int) -> bool:
        """Return whether a snapshot follows step ``step``; the same on every rank, without communication."""
        return not self._off and (self._next is None or step >= self._next)

    def tick(self) -> None:
        """Record the end of a step, to measure the time of steps; every rank calls it after each step."""
        now = time.monotonic()
        if self._ticked is not None:
            self._steps_s.append(now - self._ticked)
        self._ticked = now

    def write(self, take: Callable[[], State], step: int, values: Mapping[str, Any]) -> bool:
        """Copy this rank's state, and return while a thread completes the snapshot; every rank calls it.

        Failures here never end the run: without snapshots it continues from its checkpoints. They are reported once.

        Args:
            take: Returns the rank's tensors by name, flat, on any device, and the state other than tensors as JSON
                holds it.
            step: Optimizer steps taken.
            values: The program's own values.

        Returns:
            True if a snapshot is being written.
        """
        if self._off:
            return False
        started = time.monotonic()
        self._join()
        tensors: Mapping[str, torch.Tensor] = {}
        plain: Mapping[str, Any] = {}
        try:
            (tensors, plain), values = take(), as_json(values)
        except CheckpointError as error:
            self._problem = str(error)
        self._agree(tensors)
        if self._off:
            return False
        self._next = step + self.every
        rank, size = self._ranks.rank, self._ranks.size
        described = SnapshotHeader(
            step, rank, size, self._scratch.attempt, self._serial, self.every, self._pace, values, plain
        )
        buffer = self._buffers[self._serial % _GENERATIONS]
        self._serial += 1
        try:
            complete = buffer.write(tensors, device_of(self._ranks.device).copy_to_host)
        except OSError as error:
            self._problem = f"rank {rank} could not write to {buffer.directory}: {error}"
        else:
            self._thread = threading.Thread(
                target=self._complete, args=(complete, described), daemon=True, name="fullshard-snapshot"
            )
            self._thread.start()
        self._ticked = time.monotonic()
        self._stall_s = self._ticked - started
        return True

    def wait(self) -> None:
        """Return when this rank's last snapshot is complete, or has failed; no communication."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def newest(self) -> Snapshot | None:
        """Return this rank's part of the newest moment of which every rank has a snapshot; every rank calls it.

        Snapshots of a lost machine's ranks come from their peers. Damaged ones count as missing. The next snapshot
        does not overwrite this one.
        """
        brought = self._replicas.several and self._bring_back()
        # Checksums of both generations would take twice as long, and the older one is rarely needed.
        for newest in (True, False):
            found = together_in_background(self._ranks, partial(self._held, self._ranks.rank, newest=newest))
            everyone = self._ranks.all_gather_object((set(found), self._life_s))
            common = set.intersection(*(keys for keys, _ in everyone))
            if common:
                break
        else:
            return None
        chosen = found[max(common)]
        described = chosen.described
        self._serial = described.serial + 1  # the other buffer is written next
        if self._measured:
            # What the attempt before has measured holds until this one has: it may not last that long.
            self.every, self._pace = min(FIRST_GAP, described.every), described.pace
            self._keep_pace([life for _, life in everyone])
        # A machine that lacked its own lacks its peers' too: they are sent again after the next step.
        self._next = described.step + (1 if brought else self.every)
        return chosen

    @property
    def several(self) -> bool:
        """Whether other machines have copies, so that a run may lose some of its ranks and go on without them."""
        return self._replicas.several

    def of_other_ranks(self) -> OfOtherRanks | None:
        """Return the newest moment of another number of ranks that is here complete; every rank calls it.

        Returns:
            None if machines are gone whose snapshots nobody has a copy of, or if the number of ranks is unchanged.
        """
        rank, size = self._ranks.rank, self._ranks.size
        here = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        first = int(os.environ.get("LOCAL_RANK", rank % here))
        owners = sorted(int(path.name.removeprefix("rank-")) for path in self._scratch.directory.glob("rank-*"))

        def read() -> dict[tuple[int, Key, int], Snapshot]:
            buffers = [
                self._replicas.buffer_of(owner, one) for owner in owners[first::here] for one in range(_GENERATIONS)
            ]
            # Those of the same number of ranks are not read: checksums of all bytes would delay every restart again.
            others = [
                buffer for buffer in buffers if (said := buffer.described()) is not None and said.world_size != size
            ]
            found = [one for buffer in others if (one := buffer.read()) is not None]
            return {(one.described.world_size, one.described.key, one.described.rank): one for one in found}

        mine = together_in_background(self._ranks, read)
        everyone = self._ranks.all_gather_object(set(mine))
        chosen = newest_complete(set().union(*everyone))
        if chosen is None:
            return None
        holders: list[int] = []  # spread over ranks: files are written in parallel, and every rank has frozen weights
        for owner in range(chosen[0]):
            having = [one for one, has in enumerate(everyone) if (*chosen, owner) in has]
            holders.append(min(having, key=holders.count))
        passed_on = tuple(mine[*chosen, owner] for owner, holder in enumerate(holders) if holder == rank)
        described = passed_on[0].described if holders[0] == rank else None
        return OfOtherRanks(self._ranks.all_gather_object(described)[holders[0]], passed_on)

    def _held(self, rank: int, *, newest: bool = False) -> dict[Key, Snapshot]:
        """Return the complete snapshots of a rank on this machine, by key; or only the newest one."""
        buffers, size = [self._replicas.buffer_of(rank, number) for number in range(_GENERATIONS)], self._ranks.size
        noted = [(said.key, buffer) for buffer in buffers if (said := buffer.described()) and said.world_size == size]
        noted.sort(key=lambda pair: pair[0])
        read = [buffer.read() for _, buffer in noted[-1 if newest else 0 :]]
        return {one.described.key: one for one in read if one is not None}

    def _bring_back(self) -> bool:
        """Send the newest moment's snapshots to the ranks that lack theirs; every rank calls it.

        Returns:
            True if a rank lacked its own.
        """
        rank, size, each = self._ranks.rank, self._ranks.size, self._replicas.each
        mine = together_in_background(
            self._ranks, lambda: {owner: self._held(owner) for owner in range(rank % each, size, each)}
        )
        everyone = self._ranks.all_gather_object({owner: set(found) for owner, found in mine.items()})
        holders = senders(everyone)

        def send() -> None:
            try:
                for owner, (key, source) in holders.items():
                    if source == rank:
                        self._replicas.send(owner, mine[owner][key].directory)
            except OSError as error:
                raise CheckpointError(f"A snapshot could not be brought back from another machine: {error}") from error

        try:
            together_in_background(self._ranks, send)
        except CheckpointError as error:
            _log.warning("%s; an older state is used.", error)
        return bool(holders)

    def _join(self) -> None:
        """Wait for the previous snapshot, and record its cost."""
        waited = time.monotonic()
        self.wait()
        if self._stall_s is not None:
            # CPU ranks compute on the cores that the thread takes; GPU ranks have cores to spare.
            busy = self._busy_s if self._ranks.device.type == "cpu" else 0.0
            self.costs.append(self._stall_s + busy + time.monotonic() - waited)

    def _agree(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Exchange problems and costs; afterwards every rank has completed the snapshot before.

        Sets ``every``, or disables snapshots, on all ranks alike.
        """
        first = self._next is None and not self.costs
        room = (room_of(tensors, several=self._replicas.several), self._free()) if first else None
        step_s = statistics.median(self._steps_s) if self._steps_s else 0.0
        # One snapshot of several costs twice as much as the others, and would double the interval.
        cost = statistics.median(self.costs[_GENERATIONS:][-_COSTS:] or [0.0])
        self._steps_s.clear()
        mine = self._problem, cost, self._written_s, step_s, self._life_s, room
        everyone = self._ranks.all_gather_object(mine)
        problems = [problem for problem, *_ in everyone if problem is not None]
        rooms = [one for *_, one in everyone if one is not None]
        problems += _too_large(rooms)
        if problems:
            self._off = True
            if self._ranks.rank == 0:
                _log.warning(
                    "No snapshots are kept in memory: %s. After a failure the newest checkpoint is used.",
                    problems[0].rstrip("."),
                )
            return
        if rooms and self._ranks.rank == 0:
            nbytes = max(nbytes for nbytes, _ in rooms)
            _log.info("snapshots in %s: %s for each rank", self._scratch.directory, format_bytes(nbytes))
        slowest = max(one[3] for one in everyone)
        if self._measured and slowest and len(self.costs) > _GENERATIONS:
            self._pace = max(one[1] for one in everyone), max(one[2] for one in everyone), slowest
            self._keep_pace([one[4] for one in everyone])

    def _keep_pace(self, lives: Sequence[float | None]) -> None:
        """Set ``every`` by the pace, if it is known, and how long attempts last by each rank's machine."""
        if self._pace is not None:
            cost_s, written_s, step_s = self._pace
            life_s = min((one for one in lives if one is not None), default=math.inf)
            self.every = _interval(cost_s, written_s, step_s, life_s)

    def _free(self) -> dict[str, int]:
        """Return the bytes that snapshots may still take, by pool: memory, and the file system that they are in.

        A container's /dev/shm often has 64 MB, which loaders' workers and NCCL need too.
        """
        with contextlib.suppress(OSError):
            found = os.statvfs(self._scratch.directory.parent)
            machine = self._ranks.rank // self._replicas.each
            here = f"file system ({self._scratch.directory.parent}): machine {machine}"
            return {**free_memory(torch.device("cpu")), here: found.f_bavail * found.f_frsize}
        return free_memory(torch.device("cpu"))

    def _complete(self, complete: Callable[[SnapshotHeader], None], described: SnapshotHeader) -> None:
        """Complete a snapshot; runs in the thread."""
        started, busy = time.monotonic(), time.thread_time()
        try:
            complete(described)
            if self._replicas.several:
                self._replicas.send(self._replicas.peer, self._buffers[described.serial % _GENERATIONS].directory)
        except Exception as error:  # any: the next exchange reports it
            self._problem = f"rank {described.rank} could not complete the snapshot of step {described.step}: {error!r}"
        self._busy_s, self._written_s = time.thread_time() - busy, time.monotonic() - started


def newest_complete(found: set[tuple[int, Key, int]]) -> tuple[int, Key] | None:
    """Return the number of ranks and the key of the latest step of which all ranks' snapshots are among ``found``.

    Args:
        found: Number of ranks, key and rank of each snapshot.

    Examples:
        >>> old, new = (0, 1, 8), (0, 2, 9)
        >>> newest_complete({(2, old, 0), (2, old, 1), (2, new, 0)})
        (2, (0, 1, 8))
    """
    moments = {(size, key) for size, key, _ in found}
    complete = [(size, key) for size, key in moments if all((size, key, rank) in found for rank in range(size))]
    return max(complete, key=lambda moment: (moment[1][2], moment), default=None)


def senders(everyone: Sequence[Mapping[int, set[Key]]]) -> dict[int, tuple[Key, int]]:
    """Return the transfers that give each rank the newest moment that all can have.

    Args:
        everyone: Of each rank, the keys of the snapshots on its machine that it looked at, by the rank they belong to.

    Returns:
        By rank that lacks it, the key, and the rank that sends it.

    Examples:
        >>> old, new = (0, 1, 8), (0, 2, 9)  # rank 1's machine is new; rank 0's has its copies
        >>> senders([{0: {old, new}, 1: {old, new}}, {0: set(), 1: set()}])
        {1: ((0, 2, 9), 0)}
    """
    owners = range(len(everyone))
    there = [set().union(*(found.get(owner, ()) for found in everyone)) for owner in owners]
    common = set.intersection(*there)
    if not common:
        return {}
    key = max(common)
    lacking = [owner for owner in owners if key not in everyone[owner].get(owner, ())]
    return {
        owner: (key, next(rank for rank, found in enumerate(everyone) if key in found.get(owner, ())))
        for owner in lacking
    }


def room_of(tensors: Mapping[str, torch.Tensor], *, several: bool) -> int:
    """Return the bytes of a rank's snapshots of these tensors on its machine; any rank.

    With ``several`` machines it is twice as much: each rank also stores its peer's.
    """
    return _GENERATIONS * (2 if several else 1) * nbytes_of(tensors)


def _interval(cost_s: float, written_s: float, step_s: float, life_s: float = math.inf) -> int:
    """Return the steps between snapshots: their cost within ``SHARE``, and one complete before the next begins.

    If attempts last ``life_s`` in the mean, half an interval is lost in each: the sum of that and of what snapshots
    cost is least with the square root (Young, 1974), rounded, since nothing is bounded by it.
    """
    rarest = math.ceil(cost_s / SHARE / step_s)
    best = round(min(rarest, math.sqrt(2 * cost_s * life_s) / step_s))
    return max(1, best, math.ceil(written_s / step_s))


def _too_large(rooms: list[tuple[int, Mapping[str, int]]]) -> list[str]:
    """Return why the snapshots of a machine would take too much of its memory; none if they do not.

    Args:
        rooms: For each rank, the bytes of all its snapshots and the free memory by pool.
    """
    wanted: dict[str, int] = {}
    left: dict[str, int] = {}
    for nbytes, pools in rooms:
        for pool, free in pools.items():
            wanted[pool] = wanted.get(pool, 0) + nbytes
            left[pool] = min(free, left.get(pool, free))
    return [
        f"the ranks of a {pool.partition(':')[0]} would take {format_bytes(wanted[pool])}, and it has "
        f"{format_bytes(left[pool])} free, of which they may take {_MEMORY_SHARE:.0%}"
        for pool in wanted
        if wanted[pool] > _MEMORY_SHARE * left[pool]
    ]
