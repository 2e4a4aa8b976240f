"""The save of one checkpoint on one rank, in a thread of its own.

Every rank writes its file and, when that is on the disk, a small part of the index beside it. Rank 0 waits for all
parts by looking at the directory, not by a collective: training may go on, and a slow disk holds nobody up in one.
Then it writes the index, marks the checkpoint as whole, renames it to its name and deletes what is not to be kept.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fullshard.errors import CheckpointError
from fullshard.storage.atomic import commit, sibling, write_text
from fullshard.storage.index import (
    INDEX_NAME,
    Index,
    merge_tensors,
    require_covered,
    tensors_as_plain,
    tensors_from_plain,
)
from fullshard.storage.piece import SavePlan
from fullshard.storage.shard_file import shard_name, write_shard_file
from fullshard.storage.store import Keep, clear_leftovers, prune, step_directory, write_completion

_log = logging.getLogger("fullshard")

GIVEN_UP = "given up, because another rank could not write its part"
"""The outcome of a rank that is not the cause."""

_LOOK_SECONDS = 0.02
"""How often rank 0 looks for the other ranks' parts at first; later up to twenty times as long."""


@dataclass(frozen=True)
class SaveJob:
    """One rank's share of the save of one checkpoint.

    Attributes:
        directory: Where the checkpoints lie.
        rank: This rank.
        index: What is known before the tensors are written: everything but ``tensors``, ``groups`` and ``scalars``.
        plan: What this rank writes; the pieces must not change before the save is finished.
        keep: Which checkpoints outlive this one.
        ready: Returns when the pieces may be read.
        timeout_s: Longest time for the whole save.
    """

    directory: Path
    rank: int
    index: Index
    plan: SavePlan
    keep: Keep
    ready: Callable[[], None]
    timeout_s: float

    @property
    def temporary(self) -> Path:
        """Where the checkpoint is while it is written."""
        return sibling(step_directory(self.directory, self.index.step), "tmp")


def begin(directory: Path, step: int) -> None:
    """Make the empty directory that all ranks write into; on rank 0, under the lock.

    Raises:
        CheckpointError: The file system refused.
    """
    final = step_directory(directory, step)
    try:
        clear_leftovers(directory)  # also of a save that has failed: they may be what fills the disk
        sibling(final, "tmp").mkdir()
    except OSError as error:
        raise _refused(final, error) from error


