"""Measures collectives between the running ranks: alone, and behind computation."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from math import ceil

import torch

from fullshard.core.comm import Comm, Work, clock_of, settle
from fullshard.planner.work import Issued

KINDS = ("all_gather", "reduce_scatter", "all_reduce")
"""Kinds to measure; others are treated as all-gathers."""

_ROUNDS = 9
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
    for number in range(_ROUNDS):  # of all sizes, so that what disturbs the machine for a while is not all of one
        for one in tries:
            one.repeat(number)
    found: dict[str, list[tuple[int, float, float]]] = {}
    for (kind, sent), one in zip(sizes, tries, strict=True):
        found.setdefault(kind, []).append((sent, *one.result()))
    return found


class _Tries:
    """Times of one collective, of a computation, and of both together."""

    def __init__(self, comm: Comm, issue: Callable[[], Work], computation: _Computation) -> None:
        self._comm, self._issue, self._computation = comm, issue, computation
        first = _slowest(comm, [_seconds(comm, self._alone) for _ in range(3)])
        self._rounds = _ROUNDS if first < _SLOW_S else _ROUNDS // 3
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

    def collective(self, kind: str, sent_bytes: int) -> Callable[[], Work]:
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


def _finish(work: Work) -> None:
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
