"""Small values of many split parameters added up among their ranks; those of the same ranks travel as one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fullshard.comm import Comm
from fullshard.optim.sharing import Shared, Sharing


class Pooled:
    """One flat value of each split parameter on its way to being added up; every rank of the group takes part."""

    def __init__(
        self,
        comm: Comm,
        values: Sequence[tuple[range, torch.Tensor]],
        dtype: torch.dtype,
        what: str,
        *,
        at_once: bool = False,
    ) -> None:
        """Send this rank's values to the other owners.

        Args:
            comm: The ranks among which the parameters are sharded.
            values: Owners of a parameter and what this rank has of its value, (n,), on any device; for the split
                parameters of which it holds any, in an order that any two ranks have in common.
            dtype: Of what travels, the same on every rank.
            what: For people, what is shared.
            at_once: See :class:`Sharing`.
        """
        self._values = values
        self._groups: dict[range, list[int]] = {}
        for index, (owners, _) in enumerate(values):
            self._groups.setdefault(owners, []).append(index)
        shared = [
            Shared(owners, torch.cat([values[index][1].to(comm.device, dtype) for index in indices]))
            for owners, indices in self._groups.items()
        ]
        self._sharing = Sharing(comm, shared, what, at_once=at_once, dtype=dtype)

    def wait(self) -> list[torch.Tensor]:
        """The totals, in the order of the values, each with the dtype and on the device of this rank's value."""
        self._sharing.wait()
        totals = [value for _, value in self._values]
        for indices, one in zip(self._groups.values(), self._sharing.values, strict=True):
            sizes = [totals[index].numel() for index in indices]
            for index, total in zip(indices, one.value.split(sizes), strict=True):
                totals[index] = total.to(totals[index])
        return totals
