"""The save of one checkpoint on one rank, in a thread of its own.

Every rank writes its file and, when that is on disk, its part of the index next to it. Rank 0 waits for all parts by
polling the directory, not in a collective: training may continue, and a slow disk blocks no other rank. Then it writes
the index, marks the checkpoint as complete, renames it to its final name and deletes the checkpoints not to be kept.
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
from fullshard.storage.completion import write_completion
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
from fullshard.storage.store import Keep, clear_leftovers, next_serial, prune, step_directory

_log = logging.getLogger("fullshard")

GIVEN_UP = "given up, because another rank could not write its part"
"""The outcome on a rank that did not cause the failure."""

_LOOK_SECONDS = 0.02
"""Rank 0's first polling interval for other ranks' parts; later up to twenty times as long."""


@dataclass(frozen=True)
class SaveJob:
    """One rank's share of the save of one checkpoint."""

    directory: Path  # the directory of checkpoints
    rank: int
    index: Index  # the index without ``tensors``, ``groups`` and ``scalars``, which are known only after writing
    plan: SavePlan  # what this rank writes; the pieces must not change before the save is finished
    keep: Keep  # which checkpoints are kept
    ready: Callable[[], None]  # called in the thread; returns when the pieces may be read
    timeout_s: float  # longest time for the complete save, in seconds

    @property
    def temporary(self) -> Path:
        """The checkpoint's directory while it is written."""
        return sibling(step_directory(self.directory, self.index.step), "tmp")


def begin(directory: Path, step: int) -> None:
    """Make the empty directory that all ranks write into; on rank 0, under the lock.

    Raises:
        CheckpointError: The file system refused.
    """
    final = step_directory(directory, step)
    try:
        clear_leftovers(directory)  # including those of a failed save, which may be what fills the disk
        sibling(final, "tmp").mkdir()
    except OSError as error:
        raise _refused(final, error) from error


class Save:
    """One checkpoint being written by this rank; made by every rank for the same step.

    Attributes:
        job: What is written, and where.
        done_bytes: Bytes written so far.
        total_bytes: Bytes that this rank writes.
        seconds: Duration, once it is finished.
        reported: Whether its commit was reported to the caller.
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
        """The checkpoint's directory when it is complete."""
        return step_directory(self.job.directory, self.job.index.step)

    def poll(self, seconds: float) -> str | None:
        """Wait for at most ``seconds``.

        Returns:
            None while it is under way; ``""`` when it is finished, which on rank 0 means committed; else the error.
        """
        self._thread.join(seconds)
        if not self._thread.is_alive():
            return self._problem or ""
        if time.monotonic() - self._started > self.job.timeout_s + 10:
            return f"{self.final}: the disk has not responded for {self.job.timeout_s:g} s (rank {self.job.rank})."
        return None

    def cancel(self) -> None:
        """Give up, because another rank has failed."""
        self._cancelled.set()

    def _run(self) -> None:
        """Run the save; the thread's function."""
        try:
            self._write_mine()
            if self.job.rank == 0:
                self._commit()
        except OSError as error:
            self._problem = str(_refused(self.final, error))
        except CheckpointError as error:
            self._problem = str(error)
        except BaseException as error:
            # Any error at all: one that ended this thread unreported would leave the other ranks waiting.
            self._problem = f"{self.final}: rank {self.job.rank} could not write its part: {error!r}"
        self.seconds = time.monotonic() - self._started
        if self._problem is not None:
            self._withdraw()

    def _write_mine(self) -> None:
        """Write this rank's file, then its part of the index, which signals rank 0 that the file is on disk."""
        job = self.job
        job.ready()
        name = shard_name(job.rank, job.index.world_size)
        tensors = write_shard_file(job.temporary / name, job.plan.pieces, self._count)
        part = {"tensors": tensors_as_plain(tensors), "groups": job.plan.groups, "scalars": job.plan.scalars}
        write_text(_part_path(job, job.rank), json.dumps(part))

    def _count(self, nbytes: int) -> None:
        """Count written bytes, and give up if another rank failed."""
        self.done_bytes += nbytes
        if self._cancelled.is_set():
            raise CheckpointError(GIVEN_UP)

    def _commit(self) -> None:
        """Make a complete checkpoint under its final name from all ranks' parts; on rank 0."""
        job = self.job
        parts = [self._wait_for_part(rank) for rank in range(job.index.world_size)]
        tensors = merge_tensors(tensors_from_plain(part["tensors"]) for part in parts)
        require_covered(tensors, self.final)
        scalars = {name: values for part in parts for name, values in part["scalars"].items()}
        groups = merge_groups([part["groups"] for part in parts])
        serial = next_serial(job.directory)
        index = replace(job.index, tensors=tensors, groups=groups, scalars=scalars, serial=serial)
        write_text(job.temporary / INDEX_NAME, index.as_json())
        self._count(0)
        # The marker comes after everything that it vouches for, and the deletion of old checkpoints after the commit:
        # whenever the process is killed, the previous checkpoint or this one is complete.
        for rank in range(job.index.world_size):
            os.unlink(_part_path(job, rank))
        write_completion(job.temporary, index)
        commit(job.temporary, self.final)
        try:
            prune(job.directory, job.keep, newest=self.final)
        except (OSError, CheckpointError) as error:
            _log.warning("%s is committed, but older checkpoints could not be deleted: %s", self.final, error)

    def _wait_for_part(self, rank: int) -> dict[str, Any]:
        """Return a rank's part of the index, as soon as it exists.

        Raises:
            CheckpointError: The rank has failed, or takes too long.
        """
        path, seconds = _part_path(self.job, rank), _LOOK_SECONDS
        while not path.exists():
            self._count(0)
            if time.monotonic() - self._started > self.job.timeout_s:
                raise CheckpointError(
                    f"{self.final}: rank {rank} has not written its part within {self.job.timeout_s:g} s, or rank 0 "
                    "does not see it. All ranks must write to a shared file system; for a slow disk raise timeout_s."
                )
            self._cancelled.wait(seconds)
            seconds = min(20 * _LOOK_SECONDS, 1.5 * seconds)
        return json.loads(path.read_text(encoding="utf-8"))

    def _withdraw(self) -> None:
        """Delete what was written, after a failure; on rank 0. The next save deletes what is left."""
        if self.job.rank == 0:
            with contextlib.suppress(OSError):
                shutil.rmtree(self.job.temporary)


def merge_groups(by_rank: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Merge all ranks' parameter groups, those with equal options into one; a rank lists parameters it has rows of."""
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
        f"Could not write checkpoint {final}: {error}. Earlier checkpoints are unchanged. Free disk space or check "
        "that you can write to the directory, then save again."
    )
