"""Split matrices on their way to the ranks that orthogonalise them, and back, beside the computing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from fullshard.comm import Comm, Work, settle
from fullshard.optim.muon.balance import Plan, plan_rounds
from fullshard.optim.muon.matrix import MuonMatrix, alike, orthogonalised

ROUND_BYTES = 64 << 20
"""Matrices that a rank gathers, or orthogonalises at once; a larger one comes alone."""


def plan_of(comm: Comm, split: Sequence[MuonMatrix], whole: Sequence[MuonMatrix]) -> Plan:
    """Who orthogonalises which of ``split``, in which rounds; the same on every rank, no communication.

    Args:
        comm: The ranks among which the matrices are sharded.
        split: Of one dtype, in an order that is the same on every rank.
        whole: The other matrices of these ranks, which stay where they are.
    """
    fixed = [0] * comm.size
    for matrix in whole:
        fixed[matrix.meta.owners.start] += matrix.work
    return plan_rounds([matrix.as_split() for matrix in split], fixed, ROUND_BYTES // split[0].dtype.itemsize)


def step_whole(matrices: Sequence[MuonMatrix]) -> None:
    """Step matrices that are whole on this rank and have a gradient."""
    for batch in alike(matrices, ROUND_BYTES):
        results = orthogonalised(batch, [matrix.update() for matrix in batch])
        for matrix, result in zip(batch, results, strict=True):
            matrix.apply(result)


@dataclass
class _Load:
    """What one exchange brings, by rank and in the order of the round on both sides.

    Attributes:
        given: To each rank.
        awaited: From each rank, elements by the number of the matrix.
    """

    given: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    awaited: dict[int, dict[int, int]] = field(default_factory=dict)


@dataclass
class _Transfer:
    """One exchange under way.

    Attributes:
        work: The collective.
        parts: What comes, by rank and number of the matrix.
        sent: What other ranks are given, alive until they have it.
    """

    work: Work
    parts: dict[tuple[int, int], torch.Tensor]
    sent: list[torch.Tensor]


class MuonRounds:
    """The split matrices of one step, all of one dtype.

    Every rank of the group makes one and calls :meth:`finish`, also one that holds no part of any. While a round is
    computed the next one is gathered and the rows of the one before go home: an owner has at most two rounds of
    gathered matrices and two of orthogonal ones in memory.
    """

    def __init__(self, comm: Comm, plan: Plan, matrices: Sequence[MuonMatrix]) -> None:
        """Start gathering the first round.

        Args:
            comm: The ranks among which the matrices are split.
            plan: Made from ``matrices``, on every rank.
            matrices: At least one; of one dtype, in an order that is the same on every rank.
        """
        self._comm = comm
        self._plan = plan
        self._matrices = matrices
        self._splits = plan.matrices
        self._own: dict[int, torch.Tensor] = {}
        self._first = self._gather(0)

    def finish(self) -> None:
        """Orthogonalise, send rows home and step the parameters."""
        arriving: _Transfer | None = self._first
        going_home: _Transfer | None = None
        for number in range(len(self._plan.rounds)):
            assert arriving is not None
            following = self._gather(number + 1) if number + 1 < len(self._plan.rounds) else None
            arriving.work.wait()
            leaving = self._send_home(number, self._compute(number, arriving.parts))
            settle(arriving.work)
            if going_home is not None:
                self._apply(going_home)
            arriving, going_home = following, leaving
        if going_home is not None:
            self._apply(going_home)

    def _mine(self, number: int) -> list[int]:
        """The matrices of a round that this rank orthogonalises."""
        return [index for index in self._plan.rounds[number] if self._plan.owners[index] == self._comm.rank]

    def _others(self, number: int) -> list[tuple[int, int, int]]:
        """Those that another rank does and of which this one holds a part: number, owner, elements here."""
        rank = self._comm.rank
        return [
            (index, self._plan.owners[index], self._splits[index].piece_of(rank))
            for index in self._plan.rounds[number]
            if rank in self._splits[index].sharers and rank != self._plan.owners[index]
        ]

    def _gather(self, number: int) -> _Transfer:
        """Step the momentum of a round's matrices, and send what this rank has of them to their owners."""
        load = _Load()
        for index in self._mine(number):
            self._own[index] = self._matrices[index].update()
            for rank, numel in zip(self._splits[index].sharers, self._splits[index].pieces, strict=True):
                if rank != self._comm.rank:
                    load.awaited.setdefault(rank, {})[index] = numel
        for index, owner, _ in self._others(number):
            load.given.setdefault(owner, []).append(self._matrices[index].update())
        return self._exchange(load, number, "updates")

    def _compute(self, number: int, arrived: dict[tuple[int, int], torch.Tensor]) -> dict[int, torch.Tensor]:
        """Orthogonalise this rank's matrices of a round; flattened, by number."""
        mine = self._mine(number)
        numbers = {id(self._matrices[index]): index for index in mine}
        results: dict[int, torch.Tensor] = {}
        for batch in alike([self._matrices[index] for index in mine], ROUND_BYTES):
            indices = [numbers[id(matrix)] for matrix in batch]
            pieces = [
                self._own.pop(index) if rank == self._comm.rank else arrived.pop((rank, index))
                for index in indices
                for rank in self._splits[index].sharers
            ]
            results.update(zip(indices, orthogonalised(batch, pieces), strict=True))
        return results

    def _send_home(self, number: int, results: dict[int, torch.Tensor]) -> _Transfer:
        """Step this rank's rows of the matrices that it has orthogonalised, and send the others' rows to them."""
        load = _Load()
        for index in self._mine(number):
            split = self._splits[index]
            for rank, rows in zip(split.sharers, results[index].split(split.pieces), strict=True):
                if rank == self._comm.rank:
                    self._matrices[index].apply(rows)
                else:
                    load.given.setdefault(rank, []).append(rows)
        for index, owner, numel in self._others(number):
            load.awaited.setdefault(owner, {})[index] = numel
        return self._exchange(load, number, "orthogonal rows")

    def _apply(self, arriving: _Transfer) -> None:
        """Step the rows of matrices that other ranks have orthogonalised."""
        arriving.work.wait()
        for (_, index), rows in arriving.parts.items():
            self._matrices[index].apply(rows)
        settle(arriving.work)

    def _exchange(self, load: _Load, number: int, what: str) -> _Transfer:
        none = torch.empty(0, dtype=self._matrices[0].dtype, device=self._comm.device)
        parts: dict[tuple[int, int], torch.Tensor] = {}
        received, sent = [], []
        for rank in range(self._comm.size):
            sizes = load.awaited.get(rank, {})
            received.append(none.new_empty(sum(sizes.values())))
            for index, part in zip(sizes, received[-1].split(list(sizes.values())) if sizes else (), strict=True):
                parts[rank, index] = part
            given = load.given.get(rank, [none])
            sent.append(torch.cat(given) if len(given) > 1 else given[0])
        self._comm.announce(f"Muon: {what} of round {number + 1} of {len(self._plan.rounds)}")
        return _Transfer(self._comm.exchange(received, sent), parts, sent)
