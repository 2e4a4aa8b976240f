"""Checkpoints of a training run: saved by all ranks, optionally in the background, and loaded on any number."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from torch import nn

from fullshard.core.comm import Mesh, as_mesh, await_all, device_of, together, together_in_background
from fullshard.core.engine import mesh_of
from fullshard.core.optim.average import ExponentialMovingAverage
from fullshard.core.policy import ShardingStrategy
from fullshard.errors import CheckpointError
from fullshard.state.saving.full import JOIN_SECONDS, write_assets
from fullshard.state.saving.loading import Restored, load_checkpoint
from fullshard.state.saving.memory import Every, InMemory
from fullshard.state.saving.parameter_state import Stepping
from fullshard.state.saving.pieces import HostCopies, index_of, plan_save, require_between_steps, rng_piece
from fullshard.state.saving.scratch import ScratchDirectory
from fullshard.state.storage import (
    GIVEN_UP,
    Base,
    Keep,
    Lock,
    ObjectPath,
    Place,
    Save,
    SaveJob,
    SavePlan,
    Survey,
    as_place,
    backend_of,
    begin,
    read_index,
    survey,
)


@dataclass(frozen=True)
class SaveReport:
    """A committed checkpoint."""

    path: Place  # its directory
    step: int  # optimizer steps taken
    nbytes: int  # bytes of tensors that this rank wrote
    seconds: float  # from the start of the save to its commit; on ranks other than 0 to the end of their own file
    stall_seconds: float  # time during which ``save`` and ``wait`` blocked training on this rank


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


_log = logging.getLogger("fullshard")

_LOST_SECONDS = 1.0
"""Seconds for a background save to end after a rank was lost, which may have written its part before."""

_REPORT_SECONDS = 10.0
"""Interval at which a wait for a save reports its progress, in seconds."""

NOTHING: Mapping[str, Any] = MappingProxyType({})


class Checkpoints:
    """The checkpoints of one run in one directory; made by every rank, and closed at the end or used in ``with``.

    Every rank writes its own file, so the directory must be on a file system that all ranks share, or in an object
    store. A checkpoint appears when all of it is on disk or in the store, and earlier ones are deleted after that,
    never before: whenever one or all processes are killed, a complete checkpoint is found. ::

        with Checkpoints("runs/mine/checkpoints", keep_last=2) as checkpoints:
            restored = checkpoints.load(model, optimizer)
            for step in range(restored.step + 1 if restored else 1, steps + 1):
                ...
                if step % 100 == 0:
                    checkpoints.save(model, optimizer, step=step, background=True)
    """

    def __init__(
        self,
        directory: str | Path | ObjectPath,
        *,
        ranks: Any = None,
        keep_last: int | None = 2,
        keep_best: int = 0,
        greater_is_better: bool = True,
        timeout_s: float = 1800.0,
        in_memory: Every | None = None,
    ) -> None:
        """Lock the directory for this run, and delete what a killed save left in it; every rank calls it.

        Args:
            directory: Made if it does not exist; a relative path is resolved against the working directory. Or the URL
                of a prefix in an object store, such as ``s3://bucket/run``, which fsspec opens.
            ranks: All ranks of the run: None (the default process group), a Comm, a process group or a mesh.
            keep_last: Number of newest checkpoints that are kept; None: all.
            keep_best: Number of checkpoints with the best ``metric`` that are kept in addition.
            greater_is_better: Whether a greater ``metric`` is better; False for a loss or a perplexity. It is saved
                with the metric, and checkpoints already in the directory keep theirs. Checkpoints of earlier versions,
                which did not save it, are compared as the later ones are, or as set here.
            timeout_s: Longest time without progress of a save, in seconds: nothing written, and no other rank's part
                done. A save may take longer.
            in_memory: Steps from one :meth:`snapshot` to the next, or ``"auto"``: as often as costs 1 % of the time.
                None: none are taken. Nor are they without a launcher that restarts the ranks, and in the last attempt
                that it starts on one machine. Frozen parameters are included: only the script knows whether it would
                make the same ones again.

        Raises:
            CheckpointError: Another run writes to the directory, the file system refused, or a number is too small; on
                every rank.
            StoreError: The object store cannot be reached, or refuses; on every rank.
        """
        place = as_place(directory)
        self.directory: Place = place.absolute() if isinstance(place, Path) else place
        self.ranks = ranks if isinstance(ranks, Mesh) else as_mesh(ranks, ShardingStrategy.FULL_SHARD, None)
        self.keep = Keep(keep_last, keep_best, greater_is_better)
        self.timeout_s = timeout_s
        self._save: Save | None = None
        self._stall_seconds = 0.0
        self._copies = HostCopies(self.ranks)
        self._lock: Lock | None = None
        self._saves = 0
        kept = None if in_memory is None else ScratchDirectory.of(self.directory)
        if (keep_last is not None and keep_last < 1) or keep_best < 0:
            raise CheckpointError(
                f"keep_last must be at least 1 and keep_best at least 0; got {keep_last} and {keep_best}."
            )
        together_in_background(self.ranks, self._take)
        told = self.ranks.all_gather_object((secrets.token_hex(4), kept is not None))
        self._run = told[0][0]
        self.in_memory: InMemory | None = None
        if in_memory is not None and kept is not None and all(keeps for _, keeps in told):
            self.in_memory = InMemory(self.ranks, kept, in_memory)

    def _take(self) -> None:
        """Lock the directory and delete leftovers; on rank 0."""
        if self.ranks.rank == 0:
            try:
                self._lock = backend_of(self.directory).lock(self.directory)
            except OSError as error:
                raise CheckpointError(
                    f"The leftovers of a killed save in {self.directory} cannot be deleted: {error}."
                ) from error

    def __enter__(self) -> Checkpoints:
        """Return self; the directory is locked already."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; after an error without waiting for other ranks, which may not get here.

        A background save may still end in that case, until it makes no progress for ``JOIN_SECONDS``; after a Ctrl-C it
        is given up at once.
        """
        if error is None:
            self.close()
            return
        save = self._save
        # Also if one Ctrl-C follows another. Once the lock is free the next run may start, so nothing may be written or
        # committed after that.
        with ExitStack() as stack:
            stack.callback(self._release)
            if save is not None:
                stack.callback(save.poll, JOIN_SECONDS)
                stack.callback(save.cancel)
                if isinstance(error, Exception):
                    # The other ranks' writers continue too, so usually the save completes. Not if one of them is lost.
                    lost = getattr(error, "transient", False)
                    save.poll(_LOST_SECONDS) if lost else save.let_end(JOIN_SECONDS)

    def save(  # noqa: PLR0913 (what is saved, and its description)
        self,
        model: nn.Module,
        optimizer: Stepping | None = None,
        *,
        step: int,
        values: Mapping[str, Any] = NOTHING,
        metric: float | None = None,
        background: bool = False,
        gradients: bool = False,
        average: ExponentialMovingAverage | None = None,
        assets: Callable[[Path], None] | None = None,
        base: Base | None = None,
    ) -> Place:
        """Save the complete training state as ``step-…``; every rank calls it, after the optimizer's step.

        It includes the model's shards and persistent buffers, the optimizer's state and options, and each rank's random
        state. First waits for an earlier background save.

        Args:
            model: The sharded model.
            optimizer: Over its parameters, or what ``step_in_backward`` returned; None: none is saved.
            step: Optimizer steps taken; a checkpoint of the same step is replaced.
            values: Whatever else is needed to resume (``scheduler.state_dict()``, ``scaler.state_dict()``, the position
                in the data): anything that JSON can hold, with strings as keys, the same on every rank; rank 0's is
                saved.
            metric: For ``keep_best`` and :meth:`best`; nan counts as None.
            background: Copy this rank's part to host memory, in buffers that are kept for the next save, and return
                while a thread writes it. An error is raised by the next ``save``, ``wait`` or ``close``.
            gradients: Also save the shards' ``.grad``, for a save between the backwards of an accumulated gradient.
            average: The moving average of the model's weights to save too; None: none is.
            assets: Called on rank 0 with a directory inside the checkpoint, to write small files into; None: a Hugging
                Face model's configuration is written, which ``fullshard export`` needs in addition to the tensors.
            base: The model that frozen parameters were read from: they are not saved, and a model that loads the
                checkpoint must have read them from there too; None: they are saved.

        Returns:
            Where the checkpoint is once it is complete, which in the background is later.

        Raises:
            CheckpointError: This save or an earlier background save failed; on every rank, with the same text. Earlier
                checkpoints are unchanged.
        """
        started = time.monotonic()
        self.wait()
        plan = partial(plan_save, model, optimizer, gradients=gradients, average=average, frozen=base is None)
        job = together(self.ranks, lambda: self._job(model, plan, step, values, metric, base))
        begin_files(self.ranks, job, self._lock, assets or partial(write_assets, model))
        save = self._save = Save(self._copies.take(job) if background else job)
        self._stall_seconds = time.monotonic() - started
        if background:
            return job.final
        try:
            self.wait()
        except BaseException:
            save.cancel()  # after Ctrl-C or a lost rank the shards may change, which the thread still reads
            raise
        return job.final

    def snapshot(
        self,
        model: nn.Module,
        optimizer: Stepping | None = None,
        *,
        step: int,
        values: Mapping[str, Any] = NOTHING,
        average: ExponentialMovingAverage | None = None,
    ) -> bool:
        """Copy the training state to the machine's memory if that is due; every rank calls it after every step.

        If a rank dies, ``fullshard launch --max_restarts`` starts all of them again, and :meth:`load` continues from
        the newest snapshot. The arguments are those of :meth:`save`; ``values`` are this rank's own.

        Returns:
            True if it was due, the same on every rank; False if :class:`Checkpoints` says that none are taken.
        """
        if self.in_memory is None:
            return False
        self.in_memory.tick()
        return self.in_memory.due(step) and self.in_memory.take(
            model, optimizer, step=step, values=values, average=average
        )

    def wait(self) -> SaveReport | None:
        """Wait until the last save is committed; every rank calls it. Logs the progress every ten seconds.

        Returns:
            The committed checkpoint; None if there was no save, or it was reported before.

        Raises:
            CheckpointError: The save failed; on every rank, with the same text.
        """
        save = self._save
        if save is None:
            return None
        started = reported = time.monotonic()

        def report(outcomes: list[str | None]) -> None:
            nonlocal reported
            if any(outcomes):
                save.cancel()
            if time.monotonic() - reported > _REPORT_SECONDS:
                reported = time.monotonic()
                share = save.done_bytes / max(1, save.total_bytes)
                _log.warning(
                    "waiting for %s: %.0f s so far, rank %d has written %.0f %% of %s bytes",
                    save.final,
                    reported - started,
                    self.ranks.rank,
                    100 * share,
                    f"{save.total_bytes:,}",
                )

        problems = [problem for problem in await_all(self.ranks, save.poll, report) if problem]
        self._save = None  # only now: if anything is raised while it is under way, __exit__ takes care of it
        if problems:
            # A thread that is stuck in the disk may continue later: it must commit nothing, and the next save must not
            # reuse the buffers it reads.
            save.cancel()
            self._copies.clear()
            raise CheckpointError(next((problem for problem in problems if problem != GIVEN_UP), GIVEN_UP))
        self._stall_seconds += time.monotonic() - started
        return self._report(save)

    def committed(self) -> SaveReport | None:
        """Return the background save if it was committed since the last call; on rank 0, no communication.

        Returns:
            The committed checkpoint, once; None while it is under way or if it failed, which the next ``wait`` raises.
        """
        if self._save is None or self.ranks.rank != 0 or self._save.reported or self._save.poll(0.0) != "":
            return None
        return self._report(self._save)

    def _report(self, save: Save) -> SaveReport | None:
        if save.reported:
            return None
        save.reported = True
        return SaveReport(save.final, save.job.index.step, save.total_bytes, save.seconds, self._stall_seconds)

    def latest(self) -> Place | None:
        """Return the checkpoint that was saved last, as rank 0 sees it; None if there is none. Every rank calls it.

        Raises:
            CheckpointError: It is damaged, or a damaged one may be newer; on every rank, with the same text.
        """
        return self._newest(previous=False)

    def _newest(self, *, previous: bool, in_memory: bool = False) -> Place | None:
        """Return the newest checkpoint; with ``previous``, rename damaged ones that may be newer, on rank 0."""

        def choose() -> Place | None:
            if self.ranks.rank != 0:
                return None
            found = survey(self.directory, parse_newest=True)
            if previous and (found.complete or in_memory):  # otherwise the run would silently start over
                found = self._go_back(found)
            return found.newest()

        return self.ranks.all_gather_object(together_in_background(self.ranks, choose))[0]

    def _go_back(self, found: Survey) -> Survey:
        """Set the damaged checkpoints aside that may be newer than the newest complete one."""
        newer = found.newer_damaged()
        if newer and self._lock is None:
            raise CheckpointError(f"{self.directory} is closed; only a run that holds its lock can go back.")
        for one in newer:
            try:
                name = backend_of(self.directory).set_aside(one.path)
            except OSError as error:
                raise CheckpointError(f"{one.path} is damaged and cannot be renamed: {error}.") from error
            _log.warning("%s The checkpoint before it is loaded; the damaged one is now %s.", one.problem, name)
        return replace(found, damaged=tuple(one for one in found.damaged if one not in newer))

    def best(self) -> Place | None:
        """Return the complete checkpoint with the best metric, among equal ones the newest; every rank calls it.

        The saved direction of the metric is used; if it has changed, only checkpoints with the newest's are compared.

        Raises:
            CheckpointError: It is damaged, or a damaged one may be better; on every rank, with the same text.
        """

        def judge() -> Place | None:
            on_rank_0 = self.ranks.rank == 0
            return survey(self.directory).best(otherwise=self.keep.greater_is_better) if on_rank_0 else None

        return self.ranks.all_gather_object(together_in_background(self.ranks, judge))[0]

    def load(
        self,
        model: nn.Module,
        optimizer: Stepping | None = None,
        *,
        path: str | Path | ObjectPath | None = None,
        average: ExponentialMovingAverage | None = None,
        previous: bool = False,
    ) -> Restored | None:
        """Load a checkpoint of any world size and strategy; every rank calls it.

        With ``in_memory``, an attempt after the first loads the newest snapshot if its step is later than that of the
        newest complete checkpoint, and passes over damaged ones. Rank 0 logs which it is. Snapshots are loaded on as
        many ranks as took them, sharded alike.

        Args:
            model: The sharded model; its shards and persistent buffers are filled in place.
            optimizer: Its state and options are set; None: they are left unchanged.
            path: The checkpoint; None: the newest one.
            average: The moving average of the model's weights, filled in place; None: it is not read.
            previous: Whether to go back to the newest complete checkpoint if later ones are not complete. These are
                renamed to ``step-….damaged``, or marked in an object store, on rank 0, with a warning. Without it they
                are an error.

        Returns:
            The contents of the checkpoint other than tensors; None if there is no checkpoint and no path was given.

        Raises:
            CheckpointError: The checkpoint is damaged or of another model; on every rank, with the same text. It names
                the damaged file and the newest good checkpoint.
        """
        self.wait()
        if previous and path is not None:
            raise CheckpointError(f"previous=True chooses a checkpoint, and path={str(path)!r} does too. Pass one.")
        if path is not None:
            return load_checkpoint(model, optimizer, as_place(path), average=average)
        if self.in_memory is None or self.in_memory.attempt == 0:
            chosen = self._newest(previous=previous)
        else:
            kept = self.in_memory.newest()
            on_disk = self._newest(previous=True, in_memory=kept is not None)

            def steps() -> list[int]:
                return [0 if path is None else read_index(path).step for path in (kept, on_disk)]

            in_memory, saved = together_in_background(self.ranks, steps)
            chosen = kept if in_memory > saved else on_disk
            source = "the start" if chosen is None else "the snapshot in memory" if chosen is kept else str(chosen)
            if self.ranks.rank == 0:
                step = max(in_memory, saved)
                _log.warning("attempt %d continues after step %d from %s", self.in_memory.attempt, step, source)
        return None if chosen is None else load_checkpoint(model, optimizer, chosen, average=average)

    def close(self) -> None:
        """Wait for the background save and release the directory; every rank calls it.

        Raises:
            CheckpointError: The save failed.
        """
        try:
            if self.in_memory is not None:
                self.in_memory.wait()
            self.wait()
        finally:
            self._release()

    def _release(self) -> None:
        self._copies.clear()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _job(
        self,
        model: nn.Module,
        make_plan: Callable[[], SavePlan],
        step: int,
        values: Mapping[str, Any],
        metric: float | None,
        base: Base | None,
    ) -> SaveJob:
        """Check and describe what this rank writes.

        Raises:
            CheckpointError: The state cannot be saved as it is.
        """
        require_between_steps(self.ranks, model, step)
        plan, index = make_plan(), index_of(model, step, values, metric, self.keep, base)
        plan.pieces.append(rng_piece(mesh_of(model).rank, self.ranks.device))
        # In the foreground, the writer thread reads the shards themselves: wait for the streams that write them.
        ready = device_of(self.ranks.device).copy_to_host([])
        self._saves += 1
        return SaveJob(
            self.directory,
            f"{self._run}-{self._saves}",
            self.ranks.rank,
            index,
            plan,
            self.keep,
            ready,
            self.timeout_s,
            self._lock.require_commit if self._lock is not None else lambda: None,
        )
