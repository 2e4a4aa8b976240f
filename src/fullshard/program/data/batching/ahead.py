"""Reading ahead: token ids of coming steps are made in a thread while the current one computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

from fullshard.program.data.tokenizing.tokenize import TokenizedSet

T = TypeVar("T")

STEPS_AHEAD = 2
"""Steps read ahead. Two, because one may be slow; each holds only its rows' ids."""


def read_ahead(
    tokenized: TokenizedSet, wanted: Iterator[Sequence[int]], use: Callable[[TokenizedSet], T]
) -> Iterator[T]:
    """Yield ``use`` of each step's rows, which are read ahead into memory if the set makes ids on demand.

    Args:
        tokenized: The set; used as it is if it holds its ids.
        wanted: The rows of each step, ascending.
        use: Called in the order of the steps, in the caller's thread.

    Raises:
        DataError: A row cannot be read; raised when its step is due.
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
                # Started only here: the thread competes for the GIL with ``use``, which then took 3 ms instead of 1.
                waiting += [worker.submit(tokenized.taken, rows) for rows in islice(wanted, 1)]
                yield made
        finally:
            for left in waiting:
                left.cancel()
