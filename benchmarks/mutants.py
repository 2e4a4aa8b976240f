"""Mutation testing: do the fast tests notice small changes of the engine's step and of the layout? (make mutants)

Each mutant is one change of one line: a comparison turned, an integer moved by one, ``and`` for ``or``, a condition
negated, a statement dropped, True for False, None returned. Which tests run which lines is recorded once; a mutant
then meets only those that run its statement, quick and narrow ones first, until one fails. Records and outcomes are
kept in ``--out``, so an interrupted run continues where it was.
"""

from __future__ import annotations

import argparse
import ast
import copy
import hashlib
import json
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from mutant_tests import OUTPUT, Chosen, Recorder, import_all, in_fork

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("src/fullshard/core/engine/step", "src/fullshard/core/layout")
TESTS = (
    *("tests/unit/layout", "tests/unit/engine", "tests/unit/optim", "tests/unit/shards", "tests/unit/comm"),
    *("tests/sim", "src/fullshard/core/layout"),  # the layout has examples in its docstrings
)
ROUNDS_S = (
    3.0,
    30.0,
    float("inf"),
)  # seconds of tests in each fork: most mutants end in the first, which collects little
TURNED: dict[type, type] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In},
}


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what may stand in ``node``'s place."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        other = copy.copy(node)
        other.ops = [TURNED[type(node.ops[0])]()]
        yield other
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield from (ast.Constant(node.value + 1), ast.Constant(node.value - 1))
    elif isinstance(node, (ast.If, ast.IfExp)):
        other = copy.copy(node)
        other.test = ast.UnaryOp(ast.Not(), node.test)
        yield other
    elif isinstance(node, ast.Return) and node.value is not None:
        yield ast.Return(ast.Constant(None))
    elif isinstance(node, (ast.Assign, ast.AugAssign, ast.Delete, ast.Raise)) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ):
        yield ast.Pass()


@dataclass(frozen=True)
class Place:
    """Where a node stands."""

    parent: ast.AST
    field: str
    index: int | None
    function: str
    statement: ast.stmt  # the innermost one around the node

    def put(self, node: ast.AST) -> None:
        """Have ``node`` here."""
        if self.index is None:
            setattr(self.parent, self.field, node)
        else:
            getattr(self.parent, self.field)[self.index] = node

    def lines(self) -> set[int]:
        """Return the lines of the statement; of one with a body, those before the body."""
        body, last = getattr(self.statement, "body", None), self.statement.end_lineno or 0
        if body and not isinstance(self.statement, ast.FunctionDef):
            last = max(self.statement.lineno, body[0].lineno - 1)
        return set(range(self.statement.lineno, last + 1))


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the functions that stand in no other function, with their class."""
    todo: list[tuple[str, ast.AST]] = [("", one) for one in tree.body]
    while todo:
        before, one = todo.pop(0)
        if isinstance(one, ast.FunctionDef):
            yield before + one.name, one
        elif isinstance(one, ast.ClassDef):
            todo += ((f"{before}{one.name}.", inner) for inner in one.body)


def code_of(name: str, function: ast.FunctionDef) -> Iterator[tuple[Place, ast.AST]]:
    """Yield everything inside a function but annotations, docstrings and texts."""
    stack: list[tuple[ast.AST, ast.stmt]] = [(function, function)]
    while stack:
        one, statement = stack.pop()
        for field, value in ast.iter_fields(one):
            if field in ("annotation", "returns", "decorator_list") or isinstance(one, ast.JoinedStr):
                continue
            for index, child in enumerate(value) if isinstance(value, list) else ((None, value),):
                if isinstance(child, ast.AST):
                    inner = child if isinstance(child, ast.stmt) else statement
                    stack.append((child, inner))
                    yield Place(one, field, index, name, inner), child


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    path: str
    tree: ast.Module
    place: Place
    node: ast.AST
    other: ast.AST
    number: int  # among equal changes of one function

    @property
    def key(self) -> str:
        """Return file, function and the change: what stays while other lines of the file change."""
        return f"{self.path}: {self.place.function}: {_change(self.node, self.other)} [{self.number}]"

    @property
    def line(self) -> int:
        """Return the line of the change."""
        return getattr(self.node, "lineno", self.place.statement.lineno)

    def source(self) -> str:
        """Return the changed file."""
        self.place.put(ast.copy_location(self.other, self.node))
        try:
            return ast.unparse(ast.fix_missing_locations(self.tree))
        finally:
            self.place.put(self.node)


def _change(node: ast.AST, other: ast.AST) -> str:
    return " -> ".join(ast.unparse(one).splitlines()[0] for one in (node, other))


def mutants() -> list[Mutant]:
    """Return every mutant, in an order that looks random and stays when other lines change."""
    found = []
    for path in source_files():
        tree, seen = ast.parse((ROOT / path).read_text(encoding="utf-8")), Counter[tuple[str, str]]()
        for name, function in functions(tree):
            for place, node in code_of(name, function):
                for other in changes(node):
                    change = (name, _change(node, other))
                    seen[change] += 1
                    found.append(Mutant(path, tree, place, node, other, seen[change]))
    return sorted(found, key=lambda one: digest(one.key))


def source_files() -> list[str]:
    """Return the files that mutants change."""
    return sorted(str(file.relative_to(ROOT)) for folder in SOURCES for file in (ROOT / folder).glob("*.py"))


def digest(*texts: str) -> str:
    """Return a short hash of texts."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


