"""What a tuning has measured so far, on disk: ranks that ran out of memory start again and go on from there."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fullshard.core.comm import Comm
from fullshard.program.train.setup.tuned import Setting
from fullshard.program.tune.candidates import Candidate
from fullshard.program.tune.halving import Measured
from fullshard.state.storage import write_text

LOST = ".lost"
"""Suffix of the files of what a rank could not measure, one for each."""

BEGUN = ".begun"
"""Suffix of the file that names the candidate that is being measured: the system may kill a rank without a word."""

OUT_OF_MEMORY = "out of memory: "
"""Mark in the reason of a candidate for which memory ran out."""

YOUNG_S = 3600.0
"""Age up to which an earlier tuning's journal is continued: later the machine may be in another state."""


def lost_files(path: Path) -> list[Path]:
    """Return the files on this machine that say what could not be measured."""
    return sorted(path.parent.glob(f"{path.name}.*{LOST}"))


def lose_begun(directory: Path) -> bool:
    """Record the candidate that was being measured as lost, after a rank was killed; return whether there was one."""
    found = [(file, *pair) for file in directory.glob(f"*{BEGUN}") for pair in _read(file).items()]
    for file, candidate, _ in found:
        why = f"{OUT_OF_MEMORY}a rank was killed in it, as the system does where memory runs out"
        write_text(file.with_suffix(f".{time.time_ns()}{LOST}"), json.dumps({candidate: why}))
        file.unlink()
    return bool(found)


class Journal:
    """Results in the order in which they were measured; every rank makes it, with the same path on its machine.

    A tuning measures the same candidates in the same order again after a restart, and takes what is recorded.
    """

    def __init__(self, path: Path, comm: Comm) -> None:
        """Read what an earlier attempt left: the results of rank 0, and what was lost on any machine."""
        self._path, self._comm = path, comm
        kept = _read(path) if comm.rank == 0 else {}
        lost = [pair for file in lost_files(path) for pair in _read(file).items()]
        everyone = comm.all_gather_object((kept, lost))
        self.values: dict[str, Any] = {"measured": {}, "plain": {}, "wrong": {}, **everyone[0][0]}
        every = [pair for _, of_rank in everyone for pair in of_rank]
        # Ranks that lost another one in a collective fail too: memory that ran out is the cause.
        self._lost = dict(sorted(reversed(every), key=lambda pair: OUT_OF_MEMORY in pair[1]))
        self._taken: dict[str, int] = {}

    def take(self, candidate: Candidate) -> Measured | str | None:
        """Return the next recorded result of a candidate; None if it was not measured yet."""
        name = str(candidate)
        if name in self._lost:
            return self._lost[name]
        place, recorded = self._taken.get(name, 0), self.values["measured"].get(name, [])
        if place >= len(recorded):
            return None
        self._taken[name] = place + 1
        return _measured(recorded[place])

    def has(self, candidate: Candidate) -> bool:
        """Return whether :meth:`take` would return a result."""
        name = str(candidate)
        return name in self._lost or self._taken.get(name, 0) < len(self.values["measured"].get(name, []))

    def begin(self, candidate: Candidate) -> None:
        """Note which candidate is measured from here on, until :meth:`add`; every rank calls it, and rank 0 writes."""
        if self._comm.rank == 0:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self._begun, json.dumps({str(candidate): ""}))

    @property
    def _begun(self) -> Path:
        return self._path.with_name(f"{self._path.name}{BEGUN}")

    def add(self, candidate: Candidate, result: Measured | str) -> None:
        """Record a result; every rank calls it, and rank 0 writes."""
        name = str(candidate)
        recorded = self.values["measured"].setdefault(name, [])
        recorded.append(result if isinstance(result, str) else asdict(result))
        self._taken[name] = len(recorded)
        if self._comm.rank == 0:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self._path, json.dumps(self.values))
            self._begun.unlink(missing_ok=True)

    def lose(self, candidate: Candidate, why: str) -> None:
        """Record that a candidate cannot be measured; the rank that failed calls it, alone."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_text(self._path.with_name(f"{self._path.name}.{time.time_ns()}{LOST}"), json.dumps({str(candidate): why}))

    def remove(self) -> None:
        """Remove this machine's files, at the end."""
        for file in (self._path, self._begun, *lost_files(self._path)):
            with contextlib.suppress(OSError):
                file.unlink()


def _read(path: Path) -> dict[str, Any]:
    try:
        young = time.time() - path.stat().st_mtime < YOUNG_S
        return json.loads(path.read_text(encoding="utf-8")) if young else {}
    except (OSError, ValueError):
        return {}


def _measured(recorded: Any) -> Measured | str:
    if isinstance(recorded, str):
        return recorded
    setting = recorded["setting"]
    setting = Setting(**{**setting, "ways": tuple(setting["ways"])})
    return Measured(**{**recorded, "setting": setting, "steps_s": tuple(recorded["steps_s"])})
