"""The interface for recording a step. Unless the user records one, its parts are labelled for ``torch.profiler``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from fullshard.core.comm import Labels, Work

Kind = Literal[
    "gather", "gather_wait", "forward", "backward", "reduce", "reduce_wait", "optimizer", "exchange", "exchange_wait"
]
Transfer = Literal["gather", "reduce", "exchange"]

_LABELS: Mapping[Kind, str] = {"gather": "all_gather", "reduce": "reduce_scatter"}
"""Labels of kinds that a trace shows under the collective's name."""


class StepRecorder:
    """Receives the events of a step and labels them in the profiler's trace; ``Recorder`` also notes their times."""

    def __init__(self) -> None:
        """Start with no label open."""
        self._labels = Labels()

    def begin(self, unit: str, kind: Kind) -> None:
        """Receive the start of an interval."""
        self._labels.begin(_LABELS.get(kind, kind), unit)

    def end(self, unit: str, kind: Kind) -> None:
        """Receive the end of an interval."""
        self._labels.end(_LABELS.get(kind, kind), unit)

    def issued(self, unit: str, kind: Transfer, works: Sequence[Work]) -> None:
        """Receive the works of an interval's collectives, which are under way; its label ends here."""
        self._labels.end(_LABELS.get(kind, kind), unit)

    def wait(self, unit: str, kind: Transfer, works: Sequence[Work], how: Callable[[Work], None]) -> None:
        """Apply ``how``, which waits, to ``works``."""
        label = f"{_LABELS.get(kind, kind)}_wait"
        self._labels.begin(label, unit)
        for work in works:
            how(work)
        self._labels.end(label, unit)

    def gradients_take(self, unit: str, nbytes: Callable[[], int]) -> None:
        """Receive that the gradients of the shards of ``unit`` may have changed in size."""

    def sample(self) -> None:
        """Receive that the engine allocated or freed a buffer."""
