"""Do all ranks do the same? Asked before each collective of the first pass, and once a step after that."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from typing import NoReturn

import torch

from fullshard.comm import Mesh, Work
from fullshard.errors import MismatchError
from fullshard.layout.sharded import Claims

_CHECKSUM_BITS = 20  # a squared checksum summed over 2**20 ranks still fits an int64


class Agreement:
    """Compares what ranks are about to do, or have done.

    A collective that different ranks enter for different units hangs, or worse, exchanges buffers that happen to have
    one size. In the first pass every collective is therefore announced first. Later, one small all-reduce at the end
    of each backward carries a checksum of the order of units and of all their collectives since the last one (and
    which parameters got a gradient anywhere). What optimizers have stepped of the model goes into that checksum.

    Attributes:
        claims: What optimizers step of the model on this rank; they note it themselves.
    """

    def __init__(self, mesh: Mesh, names: Sequence[str]) -> None:
        """Compare among the ranks of ``mesh``; ``names`` are the units'."""
        self.mesh = mesh
        self.names = list(names)
        self.first_pass = True
        self.every_pass = os.environ.get("FULLSHARD_DEBUG", "") == "1"
        self.claims: list[Claims] = []
        self._checksums: list[int] = []
        self._issued = 0  # checksum of the collectives since the last comparison, in their order
        self._verdict: tuple[Work, torch.Tensor, int] | None = None

    def before(self, collective: str, unit: int) -> None:
        """Announce a collective, and in the first pass compare it with other ranks'.

        Raises:
            MismatchError: Another rank announces another one; raised on every rank.
        """
        self.mesh.announce(f"{collective} of unit {self.names[unit]}")
        code = 2 * unit + (collective == "all-gather")
        self._issued = zlib.crc32(code.to_bytes(4, "little"), self._issued)
        if not self.first_pass:
            return
        extremes = torch.tensor([code, -code], dtype=torch.int64, device=self.mesh.device)
        self.mesh.all_reduce(extremes, "max").wait()
        if extremes[0] == code and extremes[1] == -code:
            return
        announced = self.mesh.all_gather_object(f"{collective} of unit {self.names[unit]}")
        raise MismatchError(
            "Ranks run different units: "
            + "; ".join(f"rank {rank}: {what}" for rank, what in enumerate(announced))
            + ". Every rank must call the same modules in the same order; "
            "check code that depends on the rank or the data."
        )

    def pass_is_over(self) -> None:
        """The first pass is complete: later ones are compared as a whole, unless ``FULLSHARD_DEBUG`` is 1."""
        self.first_pass = self.every_pass

    def on_any_rank(self, flags: Sequence[bool]) -> list[bool]:
        """For each of some questions, the same on every rank, whether any rank says yes; no communication for none."""
        if not flags:
            return []
        message = torch.tensor(flags, dtype=torch.int64, device=self.mesh.device)
        self.mesh.announce("whether shards have changed since they were gathered")
        self.mesh.all_reduce(message, "max").wait()
        return [count > 0 for count in message.tolist()]

    def after_backward(self, arrived: Sequence[bool], checksum: int) -> list[bool] | None:
        """Exchange which parameters got a gradient, and the checksum of the step's order.

        On CPU the answer is read at once. On CUDA reading it would stall the queue of kernels, so the checksum is read
        a step later, and the flags only where this rank misses a gradient.

        Args:
            arrived: For each parameter, whether a gradient arrived on this rank, or none is due.
            checksum: Checksum of this rank's order of units.

        Returns:
            For each of them, whether a gradient arrived on any rank; None if all arrived here.

        Raises:
            MismatchError: The order differed between ranks, in this step (CPU) or the one before (CUDA), or optimizers
                step other parameters, or in other groups.
        """
        self._check_verdict()
        for claims in self.claims[len(self._checksums) :]:
            self._checksums.append(zlib.crc32(repr(sorted(claims.items())).encode()))
        mark = (checksum + self._issued + sum(self._checksums)) % (1 << _CHECKSUM_BITS)
        self._issued = 0
        message = torch.tensor([mark, mark * mark, *arrived], dtype=torch.int64).to(self.mesh.device, non_blocking=True)
        self.mesh.announce("which parameters got a gradient, at the end of backward")
        self._verdict = (self.mesh.all_reduce(message), message, mark)
        if self.first_pass or self.mesh.device.type == "cpu":
            self._check_verdict()
        self.pass_is_over()
        if all(arrived):
            return None
        self._check_verdict()
        return [count > 0 for count in message[2:].tolist()]

    def _check_verdict(self) -> None:
        if self._verdict is None:
            return
        work, message, mark = self._verdict
        self._verdict = None
        work.wait()
        total, squares = message[:2].tolist()
        # sum and sum of squares are those of equal marks only if all marks are equal (Cauchy-Schwarz)
        if total != mark * self.mesh.size or squares != mark * mark * self.mesh.size:
            self._tell_apart(mark)

    def _tell_apart(self, mark: int) -> NoReturn:
        """Raise what ranks differ in, once checksums have differed."""
        also = " or gave optimizers different parameters (FULLSHARD_DEBUG=1 tells)" if self.claims else ""
        if self.mesh.device.type == "cpu" or self.every_pass:  # then all of them read the verdict at the same place
            found = _difference(self.mesh.all_gather_object(self.claims))
            if found is not None:
                raise MismatchError(
                    f"Ranks' optimizers step different parameters, or the same ones in different groups: {found}. A "
                    "parameter whose parts are stepped differently is trained wrong. Give the optimizer all parameters "
                    "in the same groups on every rank: group by name, p.ndim or p.shard_meta.global_shape, "
                    "as fullshard.optim.decay_groups does, never by p.numel() or p.shape."
                )
            also = ""
        raise MismatchError(
            f"Ranks ran units in different orders in one step{also} (checksum {mark} on rank "
            f"{self.mesh.rank}): its gradients are wrong, do not use them. Every rank must call the same modules in "
            "the same order."
        )


def _difference(by_rank: Sequence[Sequence[Claims]]) -> str | None:
    """The first parameter that optimizers step otherwise on another rank than on rank 0, and how; None: none is."""
    merged = [{name: place for claims in of_rank for name, place in claims.items()} for of_rank in by_rank]
    for rank, other in enumerate(merged):
        for name in [*merged[0], *other]:
            here, there = merged[0].get(name), other.get(name)
            if here != there:
                return f"{name} is in {_place(here, there)} on rank 0 and in {_place(there, here)} on rank {rank}"
        if len(by_rank[rank]) != len(by_rank[0]):
            return f"rank 0 has stepped {len(by_rank[0])} of them and rank {rank} {len(by_rank[rank])}"
    return None


def _place(place: tuple[int, tuple[str, ...]] | None, other: tuple[int, tuple[str, ...]] | None) -> str:
    """A group, with the options that the other one has not."""
    if place is None:
        return "no optimizer that has stepped"
    number, options = place
    apart = ", ".join(one for one in options if other is not None and one not in other[1])
    return f"group {number} ({apart})" if apart else f"group {number}"
