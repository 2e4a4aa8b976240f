"""One step of Muon's matrices: which rank orthogonalises which one, Newton-Schulz, and the rounds that move pieces.

A matrix that several ranks hold parts of is gathered on one of them, its owner. Owners are chosen greedily, the largest
matrix first and always the least loaded of the ranks that hold parts of it (Graham's longest processing time first;
with matrices that every rank shares, at most 4/3 of the best possible largest load). Matrices that are complete on a
rank count as load of that rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fullshard.core.comm import Comm
from fullshard.core.optim.exchange import PieceExchange
from fullshard.core.optim.shards import comm_of, meta_of
from fullshard.errors import ConfigError


def newton_schulz(
    matrices: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """Bring all singular values near 1 and keep the singular vectors; any rank, no communication.

    The quintic iteration of Keller Jordan's Muon (https://kellerjordan.github.io/posts/muon), operation by operation as
    in ``torch.optim.Muon``: ``X / |X|``, then ``X <- a X + (b G + c G G) X`` with ``G = X X'`` on the short side. With
    the usual coefficients singular values end between about 0.7 and 1.2.

    Args:
        matrices: (rows, columns), or (n, rows, columns) for a batch, floating, in the dtype to compute in; not changed.
        coefficients: a, b and c.
        steps: Number of iterations.
        eps: Smallest norm that a matrix is divided by.

    Returns:
        Matrices of the same shape and dtype.
    """
    a, b, c = coefficients
    add_product = torch.addmm if matrices.ndim == 2 else torch.baddbmm
    upright = matrices.size(-2) > matrices.size(-1)
    wide = matrices.mT if upright else matrices
    wide = wide / torch.linalg.vector_norm(wide, dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = wide @ wide.mT
        factor = add_product(gram, gram, gram, beta=b, alpha=c)
        wide = add_product(wide, factor, wide, beta=a)
    return wide.mT if upright else wide


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


NS_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
"""Dtypes that Newton-Schulz can be computed in, by their name in parameter groups."""


class MuonMatrix:
    """A matrix in one step of Muon on this rank, which may hold all of it, a part, or nothing."""

    def __init__(self, param: nn.Parameter, group: dict[str, Any], states: MutableMapping[Any, Any]) -> None:
        """Step ``param`` with the options of ``group`` and the optimizer's ``states``."""
        self.meta = meta_of(param)
        self.shape = self.meta.global_shape
        self.dtype = NS_DTYPES[group["ns_dtype"]]
        self._param = param
        self._group = group
        self._states = states
        # Equal for matrices that are orthogonalised in one batch.
        self.settings = (self.shape, self.dtype, tuple(group["ns_coefficients"]), group["ns_steps"], group["eps"])

    @property
    def has_gradient(self) -> bool:
        """True if it is stepped here; the same on all ranks that hold parts of it."""
        return self._param.grad is not None and self._param.numel() > 0

    @property
    def work(self) -> int:
        """Floating-point operations to orthogonalise it."""
        return newton_schulz_flops(self.shape[0], self.shape[1], self._group["ns_steps"])

    def as_split(self) -> SplitMatrix:
        """Return its ranks, pieces and work for the plan."""
        ranges = [self.meta.layout.local_range(self.meta.placement, rank) for rank in self.meta.owners]
        return SplitMatrix(self.meta.owners.start, tuple(stop - start for start, stop in ranges), self.work)

    def update(self) -> torch.Tensor:
        """Step the momentum, and return this rank's elements of the matrix to orthogonalise; once a step.

        Returns:
            Flat, in the dtype of Newton-Schulz, on the device of the ranks' collectives; zeros if there is no gradient,
            and the momentum is then unchanged.
        """
        param, device = self._param, comm_of(self._param).device
        if param.grad is None:
            return torch.zeros(param.numel(), dtype=self.dtype, device=device)
        grad, momentum = dense_gradient(param), self._group["momentum"]
        state = self._states[param]
        if "momentum_buffer" not in state:
            wide = torch.promote_types(param.dtype, grad.dtype)
            state["momentum_buffer"] = torch.zeros_like(grad, dtype=wide)
        buffer: torch.Tensor = state["momentum_buffer"]
        grad = grad.to(buffer.dtype)
        buffer.lerp_(grad, 1 - momentum)
        update = grad.lerp(buffer, momentum) if self._group["nesterov"] else buffer
        return update.reshape(-1).to(self.dtype).to(device, non_blocking=True)

    def apply(self, direction: torch.Tensor) -> None:
        """Decay this rank's elements, and move them along their part of the orthogonal matrix.

        Args:
            direction: This rank's elements of the orthogonal matrix, floating, on any device.
        """
        if not self.has_gradient:
            return
        param, lr = self._param, float(self._group["lr"])
        param.mul_(1 - lr * self._group["weight_decay"])
        param.add_(direction.to(param.device).view(param.shape), alpha=-lr * self._ratio())

    def _ratio(self) -> float:
        """Return the learning rate of this shape over the group's, as torch.optim.Muon adjusts it."""
        rows, columns = self.shape
        if self._group["adjust_lr_fn"] == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1, rows / columns))


def dense_gradient(param: nn.Parameter) -> torch.Tensor:
    """Return a parameter's gradient as a plain tensor.

    Raises:
        ConfigError: It is sparse.
    """
    assert param.grad is not None
    if param.grad.is_sparse:
        raise ConfigError(
            f"Muon steps dense gradients; that of {meta_of(param).name or 'a parameter'}, {tuple(param.shape)}, is "
            "sparse. Make the embedding with sparse=False."
        )
    return param.grad.as_subclass(torch.Tensor)  # compat's gradients compute norms over ranks


def batches_of_equal_settings(matrices: Iterable[MuonMatrix], max_bytes: int) -> list[list[MuonMatrix]]:
    """Return the matrices in batches of one shape and settings, each of at most ``max_bytes`` or of one matrix."""
    batches: dict[tuple[Any, ...], list[list[MuonMatrix]]] = {}
    for matrix in matrices:
        full = max(1, max_bytes // max(1, math.prod(matrix.shape) * matrix.dtype.itemsize))
        of_kind = batches.setdefault(matrix.settings, [[]])
        if len(of_kind[-1]) == full:
            of_kind.append([])
        of_kind[-1].append(matrix)
    return [batch for of_kind in batches.values() for batch in of_kind]


def orthogonalised(batch: Sequence[MuonMatrix], pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run Newton-Schulz on a batch of matrices of one shape and settings.

    Args:
        batch: At least one matrix.
        pieces: Their updates, flat, one matrix after the other, each in any number of pieces.

    Returns:
        The orthogonal matrices, flattened.
    """
    shape, _, coefficients, steps, eps = batch[0].settings
    joined = torch.cat(list(pieces)) if len(pieces) > 1 else pieces[0]
    stacked = joined.view(shape if len(batch) == 1 else (len(batch), *shape))
    return list(newton_schulz(stacked, coefficients, steps, eps).reshape(len(batch), -1))


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
