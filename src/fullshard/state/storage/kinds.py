"""The kinds of path: a checkpoint, a directory of checkpoints, a run, a model, or a weight file."""

from __future__ import annotations

import contextlib
import re
from enum import Enum

from fullshard.errors import CheckpointError
from fullshard.state.storage.backend import backend_of
from fullshard.state.storage.completion import COMPLETE_NAME
from fullshard.state.storage.index import INDEX_NAME
from fullshard.state.storage.object_path import ObjectPath, Place
from fullshard.state.storage.weight_files import INDEX_SUFFIX, WEIGHTS_IN_DIRECTORY

CHECKPOINTS_NAME = "checkpoints"
"""Name of the directory of checkpoints inside a run's directory."""

FINISHED_NAME = "finished.json"
"""File in the directory of the checkpoints that marks a finished run."""

ADAPTER_NAME = "adapter_model.safetensors"
"""Name of the weight file in a directory written by peft."""

MODEL_WEIGHTS = (*WEIGHTS_IN_DIRECTORY, ADAPTER_NAME)
"""A directory that holds one of these files is a model's."""

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", INDEX_SUFFIX)
"""Suffixes of weight files."""

_UNFINISHED = re.compile(r"best.*\.(tmp|old|next|last|lost)")
_RUN_FILES = ("metrics.jsonl", "summary.json")


class Kind(Enum):
    """The kind of a path."""

    CHECKPOINT = "checkpoint"
    CHECKPOINTS = "checkpoints"
    RUN = "run"
    MODEL = "model"
    WEIGHTS = "weights"


def kind_of(path: Place) -> Kind:
    """Return the kind of a directory or file, judged by file names only; any rank.

    In an object store it is a checkpoint or a directory of checkpoints.

    Raises:
        CheckpointError: The path does not exist, or is of no known kind.
    """
    if not path.exists():
        raise CheckpointError(
            f"There is no {path}. Give a run's directory, its {CHECKPOINTS_NAME} directory, one checkpoint (step-…), a "
            "model's directory or a weight file."
        )
    if isinstance(path, ObjectPath):
        return _kind_of_prefix(path)
    if path.is_file():
        if path.name.endswith(WEIGHT_SUFFIXES):
            return Kind.WEIGHTS
        raise CheckpointError(
            f"{path} is not a weight file (*{', *'.join(WEIGHT_SUFFIXES)}). Give one, or a directory: a run's, its "
            f"{CHECKPOINTS_NAME}, one checkpoint (step-…) or a model's{_around(path)}."
        )
    if re.match(r"step-\d{8,}", path.name) or (path / COMPLETE_NAME).exists() or (path / INDEX_NAME).exists():
        return Kind.CHECKPOINT
    if (path / CHECKPOINTS_NAME).is_dir() or any((path / name).exists() for name in _RUN_FILES):
        return Kind.RUN
    if any((path / name).exists() for name in MODEL_WEIGHTS):
        return Kind.MODEL
    if path.name == CHECKPOINTS_NAME or any(path.glob("step-*")):
        return Kind.CHECKPOINTS
    raise CheckpointError(
        f"{path} is nothing that fullshard writes or reads: it has no {CHECKPOINTS_NAME} or step-… directory, and no "
        f"weights ({', '.join(MODEL_WEIGHTS)})."
    )


def _kind_of_prefix(path: ObjectPath) -> Kind:
    names = set(path.sizes())
    if COMPLETE_NAME in names or INDEX_NAME in names or path.name.startswith("step-"):
        return Kind.CHECKPOINT
    if any(name.startswith("step-") for name in names):
        return Kind.CHECKPOINTS
    raise CheckpointError(
        f"{path} has no step-… checkpoint. Of an object store only checkpoints are read; copy a run or a model to a "
        "disk first."
    )


def _around(file: Place) -> str:
    """Return a hint at the directory that the user may have meant by naming a file in it."""
    with contextlib.suppress(CheckpointError):
        return f"; it is in {file.parent}, a {kind_of(file.parent).value.removesuffix('s')}"
    return ""


def checkpoints_in(directory: Place) -> list[Place]:
    """Return everything with a checkpoint's name, complete or damaged, by step; any rank."""
    return backend_of(directory).candidates(directory)


def models_in(run: Place) -> list[Place]:
    """Return the models that a run has written: the best ones and, at its end, the one in its directory; any rank."""
    kept = sorted(path for path in run.glob("best*") if path.is_dir() and not _UNFINISHED.fullmatch(path.name))
    return [path for path in [*kept, run] if any((path / name).exists() for name in MODEL_WEIGHTS)]


def unfinished_in(directory: Place) -> list[Place]:
    """Return directories being written, replaced or deleted, or left so by a killed process; any rank."""
    return backend_of(directory).unfinished(directory)


def set_aside_in(directory: Place) -> list[Place]:
    """Return damaged checkpoints that were set aside when a run went back to an earlier one; any rank."""
    return backend_of(directory).aside(directory)
