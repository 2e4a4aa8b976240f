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
    """Bytes of one rank's compute device over the step, what they are for; equally long sequences.

    The parts add up to what the allocator counted.

    Attributes:
        seconds: From the start of the step.
        parameters: Shards of the parameters.
        gradients: Shards of the gradients, and unsharded gradients that wait to be reduced.
        optimizer: Its state.
        gathered: Gathered parameters.
        activations: All that came to be in the step and is none of these: activations and temporaries.
        other: What was there before the step and is none of these: data, buffers of the model.
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
    """What one rank did in the step.

    Attributes:
        rank: The rank.
        seconds: Length of the step.
        peak_bytes: Most tensor bytes at once; CUDA: over the run so far.
        events: In the order of their starts.
        memory: What its memory was taken by.
    """

    rank: int
    seconds: float
    peak_bytes: int
    events: tuple[TraceEvent, ...]
    memory: MemoryTimeline


@dataclass(frozen=True)
class StepTrace:
    """A step as all ranks saw it; ranks start together, each on its own clock.

    Attributes:
        step: Its number.
        device: Kind of device: ``cpu`` or ``cuda``.
        units: Names, root first.
        ranks: In rank order.
    """

    step: int
    device: str
    units: tuple[str, ...]
    ranks: tuple[RankTrace, ...]

    def as_dict(self) -> dict[str, Any]:
        """JSON-able; times are rounded to the microsecond."""
        return {"step": self.step, "device": self.device, "units": list(self.units), "ranks": _rounded(self.ranks)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StepTrace:
        """What :meth:`as_dict` gave.

        Raises:
            KeyError, TypeError: It is something else.
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
