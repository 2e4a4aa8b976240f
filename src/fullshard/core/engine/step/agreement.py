"""Comparison of ranks: before each collective of the first pass, and once a step after that."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import NoReturn

import torch

from fullshard.core.comm import Device, Mesh
from fullshard.core.layout.sharded import Fingerprint, fingerprint_difference
from fullshard.errors import MismatchError

_CHECKSUM_BITS = 20  # a squared checksum summed over 2**20 ranks still fits an int64
DIFFERENT_UNITS = "Ranks run different units"
"""How the error begins that all ranks raise where their first pass differs."""


class Agreement:
    """Compares what ranks are about to do, or have done.

    A collective that ranks enter for different units hangs, or worse, exchanges buffers that happen to have the same
    size. In the first pass every collective is therefore compared before it starts. Later, one small all-reduce at the
    end of each backward carries a checksum of the order of units and of all collectives since the last one, and which
    parameters got a gradient on any rank. The parameters that optimizers have stepped are part of the checksum.

    Attributes:
        mesh: The ranks that share the model.
        device: Where verdicts are computed.
        names: Names of the units.
        renamed: Names of all parameters, if modules were moved or renamed since they were sharded.
        first_pass: Whether each collective is compared before it starts.
        every_pass: True if every pass is compared that way; set by ``FULLSHARD_DEBUG=1``.
        fingerprints: The parameters that optimizers step on this rank, appended by the optimizers.
        rates: A checksum, a parameter and the learning rate of each group that was stepped since the last backward.
    """

    def __init__(self, mesh: Mesh, device: Device, names: Sequence[str]) -> None:
        """Compare among the ranks of ``mesh``."""
        self.mesh = mesh
        self.device = device
        self.names = list(names)
        self.renamed: list[str] = []
        self.first_pass = True
        self.every_pass = os.environ.get("FULLSHARD_DEBUG", "") == "1"
        self.fingerprints: list[Fingerprint] = []
        self.rates: list[tuple[int, str, float]] = []
        self._stepped: list[tuple[int, str, float]] = []
        self._checksums: list[int] = []
        self._issued = 0  # checksum of the collectives since the last comparison, in their order
        self._verdict: tuple[Callable[[], list[int]], int] | None = None  # of the previous step
        self._missed = False  # whether a gradient was missing on any rank in a step whose result was read

    def before(self, collective: str, unit: int) -> None:
        """Announce a collective, and in the first pass compare it over ranks.

        Raises:
            MismatchError: Ranks announce different collectives; raised on every rank.
        """
        self.mesh.announce(f"{collective} of unit {self.names[unit]}")
        code = 8 * unit + ("all-gather", "reduce-scatter", "lookup", "lookup's gradient", "loss").index(collective)
        self._issued = zlib.crc32(code.to_bytes(4, "little"), self._issued)
        if not self.first_pass:
            return
        extremes = torch.tensor([code, -code], dtype=torch.int64, device=self.mesh.device)
        self.mesh.all_reduce(extremes, "max").wait()
        if extremes[0] == code and extremes[1] == -code:
            return
        announced = self.mesh.all_gather_object(f"{collective} of unit {self.names[unit]}")
        raise MismatchError(
            f"{DIFFERENT_UNITS}: "
            + "; ".join(f"rank {rank}: {what}" for rank, what in enumerate(announced))
            + ". Every rank must call the same modules in the same order; "
            "check code that depends on the rank or the data."
        )

    def pass_is_over(self) -> None:
        """End the first pass: later ones are compared once a step, unless ``FULLSHARD_DEBUG`` is 1."""
        self.first_pass = self.every_pass

    def on_any_rank(self, flags: Sequence[bool]) -> list[bool]:
        """Return for each flag whether it is set on any rank; no communication without flags."""
        if not flags:
            return []
        message = torch.tensor(flags, dtype=torch.int64, device=self.mesh.device)
        self.mesh.announce("whether shards have changed since they were gathered")
        self.mesh.all_reduce(message, "max").wait()
        return [count > 0 for count in message.tolist()]

    def after_backward(self, arrived: Sequence[bool], checksum: int) -> list[bool] | None:
        """Exchange which parameters got a gradient, and the checksum of the step's order.

        On CPU the result is read at once. On CUDA reading it would stall the queue of kernels, so the checksum is read
        one step later. The flags are needed before the optimizer steps: in the first step with a missing gradient they
        are read from the device, from the next one on all ranks add them up in host memory, where ranks wait for each
        other's Python but not for a device.

        Args:
            arrived: For each parameter, whether a gradient arrived on this rank, or none is expected.
            checksum: Checksum of this rank's order of units.

        Returns:
            For each parameter, whether a gradient arrived on any rank; None if all arrived on this rank.

        Raises:
            MismatchError: The order differed between ranks, in this step (CPU) or the one before (CUDA), or optimizers
                step different parameters, or group them differently.
        """
        self._check_verdict()
        for fingerprints in self.fingerprints[len(self._checksums) :]:
            self._checksums.append(zlib.crc32(repr(sorted(fingerprints.items())).encode()))
        self._stepped, self.rates[:] = list(self.rates), []
        rates = sum(one for one, _, _ in self._stepped)
        names = zlib.crc32(repr(self.renamed).encode())
        mark = (checksum + self._issued + rates + names + sum(self._checksums)) % (1 << _CHECKSUM_BITS)
        self._issued = 0
        message = torch.tensor([mark, mark * mark, *arrived], dtype=torch.int64).to(self.mesh.device, non_blocking=True)
        self.mesh.announce("which parameters got a gradient, at the end of backward")
        self._verdict = self.device.read_later(self.mesh.all_reduce(message), message), mark
        add = self.mesh.host_sum() if self._missed and self.device.queues else None
        now = self.first_pass or not self.device.queues or (add is None and not all(arrived))
        counts = self._check_verdict()[2:] if now else []
        if add is not None:
            flags = torch.tensor(arrived, dtype=torch.int64)
            add(flags)
            counts = flags.tolist()
        self.pass_is_over()
        return None if all(arrived) else [count > 0 for count in counts]

    def _check_verdict(self) -> list[int]:
        """Return the sums over ranks that :meth:`after_backward` left; empty if there are none."""
        if self._verdict is None:
            return []
        (read, mark), self._verdict = self._verdict, None
        total, squares, *arrived = counts = read()
        self._missed = self._missed or any(count < self.mesh.size for count in arrived)  # on all ranks alike
        # Sum and sum of squares match those of equal marks only if all marks are equal (Cauchy-Schwarz).
        if total != mark * self.mesh.size or squares != mark * mark * self.mesh.size:
            self._raise_mismatch(mark)
        return counts

    def _raise_mismatch(self, mark: int) -> NoReturn:
        """Raise an error that names the difference between ranks, after their checksums have differed."""
        also = " or gave optimizers different parameters (FULLSHARD_DEBUG=1 shows which)" if self.fingerprints else ""
        if self.mesh.device.type == "cpu" or self.every_pass:  # then all ranks read the result at the same point
            found = fingerprint_difference(self.mesh.all_gather_object(self.fingerprints))
            if found is not None:
                raise MismatchError(
                    f"Ranks' optimizers step different parameters, or the same ones in different groups: {found}. A "
                    "parameter whose rows are stepped differently is trained wrong. Give the optimizer all parameters "
                    "in the same groups on every rank: group by name, p.ndim or p.shard_meta.global_shape, "
                    "as fullshard.optim.decay_groups does, never by p.shape."
                )
            trees = self.mesh.all_gather_object(self.renamed)
            other = next((rank for rank, names in enumerate(trees) if names != trees[0]), None)
            if other is not None:
                pairs = zip_longest(trees[0], trees[other], fillvalue="under its old name")
                here, there = next((here, there) for here, there in pairs if here != there)
                raise MismatchError(
                    f"Modules were moved or renamed differently since they were sharded: the parameter that is {here} "
                    f"on rank 0 is {there} on rank {other}. Change the model in the same way on every rank."
                )
            by_rank = [dict(rates) for rates in self.mesh.all_gather_object([one[1:] for one in self._stepped])]
            other = next((rank for rank, rates in enumerate(by_rank) if rates != by_rank[0]), None)
            if other is not None:
                raise MismatchError(
                    f"Ranks' optimizers stepped with different learning rates: {by_rank[0]} on rank 0 and "
                    f"{by_rank[other]} on rank {other} (by the first parameter of each group). Rows of one parameter "
                    "would be trained differently. Set the same rates on every rank."
                )
            also = ""
        raise MismatchError(
            f"Ranks ran units in different orders in one step{also} (checksum {mark} on rank "
            f"{self.mesh.rank}): its gradients are wrong. Do not use them. Every rank must call the same modules in "
            "the same order."
        )
