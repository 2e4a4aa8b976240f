"""Steps of a planned rank with memory and values on a device, to measure the times of its operators."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from fullshard.core.comm import Comm, Work as CommWork, settle
from fullshard.core.comm.protocol import ReduceOp
from fullshard.core.comm.stopwatch import Stopwatch, stopwatch_of
from fullshard.core.torch_private import dispatch_mode, plain_functions, without_modes
from fullshard.planner.ranks import Ledger, PlannedComm
from fullshard.planner.rehearsal import Rehearsed
from fullshard.planner.work import Awaited, Computed, Issued, Operator, Work

WARM_UP = 3
"""Steps before measuring: the first make the optimizer's state and learn the order of units."""

Span = tuple[float, Issued | Awaited | None]
"""Seconds of operators, and what follows them."""


@dataclass(frozen=True)
class Trial:
    """Measurements of a rank's steps.

    Attributes:
        steps_s: Seconds of each step, without other ranks.
        issue_s: Seconds until each was issued; the step's own if operations are not queued.
        operators: Operators and the seconds of each, in the median of the watched steps.
        calls: How often each was called in a step.
        spans: Of each step that was watched, in order: seconds of operators, and which collective is then issued or
            awaited; None at the end.
        issued: The step's collectives.
    """

    steps_s: list[float]
    issue_s: list[float]
    operators: dict[str, tuple[Operator, float]]
    calls: dict[str, int]
    spans: list[list[Span]]
    issued: list[Issued]


def try_steps(
    build: Callable[[Comm], Rehearsed],
    rank: int,
    size: int,
    device: torch.device,
    rounds: Callable[[float], int],
    ready: Callable[[], None],
    ranks: Comm | None = None,
) -> Trial:
    """Take steps as ``rank`` of ``size`` ranks; what it takes to get the other ranks' values does not count.

    Steps that are watched, operator by operator, alternate with unwatched ones, which give the time between
    operators.

    Args:
        build: As for ``rehearse``, except that its ``step`` may be called any number of times.
        rank: The rank to simulate.
        size: Number of ranks.
        device: The device to run on.
        rounds: Returns the number of pairs of steps, from the seconds of one.
        ready: Called before each step, to start the steps of several processes at the same time.
        ranks: Ranks that take their steps at the same time. If they are all of ``size``, they exchange their values;
            else the other ranks' values are this rank's own, and a router may send tokens to other experts.
    """
    clock = stopwatch_of(device)
    echo = _Echo(clock, ranks if ranks is not None and ranks.size == size > 1 else None)
    ledger = Ledger(rank, size, device, echo.comm)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a run that does not take place
        made = build(ledger.world)
        took = [_timed(made.step, echo, ready) for _ in range(WARM_UP)]
        plain, watches = [], []
        for _ in range(rounds(took[-1][0])):
            plain.append(_timed(made.step, echo, ready))
            watches.append(_Watching(clock))
            ready()
            ledger.note = watches[-1].work.issue
            with watches[-1]:
                made.step()
            ledger.note = ledger.ignore
            watches[-1].read()
    return _summed(plain, watches)


def _timed(step: Callable[[], object], echo: _Echo, ready: Callable[[], None]) -> tuple[float, float]:
    """Return the seconds of a step, and those until it was issued."""
    ready()
    echo.marks.clear()
    echo.clock.finish()
    started, begin = time.perf_counter(), echo.clock.mark()
    step()
    issued, end = time.perf_counter() - started, echo.clock.mark()
    echo.clock.finish()
    return echo.clock.seconds(begin, end) - echo.seconds(), issued


def _summed(plain: list[tuple[float, float]], watches: list[_Watching]) -> Trial:
    work, counts = watches[-1].work, {key: len(seconds) for key, seconds in watches[-1].seconds.items()}
    means = {
        key: [sum(watch.seconds[key]) / counts[key] for watch in watches if key in watch.seconds] for key in counts
    }
    operators = {key: (work.operators[key], statistics.median(means[key])) for key in counts}
    issued = [event for event in work.events if isinstance(event, Issued)]
    steps_s, issue_s = (list(one) for one in zip(*plain, strict=True))
    return Trial(steps_s, issue_s, operators, counts, [watch.spans for watch in watches], issued)


