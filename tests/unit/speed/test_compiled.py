"""What is told while the compiler runs."""

import io
import threading

import pytest
import torch
from rich.console import Console

from fullshard.program.speed import compiled, watch_compiling
from fullshard.program.train import ConsoleSink


def test_the_compiler_gives_signs_of_life_from_its_begin_until_it_ends(monkeypatch):
    monkeypatch.setattr(compiled, "TICK_S", 0.01)
    told, running, thrice = [], [], threading.Event()

    def alive(so_far):
        running.append(so_far)
        if len(running) == 3:
            thrice.set()

    def backend(graph, _):
        assert thrice.wait(60)
        return graph.forward

    torch._dynamo.reset()
    with watch_compiling(told.append, alive):
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
        seen = len(running)
        assert [one.graphs for one in running[:3]] == [0, 0, 0]
        assert [one.seconds for one in running[:3]] == sorted(one.seconds for one in running[:3])
        assert told[-1].graphs == 1
        assert told[-1].seconds >= running[2].seconds > 0
    assert len(running) <= seen + 1  # one may be on its way
    assert "compiling" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(("calls", "lines"), [([0.0, 4.0, 8.0, 12.0, 16.0], 3), ([0.0, 1.0, 2.0], 1)])
def test_without_a_terminal_the_first_line_comes_at_once_and_no_gap_is_longer_than_ten_seconds(
    monkeypatch, calls, lines
):
    text, now = io.StringIO(), 0.0
    monkeypatch.setattr("fullshard.program.train.reporting.sinks.time.monotonic", lambda: now)
    sink = ConsoleSink(Console(file=text, width=200))
    for now in calls:
        sink.compiling(0, now)
    assert len(text.getvalue().splitlines()) == lines
