"""The save of one checkpoint on one rank, in its own thread.

Every rank writes its file and, when that is on disk, its part of the index next to it. Rank 0 waits for all parts by
polling the directory, not in a collective: training may continue, and a slow disk blocks no other rank. Then it writes
the index, marks the checkpoint as complete, makes it appear (``finish``) and
deletes the checkpoints not to be kept. A rank may also save its own state alone (:class:`Part`).
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fullshard.errors import CheckpointError, StoreError
from fullshard.state.storage import rules
from fullshard.state.storage.backend import backend_of
from fullshard.state.storage.completion import completion_of, write_completion
from fullshard.state.storage.index import (
    INDEX_BOUNDS,
    INDEX_NAME,
    Index,
    IndexPart,
    known_fields,
    merge_tensors,
    require_covered,
)
from fullshard.state.storage.json_file import read_bounded
from fullshard.state.storage.object_path import Place
from fullshard.state.storage.shard_file import SavePlan, shard_name, write_shard_file
from fullshard.state.storage.store import Keep, contradiction, next_serial, prune

_log = logging.getLogger("fullshard")

GIVEN_UP = "given up, because another rank could not write its part"
"""The outcome on a rank that did not cause the failure."""

_LOOK_SECONDS = 0.05, 2.0
"""Shortest and longest interval of rank 0's polling for other ranks' parts."""


@dataclass(frozen=True)
class SaveJob:
    """One rank's share of the save of one checkpoint."""

    directory: Place  # the directory of checkpoints
    attempt: str  # distinguishes this save from all others in the directory, if the backend has no renames
    rank: int
    index: Index  # the index without ``tensors``, ``groups`` and ``scalars``, which are known only after writing
    plan: SavePlan  # the pieces that this rank writes; they must not change before the save is finished
    keep: Keep  # which checkpoints are kept
    ready: Callable[[], None]  # called in the thread; returns once the pieces may be read
    timeout_s: float  # longest time without progress, in seconds
    require_commit: Callable[[], None]  # called on rank 0 right before the commit; raises if another run writes here
    mapped: bool = False  # whether the pieces are the memory of this rank's file

    @property
    def writers(self) -> Sequence[int]:
        """The ranks whose parts make up the checkpoint; the first one completes it."""
        part = self.index.part
        return range(self.index.world_size) if part is None else [part.rank]

    @property
    def temporary(self) -> Place:
        """The checkpoint's directory while it is written."""
        return backend_of(self.directory).names(self.directory, self.index.step, self.attempt)[0]

    @property
    def final(self) -> Place:
        """The checkpoint's directory when it is complete."""
        return backend_of(self.directory).names(self.directory, self.index.step, self.attempt)[1]


def begin(job: SaveJob, assets: Callable[[Path], None]) -> None:
    """Create the directory that all ranks write into, with the small files by ``assets``; on rank 0, under the lock.

    Raises:
        CheckpointError: The file system refused.
    """
    try:
        # This first clears leftovers, also those of a failed save, which may be what fills the disk.
        with backend_of(job.directory).begin(job.temporary) as directory:
            assets(directory)
    except OSError as error:
        raise _refused(job.final, error) from error


class Save:
    """A checkpoint being written by this rank; every rank makes one for the same step.

    Attributes:
        job: Description of the save.
        done_bytes: Bytes written so far.
        total_bytes: Bytes that this rank writes.
        seconds: Duration; set once the save is finished.
        busy_seconds: Processor time of its thread; set once the save is finished.
        reported: True if its commit was reported to the caller.
    """

    def __init__(self, job: SaveJob) -> None:
        """Start writing."""
        self.job = job
        self.done_bytes = 0
        self.total_bytes = sum(piece.tensor.nbytes for piece in job.plan.pieces)
        self.seconds = self.busy_seconds = 0.0
        self.reported = False
        self._started = self._moved_at = time.monotonic()
        self._problem: str | None = None
        self._cancelled = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fullshard-save", daemon=True)
        self._thread.start()

    @property
    def final(self) -> Place:
        """The checkpoint's directory when it is complete."""
        return self.job.final

    def poll(self, seconds: float) -> str | None:
        """Wait for at most ``seconds``.

        Returns:
            None while it is under way; ``""`` once it is finished, which on rank 0 means committed; else the error.
        """
        self._thread.join(seconds)
        if not self._thread.is_alive():
            return self._problem or ""
        if time.monotonic() - self._moved_at > self.job.timeout_s + 10:
            return f"{self.final}: the disk has not responded for {self.job.timeout_s:g} s (rank {self.job.rank})."
        return None

    def let_end(self, seconds: float) -> None:
        """Wait until it is finished, or until this rank has written nothing for ``seconds``."""
        before = -1
        while before != self.done_bytes:
            before = self.done_bytes
            if self.poll(seconds) is not None:
                return

    def cancel(self) -> None:
        """Abandon the save, because another rank has failed."""
        self._cancelled.set()

    def _run(self) -> None:
        """Run the save in the thread."""
        try:
            self._write_mine()
            if self.job.rank == self.job.writers[0]:
                parts = [self._wait_for_part(rank) for rank in self.job.writers]
                commit_save(self.job, parts, self._count)
        except OSError as error:
            self._problem = str(_refused(self.final, error))
        except CheckpointError as error:
            self._problem = str(error)
        except BaseException as error:
            # Any error: if this thread ended unreported, the other ranks would wait for it.
            self._problem = f"{self.final}: rank {self.job.rank} could not write its part: {error!r}"
        self.seconds, self.busy_seconds = time.monotonic() - self._started, time.thread_time()
        if self._problem is not None and self.job.rank == self.job.writers[0]:
            # Delete what was written; the next save deletes the remainder.
            with contextlib.suppress(OSError, StoreError):
                backend_of(self.job.directory).remove(self.job.temporary)

    def _write_mine(self) -> None:
        self.job.ready()
        write_part(self.job, self._count)

    def _count(self, nbytes: int) -> None:
        """Count written bytes; raise if another rank failed."""
        if nbytes:
            self.done_bytes += nbytes
            self._moved_at = time.monotonic()
        if self._cancelled.is_set():
            raise CheckpointError(GIVEN_UP)

    def _wait_for_part(self, rank: int) -> IndexPart:
        """Return a rank's part of the index as soon as it exists.

        Raises:
            CheckpointError: The rank has failed, or takes too long.
        """
        while True:
            try:
                part = read_part(self.job, rank)
            except OSError as error:
                renamed = error.errno == errno.ESTALE  # on NFS, while it was read
                if not (renamed or isinstance(error, FileNotFoundError)):
                    raise
            else:
                self._moved_at = time.monotonic()
                return part
            self._count(0)
            waited = time.monotonic() - self._moved_at
            if waited > self.job.timeout_s:
                raise CheckpointError(
                    f"{self.final}: rank {rank} has not written its part within {self.job.timeout_s:g} s, or rank 0 "
                    "does not see it. All ranks must write to a shared file system; for a slow disk raise timeout_s."
                )
            # In an object store each look is one or two requests: the interval is a tenth of the wait so far.
            self._cancelled.wait(min(max(_LOOK_SECONDS[0], waited / 10), _LOOK_SECONDS[1]))