class Copy:
    """A copy of the tree in which tests run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("src", "tests", "examples", "docs", "benchmarks"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)

    def write(self, path: str, text: str | None) -> None:
        """Write a changed file, or the tree's own for None."""
        file = self.folder / path
        if text is None:
            shutil.copy2(ROOT / path, file)
        else:
            file.write_text(text, encoding="utf-8")
        for compiled in file.parent.glob(f"__pycache__/{file.stem}.*"):
            compiled.unlink()  # two changes in one second, of one length, have the same mark in a compiled file

    def record(self, files: list[str]) -> dict[str, Any]:
        """Return the record of each test of ``files``: its seconds, whether it passed, and the lines it ran."""
        out = self.folder / "record.jsonl"
        out.touch()
        plugin = partial(Recorder, [self.folder / path for path in source_files()], out)
        outcome = in_fork(self.folder, files, plugin, {})
        if outcome != "survived":
            raise RuntimeError(f"The tests could not be recorded: {outcome}\n{(self.folder / OUTPUT).read_text()}")
        found = dict(map(json.loads, out.read_text(encoding="utf-8").splitlines()))
        for one in found.values():
            one["lines"] = {str(Path(path).relative_to(self.folder)): lines for path, lines in one["lines"].items()}
        return found

    def outcome(self, changed: dict[str, str], tests: dict[str, float]) -> str:
        """Return the outcome of ``tests``, from name to seconds, with changed files."""
        for path, text in changed.items():
            self.write(path, text)
        try:
            for names in rounds(tests):
                files = list(dict.fromkeys(name.split("::")[0] for name in names))
                limits = {name: 5 + 10 * tests[name] for name in names}
                outcome = in_fork(self.folder, files, partial(Chosen, names), limits)
                if outcome != "survived":
                    return outcome
            return f"survived {len(tests)} tests"
        finally:
            for path in changed:
                self.write(path, None)


def rounds(tests: dict[str, float]) -> Iterator[list[str]]:
    """Yield names of tests in order, as many at once as their seconds allow."""
    todo, ends = list(tests), iter(ROUNDS_S)
    while todo:
        end, seconds, count = next(ends), 0.0, 0
        while count < len(todo) and seconds < end:
            seconds, count = seconds + tests[todo[count]], count + 1
        yield todo[:count]
        todo = todo[count:]


class Records:
    """Which tests run which lines, from name to record, kept in a file until tests or sources change."""

    def __init__(self, path: Path) -> None:
        self.path = path
        known = json.loads(path.read_text()) if path.exists() else {}
        sources = digest(*((ROOT / one).read_text() for one in source_files()))
        self.of, self.tests = {"sources": sources}, {}
        if known.get("of", {}).get("sources") == sources:
            self.of, self.tests = known["of"], known["tests"]
        self.files = {
            str(file.relative_to(ROOT)): digest(file.read_text(encoding="utf-8"))
            for folder in TESTS
            for file in sorted((ROOT / folder).rglob("test_*.py" if folder.startswith("tests") else "*.py"))
        }

    def stale(self) -> list[str]:
        """Return the files whose tests must be recorded."""
        return [path for path, mark in self.files.items() if self.of.get(path) != mark]

    def add(self, files: list[str], found: dict[str, Any]) -> None:
        """Replace the records of ``files``."""
        self.tests = {name: one for name, one in self.tests.items() if name.split("::")[0] not in files} | found
        self.of |= {path: self.files[path] for path in files}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({"of": self.of, "tests": self.tests}))

    def covering(self, path: str, lines: set[int], limit_s: float) -> dict[str, float]:
        """Return tests that run one of ``lines``, with their seconds, in the order of :func:`ordered`.

        Args:
            path: The file of the lines.
            lines: Numbers of lines.
            limit_s: Seconds that all of them may take; the last ones are left out.
        """
        found = {
            name: one
            for name, one in self.tests.items()
            if one["passed"] and lines.intersection(one["lines"].get(path, ()))
        }
        names = ordered(found)
        ends = accumulate(found[name]["seconds"] for name in names)
        return {name: found[name]["seconds"] for name, end in zip(names, ends, strict=True) if end <= limit_s}


