"""The trace of one step: when each unit did what, and how each rank's memory was used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from fullshard.core.engine import TraceEvent

TRACE_NAME = "trace.json"
"""The file of a run that holds its trace."""


@dataclass(frozen=True)
class MemoryTimeline:
    """Bytes on one rank's compute device during the step, by use; all sequences are equally long.

    At each moment the uses sum to the allocator's count.
    """

    seconds: tuple[float, ...]  # time from the start of the step
    parameters: tuple[int, ...]  # shards of the parameters
    gradients: tuple[int, ...]  # shards of the gradients, and unsharded gradients that wait to be reduced
    optimizer: tuple[int, ...]  # state of the optimizer
    gathered: tuple[int, ...]  # gathered parameters
    activations: tuple[int, ...]  # everything else that was allocated in the step: activations and temporaries
    other: tuple[int, ...]  # everything else that was allocated before the step: data, buffers of the model


@dataclass(frozen=True)
class RankTrace:
    """The step on one rank."""

    rank: int
    seconds: float  # length of the step
    peak_bytes: int  # peak tensor bytes; on CUDA over the run so far
    events: tuple[TraceEvent, ...]  # sorted by their start
    memory: MemoryTimeline  # use of its memory


@dataclass(frozen=True)
class StepTrace:
    """The trace of one step on all ranks, which start together; each rank has its own clock."""

    step: int
    device: str  # kind of device: ``cpu`` or ``cuda``
    units: tuple[str, ...]  # names of the units, root first
    ranks: tuple[RankTrace, ...]  # traces in rank order

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-able values; times are rounded to the microsecond."""
        return {"step": self.step, "device": self.device, "units": list(self.units), "ranks": _rounded(self.ranks)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StepTrace:
        """Return the trace that :meth:`as_dict` was called on.

        Raises:
            KeyError, TypeError: ``values`` are something else.
        """
        ranks = [
            RankTrace(
                **{
                    **one,
                    "events": tuple(TraceEvent(**event) for event in one["events"]),
                    "memory": MemoryTimeline(**{name: tuple(column) for name, column in one["memory"].items()}),
                }
            )
            for one in values["ranks"]
        ]
        return cls(values["step"], values["device"], tuple(values["units"]), tuple(ranks))


def _rounded(ranks: Sequence[RankTrace]) -> list[dict[str, Any]]:
    def times(values: Mapping[str, Any]) -> dict[str, Any]:
        return {key: round(value, 6) if isinstance(value, float) else value for key, value in values.items()}

    return [
        {
            **times({"rank": one.rank, "seconds": one.seconds, "peak_bytes": one.peak_bytes}),
            "events": [times(asdict(event)) for event in one.events],
            "memory": {
                field.name: [round(value, 6) for value in getattr(one.memory, field.name)]
                for field in fields(MemoryTimeline)
            },
        }
        for one in ranks
    ]