def write_part(job: SaveJob, count: Callable[[int], None] = lambda nbytes: None) -> None:
    """Write a rank's file, then its part of the index, which tells rank 0 that the file is on disk.

    Raises:
        OSError, CheckpointError: It could not be written, or ``count``, which receives the number of bytes, raised.
    """
    name = shard_name(job.rank, job.index.world_size)
    tensors = write_shard_file(job.temporary / name, job.plan.pieces, count, mapped=job.mapped)
    part = IndexPart(tensors, job.plan.groups, job.plan.scalars)
    backend_of(job.directory).write_text(_part_path(job, job.rank), json.dumps(part, default=known_fields))


def read_part(job: SaveJob, rank: int) -> IndexPart:
    """Return a rank's part of the index.

    Raises:
        FileNotFoundError: The rank has not written it yet.
    """
    return rules.parse(IndexPart, read_bounded(_part_path(job, rank), INDEX_BOUNDS.nbytes))


def commit_save(job: SaveJob, parts: Sequence[IndexPart], count: Callable[[int], None] = lambda nbytes: None) -> None:
    """Make a complete checkpoint under its final name from all ranks' parts; on the first of its writers.

    Raises:
        OSError, CheckpointError: It could not be written, a part is missing, or ``count`` raised.
    """
    backend = backend_of(job.directory)
    tensors = merge_tensors(part.tensors for part in parts)
    require_covered(tensors, job.final, alone=job.index.part is not None)
    scalars = {name: values for part in parts for name, values in part.scalars.items()}
    groups = merge_groups([part.groups for part in parts])
    serial = next_serial(job.directory)
    index = replace(job.index, tensors=tensors, groups=groups, scalars=scalars, serial=serial)
    backend.write_text(job.temporary / INDEX_NAME, index.as_json())
    count(0)
    # The marker comes after everything that it vouches for, and the deletion of old checkpoints after the commit:
    # whenever the process is killed, the previous checkpoint or this one is complete.
    for rank in job.writers:
        _part_path(job, rank).unlink(missing_ok=True)
    job.require_commit()
    backend.finish(job.temporary, job.final, lambda: _mark(job, index))
    try:
        prune(job.directory, job.keep, newest=job.final)
    except (OSError, CheckpointError) as error:
        _log.warning("%s is committed, but older checkpoints could not be deleted: %s", job.final, error)


def _mark(job: SaveJob, index: Index) -> None:
    """Write ``complete.json``, after a last check of the files that it vouches for."""
    done = completion_of(job.temporary, index)
    problem = contradiction(index, done)
    if problem is not None:
        raise CheckpointError(f"{job.final}: {INDEX_NAME} {problem}. Save again.")
    write_completion(job.temporary, done)


def merge_groups(by_rank: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Merge all ranks' parameter groups, those with equal options into one; a rank lists parameters it has rows of."""
    merged: dict[str, dict[str, Any]] = {}
    for groups in by_rank:
        for group in groups:
            options = {name: value for name, value in group.items() if name != "params"}
            known = merged.setdefault(json.dumps(options, sort_keys=True), {**options, "params": []})
            known["params"] = list(dict.fromkeys([*known["params"], *group["params"]]))
    return list(merged.values())


def _part_path(job: SaveJob, rank: int) -> Place:
    return job.temporary / f"{shard_name(rank, job.index.world_size)}.part.json"


def _refused(final: Place, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"Could not write checkpoint {final}: {error}. Earlier checkpoints are unchanged. Free disk space or check "
        "that you can write to the directory, then save again."
    )
