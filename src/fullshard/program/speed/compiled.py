"""Compiled blocks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fullshard.core.torch_private import compiler_watched, graphs_compiled
from fullshard.program.models import blocks_of, compile_blocks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from fullshard.program.speed.way import Facts, Part


class Compile:
    """Compile each block with torch.compile."""

    name = "compile"
    purpose = "torch.compile of each block in training, for at most six shapes of micro-batches"
    part: Part = "blocks"
    exact = False

    def misfit(self, model: PreTrainedModel, facts: Facts) -> str | None:
        """See :meth:`Way.misfit`."""
        return None if blocks_of(model) else f"{type(model).__name__} has no blocks that can be compiled one by one"

    def apply(self, model: PreTrainedModel, facts: Facts) -> None:
        """See :meth:`Way.apply`."""
        compile_blocks(model)


@dataclass
class Compiled:
    """What this process has compiled so far."""

    graphs: int = 0  # graphs of a forward, each with its backward
    seconds: float = 0.0  # wall time of the compiler


TICK_S = 4.0
"""Seconds between two signs of life while the compiler runs."""


@contextmanager
def watch_compiling(
    told: Callable[[Compiled], None], running: Callable[[Compiled], None] = lambda _: None
) -> Iterator[Compiled]:
    """Count what is compiled inside the context, and tell each time the compiler has run, in the thread that waits.

    ``running`` is called with what was compiled so far when the compiler begins, and every ``TICK_S`` seconds while it
    runs, then from another thread.
    """
    found, before = Compiled(), graphs_compiled()
    started: float | None = None
    over = threading.Event()

    def so_far() -> Compiled:
        return Compiled(found.graphs, found.seconds + time.perf_counter() - (started or time.perf_counter()))

    def begins(_: object) -> None:
        nonlocal started
        started = time.perf_counter()
        running(so_far())

    def ends(_: object) -> None:
        nonlocal started
        found.graphs, found.seconds, started = graphs_compiled() - before, so_far().seconds, None
        if found.graphs:
            told(found)

    def tick() -> None:
        while not over.wait(TICK_S):
            if started is not None:
                running(so_far())

    ticker = threading.Thread(target=tick, name="compiling", daemon=True)
    ticker.start()
    try:
        with compiler_watched(begins, ends):
            yield found
    finally:
        over.set()
        ticker.join()
