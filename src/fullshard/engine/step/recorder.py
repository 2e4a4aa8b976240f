"""The interface through which a step is recorded; silent unless the user records one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from fullshard.comm import Work

Kind = Literal[
    "gather", "gather_wait", "forward", "backward", "reduce", "reduce_wait", "optimizer", "exchange", "exchange_wait"
]
Transfer = Literal["gather", "reduce", "exchange"]


class SilentRecorder:
    """Receives the events of a step and records nothing; ``Recorder`` overrides it."""

    def begin(self, unit: str, kind: Kind) -> None:
        """An interval starts."""

    def end(self, unit: str, kind: Kind) -> None:
        """An interval ends."""

    def issued(self, unit: str, kind: Transfer, works: Sequence[Work]) -> None:
        """The collectives of an interval are under way."""

    def wait(self, unit: str, kind: Transfer, works: Sequence[Work], how: Callable[[Work], None]) -> None:
        """Apply ``how``, which waits, to ``works``."""
        for work in works:
            how(work)

    def gradients_take(self, unit: str, nbytes: Callable[[], int]) -> None:
        """The gradients of the shards of ``unit`` may have changed in size."""

    def sample(self) -> None:
        """The engine allocated or freed a buffer."""


SILENT = SilentRecorder()
