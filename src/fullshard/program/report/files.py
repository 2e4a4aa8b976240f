"""Reader of a run's files. Only the metrics are required: the run may still be running or have been killed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from fullshard.errors import CheckpointError
from fullshard.program.metrics import Confusion
from fullshard.program.train.reporting.reports import TRACE_NAME, StepTrace
from fullshard.program.train.reporting.sinks import METRICS_NAME, PREDICTIONS_NAME, RUN_NAME, SUMMARY_NAME

T = TypeVar("T")

Record = dict[str, Any]


@dataclass(frozen=True)
class RunFiles:
    """The files of one run."""

    directory: Path  # its ``output_dir``
    steps: tuple[Record, ...]  # records of steps in the metrics file, in order
    evaluations: tuple[Record, ...]  # records of evaluations, in order
    checkpoints: tuple[Record, ...]  # records of checkpoints, in order
    run: Record = field(default_factory=dict)  # facts written at the start of the run; empty if the file is missing
    summary: Record = field(default_factory=dict)  # facts written at its end; empty if the file is missing
    predictions: tuple[Record, ...] = ()  # the best model's predictions on held-out rows
    trace: StepTrace | None = None  # the recorded step, or None
    missing: Mapping[str, str] = field(default_factory=dict)  # for each file that is missing or unreadable, the reason

    @property
    def finished(self) -> bool:
        """True if the run has finished."""
        return bool(self.summary)

    def fact(self, key: str) -> Any:
        """Return a fact written at the start or the end of the run, or None."""
        return self.run.get(key, self.summary.get(key))

    @property
    def best(self) -> Record | None:
        """The evaluation of the best model."""
        kept = [one for one in self.evaluations if one.get("is_best")]
        return kept[-1] if kept else None

    @property
    def confusion(self) -> Confusion | None:
        """The best model's confusion matrix."""
        values = self.summary.get("confusion") or (self.best or {}).get("confusion")
        return Confusion.from_values(values) if values else None


def read_run(directory: Path) -> RunFiles:
    """Read the files of a run. Any process can call it.

    Raises:
        CheckpointError: There are no metrics, or they cannot be read.
    """
    path = directory / METRICS_NAME
    if directory.is_file():
        run = next((one for one in directory.parents if (one / METRICS_NAME).is_file()), Path("runs/mine"))
        raise CheckpointError(f"{directory} is a file; the output_dir of a run is expected, such as {run}.")
    if not path.is_file():
        raise CheckpointError(
            f"{directory} has no {METRICS_NAME}, which every run writes from its first step. Name the output_dir of a "
            "run that `fullshard train` has started."
        )
    try:
        records = _lines(path)
    except OSError as error:
        raise CheckpointError(f"Could not read {path}: {error}.") from error
    missing: dict[str, str] = {}

    def tried(name: str, read: Callable[[Path], T], otherwise: T) -> T:
        try:
            return read(directory / name)
        except FileNotFoundError:
            missing[name] = f"There is no {name}."
        except OSError as error:
            missing[name] = f"{name} could not be read: {error}."
        except (ValueError, KeyError, TypeError) as error:
            missing[name] = f"{name} is not in the format of a run: {error!r}."
        return otherwise

    def of_kind(kind: str) -> tuple[Record, ...]:
        return tuple(record for record in records if record.get("kind") == kind)

    return RunFiles(
        directory=directory,
        steps=of_kind("step"),
        evaluations=of_kind("evaluation"),
        checkpoints=of_kind("checkpoint"),
        run=tried(RUN_NAME, _object, {}),
        summary=tried(SUMMARY_NAME, _object, {}),
        predictions=tried(PREDICTIONS_NAME, lambda path: tuple(_lines(path)), ()),
        trace=tried(TRACE_NAME, lambda path: StepTrace.from_dict(_object(path)), None),
        missing=missing,
    )


def _object(path: Path) -> Record:
    values = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise TypeError(f"an object was expected, not {type(values).__name__}")
    return values


def _lines(path: Path) -> list[Record]:
    """Read the objects of a JSON Lines file; invalid lines, such as the last one of a killed run, are skipped."""
    found: list[Record] = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                found.append(record)
    return found
