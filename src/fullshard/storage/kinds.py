"""The kinds of path on disk: a checkpoint, a directory of checkpoints, a run, a model, or a weight file."""

from __future__ import annotations

import contextlib
import re
from enum import Enum
from pathlib import Path

from fullshard.errors import CheckpointError
from fullshard.storage.completion import COMPLETE_NAME
from fullshard.storage.index import INDEX_NAME
from fullshard.storage.weight_files import INDEX_SUFFIX, WEIGHTS_IN_DIRECTORY

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

_CHECKPOINT = re.compile(r"step-\d{8,}(\.old)?")
_UNFINISHED = re.compile(r"(step-\d{8,}|best.*)\.(tmp|old|next|last|lost)")
_SET_ASIDE = re.compile(r"step-\d{8,}\.damaged(\.\d+)?")
_RUN_FILES = ("metrics.jsonl", "summary.json")


class Kind(Enum):
    """The kind of a path."""

    CHECKPOINT = "checkpoint"
    CHECKPOINTS = "checkpoints"
    RUN = "run"
    MODEL = "model"
    WEIGHTS = "weights"


def kind_of(path: Path) -> Kind:
    """Return the kind of a directory or file, judged by file names only; any rank.

    Raises:
        CheckpointError: The path does not exist, or is of no known kind.
    """
    if not path.exists():
        raise CheckpointError(
            f"There is no {path}. Give a run's directory, its {CHECKPOINTS_NAME} directory, one checkpoint (step-…), a "
            "model's directory or a weight file."
        )
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


def _around(file: Path) -> str:
    """Return a hint at the directory that the user may have meant by naming a file in it."""
    with contextlib.suppress(CheckpointError):
        return f"; it is in {file.parent}, a {kind_of(file.parent).value.removesuffix('s')}"
    return ""


def checkpoints_in(directory: Path) -> list[Path]:
    """Return everything with a checkpoint's name, complete or not, by step; any rank.

    A directory that was moved aside (``.old``) counts if nothing has taken its place.
    """
    names = {path.name for path in directory.iterdir() if path.is_dir()} if directory.is_dir() else set()
    return [
        directory / name
        for name in sorted(names, key=lambda name: (len(name.removesuffix(".old")), name))
        if _CHECKPOINT.fullmatch(name) and (not name.endswith(".old") or name.removesuffix(".old") not in names)
    ]


def models_in(run: Path) -> list[Path]:
    """Return the models that a run has written: the best ones and, at its end, the one in its directory; any rank."""
    kept = sorted(path for path in run.glob("best*") if path.is_dir() and not _UNFINISHED.fullmatch(path.name))
    return [path for path in [*kept, run] if any((path / name).exists() for name in MODEL_WEIGHTS)]


def unfinished_in(directory: Path) -> list[Path]:
    """Return directories being written, replaced or deleted, or left so by a killed process; any rank."""
    if not directory.is_dir():
        return []
    found = checkpoints_in(directory)
    return sorted(p for p in directory.iterdir() if p.is_dir() and _UNFINISHED.fullmatch(p.name) and p not in found)


def set_aside_in(directory: Path) -> list[Path]:
    """Return damaged checkpoints that were renamed when a run went back to an earlier one; any rank."""
    found = directory.iterdir() if directory.is_dir() else ()
    return sorted(path for path in found if _SET_ASIDE.fullmatch(path.name))
