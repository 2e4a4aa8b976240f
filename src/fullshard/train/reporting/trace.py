"""The trace of one step: what each unit did when, and what each rank's memory was used for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from fullshard.engine import TraceEvent

TRACE_NAME = "trace.json"
"""The file of a run that holds its trace."""


@dataclass(frozen=True)
class MemoryTimeline:
    """Bytes on one rank's compute device during the step, by use; all sequences are equally long.

    At each moment the uses sum to the allocator's count.

    Attributes:
        seconds: Time from the start of the step.
        parameters: Shards of the parameters.
        gradients: Shards of the gradients, and unsharded gradients that wait to be reduced.
        optimizer: State of the optimizer.
        gathered: Gathered parameters.
        activations: Everything else that was allocated in the step: activations and temporaries.
        other: Everything else that was allocated before the step: data, buffers of the model.
    """

    seconds: tuple[float, ...]
    parameters: tuple[int, ...]
    gradients: tuple[int, ...]
    optimizer: tuple[int, ...]
    gathered: tuple[int, ...]
    activations: tuple[int, ...]
    other: tuple[int, ...]


@dataclass(frozen=True)
class RankTrace:
    """The step on one rank.

    Attributes:
        rank: The rank.
        seconds: Length of the step.
        peak_bytes: Peak tensor bytes; on CUDA over the run so far.
        events: Sorted by their start.
        memory: Use of its memory.
    """

    rank: int
    seconds: float
    peak_bytes: int
    events: tuple[TraceEvent, ...]
    memory: MemoryTimeline


@dataclass(frozen=True)
class StepTrace:
    """The trace of one step on all ranks, which start together; each rank has its own clock.

    Attributes:
        step: Number of the step.
        device: Kind of device: ``cpu`` or ``cuda``.
        units: Names of the units, root first.
        ranks: Traces in rank order.
    """

    step: int
    device: str
    units: tuple[str, ...]
    ranks: tuple[RankTrace, ...]

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
