"""What a run saved in a checkpoint, checked, and the meaning that its settings had when it began."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import ceil, isfinite
from typing import Any, Literal

from fullshard.errors import CheckpointError
from fullshard.program.config import RunConfig, options
from fullshard.state.storage import (
    Place,
    changed_small_files,
    instead_of,
    read_completion,
    read_index,
    read_json,
    shown,
)

EVALUATION_NAME = "evaluation.json"
"""File that an evaluation after a checkpoint's step adds to the checkpoint: the run so far, with the evaluation."""


@dataclass(frozen=True)
class Rules:
    """What settings mean in a run: as in this version, or as in the earlier one that began it."""

    # parameters with weight decay: by names, as in Hugging Face's Trainer, or those with two or more dimensions
    weight_decay: Literal["names", "dimensions"] = "names"
    # what limits the steps if ``training.max_steps`` is set: that alone, or the epochs too
    steps: Literal["max_steps", "smaller"] = "max_steps"

    @classmethod
    def of(cls, values: Mapping[str, Any] | None) -> Rules:
        """Return the rules of a run that continues with these values of a checkpoint; None: it starts here."""
        if values is None:
            return cls()
        return cls(**values["rules"]) if "rules" in values else _EARLIER

    def as_values(self) -> dict[str, Any]:
        """Return the values that :meth:`of` reads."""
        return asdict(self)

    def settled(self, config: RunConfig, steps_per_epoch: int) -> RunConfig:
        """Return the settings with the limit on steps that holds: without ``max_steps`` where epochs end earlier."""
        training = config.training
        epochs = ceil(steps_per_epoch * training.num_train_epochs)
        if self.steps == "max_steps" or training.max_steps is None or training.max_steps <= epochs:
            return config
        return config.model_copy(update={"training": training.model_copy(update={"max_steps": None})})


THIS_VERSION = Rules()
"""The rules of runs that begin now."""

_EARLIER = Rules(weight_decay="dimensions", steps="smaller")
"""The rules of runs whose checkpoints record none."""


def read_values(path: Place) -> tuple[int, Mapping[str, Any]]:
    """Return step and values of a run's checkpoint.

    Raises:
        CheckpointError: It is damaged, or was not saved by a run.
    """
    index = read_index(path)
    values = index.values
    if "settings" not in values:
        raise CheckpointError(f"{path} was not saved by fullshard train: it has no settings of a run.")
    rows, scaler = values.get("group_rows"), values.get("scaler")
    numbers = [value for value in (scaler or {}).values() if isinstance(value, float)] if _is_object(scaler) else []
    problems = {
        "settings": not isinstance(values["settings"], Mapping),
        "record": not isinstance(values.get("record"), Mapping),
        "group_rows": type(rows) is not int or rows < 1,
        "rules": "rules" in values and not _are_rules(values["rules"]),
        "scaler": not _is_object(scaler) or not all(isfinite(value) for value in numbers),
    }
    wrong = [name for name, is_wrong in problems.items() if is_wrong]
    if wrong:
        raise CheckpointError(
            f"{path / 'index.json'} has values that no run saves: {wrong[0]} is {shown(values.get(wrong[0]))}. "
            f"{instead_of(path)}"
        )
    # Checkpoints of older versions, which had only AdamW, tokenized first and knew quotes of CSV alone, do not name
    # these. Whether files without such quotes give other rows now is seen by the rows' hash.
    older = {key: option.before for key, option in options().items() if option.before is not None}
    settings = {**older, **values["settings"]}
    return index.step, {**values, **_added_values(path), "settings": settings}


def _added_values(path: Place) -> Mapping[str, Any]:
    """Return what the evaluation after a complete checkpoint's step added to it."""
    # A file that a killed run wrote but did not list is not part of the checkpoint.
    done = read_completion(path)
    if EVALUATION_NAME not in done.files:
        return {}
    try:
        for name, text in changed_small_files(path, done):
            if name == EVALUATION_NAME:
                raise ValueError(text)
        return {"record": read_json(path / EVALUATION_NAME)["record"]}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path / EVALUATION_NAME} cannot be read: {error}. {instead_of(path)}") from error


def _are_rules(value: object) -> bool:
    """Return whether a value is what :meth:`Rules.as_values` returns."""
    decay, steps = ("names", "dimensions"), ("max_steps", "smaller")
    return value in [{"weight_decay": one, "steps": other} for one in decay for other in steps]


def _is_object(value: object) -> bool:
    """Return whether a value is an object or null."""
    return value is None or isinstance(value, Mapping)
