"""A directory of checkpoints: which are complete, which is the newest or best, and which are kept.

::

    checkpoints/
      step-00000100/            complete: complete.json exists and agrees with the other files
        shard-00000-of-00002.safetensors, …, index.json, model/, complete.json (written last)
      step-00000200.tmp/        being written, left by a killed writer, or being deleted
      step-00000100.old/        being replaced by a new checkpoint of the same step
      step-00000100.damaged/    set aside when a run went back to an earlier checkpoint
      lock                      held by the run that writes here

On a disk one rename makes a checkpoint appear and one makes it disappear; in an object store
(:mod:`fullshard.state.storage.object_store`) the marker does. So a kill never leaves an incomplete directory under a
checkpoint's own name: one that is not complete was damaged, or copied only in part. It is never passed over silently.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fullshard.errors import CheckpointError, StoreError
from fullshard.state.storage.backend import backend_of
from fullshard.state.storage.completion import COMPLETE_NAME, Completion, check_completion, parse_completion
from fullshard.state.storage.index import INDEX_BOUNDS, INDEX_NAME, Index, parse_index
from fullshard.state.storage.json_file import SMALL, read_bounded
from fullshard.state.storage.object_path import Place
from fullshard.state.storage.rules import shown
from fullshard.state.storage.shard_file import dtype_of


def step_directory(directory: Place, step: int) -> Place:
    """Return the directory of a step's checkpoint, which need not exist; in an object store the newest save of it."""
    name = f"step-{step:08d}"
    saves = [path for path in backend_of(directory).listed(directory).candidates if path.name.partition(".")[0] == name]
    return saves[-1] if saves else directory / name


def read_completion(path: Place) -> Completion:
    """Check that a checkpoint is complete, without reading tensors; any rank.

    Raises:
        CheckpointError: It does not exist or is not complete; the message names the problem and what to use instead.
    """
    with or_instead_of(path):
        return check_completion(path)


def read_index(path: Place) -> Index:
    """Read the index of a complete checkpoint; any rank.

    Args:
        path: The checkpoint's directory.

    Raises:
        CheckpointError: It is not complete, or its index is damaged; the message names the problem and what to use
            instead.
    """
    with or_instead_of(path):
        return _checked_index(path, check_completion(path))


def _checked_index(path: Place, done: Completion) -> Index:
    """Read an index and compare it with ``complete.json``."""
    file = path / INDEX_NAME
    try:
        index = parse_index(read_bounded(file, INDEX_BOUNDS.nbytes), file)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}.") from error
    problem = contradiction(index, done)
    if problem is not None:
        raise CheckpointError(f"{file} {problem}.")
    return index


def contradiction(index: Index, done: Completion) -> str | None:
    """Describe how an index contradicts ``complete.json`` or torch, to follow the file's name; None if it does not."""
    if index.step != done.step:
        return f"is of step {index.step:,}, but {COMPLETE_NAME} is of step {done.step:,}"
    listed: dict[str, int] = {}
    for name, entry in index.tensors.items():
        try:
            itemsize = dtype_of(entry).itemsize
        except CheckpointError:
            return f"lists {shown(name)} with dtype {shown(entry.dtype)}, which this version of torch lacks"
        for piece in entry.pieces:
            nbytes = (piece.stop - piece.start) * itemsize
            listed[piece.file] = listed.get(piece.file, 0) + nbytes
    for name, nbytes in listed.items():
        if nbytes > done.files.get(name, 0):
            return f"lists {nbytes:,} bytes in {name}, which has {done.files.get(name, 0):,}"
    return None


def instead_of(path: Place) -> str:
    """Return a sentence that names the newest other complete checkpoint to use instead of a damaged one; any rank."""
    others: list[Place] = []
    with contextlib.suppress(OSError, StoreError):
        others = [other for other in find_checkpoints(path.parent) if other.name != path.name]
    if not others:
        return f"There is no other complete checkpoint in {path.parent}."
    newest = others[-1]
    return (
        f"The newest other complete one is {newest}. To use it, pass resume={newest} to fullshard train, "
        f"path={str(newest)!r} to Checkpoints.load or load_checkpoint, or {newest} to fullshard export."
    )


@contextlib.contextmanager
def or_instead_of(path: Place) -> Iterator[None]:
    """Add to an error about a damaged checkpoint which one to use instead; an object store that fails is no damage."""
    try:
        yield
    except StoreError:
        raise
    except CheckpointError as error:
        raise CheckpointError(f"{error} {instead_of(path)}") from error


