"""Successive halving: a timed step of every candidate, more of the better half, three of the best, within the time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from fullshard.program.train.setup.tuned import Setting
from fullshard.program.tune.candidates import SAME, Candidate

FINALISTS = 3
"""Candidates whose steps are all timed three times at the end."""

FULL = 3
"""Timed steps of a candidate in the final round."""

TURNS = 2
"""How often the best are measured again at most, in turns."""

UNTIMED = 3
"""Steps of a candidate before those that are timed: one to compare its values, and at least two to be warm."""

CLOSE = 1.02
"""Factor of the fastest step within which fewer ways are preferred: one that gains nothing still rounds differently."""

NO_TIME = "no time was left"


def _differing(one: Candidate, base: Candidate) -> list[str]:
    """Return the axes on which two candidates differ."""
    return [axis for axis, value in one.axes().items() if value != base.axes()[axis]]


@dataclass(frozen=True)
class Measured:
    """What was measured of a candidate in one go; the same on every rank."""

    setting: Setting
    steps_s: tuple[float, ...]  # of the timed steps, of the slowest rank
    tokens: int  # of a step, all ranks together, without padding
    took_s: float  # of everything, from building the model
    compile_s: float  # of the first steps, beyond what a step takes
    reserved_bytes: int  # most of a rank, by the allocator of a GPU; 0: not known
    share_of_peak: float | None = None  # FLOPs of a timed step, of the cards' peak; None: not known

    def __add__(self, later: Measured) -> Measured:
        """Return both together; what is not times is of the first."""
        return Measured(
            self.setting,
            self.steps_s + later.steps_s,
            self.tokens,
            max(self.took_s, later.took_s),
            self.compile_s,
            max(self.reserved_bytes, later.reserved_bytes),
            self.share_of_peak,
        )

    @property
    def step_s(self) -> float:
        """Median seconds of a step."""
        return median(self.steps_s)

    @property
    def setup_s(self) -> float:
        """Seconds to build and compile, roughly."""
        return max(self.took_s - (UNTIMED + len(self.steps_s)) * self.step_s, 0.0)


Measure = Callable[[Candidate, int], Measured | str]
"""Measures a candidate for at least so many timed steps; a text says why it is left out."""


@dataclass
class Outcome:
    """What a tuning found; the same on every rank."""

    measured: dict[Candidate, Measured] = field(default_factory=dict)  # the best first, once it is done
    left_out: dict[Candidate, str] = field(default_factory=dict)


class Halving:
    """Measures candidates in rounds. Every rank calls it alike, and ``measure`` and ``clock`` give all ranks the same.

    ``clock`` returns the seconds since the start, of which there are ``limit_s``. A candidate whose next result
    ``is_recorded`` takes none of them.
    """

    def __init__(
        self,
        measure: Measure,
        clock: Callable[[], float],
        limit_s: float,
        progress: Callable[[int, int], None] = lambda done, total: None,
        is_recorded: Callable[[Candidate], bool] = lambda one: False,
    ) -> None:
        self._measure, self._clock, self._limit_s, self._progress = measure, clock, limit_s, progress
        self._is_recorded = is_recorded
        self._found = Outcome()

    def run(self, candidates: Sequence[Candidate]) -> Outcome:
        """Measure, and return the candidates in their order: those of later rounds first, then by their steps.

        Of those that are about as fast as the fastest, the one with the fewest ways comes first.
        """
        self._first_round(candidates)
        left, places = self._by_time(self._found.measured), list[Candidate]()
        while len(left) > FINALISTS:
            left = self._by_time(left)
            keep = max(FINALISTS, math.ceil(len(left) / 2))
            places[:0], left = left[keep:], left[:keep]
            if keep > FINALISTS:
                self._more(left, 1)
        self._more(left, FULL)
        left = self._by_time(left)
        self._in_turns(left)
        left = self._by_time(left)
        near = [one for one in left if self._found.measured[one].step_s <= CLOSE * self._found.measured[left[0]].step_s]
        near.sort(key=lambda one: len(one.ways))  # stable: of equally many, the faster first
        left = [*near, *left[len(near) :]]
        self._found.measured = {one: self._found.measured[one] for one in (*left, *places)}
        return self._found

    def _first_round(self, candidates: Sequence[Candidate]) -> None:
        waiting = list(candidates)
        while waiting:
            self._progress(len(candidates) - len(waiting), len(candidates))
            one = min(waiting, key=self._promise(waiting))
            waiting.remove(one)
            if self._fits(one):
                self._take(one, 1)
            else:
                self._found.left_out[one] = NO_TIME

    def _promise(self, waiting: Sequence[Candidate]) -> Callable[[Candidate], tuple[bool, float, int]]:
        """Return the key to order candidates by: first those that show what one axis alone does, then by that."""
        order, predicted = {one: place for place, one in enumerate(waiting)}, self._predictor()
        base = next(iter(self._found.measured), None)

        def key(one: Candidate) -> tuple[bool, float, int]:
            ratio = predicted(one)
            several = base is not None and len(_differing(one, base)) > 1
            return (several or ratio > 1.0, ratio, order[one]) if base is not None else (False, 1.0, order[one])

        return key

    def _predictor(self) -> Callable[[Candidate], float]:
        """Return a function that predicts a candidate's step, of the first that was measured.

        It is the product of what each of its values makes alone. Fewer rows than those that were measured are no
        faster: of them it is the ratio of the fewest. What is not known changes nothing.
        """
        known = {one: found.step_s for one, found in self._found.measured.items()}
        base = next(iter(known), None)
        if base is None:
            return lambda one: 1.0
        alone: dict[tuple[str, object], float] = {}
        for one, seconds in known.items():
            if len(axes := _differing(one, base)) == 1:
                alone[axes[0], one.axes()[axes[0]]] = seconds / known[base]
        rows = {value: ratio for (axis, value), ratio in alone.items() if axis == "rows" and isinstance(value, int)}

        def ratio(axis: str, value: object) -> float:
            if (axis, value) in alone:
                return alone[axis, value]
            if axis == "rows" and rows and isinstance(value, int) and value < min(rows):
                return rows[min(rows)]
            return 1.0

        def predicted(one: Candidate) -> float:
            return math.prod(ratio(axis, one.axes()[axis]) for axis in _differing(one, base))

        return predicted

    def _fits(self, one: Candidate, *, last: bool = False) -> bool:
        """Return whether there is time for a candidate; before the ``last`` round, and then for that."""
        known = self._found.measured
        if not known or self._is_recorded(one):
            return True
        best = sorted(known.values(), key=lambda found: found.step_s)[: 0 if last else FINALISTS]
        later = sum(found.took_s for found in best if len(found.steps_s) < FULL)
        return self._clock() + self._cost(one) + later <= self._limit_s

    def _cost(self, one: Candidate) -> float:
        """Return the seconds that measuring a candidate may take: to build and compile it, and its steps."""
        known = self._found.measured
        if one in known:
            return known[one].took_s
        alike = [found.setup_s for other, found in known.items() if other.blocks == one.blocks]
        setup = max(alike or [found.setup_s for found in known.values()])
        return setup + (UNTIMED + 1) * next(iter(known.values())).step_s * self._predictor()(one)

    def _take(self, one: Candidate, steps: int) -> None:
        found = self._measure(one, steps)
        if isinstance(found, Measured):
            before = self._found.measured.get(one)
            self._found.measured[one] = found if before is None else before + found
        else:
            self._found.measured.pop(one, None)
            if found != SAME:
                self._found.left_out[one] = found

    def _more(self, some: Sequence[Candidate], steps: int) -> None:
        """Measure candidates again that have fewer than three timed steps, as long as there is time."""
        for one in some:
            if len(self._found.measured[one].steps_s) < FULL and self._fits(one, last=True):
                self._take(one, steps)

    def _in_turns(self, some: Sequence[Candidate]) -> None:
        """Measure the best again, one after the other, and then two while their steps overlap.

        What else the machine does meanwhile may have slowed one of them alone.
        """
        for _ in range(TURNS):
            for one in some:
                if one in self._found.measured and self._fits(one, last=True):
                    self._take(one, FULL)
            some = self._by_time(some)[:2]
            times = [self._found.measured[one].steps_s for one in some]
            if len(times) < 2 or max(times[0]) < min(times[1]):
                return

    def _by_time(self, some: Sequence[Candidate] | Mapping[Candidate, Measured]) -> list[Candidate]:
        return sorted(
            (one for one in some if one in self._found.measured), key=lambda one: self._found.measured[one].step_s
        )
