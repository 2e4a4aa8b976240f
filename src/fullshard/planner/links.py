"""Measures collectives between the running ranks: alone, and behind computation."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from math import ceil

import torch

from fullshard.comm import Comm, Work, settle
from fullshard.comm.stopwatch import stopwatch_of
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
    computation = _Computation(comm)
    found: dict[str, list[tuple[int, float, float]]] = {}
    for kind, sent in sizes:
        found.setdefault(kind, []).append((sent, *_measured(comm, _collective(comm, kind, sent), computation)))
    return found


def _measured(comm: Comm, issue: Callable[[], Work], computation: _Computation) -> tuple[float, float]:
    def alone() -> None:
        _finish(issue())

    def behind() -> None:
        work = issue()
        computation.run(products)
        _finish(work)

    first = _slowest(comm, [_seconds(comm, alone) for _ in range(3)])
    rounds = _ROUNDS if first < _SLOW_S else _ROUNDS // 3
    products = max(ceil(2 * first / computation.product_s), 1)
    seconds: list[list[float]] = [[], [], []]
    for _ in range(rounds):
        for kept, work in zip(seconds, (alone, behind, lambda: computation.run(products)), strict=True):
            kept.append(_seconds(comm, work))
    by_itself, with_computation, only_computation = (_slowest(comm, kept) for kept in seconds)
    return by_itself, min(max(with_computation - only_computation, 0.0), by_itself)


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


def _collective(comm: Comm, kind: str, sent_bytes: int) -> Callable[[], Work]:
    others = comm.size - 1
    if kind == "all_reduce":
        summed = torch.zeros(max(sent_bytes * comm.size // (2 * others) // 4, 1), device=comm.device)
        return lambda: comm.all_reduce(summed)
    each = max(sent_bytes // others // 4, 1)
    full, shard = (torch.zeros(elements, device=comm.device) for elements in (comm.size * each, each))
    if kind == "all_gather":
        return lambda: comm.all_gather(full, shard)
    return lambda: comm.reduce_scatter(shard, full)


def _finish(work: Work) -> None:
    work.wait()
    settle(work)


def _seconds(comm: Comm, work: Callable[[], None]) -> float:
    clock = stopwatch_of(comm.device)
    clock.finish()
    comm.barrier()
    begin = clock.mark()
    work()
    end = clock.mark()
    clock.finish()
    return clock.seconds(begin, end)


def _slowest(comm: Comm, seconds: list[float]) -> float:
    return max(comm.all_gather_object(statistics.median(seconds)))