class _Watching(dispatch_mode):
    """Context in which each operator is timed.

    Attributes:
        work: The operators that ran.
        seconds: Of each call, by key; after :meth:`read`.
        spans: See :class:`Trial`; after :meth:`read`.
    """

    def __init__(self, clock: Stopwatch) -> None:
        super().__init__()
        self.work = Work(lambda: "")
        self.seconds: dict[str, list[float]] = {}
        self.spans: list[Span] = []
        self._clock = clock
        self._marks: list[tuple[Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with plain_functions():
            begin = self._clock.mark()
            result = func(*args, **kwargs)
            end = self._clock.mark()
            self._marks.append((begin, end))
            self.work.compute(func, args, kwargs, result)
            return result

    def read(self) -> None:
        """Read the times."""
        self._clock.finish()
        operators = iter(self._marks)
        since = 0.0
        for event in self.work.events:
            if isinstance(event, Computed):
                took = self._clock.seconds(*next(operators))
                self.seconds.setdefault(event.operator, []).append(took)
                since += took
            else:
                self.spans.append((since, event))
                since = 0.0
        self.spans.append((since, None))


class _Echo:
    """Makes communicators with the values of the other ranks, or this one's for them, and takes the time of it."""

    def __init__(self, clock: Stopwatch, ranks: Comm | None) -> None:
        self.clock = clock
        self.ranks = ranks
        self.marks: list[tuple[Any, Any]] = []

    def comm(self, rank: int, size: int, device: torch.device, issue: Callable[[], CommWork]) -> PlannedComm:
        """Return a communicator."""
        if self.ranks is not None and size == self.ranks.size:
            return _MeetingComm(self, self.ranks, issue)
        return _EchoComm(self, rank, size, device, issue)

    def seconds(self) -> float:
        """Return the seconds that :meth:`aside` took since ``marks`` was cleared."""
        return sum(self.clock.seconds(begin, end) for begin, end in self.marks)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Run something that does not count as part of the step."""
        begin = self.clock.mark()
        with without_modes(), torch.no_grad():
            yield
        self.marks.append((begin, self.clock.mark()))


class _EchoComm(PlannedComm):
    """Fills what other ranks would send: leftover values could be slow numbers or nan."""

    def __init__(self, echo: _Echo, rank: int, size: int, device: torch.device, issue: Callable[[], CommWork]) -> None:
        super().__init__(rank, size, device, issue)
        self._echo = echo

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> CommWork:
        with self._echo.aside():
            for part in full.view(self.size, -1):
                if part.data_ptr() != shard.data_ptr():
                    part.copy_(shard.view(-1))
        return super().all_gather(full, shard)

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor) -> CommWork:
        with self._echo.aside():
            shard.copy_(full.view(self.size, -1)[self.rank].view_as(shard))
        return super().reduce_scatter(shard, full)

    def exchange(self, received: Any, sent: Any) -> CommWork:
        with self._echo.aside():
            for part in received:
                part.zero_()
        return super().exchange(received, sent)


class _MeetingComm(PlannedComm):
    """Takes the other ranks' values while the clock stands still."""

    def __init__(self, echo: _Echo, ranks: Comm, issue: Callable[[], CommWork]) -> None:
        super().__init__(ranks.rank, ranks.size, ranks.device, issue)
        self._echo, self._ranks = echo, ranks

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> CommWork:
        return self._now(lambda: self._ranks.all_gather(full, shard))

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor) -> CommWork:
        return self._now(lambda: self._ranks.reduce_scatter(shard, full))

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> CommWork:
        return self._now(lambda: self._ranks.all_reduce(tensor, op))

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> CommWork:
        return self._now(lambda: self._ranks.broadcast(tensor, source))

    def gather(self, shard: torch.Tensor, full: torch.Tensor | None, target: int = 0) -> CommWork:
        return self._now(lambda: self._ranks.gather(shard, full, target))

    def exchange(self, received: Any, sent: Any) -> CommWork:
        return self._now(lambda: self._ranks.exchange(received, sent))

    def all_gather_object(self, value: Any) -> list[Any]:
        with self._echo.aside():
            return self._ranks.all_gather_object(value)

    def _now(self, collective: Callable[[], CommWork]) -> CommWork:
        with self._echo.aside():
            work = collective()
            work.wait()
            settle(work)
        return self._issue()