class Save:
    """One checkpoint being written by this rank; made by every rank for the same step.

    Attributes:
        job: What is written, and where.
        done_bytes: Written so far.
        total_bytes: To be written by this rank.
        seconds: How long it took, when it is finished.
        reported: Whether somebody was told that it is committed.
    """

    def __init__(self, job: SaveJob) -> None:
        """Start writing."""
        self.job = job
        self.done_bytes = 0
        self.total_bytes = sum(piece.tensor.nbytes for piece in job.plan.pieces)
        self.seconds = 0.0
        self.reported = False
        self._started = time.monotonic()
        self._problem: str | None = None
        self._cancelled = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fullshard-save", daemon=True)
        self._thread.start()

    @property
    def final(self) -> Path:
        """Where the checkpoint is when it is whole."""
        return step_directory(self.job.directory, self.job.index.step)

    def poll(self, seconds: float) -> str | None:
        """Wait for at most ``seconds``.

        Returns:
            None while it is under way; ``""`` when it is done, on rank 0 that is committed; else what went wrong.
        """
        self._thread.join(seconds)
        if not self._thread.is_alive():
            return self._problem or ""
        if time.monotonic() - self._started > self.job.timeout_s + 10:
            return f"{self.final}: the disk has not answered for {self.job.timeout_s:g} s (rank {self.job.rank})."
        return None

    def cancel(self) -> None:
        """Give up: another rank has failed."""
        self._cancelled.set()

    def _run(self) -> None:
        """The thread."""
        try:
            self._write_mine()
            if self.job.rank == 0:
                self._commit()
        except OSError as error:
            self._problem = str(_refused(self.final, error))
        except CheckpointError as error:
            self._problem = str(error)
        except BaseException as error:
            self._problem = f"{self.final}: rank {self.job.rank} could not write its part: {error!r}"
        self.seconds = time.monotonic() - self._started
        if self._problem is not None:
            self._withdraw()

    def _write_mine(self) -> None:
        """This rank's file, then its part of the index, which says that the file is on the disk."""
        job = self.job
        job.ready()
        name = shard_name(job.rank, job.index.world_size)
        tensors = write_shard_file(job.temporary / name, job.plan.pieces, self._count)
        part = {"tensors": tensors_as_plain(tensors), "groups": job.plan.groups, "scalars": job.plan.scalars}
        write_text(_part_path(job, job.rank), json.dumps(part))

    def _count(self, nbytes: int) -> None:
        """Keep count, and give up where another rank has."""
        self.done_bytes += nbytes
        if self._cancelled.is_set():
            raise CheckpointError(GIVEN_UP)

    def _commit(self) -> None:
        """Rank 0: from all ranks' parts to a whole checkpoint under its name."""
        job = self.job
        parts = [self._wait_for_part(rank) for rank in range(job.index.world_size)]
        tensors = merge_tensors(tensors_from_plain(part["tensors"]) for part in parts)
        require_covered(tensors, self.final)
        scalars = {name: values for part in parts for name, values in part["scalars"].items()}
        index = replace(job.index, tensors=tensors, groups=merge_groups([p["groups"] for p in parts]), scalars=scalars)
        write_text(job.temporary / INDEX_NAME, index.as_json())
        for rank in range(job.index.world_size):
            os.unlink(_part_path(job, rank))
        write_completion(job.temporary, index.step, index.metric, greater_is_better=index.greater_is_better)
        commit(job.temporary, self.final)
        try:
            prune(job.directory, job.keep, newest=self.final)
        except (OSError, CheckpointError) as error:
            _log.warning("%s is committed, but older checkpoints could not be deleted: %s", self.final, error)

    def _wait_for_part(self, rank: int) -> dict[str, Any]:
        """A rank's part of the index, as soon as it is there.

        Raises:
            CheckpointError: The rank has failed, or needs too long.
        """
        path, seconds = _part_path(self.job, rank), _LOOK_SECONDS
        while not path.exists():
            self._count(0)
            if time.monotonic() - self._started > self.job.timeout_s:
                raise CheckpointError(
                    f"{self.final}: rank {rank} has not written its part within {self.job.timeout_s:g} s, or rank 0 "
                    "does not see it. All ranks must write to one shared file system; a slow disk needs more timeout_s."
                )
            self._cancelled.wait(seconds)
            seconds = min(20 * _LOOK_SECONDS, 1.5 * seconds)
        return json.loads(path.read_text(encoding="utf-8"))

    def _withdraw(self) -> None:
        """After a failure: rank 0 clears what it can; what is left is cleared by the next save."""
        if self.job.rank == 0:
            with contextlib.suppress(OSError):
                shutil.rmtree(self.job.temporary)


def merge_groups(by_rank: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Parameter groups of all ranks; a rank lists the parameters of which it holds rows. Alike groups become one."""
    merged: dict[str, dict[str, Any]] = {}
    for groups in by_rank:
        for group in groups:
            options = {name: value for name, value in group.items() if name != "params"}
            known = merged.setdefault(json.dumps(options, sort_keys=True), {**options, "params": []})
            known["params"] = list(dict.fromkeys([*known["params"], *group["params"]]))
    return list(merged.values())


def _part_path(job: SaveJob, rank: int) -> Path:
    return job.temporary / f"{shard_name(rank, job.index.world_size)}.part.json"


def _refused(final: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"Could not write checkpoint {final}: {error}. The checkpoints before it are untouched; free space or mend the "
        "permissions, then save again."
    )
