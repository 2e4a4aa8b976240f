"""The record of a step: when each unit was gathered, computed and reduced, and the memory the engine held."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fullshard.core.comm import Work, allocated_bytes, clock_of
from fullshard.core.engine.step.lane import BufferTracker
from fullshard.core.engine.step.recorder import Kind, StepRecorder, Transfer

_WAITS: Mapping[Transfer, Kind] = {"gather": "gather_wait", "reduce": "reduce_wait", "exchange": "exchange_wait"}


@dataclass(frozen=True)
class TraceEvent:
    """An interval of a recorded step.

    Attributes:
        unit: Name of the unit; empty for events of the entire model.
        kind: ``gather`` and ``reduce``: from issuing the collective to its arrival, or to the end of the wait where
            only the wait shows the arrival. ``gather_wait`` and ``reduce_wait``: the compute thread (on CUDA its
            stream) was stalled by it; ``exchange_wait``: by tokens that travel to a table. ``forward`` and
            ``backward``: the unit computed; the root's include everything inside. ``optimizer``: the optimizer's step.
        start_s: Seconds from the start of the record.
        end_s: Seconds from the start of the record.
    """

    unit: str
    kind: Kind
    start_s: float
    end_s: float


@dataclass(frozen=True)
class MemorySample:
    """Bytes on the compute device at a moment when the engine allocated or freed a buffer.

    Attributes:
        at_s: Seconds from the start of the record.
        gathered: Gathered parameters.
        gradient_buffers: Unsharded gradients that wait to be reduced.
        gradients: Gradients of the shards.
        allocated: All tensors, as counted by the allocator; None where it does not count (CPU).
    """

    at_s: float
    gathered: int
    gradient_buffers: int
    gradients: int
    allocated: int | None


class Recorder(StepRecorder):
    """Records a step on one rank until :meth:`stop`; called by the thread that runs the step.

    Attributes:
        events: In the order of their starts; empty before :meth:`stop`.
        samples: In the order of time; empty before :meth:`stop`.
        started: The clock's mark at the start; on CPU a ``time.perf_counter``.
        seconds: Length of the record; 0 before :meth:`stop`.
    """

    def __init__(self, device: Any, tracker: BufferTracker, gradients: Mapping[str, int]) -> None:
        """Start the record.

        Args:
            device: Device that the units compute on.
            tracker: Bytes of the engine's buffers.
            gradients: Current bytes of the shards' gradients, by unit.
        """
        super().__init__()
        self._device = device
        self._tracker = tracker
        self._gradients = dict(gradients)
        self._clock = clock_of(device)
        self._open: dict[tuple[str, Kind], Any] = {}
        self._arrivals: dict[tuple[str, Kind], Any] = {}
        self._spans: list[tuple[str, Kind, Any, Any]] = []
        self._samples: list[tuple[Any, int, int, int, int | None]] = []
        self.events: tuple[TraceEvent, ...] = ()
        self.samples: tuple[MemorySample, ...] = ()
        self.seconds = 0.0
        self.started = self._clock.mark()
        self.sample()

    def begin(self, unit: str, kind: Kind) -> None:
        """Start an interval, unless it has started already."""
        super().begin(unit, kind)
        self._open.setdefault((unit, kind), self._clock.mark())

    def end(self, unit: str, kind: Kind) -> None:
        """End an interval; do nothing if it has not started."""
        super().end(unit, kind)
        begun = self._open.pop((unit, kind), None)
        if begun is not None:
            self._spans.append((unit, kind, begun, self._clock.mark()))

    def issued(self, unit: str, kind: Transfer, works: Sequence[Work]) -> None:
        """Record when the collectives arrive, if the device can tell; without collectives, forget the interval."""
        super().issued(unit, kind, works)
        if not works:
            self._open.pop((unit, kind), None)
            return
        arrival = self._clock.arrival(works)
        if arrival is not None:
            self._arrivals[unit, kind] = arrival

    def wait(self, unit: str, kind: Transfer, works: Sequence[Work], how: Callable[[Work], None]) -> None:
        """Apply ``how``, which waits, to ``works``, and record the stall; the transfer has ended by then."""
        begun = self._clock.mark()
        super().wait(unit, kind, works, how)
        ended = self._clock.mark()
        self._spans.append((unit, _WAITS[kind], begun, ended))
        issued, arrival = self._open.pop((unit, kind), None), self._arrivals.pop((unit, kind), None)
        if issued is not None:
            self._spans.append((unit, kind, issued, ended if arrival is None else arrival))

    def gradients_take(self, unit: str, nbytes: Callable[[], int]) -> None:
        """Take a sample if the gradients of the shards of ``unit`` have changed in size."""
        now = nbytes()
        if self._gradients[unit] != now:
            self._gradients[unit] = now
            self.sample()

    def sample(self) -> None:
        """Record the bytes held now."""
        live = self._tracker.live
        held = (live["gathered"], live["gradients"], sum(self._gradients.values()))
        self._samples.append((self._clock.mark(), *held, allocated_bytes(self._device)))

    def stop(self) -> None:
        """End the record and convert the clock's marks to seconds."""
        self.sample()
        marks = [mark for _, _, begun, ended in self._spans for mark in (begun, ended)]
        seconds = self._clock.seconds(self.started, [*marks, *(sample[0] for sample in self._samples)])
        times = iter(seconds)
        events = [TraceEvent(unit, kind, next(times), next(times)) for unit, kind, _, _ in self._spans]
        self.events = tuple(sorted(events, key=lambda event: (event.start_s, event.end_s)))
        self.samples = tuple(MemorySample(next(times), *held) for _, *held in self._samples)  # type: ignore[arg-type]
        self.seconds = seconds[-1]
