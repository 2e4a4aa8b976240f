"""Waiting for something slow on some ranks without a collective that lasts as long.

A rank that waits inside a collective while another writes a file trips the communication timeout. Here every rank comes
to a short exchange every second at the latest, says whether it is done, and goes on waiting if not all are.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from fullshard.errors import FullshardError, UserError

T = TypeVar("T")

PATIENCE_SECONDS = 1.0
"""Longest time between two exchanges."""


class ObjectExchange(Protocol):
    """What is needed of a Comm or a Mesh."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """The picklable ``value`` of every rank, in rank order, on every rank."""
        ...


def await_all(
    ranks: ObjectExchange, poll: Callable[[float], T | None], hear: Callable[[list[T | None]], None] | None = None
) -> list[T]:
    """Return when ``poll`` has given a result on every rank; every rank calls it.

    Args:
        ranks: Those that wait for each other.
        poll: Waits for at most as many seconds as it is told, and returns this rank's picklable result, or None while
            there is none. It raises nothing: a failure is a result.
        hear: Called with the results so far, in rank order, after each exchange that found a rank without one: to show
            progress, or to give up where another rank has failed.

    Returns:
        The results in rank order, the same on every rank.
    """
    mine: T | None = None
    seconds = 0.0
    while True:
        mine = poll(seconds) if mine is None else mine
        results = ranks.all_gather_object(mine)
        if all(result is not None for result in results):
            return results
        if hear is not None:
            hear(results)
        # Those that are done pace the others: each exchange waits for the slowest poll.
        seconds = min(PATIENCE_SECONDS, max(0.01, 2 * seconds))


def together(ranks: ObjectExchange, action: Callable[[], T]) -> T:
    """Do something that may fail on any rank; if it does, every rank raises the same error and none waits for ever.

    Args:
        ranks: Those that call this.
        action: What each rank does, without talking to others.

    Returns:
        This rank's result.

    Raises:
        UserError: The first failing rank's.
        FullshardError: Another rank failed by something else, which it raises itself; its traceback is in the text.
    """
    cause: Exception | None = None
    told: UserError | str | None = None
    results: list[T] = []
    try:
        results.append(action())
    except UserError as error:
        cause = told = error
    except Exception as error:
        cause, told = error, "".join(traceback.format_exception(error)).rstrip()
    problems = ranks.all_gather_object(told)
    if cause is not None and cause is not told:
        raise cause
    for rank, problem in enumerate(problems):
        if isinstance(problem, str):
            raise FullshardError(f"Rank {rank} failed:\n{problem}") from cause
        if problem is not None:
            raise problem from cause
    return results[0]


def together_in_background(ranks: ObjectExchange, action: Callable[[], T]) -> T:
    """As :func:`together`, for what may take long (reading or writing files): no collective lasts as long as it does.

    Args:
        ranks: Those that call this.
        action: What each rank does, in a thread of its own, without talking to others.

    Returns:
        This rank's result.

    Raises:
        UserError, FullshardError: As there.
    """
    results: list[T] = []
    failures: list[BaseException] = []

    def work() -> None:
        try:
            results.append(action())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()

    def poll(seconds: float) -> bool | None:
        thread.join(seconds)
        return None if thread.is_alive() else True

    await_all(ranks, poll)

    def outcome() -> T:
        if failures:
            raise failures[0]
        return results[0]

    return together(ranks, outcome)
