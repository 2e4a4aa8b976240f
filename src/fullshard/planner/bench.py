"""Measurement of this machine's rates for the steps of one model."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from fullshard.core.comm import Comm, hides_messages
from fullshard.core.comm.device import device_of
from fullshard.errors import ConfigError
from fullshard.planner.links import measure_collectives
from fullshard.planner.rates import Rates
from fullshard.planner.rehearsal import Rehearsed
from fullshard.planner.trial import Span, Trial, try_steps
from fullshard.planner.work import Awaited, Issued

BUDGET_S = 30.0
"""Seconds of steps to measure, as far as ``_ROUNDS`` allows."""

_ROUNDS = (3, 15)
"""Fewest and most pairs of steps: one watched, which takes about twice as long as the other."""


def measure_rates(
    build: Callable[[Comm], Rehearsed],
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
    step_s = _typical(trial.issue_s if queues else trial.steps_s for trial in trials)
    watched = 0.0 if queues else sum(measured[key][1] * count for key, count in trials[0].calls.items())
    host_s = max(step_s - watched, 0.0) / sum(trials[0].calls.values())
    more = _slowest_over_mean(trials)
    slower = {key: (operator, seconds * more) for key, (operator, seconds) in measured.items()}
    return Rates(len(trials), host_s * more, slower, collectives, queues)


def _typical(ranks: Iterable[list[float]]) -> float:
    """Return the median over steps of the mean over ranks."""
    return statistics.median(map(statistics.mean, zip(*ranks, strict=True)))


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