def ordered(tests: dict[str, Any]) -> list[str]:
    """Return names of tests in the order in which they are likely to notice a change.

    First quick ones of few lines, which are about the changed line. Then, because a change can show far from where it
    is, quick ones that together run every line that any of them runs; then the rest.
    """
    ran = {name: {(path, line) for path, all in one["lines"].items() for line in all} for name, one in tests.items()}
    rest = sorted(tests, key=lambda name: (tests[name]["seconds"] * len(ran[name]), name))
    ends = accumulate(tests[name]["seconds"] for name in rest)
    first = sum(end < ROUNDS_S[0] for end in ends)
    chosen, rest = rest[:first], rest[first:]
    left = set().union(*ran.values()).difference(*(ran[name] for name in chosen))
    while left:
        best = max(rest, key=lambda name: len(ran[name] & left) / (0.01 + tests[name]["seconds"]))
        rest.remove(best)
        chosen.append(best)
        left -= ran[best]
    return chosen + rest


_copy: Copy


def _own_copy(folder: str) -> None:
    """Make a copy for this process of the pool."""
    global _copy
    _copy = Copy(Path(tempfile.mkdtemp(dir=folder)))


def _record(files: list[str]) -> dict[str, Any]:
    return _copy.record(files)


def _outcome(changed: dict[str, str], tests: dict[str, float]) -> tuple[str, float]:
    start = time.monotonic()
    return _copy.outcome(changed, tests), round(time.monotonic() - start, 1)


def unchanged() -> dict[str, str]:
    """Return all files as mutants have them, but without a change: no comments, other lines."""
    return {path: ast.unparse(ast.parse((ROOT / path).read_text(encoding="utf-8"))) for path in source_files()}


def bring_up_to_date(records: Records, pool: ProcessPoolExecutor) -> None:
    """Record the tests of new and changed files, and see that they pass without a change."""
    stale = records.stale()
    if not stale:
        return
    print(f"recording the tests of {len(stale)} files", flush=True)
    found = pool.submit(_record, stale).result()
    for name in (name for name, one in found.items() if not one["passed"]):
        print(f"left out, because it fails while its lines are recorded: {name}", flush=True)
    passed = {name: one["seconds"] for name, one in found.items() if one["passed"] and one["lines"]}
    outcome, seconds = pool.submit(_outcome, unchanged(), passed).result()
    if outcome.startswith("killed"):
        raise SystemExit(f"The tests fail without a change: {outcome}")
    records.add(stale, found)
    print(f"{len(passed):,} tests that run the sources' lines passed in {seconds:.0f} s", flush=True)


def main() -> None:
    """Run a sample of mutants and print each one's outcome."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, default=150, help="mutants of the sample (default: 150)")
    parser.add_argument("--only", type=int, help="run at most this many more of the sample")
    parser.add_argument("--again", action="store_true", help="run those that survived again, with tests written since")
    parser.add_argument("--limit", type=float, default=60, help="seconds of tests for a mutant, or inf (default: 60)")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time (default: 1)")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "mutants.json", help="outcomes so far")
    options = parser.parse_args()
    every = mutants()
    sample = every[: options.sample]
    known = json.loads(options.out.read_text()) if options.out.exists() else {}
    marks = {one.key: digest(one.source()) for one in sample}
    known = {key: one for key, one in known.items() if key not in marks or one["of"] == marks[key]}
    todo = [one for one in sample if one.key not in known or (options.again and not killed(known[one.key]))]
    print(f"{len(every):,} mutants; {len(todo)} of a sample of {len(sample)} to run", flush=True)
    import_all()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        pool = ProcessPoolExecutor(options.jobs, get_context("fork"), _own_copy, (folder,))
        with pool:
            records = Records(options.out.with_suffix(".records.json"))
            bring_up_to_date(records, pool)
            futures = {}
            for one in todo[: options.only]:
                tests = records.covering(one.path, one.place.lines(), options.limit)
                futures[pool.submit(_outcome, {one.path: one.source()}, tests)] = one
            for future in as_completed(futures):
                one, (outcome, seconds) = futures[future], future.result()
                known[one.key] = {"outcome": outcome, "seconds": seconds, "of": marks[one.key]}
                print(f"{outcome}  {one.key}  (line {one.line}, {seconds:.0f} s)", flush=True)
                options.out.write_text(json.dumps(known, indent=1))
    report(sample, known)


def killed(one: dict[str, Any]) -> bool:
    """Return whether an outcome is that tests failed."""
    return one["outcome"].startswith("killed")


def report(sample: list[Mutant], known: dict[str, Any]) -> None:
    """Print the score and the survivors."""
    ran = [one for one in sample if one.key in known]
    survived = [one for one in ran if not killed(known[one.key])]
    print(f"{len(ran)} of {len(sample)} ran, {len(ran) - len(survived)} killed; survived:")
    for one in survived:
        print(f"  line {one.line} of {one.key} ({known[one.key]['outcome']})")


if __name__ == "__main__":
    main()
