"""The card of a finished run, written anew from its files: for a merged model, or without texts of rows."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from fullshard.errors import CheckpointError
from fullshard.program.train.reporting.card_curves import CURVES_NAME
from fullshard.program.train.reporting.card_facts import Run
from fullshard.program.train.reporting.reports import Prediction, RankMemory, RunStart, RunSummary, SetFacts
from fullshard.program.train.reporting.sinks import PREDICTIONS_NAME, RUN_NAME, SUMMARY_NAME
from fullshard.state.storage import read_json


def recorded_facts(directory: Path, repo: str, *, merged: bool, texts: bool) -> Run:
    """Read what the card of a finished run states from the run's files; one process.

    Args:
        directory: The run's ``output_dir``.
        repo: The repository that the card is for.
        merged: True if the adapter was merged into its base.
        texts: True if the card may contain texts of rows.

    Raises:
        CheckpointError: A file is missing, damaged, or of an earlier version of fullshard.
    """
    try:
        start, end = (_object(directory / name) for name in (RUN_NAME, SUMMARY_NAME))
        # A card shows neither of them, and reading them needs their own classes.
        sets = tuple(SetFacts(**one) for one in start.get("sets", ()))
        start |= {"flops": None, "plan": None, "sets": sets, "output_dir": str(directory)}
        predictions = tuple(recorded_predictions(directory))
        memory = tuple(RankMemory(**one) for one in end["memory"])
        end |= {"memory": memory, "predictions": predictions, "confusion": None, "output_dir": str(directory)}
        curves = CURVES_NAME if (directory / CURVES_NAME).exists() else None
        return Run(RunStart(**start), RunSummary(**_known(end)), merged=merged, texts=texts, curves=curves, repo=repo)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"The card of {directory} cannot be made from its {RUN_NAME} and {SUMMARY_NAME}: {error!r}. They are "
            "damaged, or of another version of fullshard: use the one that trained the run."
        ) from error


def recorded_predictions(directory: Path) -> list[Prediction]:
    """Return the predictions of a finished run; empty if it has none.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is damaged.
        KeyError: The file is damaged.
    """
    path = directory / PREDICTIONS_NAME
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    records = [json.loads(line) for line in lines if line]
    return [Prediction(one["input"], one["prediction"], tuple(one["references"])) for one in records]


def _object(path: Path) -> dict[str, Any]:
    values = read_json(path)
    if not isinstance(values, dict):
        raise ValueError(f"{path} is not a JSON object")
    return values


def _known(values: dict[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(RunSummary)}
    return {name: value for name, value in values.items() if name in names}
