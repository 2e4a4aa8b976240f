"""Token ids of coming steps, made in a thread while the present one computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

from fullshard.data.tokenizing.tokenize import TokenizedSet

T = TypeVar("T")

STEPS_AHEAD = 2
"""Steps whose rows are read ahead: one may be slow, and each holds its rows' ids only."""


def read_ahead(
    tokenized: TokenizedSet, wanted: Iterator[Sequence[int]], use: Callable[[TokenizedSet], T]
) -> Iterator[T]:
    """Yield what ``use`` makes of each step's rows, from a set that has their ids in memory or mapped.

    Args:
        tokenized: The set. One that has its ids is used as it is.
        wanted: The rows of each step, ascending.
        use: Called in the order of the steps, by the caller's thread.

    Raises:
        DataError: A row cannot be read; when its step is due.
    """
    if tokenized.source is None:
        for _ in wanted:
            yield use(tokenized)
        return
    with ThreadPoolExecutor(1, "tokenize-ahead") as worker:
        waiting: deque[Future[TokenizedSet]] = deque()
        try:
            for rows in islice(wanted, STEPS_AHEAD):
                waiting.append(worker.submit(tokenized.taken, rows))
            while waiting:
                made = use(waiting.popleft().result())
                # Only now: the thread would share Python's lock with ``use``, which then took 3 ms instead of 1.
                waiting += [worker.submit(tokenized.taken, rows) for rows in islice(wanted, 1)]
                yield made
        finally:
            for left in waiting:
                left.cancel()