@dataclass(frozen=True)
class Damaged:
    """A checkpoint that is not complete."""

    path: Place  # its directory
    problem: str  # the file and what is wrong with it
    known: Completion | None  # what its undamaged files record; None if they cannot be read
    scored: bool = True  # whether its metric is known too: an evaluation changes only ``complete.json``

    def may_be_newer(self, than: Completion) -> bool:
        """Return True if it may have been saved after another one; False if the known order of saving excludes it."""
        return self.known is None or (self.known.serial, self.known.step) > (than.serial, than.step)


@dataclass(frozen=True)
class Survey:
    """The complete and the damaged checkpoints in a directory."""

    directory: Place
    complete: tuple[tuple[Completion, Place], ...]  # with their ``complete.json``, in the order they were saved in
    damaged: tuple[Damaged, ...]  # by step

    def newer_damaged(self) -> tuple[Damaged, ...]:
        """Return the damaged checkpoints that may have been saved after the newest complete one."""
        return tuple(one for one in self.damaged if not self.complete or one.may_be_newer(self.complete[-1][0]))

    def newest(self) -> Place | None:
        """Return the checkpoint that was saved last; None if there is none.

        Raises:
            CheckpointError: It is damaged, or a damaged one may be newer.
        """
        newer = self.newer_damaged()
        if not newer:
            return self.complete[-1][1] if self.complete else None
        damaged = newer[-1]
        place = self._place_of(damaged, "newest", certain=damaged.known is not None)
        raise CheckpointError(f"{damaged.problem} {place} {self._way_back(damaged)}")

    def best(self, *, otherwise: bool = True) -> Place | None:
        """Return the checkpoint with the best metric by :func:`rank_by_metric`; None if none has a metric.

        Raises:
            CheckpointError: It is damaged, or a damaged one may be better.
        """
        known = [(one.known, one.path) for one in self.damaged if one.known is not None and one.scored]
        both = sorted((*self.complete, *known), key=lambda one: (one[0].serial, one[0].step))
        first = next(iter(rank_by_metric(both, otherwise=otherwise).paths), None)
        for one in self.damaged:
            if one.known is None or not one.scored or one.path == first:
                good = next(iter(rank_by_metric(self.complete, otherwise=otherwise).paths), None)
                remedy = (
                    "There is no other with a metric." if good is None else f"The best good one is {good}: pass it."
                )
                place = self._place_of(one, "best", certain=one.path == first)
                raise CheckpointError(f"{one.problem} {place} {remedy}")
        return first

    def _place_of(self, damaged: Damaged, rank: str, *, certain: bool) -> str:
        verb = "is" if certain else "may be"
        return f"{damaged.path.name} {verb} the {rank} checkpoint in {self.directory}; no other is used silently."

    def _way_back(self, damaged: Damaged) -> str:
        """Name the newest good checkpoint and the setting that uses it."""
        if not self.complete:
            return (
                "No checkpoint there is complete. Restore the files from a copy. To start from scratch, set "
                "resume=never in fullshard train, or move the directory away."
            )
        good, aside = self.complete[-1][1], backend_of(damaged.path).set_aside_text(damaged.path)
        return (
            f"The newest good one is {good}. To go back to it, set resume=previous in fullshard train, or pass "
            f"previous=True to Checkpoints.load: {damaged.path.name} will be {aside}. "
            "To use another one, pass its path: resume=PATH, path=PATH or fullshard export PATH."
        )


def survey(directory: Place, *, parse_newest: bool = False) -> Survey:
    """Classify every checkpoint in a directory by its marker, file sizes and the hash of its index; any rank.

    Args:
        directory: The directory of ``step-…`` directories; it need not exist.
        parse_newest: Also parse the index of the newest complete one and, if its values are impossible, of the one
            before it.
    """
    complete: list[tuple[Completion, Place]] = []
    damaged: list[Damaged] = []
    backend = backend_of(directory)
    for path in backend.listed(directory).candidates:
        try:
            complete.append((check_completion(path), path))
        except StoreError:
            raise
        except CheckpointError as error:
            # A reader does not hold the lock: the checkpoint may have been deleted or replaced since it was listed.
            if path in backend.listed(directory).candidates:
                damaged.append(_damaged(path, str(error)))
    complete.sort(key=lambda one: (one[0].serial, one[0].step, one[1]))
    while parse_newest and complete:
        done, path = complete[-1]
        try:
            _checked_index(path, done)
            break
        except StoreError:
            raise
        except CheckpointError as error:
            complete.pop()
            damaged.append(Damaged(path, str(error), done))
    return Survey(directory, tuple(complete), tuple(sorted(damaged, key=lambda one: (len(one.path.name), one.path))))


