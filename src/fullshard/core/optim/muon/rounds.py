"""Moving split matrices to the ranks that orthogonalise them, and their rows back, while others are computed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fullshard.core.comm import Comm
from fullshard.core.optim.exchange import PieceExchange
from fullshard.core.optim.muon.balance import RoundPlan, plan_rounds
from fullshard.core.optim.muon.matrix import MuonMatrix, batches_of_equal_settings, orthogonalised

ROUND_BYTES = 64 << 20
"""Bytes of matrices that a rank gathers, or orthogonalises, at once; a larger matrix is handled alone."""


def plan_of(comm: Comm, split: Sequence[MuonMatrix], unsplit: Sequence[MuonMatrix]) -> RoundPlan:
    """Plan which rank orthogonalises which of ``split``, in which rounds; the same on every rank, no communication.

    Args:
        comm: The ranks among which the matrices are sharded.
        split: The split matrices, of one dtype, in the same order on every rank.
        unsplit: The matrices that are complete on one of these ranks.
    """
    fixed = [0] * comm.size
    for matrix in unsplit:
        fixed[matrix.meta.owners.start] += matrix.work
    return plan_rounds([matrix.as_split() for matrix in split], fixed, ROUND_BYTES // split[0].dtype.itemsize)


def step_unsplit(matrices: Sequence[MuonMatrix]) -> None:
    """Step matrices that are complete on this rank and have a gradient."""
    for batch in batches_of_equal_settings(matrices, ROUND_BYTES):
        results = orthogonalised(batch, [matrix.update() for matrix in batch])
        for matrix, result in zip(batch, results, strict=True):
            matrix.apply(result)


class MuonRounds:
    """The split matrices of one step, all of one dtype.

    Every rank of the group makes one and calls :meth:`finish`, also one that holds no part of any matrix. While a round
    is computed, the next one is gathered and the rows of the previous one are sent back: an owner has at most two
    rounds of gathered matrices and two of orthogonal ones in memory.
    """

    def __init__(self, comm: Comm, plan: RoundPlan, matrices: Sequence[MuonMatrix]) -> None:
        """Start gathering the first round.

        Args:
            comm: The ranks among which the matrices are split.
            plan: The plan for ``matrices``, the same on every rank.
            matrices: At least one; of one dtype, in the same order on every rank.
        """
        self._comm = comm
        self._plan = plan
        self._matrices = matrices
        self._splits = plan.matrices
        self._own: dict[int, torch.Tensor] = {}
        self._first = self._gather(0)

    def finish(self) -> None:
        """Orthogonalise the matrices, return their rows to the ranks that hold them, and step the parameters."""
        arriving: PieceExchange | None = self._first
        returning: PieceExchange | None = None
        for number in range(len(self._plan.rounds)):
            assert arriving is not None
            following = self._gather(number + 1) if number + 1 < len(self._plan.rounds) else None
            arriving.wait()
            leaving = self._return_rows(number, self._orthogonalise(number, arriving.received))
            arriving.settle()
            if returning is not None:
                self._apply(returning)
            arriving, returning = following, leaving
        if returning is not None:
            self._apply(returning)

    def _own_matrices(self, number: int) -> list[int]:
        """Return the matrices of a round that this rank orthogonalises."""
        return [index for index in self._plan.rounds[number] if self._plan.owners[index] == self._comm.rank]

    def _lent_matrices(self, number: int) -> list[tuple[int, int, int]]:
        """Return number, owner and elements held here, for each matrix of a round that another rank orthogonalises."""
        rank = self._comm.rank
        return [
            (index, self._plan.owners[index], self._splits[index].piece_of(rank))
            for index in self._plan.rounds[number]
            if rank in self._splits[index].sharers and rank != self._plan.owners[index]
        ]

    def _gather(self, number: int) -> PieceExchange:
        """Step the momentum of a round's matrices, and send this rank's pieces of the updates to their owners."""
        sent: dict[int, list[torch.Tensor]] = {}
        awaited: dict[int, dict[int, int]] = {}
        for index in self._own_matrices(number):
            self._own[index] = self._matrices[index].update()
            for rank, numel in zip(self._splits[index].sharers, self._splits[index].pieces, strict=True):
                if rank != self._comm.rank:
                    awaited.setdefault(rank, {})[index] = numel
        for index, owner, _ in self._lent_matrices(number):
            sent.setdefault(owner, []).append(self._matrices[index].update())
        return self._exchange(sent, awaited, f"updates of round {number + 1}")

    def _orthogonalise(self, number: int, arrived: dict[tuple[int, int], torch.Tensor]) -> dict[int, torch.Tensor]:
        """Orthogonalise this rank's matrices of a round; flattened, by number. Empties ``arrived``."""
        own = self._own_matrices(number)
        numbers = {id(self._matrices[index]): index for index in own}
        results: dict[int, torch.Tensor] = {}
        for batch in batches_of_equal_settings([self._matrices[index] for index in own], ROUND_BYTES):
            indices = [numbers[id(matrix)] for matrix in batch]
            # Popped, so that a round's memory is freed batch by batch.
            pieces = [
                self._own.pop(index) if rank == self._comm.rank else arrived.pop((rank, index))
                for index in indices
                for rank in self._splits[index].sharers
            ]
            results.update(zip(indices, orthogonalised(batch, pieces), strict=True))
        return results

    def _return_rows(self, number: int, results: dict[int, torch.Tensor]) -> PieceExchange:
        """Step this rank's rows of the matrices that it orthogonalised, and send the other rows to their ranks."""
        sent: dict[int, list[torch.Tensor]] = {}
        awaited: dict[int, dict[int, int]] = {}
        for index in self._own_matrices(number):
            split = self._splits[index]
            for rank, rows in zip(split.sharers, results[index].split(split.pieces), strict=True):
                if rank == self._comm.rank:
                    self._matrices[index].apply(rows)
                else:
                    sent.setdefault(rank, []).append(rows)
        for index, owner, numel in self._lent_matrices(number):
            awaited.setdefault(owner, {})[index] = numel
        return self._exchange(sent, awaited, f"orthogonal rows of round {number + 1}")

    def _apply(self, returning: PieceExchange) -> None:
        """Step the rows of matrices that other ranks have orthogonalised."""
        returning.wait()
        for (_, index), rows in returning.received.items():
            self._matrices[index].apply(rows)
        returning.settle()

    def _exchange(
        self, sent: dict[int, list[torch.Tensor]], awaited: dict[int, dict[int, int]], what: str
    ) -> PieceExchange:
        what = f"Muon: {what} of {len(self._plan.rounds)}"
        return PieceExchange(self._comm, sent, awaited, self._matrices[0].dtype, what)
