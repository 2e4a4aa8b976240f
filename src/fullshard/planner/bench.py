"""Measurement of this machine's rates: a rank's steps with memory and values, by operator, and the collectives."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import torch

from fullshard.core.comm import Clock, Comm, Work as CommWork, clock_of, hides_messages, settle
from fullshard.core.comm.device import device_of
from fullshard.core.torch_private import dispatch_mode, plain_functions, without_modes
from fullshard.errors import ConfigError
from fullshard.planner.ranks import Ledger, PlannedComm
from fullshard.planner.rates import Rates
from fullshard.planner.simulation import PlannedStep
from fullshard.planner.work import Awaited, Computed, Issued, Operator, Work

KINDS = ("all_gather", "reduce_scatter", "all_reduce")
"""Kinds to measure; others are treated as all-gathers."""

_REPEATS = 9
_SLOW_S = 0.2
"""Duration of a collective, in seconds, from which on a third of the rounds is enough."""

_PRODUCT = {"cpu": 192, "cuda": 2048}
"""Rows of the matrices that are multiplied while a collective runs: a part of a millisecond."""


def measure_collectives(comm: Comm, wanted: Iterable[Issued]) -> dict[str, list[tuple[int, float, float]]]:
    """Return the times of collectives by kind, with growing sizes; every rank calls it with equal ``wanted``.

    For each size (the bytes that a rank sends): the seconds of a collective alone, and the seconds that it adds to a
    computation of twice that time, which are not hidden. Both are medians over rounds of the slowest rank.

    Args:
        comm: The ranks, at least two.
        wanted: Collectives of a step; only kinds and bytes are used.
    """
    sizes = sorted({(one.kind if one.kind in KINDS else KINDS[0], one.sent_bytes) for one in wanted})
    computation, buffer = _Computation(comm), _Buffer(comm, max((sent for _, sent in sizes), default=0))
    tries = [_Tries(comm, buffer.collective(kind, sent), computation) for kind, sent in sizes]
    for number in range(_REPEATS):  # of all sizes, so that what disturbs the machine for a while is not all of one
        for one in tries:
            one.repeat(number)
    found: dict[str, list[tuple[int, float, float]]] = {}
    for (kind, sent), one in zip(sizes, tries, strict=True):
        found.setdefault(kind, []).append((sent, *one.result()))
    return found


class _Tries:
    """Times of one collective, of a computation, and of both together."""

    def __init__(self, comm: Comm, issue: Callable[[], CommWork], computation: _Computation) -> None:
        self._comm, self._issue, self._computation = comm, issue, computation
        first = _slowest(comm, [_seconds(comm, self._alone) for _ in range(3)])
        self._rounds = _REPEATS if first < _SLOW_S else _REPEATS // 3
        self._products = max(ceil(2 * first / computation.product_s), 1)
        self._seconds: list[list[float]] = [[], [], []]

    def repeat(self, number: int) -> None:
        """Take each time once more, unless there are enough."""
        if number < self._rounds:
            works = self._alone, self._behind, lambda: self._computation.run(self._products)
            for kept, work in zip(self._seconds, works, strict=True):
                kept.append(_seconds(self._comm, work))

    def result(self) -> tuple[float, float]:
        """Return the time alone, and what computation does not hide of it."""
        by_itself, with_computation, only_computation = (_slowest(self._comm, kept) for kept in self._seconds)
        return by_itself, min(max(with_computation - only_computation, 0.0), by_itself)

    def _alone(self) -> None:
        _finish(self._issue())

    def _behind(self) -> None:
        work = self._issue()
        self._computation.run(self._products)
        _finish(work)


class _Computation:
    """Matrix products that keep the device busy."""

    def __init__(self, comm: Comm) -> None:
        rows = _PRODUCT[comm.device.type]
        self._matrix = torch.full((rows, rows), 1e-3, device=comm.device)
        self.product_s = 1.0
        self.product_s = _slowest(comm, [_seconds(comm, lambda: self.run(32)) / 32 for _ in range(5)])

    def run(self, products: int) -> None:
        for _ in range(products):
            torch.mm(self._matrix, self._matrix)


class _Buffer:
    """What the collectives send and receive; one for all sizes."""

    def __init__(self, comm: Comm, most_bytes: int) -> None:
        self._comm = comm
        each = self._elements(most_bytes)
        self._full, self._shard = (torch.zeros(count, device=comm.device) for count in (comm.size * each, each))

    def collective(self, kind: str, sent_bytes: int) -> Callable[[], CommWork]:
        """Return a function that starts a collective of which each rank sends so many bytes."""
        comm, each = self._comm, self._elements(sent_bytes)
        full, shard = self._full[: comm.size * each], self._shard[:each]
        if kind == "all_reduce":
            summed = full[: max(comm.size * each // 2, 1)]  # each rank sends its sums too
            return lambda: comm.all_reduce(summed)
        if kind == "all_gather":
            return lambda: comm.all_gather(full, shard)
        return lambda: comm.reduce_scatter(shard, full)

    def _elements(self, sent_bytes: int) -> int:
        return max(sent_bytes // (self._comm.size - 1) // 4, 1)


def _finish(work: CommWork) -> None:
    work.wait()
    settle(work)


def _seconds(comm: Comm, work: Callable[[], None]) -> float:
    clock = clock_of(comm.device)
    clock.finish()
    comm.barrier()
    begin = clock.mark()
    work()
    end = clock.mark()
    return clock.seconds(begin, [end])[0]


def _slowest(comm: Comm, seconds: list[float]) -> float:
    return max(comm.all_gather_object(statistics.median(seconds)))


WARM_UP = 3
"""Steps before measuring: the first make the optimizer's state and learn the order of units."""

