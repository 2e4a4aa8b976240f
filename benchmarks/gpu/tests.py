"""Stage ``tests``: the tests marked gpu, a pytest process for each file, what unlocks most first.

Nothing of pytest's configuration in pyproject.toml is needed but the marks and the path, so plugins may be missing. A
file that outlasts its time has its processes aborted, innermost first: each prints where its threads are, and pytest
goes on with the file's other tests.
"""

import ast
import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as Xml
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu import ROOT
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.record import Case, Lacking

ORDER = {
    "tests/unit/comm/test_device.py": (),
    "tests/gpu/test_engine_gpu.py": (),
    "tests/gpu/test_staged_gpu.py": (),
    "tests/gpu/test_optimizers_gpu.py": (),
    "tests/gpu/test_compat_gpu.py": ("accelerate", "peft", "pydantic", "rich", "yaml"),
    "tests/gpu/test_train_gpu.py": ("pydantic", "rich", "yaml"),
}
"""Files, where they exist, and libraries without which none of their tests can pass."""
LIMIT_S = 300.0
LAST_WORDS_S = 10.0
"""Time that processes get to print their stacks, and pytest to write its results after the last."""
SHOWN = 3000


def files() -> dict[str, Sequence[str]]:
    """Return the files with tests marked gpu: those of ``ORDER``, then others."""
    marked = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    there = [str(path.relative_to(ROOT)) for path in marked]
    return {name: ORDER.get(name, ()) for name in [*ORDER, *there] if name in there}


def gpu_tests(file: str) -> list[str]:
    """Return the names of a file's functions marked gpu, or of all its tests if the file is."""
    tree = ast.parse((ROOT / file).read_text())
    tests = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    if any(isinstance(node, ast.Assign) and "mark.gpu" in ast.unparse(node) for node in tree.body):
        return [node.name for node in tests]
    return [node.name for node in tests if any("mark.gpu" in ast.unparse(mark) for mark in node.decorator_list)]


def cases(machine: Machine) -> list[Case]:
    """Return a case for each file."""
    return [Case(name, partial(_run, name, needs), limit_s=LIMIT_S) for name, needs in files().items()]


def _run(name: str, needs: Sequence[str], limit_s: float) -> dict[str, Any]:
    missing = [library for library in ("pytest", *needs) if importlib.util.find_spec(library) is None]
    if missing:
        raise Lacking(f"{', '.join(missing)} not installed, which its tests need")
    with tempfile.TemporaryDirectory() as scratch:
        results, output = Path(scratch) / "results.xml", Path(scratch) / "output"
        late = _pytest(name, results, output, limit_s)
        text = output.read_text(errors="replace")
        outcomes = outcomes_of(results) if results.exists() else outcomes_in(text)
    figures: dict[str, Any] = {"tests": outcomes, "aborted_after_s": late}
    bad = [test for test, found in outcomes.items() if found["outcome"] == "failed"]
    if bad or late or not outcomes:
        dump = text.find("Fatal Python error")
        figures["output"] = text[-SHOWN:] if dump < 0 else text[dump:][:SHOWN]
        figures["failed"] = f"{len(bad)} of {len(outcomes)} tests failed" + (", aborted" if late else "")
    return figures


def _pytest(name: str, results: Path, output: Path, limit_s: float) -> float | None:
    """Run pytest on a file; return the seconds after which its processes were aborted, or None."""
    options = ["addopts=", "filterwarnings=default", "timeout=0", f"faulthandler_timeout={limit_s / 2:.0f}"]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "--import-mode=importlib", "-p", "no:cacheprovider"]
    command += [word for option in options for word in ("-o", option)] + [f"--junitxml={results}", name]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
        "PYTHONFAULTHANDLER": "1",
    }
    with output.open("w") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        began, late = time.monotonic(), None
        try:
            process.wait(max(1.0, limit_s - 2 * LAST_WORDS_S))
        except subprocess.TimeoutExpired:
            late = round(time.monotonic() - began, 1)
            _abort(process)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return late


def _abort(process: subprocess.Popen[bytes]) -> None:
    """Abort what pytest started, innermost first; then pytest, if it does not end by itself."""
    for pid in reversed(descendants(process.pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGABRT)
    try:
        process.wait(LAST_WORDS_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LAST_WORDS_S)


def descendants(pid: int) -> list[int]:
    """Return the processes that ``pid`` started, and those that they did; parents come first."""
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            after_name = status.read_text().rpartition(")")[2].split()
            children.setdefault(int(after_name[1]), []).append(int(status.parent.name))
    found, unseen = [], [pid]
    while unseen:
        unseen = [child for parent in unseen for child in children.get(parent, [])]
        found += unseen
    return found


def outcomes_in(output: str) -> dict[str, dict[str, Any]]:
    """Return each test's outcome from what pytest printed before it was aborted."""
    outcomes: dict[str, dict[str, Any]] = {}
    for name, outcome in re.findall(r"^\S+::(.+?) (PASSED|FAILED|ERROR|SKIPPED)?", output, re.MULTILINE):
        words = {"PASSED": "passed", "SKIPPED": "skipped"}
        outcomes[name] = {"outcome": words.get(outcome, "failed"), "message": "" if outcome else "aborted"}
    return outcomes


def outcomes_of(results: Path) -> dict[str, dict[str, Any]]:
    """Return each test's outcome, seconds and, if it did not pass, the message, from pytest's JUnit file."""
    outcomes = {}
    for case in Xml.parse(results).getroot().iter("testcase"):
        found: dict[str, Any] = {"outcome": "passed", "seconds": round(float(case.get("time", "0")), 2)}
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                found["outcome"] = "skipped" if child.tag == "skipped" else "failed"
                found["message"] = (child.get("message") or child.text or "")[:SHOWN]
        outcomes[case.get("name", "?")] = found
    return outcomes
