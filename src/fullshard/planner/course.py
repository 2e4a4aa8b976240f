"""The course of a planned step: the live memory after each operator, and the activity of each unit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fullshard.core.comm import Work
from fullshard.core.engine.step.recorder import Kind, SilentRecorder, Transfer


@dataclass(frozen=True)
class Span:
    """An interval of a step, in operators from its start; a gather or reduce lasts until it is waited for."""

    unit: str  # empty: the optimizer
    kind: Kind
    start: int
    end: int


@dataclass(frozen=True)
class Course:
    """One step of a plan; places are numbers of operators that were called before."""

    operators: int  # number of operators in the step
    places: tuple[int, ...]  # ascending: where something was allocated or freed; a place has at most two moments
    parts: Mapping[str, tuple[int, ...]]  # bytes by kind at the fullest and the last moment of each place
    spans: tuple[Span, ...]  # sorted by their start
    units: tuple[str, ...]  # names, root first


class CourseRecorder(SilentRecorder):
    """Notes the course of one step at a time."""

    def __init__(self, operators: Callable[[], int]) -> None:
        """Start empty; ``operators`` returns the number of calls so far."""
        self._operators = operators
        self.clear()

    def clear(self) -> None:
        """Forget everything, because a step begins."""
        self._start = self._operators()
        self._samples: list[tuple[int, Mapping[str, int]]] = []
        self._open: dict[tuple[str, Kind], int] = {}
        self._spans: list[Span] = []

    def _place(self) -> int:
        return self._operators() - self._start

    def sample_parts(self, parts: Mapping[str, int]) -> None:
        """Record the live memory; for each place the fullest moment and the last are kept."""
        place = self._place()
        here = [one for one in self._samples[-2:] if one[0] == place]
        if len(here) == 2:
            highest = max(here, key=lambda one: sum(one[1].values()))
            self._samples[-2:] = [highest]
        self._samples.append((place, parts))

    def begin(self, unit: str, kind: Kind) -> None:
        """Start an interval, unless it has started already."""
        self._open.setdefault((unit, kind), self._place())

    def end(self, unit: str, kind: Kind) -> None:
        """End an interval; do nothing if it has not started."""
        begun = self._open.pop((unit, kind), None)
        if begun is not None:
            self._spans.append(Span(unit, kind, begun, self._place()))

    def issued(self, unit: str, kind: Transfer, works: Sequence[Work]) -> None:
        """Forget an interval that has no collectives."""
        if not works:
            self._open.pop((unit, kind), None)

    def course(self, units: Sequence[str]) -> Course:
        """Return the course of the step that ends here; everything after the units belongs to the optimizer."""
        operators = self._place()
        updates = max((span.end for span in self._spans), default=operators)
        spans = [*self._spans, Span("", "optimizer", updates, operators)]
        names = self._samples[0][1] if self._samples else {}
        return Course(
            operators=operators,
            places=tuple(place for place, _ in self._samples),
            parts={name: tuple(parts[name] for _, parts in self._samples) for name in names},
            spans=tuple(sorted(spans, key=lambda span: (span.start, span.end))),
            units=tuple(units),
        )
