"""Which rank orthogonalises which split matrix, and in which round: integers, the same on every rank.

A matrix that several ranks hold parts of is gathered on one of them, its owner. Owners are chosen greedily, the largest
matrix first and always the least loaded of the ranks that hold parts of it (Graham's longest processing time first;
with matrices that every rank shares, at most 4/3 of the best possible largest load). Matrices that are complete on a
rank count as load of that rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SplitMatrix:
    """A matrix that several ranks hold parts of."""

    first_rank: int  # the first of these ranks; they are consecutive
    pieces: tuple[int, ...]  # elements that each of them holds, in rank order
    work: int  # cost of orthogonalising it, in any unit

    @property
    def sharers(self) -> range:
        """The ranks that hold parts of it."""
        return range(self.first_rank, self.first_rank + len(self.pieces))

    @property
    def numel(self) -> int:
        """Elements of the full matrix."""
        return sum(self.pieces)

    def piece_of(self, rank: int) -> int:
        """Return the elements that one of the sharers holds."""
        return self.pieces[rank - self.first_rank]


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """Owner and round of every split matrix."""

    matrices: tuple[SplitMatrix, ...]
    owners: tuple[int, ...]  # the rank that orthogonalises each of them
    # the matrices that are gathered together, by index, in the order in which their pieces are sent
    rounds: tuple[tuple[int, ...], ...]


def newton_schulz_flops(rows: int, columns: int, steps: int) -> int:
    """Return the multiplications and additions of ``steps`` Newton-Schulz iterations.

    Examples:
        >>> newton_schulz_flops(2, 3, 1) == 2 * (2 * 2 * 3) + 2 * (2 * 2 * 2) + 2 * (2 * 2 * 3)
        True
    """
    short, long = sorted((rows, columns))
    return steps * (4 * short * short * long + 2 * short**3)


def plan_rounds(matrices: Sequence[SplitMatrix], fixed: Sequence[int], max_numel: int) -> RoundPlan:
    """Choose owners, and divide what each of them gathers into rounds; pure, so every rank computes the same plan.

    Args:
        matrices: The split matrices, in the same order on every rank.
        fixed: Work that each rank has in any case, in the unit of the matrices' work.
        max_numel: Elements that an owner gathers in one round, its own pieces included; a larger matrix has a round of
            its owner to itself.

    Examples:
        >>> halves = SplitMatrix(first_rank=0, pieces=(50, 50), work=10)
        >>> plan = plan_rounds([halves, halves, halves], fixed=[0, 15], max_numel=100)
        >>> plan.owners, plan.rounds
        ((0, 0, 1), ((0, 2), (1,)))
    """
    order = sorted(range(len(matrices)), key=lambda index: (-matrices[index].work, index))
    owners = _owners(matrices, order, list(fixed))
    gathered: dict[int, tuple[int, int]] = {}  # by owner: its last round so far, and the elements in it
    rounds: list[list[int]] = []
    for index in order:
        numel = matrices[index].numel
        number, filled = gathered.get(owners[index], (0, 0))
        if filled and filled + numel > max_numel:
            number, filled = number + 1, 0
        gathered[owners[index]] = (number, filled + numel)
        rounds.extend([] for _ in range(number + 1 - len(rounds)))
        rounds[number].append(index)
    return RoundPlan(tuple(matrices), tuple(owners), tuple(tuple(indices) for indices in rounds))


def _owners(matrices: Sequence[SplitMatrix], order: Sequence[int], loads: list[int]) -> list[int]:
    """Choose the owner of each matrix; among equally loaded ranks the one with its largest piece, which is not sent."""
    owners = [0] * len(matrices)
    for index in order:
        one = matrices[index]
        owner = min(one.sharers, key=lambda rank: (loads[rank], -one.piece_of(rank)))
        loads[owner] += one.work
        owners[index] = owner
    return owners
