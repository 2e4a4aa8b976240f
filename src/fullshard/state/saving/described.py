"""Checks before a training state is saved, and its description."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import isnan
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fullshard.core.comm import Mesh, together_in_background
from fullshard.core.engine import mesh_of, units, unreduced
from fullshard.errors import CheckpointError
from fullshard.state.storage import (
    Base,
    Index,
    Keep,
    Lock,
    Place,
    SaveJob,
    SavePlan,
    as_json,
    begin,
    commit_save,
    read_part,
    write_part,
)
from fullshard.version import __version__


@dataclass(frozen=True)
class SaveReport:
    """A committed checkpoint."""

    path: Place  # its directory
    step: int  # optimizer steps taken
    nbytes: int  # bytes of tensors that this rank wrote
    seconds: float  # from the start of the save to its commit; on ranks other than 0 to the end of their own file
    stall_seconds: float  # time during which ``save`` and ``wait`` blocked training on this rank


def require_between_steps(ranks: Mesh, model: nn.Module, step: int) -> None:
    """Check that the model is between two steps and on these ranks; no communication.

    Raises:
        CheckpointError: The state cannot be saved as it is.
    """
    if ranks.size != mesh_of(model).size:
        raise CheckpointError(
            f"The model is on {mesh_of(model).size} ranks and these checkpoints are on {ranks.size}. Pass the "
            "same ranks to both."
        )
    waiting = unreduced(model)
    if waiting:
        raise CheckpointError(
            f"Gradients of {len(waiting)} units are not reduced yet (no_sync or no_all_reduce), the first is "
            f"{waiting[0]}; a checkpoint would lose them. Save after the optimizer's step."
        )
    if not isinstance(step, int) or step < 0:
        raise CheckpointError(f"step must be a number of optimizer steps, an int of at least 0; got {step!r}.")


def index_of(
    model: nn.Module, step: int, values: Mapping[str, Any], metric: float | None, keep: Keep, base: Base | None = None
) -> Index:
    """Return a checkpoint's index without its tensors; any rank, no communication.

    Raises:
        CheckpointError: JSON cannot hold ``values``.
    """
    if metric is not None:
        metric = None if isnan(metric) else float(metric)
    versions = {"fullshard": __version__, "torch": torch.__version__, "python": platform.python_version()}
    table = [f"{row.unit}: {row.kind}, {row.tensors} tensors" for row in units(model).rows]
    greater = None if metric is None else keep.greater_is_better
    plain = as_json(values)
    size = mesh_of(model).size
    return Index(step, size, metric, plain, (), {}, versions, table, greater_is_better=greater, base=base)


def begin_files(ranks: Mesh, job: SaveJob, lock: Lock | None, assets: Callable[[Path], None]) -> None:
    """Make the directory and write the small files by ``assets``, on rank 0; every rank calls it.

    Args:
        ranks: All ranks of the run.
        job: This rank's share of the save.
        lock: The lock of the directory, where this rank holds it.
        assets: Writes the small files into a directory.

    Raises:
        CheckpointError: Another run has the lock, rank 0 could not write, or a rank does not see what it made; on every
            rank.
    """

    def make() -> None:
        if lock is not None:
            lock.require_held()
        begin(job, assets)

    def require_shared() -> None:
        if not job.temporary.is_dir():
            raise CheckpointError(
                f"Rank {job.rank} does not see {job.temporary}, which rank 0 made. All ranks write checkpoints and "
                "need a directory that they share."
            )

    together_in_background(ranks, make if job.rank == 0 else lambda: None)
    together_in_background(ranks, require_shared)


def write_others(ranks: Mesh, job: SaveJob, plans: Mapping[int, SavePlan]) -> None:
    """Write the files of other ranks and complete the checkpoint; every rank calls it.

    Args:
        ranks: The current ranks.
        job: The save, described for all of them.
        plans: The content of each file that this rank writes.

    Raises:
        CheckpointError: The file system refused; on every rank.
    """

    def write() -> None:
        for rank, plan in plans.items():
            write_part(replace(job, rank=rank, plan=plan))

    def finish() -> None:
        if ranks.rank == 0:
            commit_save(job, [read_part(job, rank) for rank in range(job.index.world_size)])

    def told(action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            raise CheckpointError(f"Could not write to {job.temporary}: {error}.") from error

    together_in_background(ranks, lambda: told(write))
    together_in_background(ranks, lambda: told(finish))
