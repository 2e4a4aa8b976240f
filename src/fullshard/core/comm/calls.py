"""Exchanges of objects that only ranks in the same call take part in: others get an error with each rank's call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from fullshard.core.comm.flight_recorder import named
from fullshard.core.comm.stack_probe import exchange_site, public_call
from fullshard.errors import MismatchError

T = TypeVar("T")


class Call(NamedTuple):
    """Where a rank exchanges an object.

    Attributes:
        site: The function that does; equal on ranks in the same exchange.
        called: The public function that the program called, and the line; may be empty.
    """

    site: str
    called: str

    def text(self) -> str:
        """Return the description for messages."""
        inside = f"in {self.site}" if self.site else "in an exchange of its own objects"
        return f"{self.called} ({inside})" if self.called else inside


def gather_in_one_call(value: T, gather: Callable[[tuple[Call, T]], Sequence[tuple[Call, T]]]) -> list[T]:
    """Return the values that ``gather`` brings from all ranks, in rank order; every rank calls it.

    Objects of different calls have the same form on the wire: without their calls one would be read as the other.

    Raises:
        MismatchError: Ranks are in different calls; on every rank, with the same text.
    """
    frame = sys._getframe(1)
    pairs = gather((Call(exchange_site(frame), public_call(frame)), value))
    if len({call.site for call, _ in pairs}) > 1:
        ranks_by_call: dict[str, list[int]] = {}
        for rank, (call, _) in enumerate(pairs):
            ranks_by_call.setdefault(call.text(), []).append(rank)
        where = "; ".join(f"{named(ranks)}: {call}" for call, ranks in ranks_by_call.items())
        raise MismatchError(
            f"Ranks are in different calls: {where}. Every rank must make the same calls in the same order, with the "
            "same arguments; check code that depends on the rank or the data."
        )
    return [value for _, value in pairs]