def _damaged(path: Place, problem: str) -> Damaged:
    """Return what is known of a damaged checkpoint from its ``complete.json`` or its index."""
    with contextlib.suppress(OSError, ValueError):
        return Damaged(path, problem, parse_completion(read_bounded(path / COMPLETE_NAME, SMALL.nbytes)))
    with contextlib.suppress(OSError, ValueError, CheckpointError):
        index = parse_index(read_bounded(path / INDEX_NAME, INDEX_BOUNDS.nbytes), path / INDEX_NAME)
        if index.serial is not None:
            return Damaged(path, problem, Completion(index.step, None, "", {}, index.serial), scored=False)
    return Damaged(path, problem, None)


def find_checkpoints(directory: Place) -> list[Place]:
    """Return the complete checkpoints in a directory, in the order they were saved in; any rank. It need not exist."""
    return [path for _, path in find_completions(directory)]


def find_completions(directory: Place) -> list[tuple[Completion, Place]]:
    """Return the same as :func:`find_checkpoints`, each with its ``complete.json``."""
    return list(survey(directory).complete)


def next_serial(directory: Place) -> int:
    """Return the serial number of the next checkpoint that is saved in a directory; on one rank, under the lock."""
    found = survey(directory)
    known = [done for done, _ in found.complete] + [one.known for one in found.damaged if one.known is not None]
    return 1 + max((done.serial for done in known), default=0)


@dataclass(frozen=True)
class Ranking:
    """Checkpoints ordered by their metric."""

    paths: tuple[Place, ...]  # the best first; among equal ones the later step first
    greater_is_better: bool  # whether a greater metric is better
    recorded: bool  # whether that is recorded in a checkpoint; otherwise it is assumed


def rank_by_metric(found: Sequence[tuple[Completion, Place]], *, otherwise: bool = True) -> Ranking:
    """Order checkpoints by their metric; those without one are left out.

    The newest checkpoint that records the direction determines it. Checkpoints that record the other direction have a
    different metric and are left out; those of an earlier version, which record none, are included.

    Args:
        found: Checkpoints in the order they were saved in.
        otherwise: Direction if no checkpoint records one.
    """
    judged = [(done, path, done.metric) for done, path in found if done.metric is not None]
    recorded = [done.greater_is_better for done, _, _ in judged if done.greater_is_better is not None]
    greater = recorded[-1] if recorded else otherwise
    comparable = [one for one in judged if one[0].greater_is_better in (None, greater)]
    comparable.sort(key=lambda one: (one[2] if greater else -one[2], one[0].step), reverse=True)
    return Ranking(tuple(path for _, path, _ in comparable), greater, bool(recorded))


@dataclass(frozen=True)
class Keep:
    """Which checkpoints are kept after the next one is saved."""

    last: int | None = 2  # number of newest checkpoints to keep; None: all
    best: int = 0  # number of checkpoints with the best metric to keep in addition
    greater_is_better: bool = True  # whether a greater metric is better if no checkpoint records it


def prune(directory: Place, keep: Keep, *, newest: Place) -> None:
    """Delete complete checkpoints that are neither among the last nor the best; on one rank, under the lock.

    ``newest``, the one just committed, is always kept; another save of its step is not.

    Raises:
        OSError: The file system refused.
    """
    found = find_completions(directory)
    own = next((done for done, path in found if path == newest), None)
    for done, path in found:
        # On a disk the rename has replaced it already.
        if own is not None and done.step == own.step and path != newest:
            backend_of(directory).remove(path)
    if keep.last is None:
        return
    found = [(done, path) for done, path in found if own is None or done.step != own.step or path == newest]
    best = rank_by_metric(found, otherwise=keep.greater_is_better).paths[: keep.best]
    # max(0, …): with fewer checkpoints than keep.last, a negative start would drop the first ones.
    kept = {newest, *(path for _, path in found[max(0, len(found) - keep.last) :]), *best}
    for _, path in found:
        if path not in kept:
            backend_of(directory).remove(path)