Span = tuple[float, Issued | Awaited | None]
"""Seconds of operators, and what follows them."""


@dataclass(frozen=True)
class Trial:
    """Measurements of a rank's steps."""

    steps_s: list[float]  # seconds of each step, without other ranks
    issue_s: list[float]  # until each was issued; the step's own if operations are not queued
    operators: dict[str, tuple[Operator, float]]  # with the seconds of each, in the median of the watched steps
    calls: dict[str, int]  # how often each was called in a step
    # of each step that was watched, in order: seconds of operators, and which collective is then issued or awaited
    spans: list[list[Span]]
    issued: list[Issued]  # the step's collectives


def try_steps(
    build: Callable[[Comm], PlannedStep],
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
        build: As for ``simulate``, except that its ``step`` may be called any number of times.
        rank: The rank to simulate.
        size: Number of ranks.
        device: The device to run on.
        rounds: Returns the number of pairs of steps, from the seconds of one.
        ready: Called before each step, to start the steps of several processes at the same time.
        ranks: Ranks that take their steps at the same time. If they are all of ``size``, they exchange their values;
            else the other ranks' values are this rank's own, and a router may send tokens to other experts.
    """
    clock = clock_of(device)
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
    return echo.clock.seconds(begin, [end])[0] - echo.seconds(), issued


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
    """Context in which each operator is timed."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.work = Work(lambda: "")  # the operators that ran
        self.seconds: dict[str, list[float]] = {}  # of each call, by key; after read()
        self.spans: list[Span] = []  # see Trial; after read()
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
                begin, end = next(operators)
                took = self._clock.seconds(begin, [end])[0]
                self.seconds.setdefault(event.operator, []).append(took)
                since += took
            else:
                self.spans.append((since, event))
                since = 0.0
        self.spans.append((since, None))


class _Echo:
    """Makes communicators with the values of the other ranks, or this one's for them, and takes the time of it."""

    def __init__(self, clock: Clock, ranks: Comm | None) -> None:
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
        return sum(self.clock.seconds(begin, [end])[0] for begin, end in self.marks)

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


def _met(collective: str) -> Any:
    """Return a method that runs a collective of the real ranks while the clock stands still."""

    def method(self: _MeetingComm, *args: Any) -> CommWork:
        with self._echo.aside():
            _finish(getattr(self._ranks, collective)(*args))
        return self._issue()

    return method


class _MeetingComm(PlannedComm):
    """Takes the other ranks' values while the clock stands still."""

    def __init__(self, echo: _Echo, ranks: Comm, issue: Callable[[], CommWork]) -> None:
        super().__init__(ranks.rank, ranks.size, ranks.device, issue)
        self._echo, self._ranks = echo, ranks

    all_gather, reduce_scatter, all_reduce = _met("all_gather"), _met("reduce_scatter"), _met("all_reduce")
    broadcast, gather, exchange = _met("broadcast"), _met("gather"), _met("exchange")

    def all_gather_object(self, value: Any) -> list[Any]:
        with self._echo.aside():
            return self._ranks.all_gather_object(value)


BUDGET_S = 30.0
"""Seconds of steps to measure, as far as ``_ROUNDS`` allows."""

_ROUNDS = (3, 15)
"""Fewest and most pairs of steps: one watched, which takes about twice as long as the other."""


def measure_rates(
    build: Callable[[Comm], PlannedStep],
    comm: Comm,
    world_size: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Rates:
    """Return the rates of operators and collectives; every rank calls it and needs the memory of its own step.

    Each takes steps as one of ``world_size`` ranks, side by side with the others; it has their values if all of them
    are there. Then the ranks of ``comm`` measure the step's collectives.

    Args:
        build: Makes the model, shards it over the given communicator and makes the optimizer; its ``step`` may be
            called any number of times.
        comm: The ranks that measure.
        world_size: Number of ranks to simulate, at least those of ``comm``.
        progress: Called with steps done and their number.

    Raises:
        ConfigError: ``world_size`` is smaller than the number of ranks of ``comm``.
        UserError: Those of ``build``.
    """
    if world_size < comm.size:
        raise ConfigError(f"world_size must be at least {comm.size}, the ranks that measure; got {world_size}.")
    done, rounds = 0, 0

    def agreed(seconds: float) -> int:
        nonlocal rounds
        slowest = max(comm.all_gather_object(seconds))
        rounds = int(min(max(BUDGET_S / (3 * slowest), _ROUNDS[0]), _ROUNDS[1]))
        return rounds

    def ready() -> None:
        nonlocal done
        progress(done, 2 * rounds)
        done += rounds > 0
        comm.barrier()

    trials = comm.all_gather_object(try_steps(build, comm.rank, world_size, comm.device, agreed, ready, comm))
    collectives = measure_collectives(comm, trials[0].issued) if comm.size > 1 else {}
    found = rates_of(trials, collectives, queues=device_of(comm.device).queues)
    return replace(found, travels=hides_messages(comm))


def rates_of(
    trials: list[Trial], collectives: dict[str, list[tuple[int, float, float]]], *, queues: bool = False
) -> Rates:
    """Return the rates of ranks that ran side by side: means, increased by the wait for the slowest.

    If operations are not queued, the time between operators is the rest of a step; otherwise that of issuing them.
    """
    measured = {
        key: (operator, statistics.mean(one.operators[key][1] for one in trials if key in one.operators))
        for trial in trials
        for key, (operator, _) in trial.operators.items()
    }
    each = (trial.issue_s if queues else trial.steps_s for trial in trials)
    step_s = statistics.median(map(statistics.mean, zip(*each, strict=True)))  # over steps, of the mean over ranks
    watched = 0.0 if queues else sum(measured[key][1] * count for key, count in trials[0].calls.items())
    host_s = max(step_s - watched, 0.0) / sum(trials[0].calls.values())
    more = _slowest_over_mean(trials)
    slower = {key: (operator, seconds * more) for key, (operator, seconds) in measured.items()}
    return Rates(len(trials), host_s * more, slower, collectives, queues)


def _slowest_over_mean(trials: list[Trial]) -> float:
    """Return how much longer a step takes because ranks wait at collectives until all others have issued them."""
    shares = []
    for spans in zip(*(trial.spans for trial in trials), strict=True):  # of one step, each rank's
        shares.append(_end(spans) / statistics.mean(sum(seconds for seconds, _ in one) for one in spans))
    return statistics.median(shares)


def _end(ranks: Sequence[Sequence[Span]]) -> float:
    """Return when the last rank ends a step that all begin at 0."""
    clocks, going = [0.0] * len(ranks), True
    issued: list[float] = []  # by number, which collectives have in common on all ranks
    ahead = [iter(spans) for spans in ranks]
    while going:
        found = [_advance(spans, issued, clock) for spans, clock in zip(ahead, clocks, strict=True)]
        clocks = [clock for clock, _ in found]
        going = any(more for _, more in found)
        issued.append(max(clocks))
    return max(clocks)


def _advance(spans: Iterator[Span], issued: Sequence[float], clock: float) -> tuple[float, bool]:
    """Return when a rank issues the next collective, or ends its step, and whether it issued one."""
    for seconds, event in spans:
        clock += seconds
        if isinstance(event, Issued):
            return clock, True
        if isinstance(event, Awaited):
            clock = max(clock, issued[event.number])
    return clock, False
