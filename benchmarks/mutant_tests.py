"""Runs tests in forks of a process that has imported torch but not fullshard, for mutants.py.

A fork imports fullshard as it is on disk at that moment, so it sees the change of a mutant, and begins in a second
where a new interpreter takes ten.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

IMPORTED = (
    *("accelerate", "datasets", "hypothesis", "numpy", "peft", "torch._dynamo"),
    *("torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "torch.testing"),
    *("transformers.models.bart.modeling_bart", "transformers.models.gpt2.modeling_gpt2"),
    *("transformers.models.llama.modeling_llama", "transformers.models.t5.modeling_t5"),
)
MEMORY = 12 << 30  # bytes of address space; a mutant that allocates without end fails, and the machine does not
COLLECTING_S = 120.0
OPTIONS = (
    *("-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", "--tb=short"),
    *("-o", "timeout=0", "--basetemp=temporary", "-W", "ignore::pytest.PytestAssertRewriteWarning"),
)
OUTPUT = "output.txt"

Tell = Callable[[str, str], None]


def import_all() -> None:
    """Import what the tests import, but not fullshard."""
    for name in IMPORTED:
        importlib.import_module(name)
    if "fullshard" in sys.modules:
        raise RuntimeError("fullshard is imported: forks would not see a mutant's change")
    gc.freeze()


class Chosen:
    """Plugin of pytest that runs the chosen tests in the given order, and tells which one runs and which one fails."""

    def __init__(self, tests: Sequence[str], tell: Tell) -> None:
        self.places = {test: place for place, test in enumerate(tests)}
        self.tell = tell

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((i for i in items if i.nodeid in self.places), key=lambda item: self.places[item.nodeid])
        if len(items) != len(self.places):
            self.tell("failed", "collection")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.tell("failed", "collection")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.tell("runs", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.tell("failed", report.nodeid)


class Recorder:
    """Plugin of pytest that runs each test in a fork of its own, and writes which lines of ``sources`` it ran.

    In forks, because a test that finds a cache or a fixture filled by an earlier test would run fewer lines.
    """

    def __init__(self, sources: Sequence[Path], out: Path, tell: Tell) -> None:
        self.lines: dict[str, set[int]] = {str(path): set() for path in sources}
        self.tracers = {path: self.tracer(lines) for path, lines in self.lines.items()}
        self.out, self.tell = out, tell

    @staticmethod
    def tracer(lines: set[int]) -> Callable[..., Any]:
        """Return a local trace function that adds to ``lines``."""

        def trace(frame: Any, event: str, argument: Any) -> Any:
            if event == "line":
                lines.add(frame.f_lineno)
            return trace

        return trace

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool:
        self.tell("runs", item.nodeid)
        pid = os.fork()
        if pid == 0:
            self.record(item)
            os._exit(0)
        os.waitpid(pid, 0)
        return True

    def record(self, item: pytest.Item) -> None:
        """Run ``item`` and append its lines, its seconds and whether it passed to the file."""

        def trace(frame: Any, event: str, argument: Any) -> Any:
            return self.tracers.get(frame.f_code.co_filename)

        start = time.monotonic()
        threading.settrace(trace)  # ranks are threads
        sys.settrace(trace)
        reports = runtestprotocol(item, log=False, nextitem=None)
        sys.settrace(None)
        seconds = round(time.monotonic() - start, 3)
        ran = {path: sorted(lines) for path, lines in self.lines.items() if lines}
        record = {"seconds": seconds, "passed": not any(one.failed for one in reports), "lines": ran}
        with self.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps([item.nodeid, record]) + "\n")


def become_tester(folder: Path) -> None:
    """Make this process, a fork, one that runs tests in ``folder``, and a group with the processes that they start."""
    os.setpgid(0, 0)
    for descriptor in (0, 1, 2):
        opened = os.open(
            folder / "output.txt" if descriptor else os.devnull, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600
        )
        os.dup2(opened, descriptor)
        os.close(opened)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.chdir(folder)
    sys.dont_write_bytecode = False  # rewriting the asserts of test files takes seconds
    os.environ |= {"PYTHONPATH": str(folder / "src"), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    sys.path[0] = str(folder / "src")  # in place of the folder of this script
    sys.argv = ["pytest"]


def in_fork(folder: Path, files: Sequence[str], plugin: Callable[[Tell], object], limits: dict[str, float]) -> str:
    """Run the tests of ``files`` that ``plugin`` lets run, and return the outcome.

    Args:
        folder: The copy of the tree.
        files: Files for pytest.
        plugin: Makes the plugin of pytest; called in the fork with a function by which it tells what happens.
        limits: Seconds of each test; one that takes longer ends the fork.

    Returns:
        ``survived``, or ``killed by`` and what.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            become_tester(folder)

            def tell(kind: str, name: str) -> None:
                os.write(writer, (json.dumps([kind, name]) + "\n").encode())

            code = pytest.main([*OPTIONS, *files], plugins=[plugin(tell)])
            tell("passed" if code in (0, 5) else "failed", "" if code in (0, 5) else f"exit code {code}")
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        os._exit(1)
    os.setpgid(pid, pid)  # here as well: whoever is first
    os.close(writer)
    outcome = watched(reader, limits)
    os.close(reader)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return outcome


def watched(reader: int, limits: dict[str, float]) -> str:
    """Return the outcome that a fork tells, or that its silence means."""
    running, limit, rest = "collection", COLLECTING_S, b""
    while select.select([reader], [], [], limit)[0]:
        new = os.read(reader, 65536)
        if not new:
            return f"killed by a crash in {running}"
        *messages, rest = (rest + new).split(b"\n")
        for kind, name in map(json.loads, messages):
            if kind == "passed":
                return "survived"
            if kind == "failed":
                return f"killed by {name}"
            running, limit = name, limits.get(name, COLLECTING_S)
    return f"killed by time in {running}"
