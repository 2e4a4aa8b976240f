"""The results of a stage: one JSON file, written after every case, and the loop that runs what is not in it yet."""

import datetime
import hashlib
import json
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu import ROOT

FINISHED = ("done", "skipped")
SHORTEST_S = 20.0
"""A case is not started with less time than this left: it would be cut."""


class Lacking(Exception):
    """This machine lacks what a case needs; the message says what."""


@dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
        name: Its key in the JSON.
        work: Takes the seconds that it may use; returns figures, with a text under ``failed`` if some are missing.
        limit_s: The most it gets, however much of the stage's budget is left.
    """

    name: str
    work: Callable[[float], dict[str, Any]]
    limit_s: float = 180.0


class Record:
    """The JSON file of one stage."""

    def __init__(self, folder: Path, stage: str, *, dry: bool, machine: dict[str, Any]) -> None:
        """Read what earlier runs wrote.

        Raises:
            SystemExit: The file is of a dry run and this is not one, or the other way round.
        """
        self.path = folder / f"{stage}.json"
        self.data: dict[str, Any] = {"stage": stage, "dry": dry, "cases": {}}
        if self.path.exists():
            self.data = json.loads(self.path.read_text())
            if self.data["dry"] != dry:
                kind = "a dry run" if self.data["dry"] else "a run on a GPU"
                raise SystemExit(f"{self.path} is of {kind}: name another folder with --out.")
        self.machine = machine
        self.data["left"] = []

    @property
    def cases(self) -> dict[str, dict[str, Any]]:
        """What each case returned, with its status."""
        return self.data["cases"]

    def pending(self, names: Sequence[str], *, again: bool) -> list[str]:
        """Return the cases to run: first those never run, then those that failed or were cut."""
        if again:
            return list(names)
        new = [name for name in names if name not in self.cases]
        return new + [name for name in names if name in self.cases and self.cases[name]["status"] not in FINISHED]

    def status(self, name: str) -> str | None:
        """Return a case's status; None if it has not run."""
        return self.cases[name]["status"] if name in self.cases else None

    def put(self, name: str, status: str, seconds: float, figures: dict[str, Any], why: str = "") -> None:
        """Add a case's result and write the file."""
        self.cases[name] = {
            "status": status,
            "why": why,
            "seconds": round(seconds, 1),
            "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "source": source_digest(),
            "device": self.machine.get("name", "CPU"),
            "torch": self.machine.get("torch"),
            "figures": figures,
        }
        self.write()

    def leave(self, names: Sequence[str]) -> None:
        """Write which cases the budget did not suffice for."""
        self.data["left"] = list(names)
        self.write()

    def write(self) -> None:
        """Replace the file, so that a process killed here leaves the earlier one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self.path.with_suffix(".part")
        scratch.write_text(json.dumps(self.data, indent=1) + "\n")
        os.replace(scratch, self.path)


def run_cases(
    record: Record,
    cases: Sequence[Case],
    *,
    budget_s: float,
    again: bool,
    tell: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Run the cases that the record lacks, in their order, until the budget is spent.

    A case that the end of the budget interrupts is ``cut`` and comes first among those to repeat; one that outlasts
    its own limit has failed.
    """
    by_name = {case.name: case for case in cases}
    todo = record.pending(list(by_name), again=again)
    tell(f"{len(todo)} of {len(cases)} cases to run in {budget_s:.0f} s")
    end = clock() + budget_s
    while todo and end - clock() >= min(SHORTEST_S, budget_s / 2):
        case = by_name[todo.pop(0)]
        tell(case.name)
        began, allowed = clock(), min(case.limit_s, end - clock())
        status, figures, why = _outcome(case, allowed)
        seconds = clock() - began
        late = seconds >= allowed or figures.get("aborted_after_s") is not None
        if status == "failed" and late and allowed < case.limit_s:
            status = "cut"
        record.put(case.name, status, seconds, figures, why)
        tell(f"{case.name}: {status} in {seconds:.1f} s {why[:300]}")
    record.leave(todo)
    if todo:
        tell(f"the budget is spent; left for the next call: {', '.join(todo)}")


def _outcome(case: Case, allowed: float) -> tuple[str, dict[str, Any], str]:
    """Return the status of a case, its figures and why there are none."""
    try:
        figures = case.work(allowed)
    except Lacking as lacking:
        return "skipped", {}, str(lacking)
    except Exception as error:
        if f"{Lacking.__name__}: " in str(error):  # raised in a rank, which told it as a text
            return "skipped", {}, str(error).partition(f"{Lacking.__name__}: ")[2]
        traceback.print_exc()
        return "failed", {}, f"{type(error).__name__}: {' '.join(str(error).split())}"[:1500]
    why = figures.pop("failed", "")
    return ("failed" if why else "done"), figures, why


def source_digest() -> str:
    """Return eight digits that change with the library's source, so that figures can be told from newer code's."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "src").rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]
