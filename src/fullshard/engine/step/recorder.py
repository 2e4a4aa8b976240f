"""The record of a step: when each unit was gathered, computed and reduced, and what the engine held meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fullshard.comm import Work, allocated_bytes, clock_of
from fullshard.engine.step.buffers import Account

Kind = Literal["gather", "gather_wait", "forward", "backward", "reduce", "reduce_wait", "optimizer"]
Transfer = Literal["gather", "reduce"]

_WAITS: Mapping[Transfer, Kind] = {"gather": "gather_wait", "reduce": "reduce_wait"}


@dataclass(frozen=True)
class TraceEvent:
    """Something that took time in a recorded step.

    Attributes:
        unit: Name of the unit; empty for what is of the whole model.
        kind: ``gather`` and ``reduce``: from when the collective was issued to its arrival, where only a wait shows
            that, to the end of the wait. ``gather_wait`` and ``reduce_wait``: the compute thread (on CUDA its stream)
            stood still for it. ``forward`` and ``backward``: the unit computed; of the root, with all that is inside.
            ``optimizer``: the optimizer's step.
        start_s: Seconds from the start of the record.
        end_s: Likewise.
    """

    unit: str
    kind: Kind
    start_s: float
    end_s: float


@dataclass(frozen=True)
class MemorySample:
    """Bytes on the compute device at a moment at which the engine took or released a buffer.

    Attributes:
        at_s: Seconds from the start of the record.
        gathered: Gathered parameters.
        gradient_buffers: Unsharded gradients that wait to be reduced.
        gradients: Gradients of the shards.
        allocated: All tensors, as the allocator counts them; None where it does not (CPU).
    """

    at_s: float
    gathered: int
    gradient_buffers: int
    gradients: int
    allocated: int | None


class Recorder:
    """Takes the record of what happens until :meth:`stop`; one rank's, called by the thread that runs the step.

    Attributes:
        events: In the order of their starts; empty before :meth:`stop`.
        samples: In the order of time; empty before :meth:`stop`.
        started: The clock's mark at the start; on CPU a ``time.perf_counter``.
        seconds: Length of the record; 0 before :meth:`stop`.
    """

    def __init__(self, device: Any, account: Account, gradients: Mapping[str, int]) -> None:
        """Start the record.

        Args:
            device: What the units compute on.
            account: Bytes of the engine's buffers.
            gradients: Of each unit, bytes of its shards' gradients now.
        """
        self._device = device
        self._account = account
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
        """Something starts, unless it has already."""
        self._open.setdefault((unit, kind), self._clock.mark())

    def end(self, unit: str, kind: Kind) -> None:
        """Something is over; nothing where it had not started."""
        begun = self._open.pop((unit, kind), None)
        if begun is not None:
            self._spans.append((unit, kind, begun, self._clock.mark()))

    def issued(self, unit: str, kind: Transfer, works: Sequence[Work]) -> None:
        """The collectives that began are under way; where there are none, nothing began."""
        if not works:
            self._open.pop((unit, kind), None)
            return
        arrival = self._clock.arrival(works)
        if arrival is not None:
            self._arrivals[unit, kind] = arrival

    def wait(self, unit: str, kind: Transfer, works: Sequence[Work], how: Callable[[Work], None]) -> None:
        """Apply ``how``, which waits, to ``works``: a stall, at whose end the transfer is over."""
        begun = self._clock.mark()
        for work in works:
            how(work)
        ended = self._clock.mark()
        self._spans.append((unit, _WAITS[kind], begun, ended))
        issued, arrival = self._open.pop((unit, kind), None), self._arrivals.pop((unit, kind), None)
        if issued is not None:
            self._spans.append((unit, kind, issued, ended if arrival is None else arrival))

    def gradients_take(self, unit: str, nbytes: int) -> None:
        """The gradients of the shards of ``unit`` take ``nbytes`` now."""
        if self._gradients[unit] != nbytes:
            self._gradients[unit] = nbytes
            self.sample()

    def sample(self) -> None:
        """Note what is held now."""
        live = self._account.live
        held = (live["gathered"], live["gradients"], sum(self._gradients.values()))
        self._samples.append((self._clock.mark(), *held, allocated_bytes(self._device)))

    def stop(self) -> None:
        """End the record: marks become seconds."""
        self.sample()
        marks = [mark for _, _, begun, ended in self._spans for mark in (begun, ended)]
        seconds = self._clock.seconds(self.started, [*marks, *(sample[0] for sample in self._samples)])
        times = iter(seconds)
        events = [TraceEvent(unit, kind, next(times), next(times)) for unit, kind, _, _ in self._spans]
        self.events = tuple(sorted(events, key=lambda event: (event.start_s, event.end_s)))
        self.samples = tuple(MemorySample(next(times), *held) for _, *held in self._samples)  # type: ignore[arg-type]
        self.seconds = seconds[-1]
