"""The interface for recording a step; silent unless the user records one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from fullshard.core.comm import Work

Kind = Literal[
    "gather", "gather_wait", "forward", "backward", "reduce", "reduce_wait", "optimizer", "exchange", "exchange_wait"
]
Transfer = Literal["gather", "reduce", "exchange"]


class SilentRecorder:
    """Receives the events of a step and records nothing; ``Recorder`` overrides it."""

    def begin(self, unit: str, kind: Kind) -> None:
        """Receive the start of an interval."""

    def end(self, unit: str, kind: Kind) -> None:
        """Receive the end of an interval."""

    def issued(self, unit: str, kind: Transfer, works: Sequence[Work]) -> None:
        """Receive the works of an interval's collectives, which are under way."""

    def wait(self, unit: str, kind: Transfer, works: Sequence[Work], how: Callable[[Work], None]) -> None:
        """Apply ``how``, which waits, to ``works``."""
        for work in works:
            how(work)

    def gradients_take(self, unit: str, nbytes: Callable[[], int]) -> None:
        """Receive that the gradients of the shards of ``unit`` may have changed in size."""

    def sample(self) -> None:
        """Receive that the engine allocated or freed a buffer."""


SILENT = SilentRecorder()
