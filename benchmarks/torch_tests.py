"""Run torch's own tests of FSDP on the CPU: with torch's FSDP, and with only the imports changed.

    python -m benchmarks.torch_tests SOURCE 1 --out face1.jsonl     # torch.distributed.fsdp; 2: fully_shard
    python -m benchmarks.torch_tests SOURCE 1 --out face1.jsonl --only test_fsdp_core --side ours --again

SOURCE is torch's source code. A copy of the tests has another device: "cuda" becomes "cpu". Each case runs in a process
of its own, with two gloo ranks or as many as it asks for. Each result is a line in ``--out``; cases that have one are
left out the next time. The table is written beside it, as JSON. Needs the package expecttest.

A case counts if torch's FSDP passes it, with at most four ranks, and it uses no private names, counts of collectives or
tensor parallelism: in its source, or in the functions and classes of its file and of ``common_fsdp`` that it names.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import importlib.util
import inspect
import json
import os
import re
import signal
import sys
import tempfile
import time
import traceback
import unittest
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDERS = {"1": "test/distributed/fsdp", "2": "test/distributed/_composable/fsdp"}
MOST_RANKS, SECONDS = 4, 60
COMMON = "torch.testing._internal.common_fsdp"
_ARGS = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
DEVICE = (
    (r'torch\.device\(\s*"cuda",\s*(?:torch\.cuda\.current_device\(\)|[\w.]+)\s*\)', 'torch.device("cpu")'),
    (r"""f?(["'])cuda(?::[^"']*)?\1""", r"\1cpu\1"),
    (r'"nccl"|"cpu:gloo,cuda:nccl"', '"gloo"'),
    (r"torch\.cuda\.current_device\(\)", 'torch.device("cpu")'),
    (r"torch\.cuda\.device_count\(\)", 'int(__import__("os").environ["TORCH_TESTS_RANKS"])'),
    (rf"torch\.cuda\.(?:set_device|synchronize|empty_cache){_ARGS}", "None"),
    (rf"(?<!torch)\.cuda{_ARGS}", ".cpu()"),
    (r"\b(device_ids|output_device)(\"?[=:] ?)(?:\[[^\]]*\]|rank)", r"\1\2None"),
    (r"skipIf\(\s*not (?:TEST_CUDA|TEST_MULTIGPU)\b", "skipIf(False"),
    (rf"@requires_nccl(?:_version)?{_ARGS}\n", "\n"),
)
# Not FSDP's: modules, and what has no public name.
PLAIN = {"_C", "_checkpoint", "_composable", "_dynamo", "_get_default_group", "_internal", "_shard", "_tensor"}
PLAIN |= {"_sleep", "_spawn_processes", "_spawn_threads", "_HYBRID_SHARD_ZERO2"}
HIDDEN = r"distributed\.(fsdp|_composable\.fsdp)\._|_composable_state|_state_dict_utils"  # private modules
PARALLEL = {"parallelize_module", "ColwiseParallel", "RowwiseParallel", "SequenceParallel"}


def copy_tests(source: Path, face: str, folder: Path) -> list[str]:
    """Copy the face's tests and ``common_fsdp`` with another device; return the tests' module names."""
    common = source / "torch/testing/_internal/common_fsdp.py"
    tests = sorted((source / FOLDERS[face]).glob("test_*.py"))
    for path in [*tests, common]:
        text = path.read_text()
        for pattern, replacement in DEVICE:
            text = re.sub(pattern, replacement, text)
        (folder / path.name).write_text(text)
    return [path.stem for path in tests]


class Reader:
    """What a case's source uses: its own text, and what it names in its file and in ``common_fsdp``."""

    def __init__(self, folder: Path, module: str) -> None:
        trees = [ast.parse((folder / f"{name}.py").read_text()) for name in ("common_fsdp", module)]
        nodes = [list(ast.walk(tree)) for tree in trees]
        self.top: dict[Any, Any] = {getattr(one, "name", None): one for tree in trees for one in tree.body}
        self.helpers = set(nodes[0])
        self.defined, self.private = set(PLAIN), set(PARALLEL)
        for node in nodes[0] + nodes[1]:
            if isinstance(node, ast.ImportFrom):
                where = node.module or ""
                shown = "distributed" in where and not re.search(HIDDEN, where)
                names = [one for one in node.names if re.search(HIDDEN, where) or (shown and one.name[0] == "_")]
                self.private |= {one.asname or one.name for one in names}
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                self.defined |= {node.attr} if ast.unparse(node.value) == "self" else set()
            else:
                self.defined |= {getattr(node, "name", None), getattr(node, "arg", None)}

    def member(self, owner: str, name: str) -> Any:
        """Return the member ``name`` of the class ``owner`` or of a base class in these files."""
        node = self.top.get(owner)
        bases = [base.id for base in getattr(node, "bases", []) if isinstance(base, ast.Name)]
        own = [one for one in getattr(node, "body", []) if getattr(one, "name", None) == name]
        return next((one for one in (*own, *(self.member(base, name) for base in bases)) if one), None)

    def case(self, owner: str, method: str) -> tuple[int, list[str]]:
        """Return how many ranks the case asks for, at least two, and what it uses that is not public."""
        owner = owner if owner in self.top else owner.removesuffix("CPU")
        start = next(one for end in range(len(method), 4, -1) if (one := self.member(owner, method[:end])))
        asked = [int(n) for node in start.decorator_list for n in re.findall(r"lt_x_gpu\((\d)\)", ast.unparse(node))]
        found, seen = set(), set()
        todo = [start, *(self.member(owner, name) for name in ("setUp", "world_size", "process_group"))]
        while todo:
            node = todo.pop()
            if node is not None and node not in seen:
                seen.add(node)
                for part in ast.walk(node):
                    found |= {"common_fsdp " * (node in self.helpers) + name for name in self.uses(part)}
                    todo.append(self.named(part, owner))
        return max([2, *asked]), sorted(found)

    def named(self, node: ast.AST, owner: str) -> Any:
        """Return the definition that ``node`` names; of a class with tests only the member."""
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            return self.member(owner if node.value.id in ("self", "cls") else node.value.id, node.attr)
        found = self.top.get(node.id) if isinstance(node, ast.Name) else None
        names = [getattr(one, "name", "") for one in getattr(found, "body", [])]
        return None if any(name.startswith(("test", "run_subtests")) for name in names) else found

    def uses(self, node: ast.AST) -> set[str]:
        """Return what one node uses that is not public."""
        name, pattern = "", r"(?!)"
        if isinstance(node, ast.Attribute):
            name, pattern = node.attr, r"_(?!_)"
        elif isinstance(node, ast.Name):
            name, pattern = node.id, "|".join(["CommDebugMode", "patch_", *(f"{one}$" for one in self.private)])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name, pattern = node.value, r"torch\.distributed\.\S*(\._|all_|reduce)\S*$|_(fsdp|flat|handle)\S*$"
        own = name in self.defined - self.private and not re.match("CommDebugMode|patch_", name)
        return {name} if re.match(pattern, name) and not own else set()


reader = functools.cache(Reader)


def prepare(side: str, folder: Path) -> None:
    """Import what all tests share, with the names of this side."""
    torch: Any = importlib.import_module("torch")
    if side == "ours":
        importlib.import_module("fullshard.compat").redirect()
    else:  # Without a GPU torch's FSDP runs only if it is told to compute on the CPU.
        cls = importlib.import_module("torch.distributed.fsdp").FullyShardedDataParallel
        cls.__init__ = functools.partialmethod(cls.__init__, device_id=torch.device("cpu"))
    distributed: Any = importlib.import_module("torch.testing._internal.common_distributed")
    distributed.skip_if_lt_x_gpu = lambda *_args, **_kwargs: lambda function: function
    distributed.MultiProcessTestCase._spawn_processes = lambda case: case._start_processes(
        torch.multiprocessing.get_context("fork").Process  # torch is imported already
    )
    spec: Any = importlib.util.spec_from_file_location(COMMON, folder / "common_fsdp.py")
    sys.modules[COMMON] = common = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(common)
    sys.path.insert(0, str(folder))


def fork(function: Callable[..., None], *args: Any) -> int:
    """Call ``function`` in a forked process and return its id: torch is imported once for all cases."""
    if (child := os.fork()) == 0:
        try:
            function(*args)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(0)
    return child


def run_side(side: str, names: list[str], *rest: Any) -> None:
    """Run all files on one side, each in a process of its own."""
    prepare(side, rest[1])
    for name in names:
        os.waitpid(fork(run_file, side, name, *rest), 0)


def run_file(side: str, name: str, options: argparse.Namespace, folder: Path, done: set[str], until: float) -> None:
    """Run the cases of one file that have no result yet, in this process's children."""
    sys.argv = [name]
    try:
        module = importlib.import_module(name)
        classes = [cls for cls in vars(module).values() if inspect.isclass(cls) and issubclass(cls, unittest.TestCase)]
        cases = [f"{cls.__name__}.{one}" for cls in classes for one in unittest.defaultTestLoader.getTestCaseNames(cls)]
    except BaseException as error:  # Also SystemExit: some files end themselves.
        _write(options.out, case=name, side=side, result="import", line=repr(error))
        return
    if side == "ours" and options.face == "2":  # Scripts for version 2 import these names from here too.
        ours = importlib.import_module("fullshard.compat.torch_fsdp.tensor")
        for one in (module, sys.modules[COMMON]):
            vars(one).update({key: getattr(ours, key) for key in set(ours.__all__) & vars(one).keys()})
    for case in cases:
        full = f"{name}.{case}"
        if full not in done and re.search(options.only, full) and time.time() < until:
            result, line = run_case(module, case, reader(folder, name).case(*case.split("."))[0])
            _write(options.out, case=full, side=side, result=result, line=line)


def run_case(module: ModuleType, case: str, ranks: int) -> tuple[str, str]:
    """Run one case in a process group of its own; return pass, skip, fail or timeout, and the error's line."""
    with tempfile.TemporaryDirectory() as place:
        answer, began = Path(place, "answer"), time.monotonic()
        child = fork(_answer, module, case, ranks, answer)
        while os.waitpid(child, os.WNOHANG)[0] == 0 and time.monotonic() - began < SECONDS:
            time.sleep(0.05)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if answer.exists():
            return tuple(json.loads(answer.read_text()))
        return ("timeout", "") if time.monotonic() - began >= SECONDS else ("fail", "the process died")


def _answer(module: ModuleType, case: str, ranks: int, answer: Path) -> None:
    os.setsid()
    log = os.open(f"{answer}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["TORCH_TESTS_RANKS"] = str(ranks)
    for one in (module, sys.modules[COMMON]):
        vars(one).update({"DEVICE_COUNT": ranks} if hasattr(one, "DEVICE_COUNT") else {})
    found = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromName(case, module).run(found)
    wrong = [text for _, text in found.errors + found.failures]
    found.skipped += [(case, "expected to fail") for case, *_ in (*found.expectedFailures, *found.unexpectedSuccesses)]
    result = "fail" if wrong else "skip" if found.skipped else "pass"
    text = "".join([*wrong[:1], *(reason for _, reason in found.skipped)])
    lines = [line for line in text.splitlines() if re.match(r"[\w.]*(Error|Exception|Warning|Exit)\b", line)]
    answer.write_text(json.dumps((result, (lines[-1] if lines else text)[:300])))


def _write(out: Path, **row: Any) -> None:
    with out.open("a") as file:
        file.write(json.dumps(row) + "\n")


def results(out: Path) -> dict[str, dict[str, str]]:
    """Return the newest result and error line of each case on each side."""
    found: dict[str, dict[str, str]] = {}
    for line in out.read_text().splitlines() if out.exists() else []:
        row = json.loads(line)
        found.setdefault(row["case"], {}).update({row["side"]: row["result"], row["side"] + "_line": row["line"]})
    return found


def report(out: Path, folder: Path) -> None:
    """Write the table beside ``out``; print the failures among the cases that count, and the counts."""
    table: dict[str, Any] = results(out)
    for case, row in table.items():
        name, *rest = case.split(".")
        if rest:
            row["ranks"], row["uses"] = reader(folder, name).case(*rest)
            row["counts"] = row.get("torch") == "pass" and row["ranks"] <= MOST_RANKS and not row["uses"]
            if row["counts"] and row.get("ours") != "pass":
                print(f"{case}: {row.get('ours')}: {row.get('ours_line')}")
    out.with_suffix(".table.json").write_text(json.dumps(table, indent=1, sort_keys=True))
    print(f"{len(table)} cases; with torch: {dict(Counter(row.get('torch') for row in table.values()))}")
    for what, key, value in (("torch passes", "torch", "pass"), ("of these count", "counts", True)):
        some = [row for row in table.values() if row.get(key) == value]
        print(f"{what} {len(some)}; fullshard passes {sum(row.get('ours') == 'pass' for row in some)}")


def main() -> None:
    """Run what has no result yet, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("source", type=Path)
    parser.add_argument("face", choices=FOLDERS)
    parser.add_argument("--out", type=Path, required=True, help="results, a JSON line each")
    parser.add_argument("--side", choices=["torch", "ours"], help="only one side")
    parser.add_argument("--only", default="", help="a regular expression: only these cases")
    parser.add_argument("--again", action="store_true", help="run them even if they have results")
    parser.add_argument("--minutes", type=float, default=600, help="start no case after this time")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder, until = Path(place), time.time() + options.minutes * 60
        names = copy_tests(options.source, options.face, folder)
        before = results(options.out)
        workers = []
        for side in [options.side] if options.side else ["torch", "ours"]:
            done = set() if options.again else {case for case, row in before.items() if side in row}
            workers.append(fork(run_side, side, names, options, folder, done, until))
        for worker in workers:
            os.waitpid(worker, 0)
        report(options.out, folder)


if __name__ == "__main__":
    main()
