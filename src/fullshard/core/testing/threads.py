"""Ranks as threads of one process: real collectives without processes, for tests of the engine's logic."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, TypeVar

import torch

from fullshard.core.comm.calls import gather_in_one_call
from fullshard.core.comm.protocol import DONE, ReduceOp, Work
from fullshard.core.comm.stack_probe import public_call
from fullshard.errors import InvariantError, MismatchError

T = TypeVar("T")


class ThreadWorld:
    """State shared by the ranks of one group: a slot for each rank, and a barrier."""

    def __init__(self, size: int, timeout_s: float) -> None:
        """Make a world of ``size`` ranks whose collectives fail after ``timeout_s`` seconds."""
        self.size = size
        self.slots: list[Any] = [None] * size
        self.timeout_s = timeout_s
        self.meeting = threading.Barrier(size, timeout=timeout_s)
        self.parts: dict[tuple[int, ...], ThreadWorld] = {}
        self.lock = threading.Lock()


class ThreadComm:
    """The :class:`~fullshard.core.comm.protocol.Comm` of one rank among threads. Collectives finish when issued."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        """Join ``world`` as ``rank``."""
        self.world = world
        self.rank = rank
        self.size = world.size
        self.device = torch.device("cpu")
        self.announced = ""

    def announce(self, what: str) -> None:
        """See :meth:`Comm.announce`."""
        self.announced = what

    def split(self, groups: Sequence[Sequence[int]]) -> ThreadComm:
        """Return the group among ``groups`` of ranks that has this rank; every rank calls it with the same groups."""
        members = next(tuple(group) for group in groups if self.rank in group)
        with self.world.lock:
            part = self.world.parts.setdefault(members, ThreadWorld(len(members), self.world.timeout_s))
        return ThreadComm(part, members.index(self.rank))

    def _meet(self, kind: str, payload: Any, use: Callable[[list[Any]], T], *, bound: bool = False) -> T:
        """Exchange ``payload`` with the other ranks, apply ``use`` to all of them, and leave together.

        Args:
            kind: Description of the collective.
            payload: This rank's contribution.
            use: Computes the result from all ranks' payloads, in rank order.
            bound: Whether ranks that announced different purposes are in different collectives.

        Raises:
            MismatchError: Another rank is in a different collective, or never came.
        """
        text = f"{kind} ({self.announced})" if self.announced else kind
        self.world.slots[self.rank] = (text if bound else kind, payload)
        try:
            self.world.meeting.wait()
            names, payloads = zip(*self.world.slots, strict=True)
            result = use(list(payloads)) if len(set(names)) == 1 else None
            self.world.meeting.wait()
        except threading.BrokenBarrierError:
            raise MismatchError(f"Rank {self.rank} waited in {text}, but another rank failed or never came.") from None
        if len(set(names)) != 1:
            called = public_call(sys._getframe())
            texts = self._meet("where ranks are", f"{text} in {called}" if called else text, list)
            where = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
            raise MismatchError(
                f"Ranks are in different collectives: {where}. Every rank must call the same modules in the same "
                "order; check code that depends on the rank or the data."
            )
        return result  # type: ignore[return-value]

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> Work:
        """See :meth:`Comm.all_gather`."""

        def use(shards: list[torch.Tensor]) -> None:
            for rank, (slot, source) in enumerate(zip(full.view(self.size, -1), shards, strict=True)):
                if rank != self.rank or source.data_ptr() != slot.data_ptr():
                    slot.copy_(source)

        self._meet(f"all_gather of {full.numel()} {full.dtype}", shard, use, bound=True)
        return DONE

    def reduce_scatter(self, shard: torch.Tensor, full: torch.Tensor) -> Work:
        """See :meth:`Comm.reduce_scatter`."""

        def use(fulls: list[torch.Tensor]) -> torch.Tensor:
            terms = [other.view(self.size, -1)[self.rank] for other in fulls]
            return torch.stack(terms).sum(0, dtype=shard.dtype)

        shard.copy_(self._meet(f"reduce_scatter of {full.numel()} {full.dtype}", full, use, bound=True))
        return DONE

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        """See :meth:`Comm.all_reduce`."""

        def use(tensors: list[torch.Tensor]) -> torch.Tensor:
            stacked = torch.stack(tensors)
            return stacked.sum(0, dtype=tensor.dtype) if op == "sum" else stacked.amax(0)

        tensor.copy_(self._meet(f"all_reduce {op} of {tensor.numel()} {tensor.dtype}", tensor, use))
        return DONE

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> Work:
        """See :meth:`Comm.broadcast`."""
        kind = f"broadcast of {tensor.numel()} {tensor.dtype} from {source}"
        value = self._meet(kind, tensor, lambda tensors: tensors[source].clone(), bound=True)
        tensor.copy_(value)
        return DONE

    def gather(self, shard: torch.Tensor, full: torch.Tensor | None, target: int = 0) -> Work:
        """See :meth:`Comm.gather`."""

        def use(shards: list[torch.Tensor]) -> None:
            if full is not None:
                torch.cat([s.reshape(-1) for s in shards], out=full)

        self._meet(f"gather of {shard.numel()} {shard.dtype} to {target}", shard, use, bound=True)
        return DONE

    def exchange(self, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> Work:
        """See :meth:`Comm.exchange`."""

        def use(by_rank: list[Sequence[torch.Tensor]]) -> None:
            for target, given in zip(received, by_rank, strict=True):
                source = given[self.rank]
                if (target.shape, target.dtype) != (source.shape, source.dtype):
                    raise InvariantError(
                        f"an exchange received {tuple(source.shape)} {source.dtype} where {tuple(target.shape)} "
                        f"{target.dtype} was expected"
                    )
                target.copy_(source)

        self._meet("exchange", sent, use, bound=True)
        return DONE

    def all_gather_object(self, value: Any) -> list[Any]:
        """See :meth:`Comm.all_gather_object`."""
        return gather_in_one_call(value, lambda mine: self._meet("all_gather_object", mine, list))

    def barrier(self) -> None:
        """See :meth:`Comm.barrier`."""
        self._meet("barrier", None, list)


def _initialisers() -> dict[ModuleType, dict[str, Any]]:
    """Return the functions of ``torch.nn.init`` that modules of ``torch.nn`` refer to, by name."""
    names = {name for name in vars(torch.nn.init) if name.endswith("_") and not name.startswith("_")}
    modules = [module for name, module in sys.modules.items() if name.startswith("torch.nn.") and module is not None]
    return {module: {name: one for name, one in vars(module).items() if name in names} for module in modules}


def run_ranks(size: int, work: Callable[[ThreadComm], T], *, timeout_s: float = 60.0) -> list[T]:
    """Run ``work(comm)`` on ``size`` threads, one for each rank, and return their results in rank order.

    Args:
        size: World size.
        work: Function of each rank. torch's default random generator is shared by all threads: draw no random numbers
            from it, or use a generator for each rank.
        timeout_s: Seconds a rank waits in a collective for the others.

    Raises:
        Exception: The first failure by cause: an error that a rank raised itself comes before those it caused on
            others.
    """
    world = ThreadWorld(size, timeout_s)
    results: list[Any] = [None] * size
    failures: list[tuple[int, BaseException]] = []

    def rank_main(rank: int) -> None:
        try:
            results[rank] = work(ThreadComm(world, rank))
        except BaseException as error:
            failures.append((rank, error))
            for part in (world, *world.parts.values()):
                part.meeting.abort()

    threads = [
        threading.Thread(target=rank_main, args=(rank,), name=f"rank{rank}", daemon=True) for rank in range(size)
    ]
    initialisers = _initialisers()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # transformers replaces these while it builds a model, then restores what it found. If two ranks build at once, the
    # second finds the replacements and would leave them forever.
    for module, functions in initialisers.items():
        vars(module).update(functions)
    for part in (world, *world.parts.values()):
        if part.size > 1:
            part.meeting.abort()  # a shard used after the ranks' end raises instead of waiting for them
    if failures:
        first = next((error for _, error in failures if "another rank failed" not in str(error)), failures[0][1])
        raise first
    return results
