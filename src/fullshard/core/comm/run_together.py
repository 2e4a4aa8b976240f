"""Actions that every rank performs on its own, with one outcome for all: ranks exchange results and errors.

A rank that waits inside a collective while another writes a file would exceed the communication timeout. Here every
rank takes part in a short exchange at least once a second, reports whether it is done, and waits on if not all are.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import TypeVar

from fullshard.core.comm.mesh import Mesh
from fullshard.core.comm.protocol import Comm
from fullshard.errors import FullshardError, UserError

T = TypeVar("T")

Ranks = Comm | Mesh

PATIENCE_SECONDS = 1.0
"""Longest time between two exchanges, in seconds."""


def await_all(
    ranks: Ranks, poll: Callable[[float], T | None], on_progress: Callable[[list[T | None]], None] | None = None
) -> list[T]:
    """Wait until ``poll`` has returned a result on every rank. Every rank calls it.

    Args:
        ranks: The ranks that wait for each other.
        poll: Called with a number of seconds to wait at most; returns this rank's picklable result, or None if there is
            none yet. It must not raise: a failure is a result.
        on_progress: Called with the results so far, in rank order, after each exchange in which a rank had none: to
            show progress, or to give up if another rank has failed.

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
        if on_progress is not None:
            on_progress(results)
        # Ranks that are done set the pace: each exchange waits for the slowest poll.
        seconds = min(PATIENCE_SECONDS, max(0.01, 2 * seconds))


def together(ranks: Ranks, action: Callable[[], T]) -> T:
    """Run an action on each rank; if it fails on one, every rank raises the same error and none waits forever.

    Args:
        ranks: The ranks that call this.
        action: Runs on each rank, without communication.

    Returns:
        This rank's result.

    Raises:
        UserError: The error of the first rank that failed.
        FullshardError: Another rank failed with another kind of error, which that rank raises itself; the text has its
            traceback.
    """
    cause: Exception | None = None
    reported: UserError | str | None = None
    results: list[T] = []
    try:
        results.append(action())
    except UserError as error:
        cause = reported = error
    except Exception as error:
        cause, reported = error, "".join(traceback.format_exception(error)).rstrip()
    problems = ranks.all_gather_object(reported)
    if cause is not None and cause is not reported:
        raise cause
    for rank, problem in enumerate(problems):
        if isinstance(problem, str):
            raise FullshardError(f"Rank {rank} failed:\n{problem}") from cause
        if problem is not None:
            raise problem from cause
    return results[0]


def together_in_background(ranks: Ranks, action: Callable[[], T]) -> T:
    """Run a slow action (reading or writing files) as :func:`together` does, but in no collective that lasts as long.

    Args:
        ranks: The ranks that call this.
        action: Runs on each rank, in a thread of its own, without communication.

    Returns:
        This rank's result.

    Raises:
        UserError, FullshardError: As for :func:`together`.
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
