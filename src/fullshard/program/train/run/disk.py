"""The disk space of a run: what checkpoints and models need from here on, compared with what is free before a step."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fullshard.core.comm import together
from fullshard.core.engine import local_tensors
from fullshard.errors import CheckpointError
from fullshard.program.train.run.assemble import Assembly
from fullshard.program.train.setup.optimizers import expected_state_bytes
from fullshard.sizes import format_bytes
from fullshard.state.saving.full import model_bytes
from fullshard.state.saving.pieces import MODEL, OPTIMIZER, plan_save


@dataclass(frozen=True)
class Demand:
    """What a run writes from here on. Tensors only, so that it is never more than what is written."""

    checkpoint: int  # bytes of a checkpoint
    model: int  # bytes of a model
    saves: int  # checkpoints to come
    evaluations: int  # evaluations to come
    limit: int | None  # most checkpoints that are kept; None: all are
    kept: int = 0  # complete checkpoints that are there already, without those that the run replaces
    has_best: bool = False  # whether best/ is there already

    @property
    def certain(self) -> Sequence[tuple[int, int]]:
        """Bytes of checkpoints and of models beside those now, at each moment that the run reaches for certain."""
        # The first evaluation of a run keeps its model; later ones may not. Without one, the last model is saved.
        models = 0 if self.has_best else self.model
        if not self.saves:
            return [(0, models)]
        # An earlier checkpoint is deleted only when the new one is complete.
        stays = self.limit is None or self.kept < self.limit
        return [(self.checkpoint, 0), (self.checkpoint if stays else 0, models)]

    @property
    def most(self) -> tuple[int, int]:
        """Most checkpoints and models that are there at once, beside those now."""
        checkpoints = self.saves
        if self.limit is not None:
            checkpoints = min(self.saves, max(1, self.limit + 1 - self.kept))
        # A better model is complete before the best one so far is deleted.
        now = int(self.has_best)
        return checkpoints, max(1 - now, min(2 - now, self.evaluations))


@dataclass(frozen=True)
class Target:
    """A directory that the run writes to."""

    path: Path  # which need not exist
    replaced: tuple[Path, ...] = ()  # files and directories that the run deletes before its first step


def checkpoint_bytes(parts: Assembly) -> int:
    """Return the bytes of tensors of a checkpoint after the next step, of all ranks together; every rank calls it.

    Raises:
        CheckpointError: The state cannot be saved; on every rank.
    """
    model, comm = parts.model, parts.comm

    def own() -> int:
        plan = plan_save(model, parts.optimizer, gradients=False, average=parts.average, frozen=parts.base is None)
        nbytes = sum(piece.tensor.nbytes for piece in plan.pieces)
        if any(piece.name.startswith(OPTIMIZER) for piece in plan.pieces):
            return nbytes
        # Of what other ranks hold too this rank writes a share, of the state as of the parameters.
        trained = [local for local in local_tensors(model) if local.param is not None and not local.is_frozen]
        held, names = sum(local.tensor.numel() for local in trained), {MODEL + local.name for local in trained}
        written = sum(piece.tensor.numel() for piece in plan.pieces if piece.name in names)
        return nbytes + expected_state_bytes(model, parts.config) * written // max(1, held)

    return sum(comm.all_gather_object(together(comm, own)))


def demand(parts: Assembly, *, saves: int, evaluations: int, has_best: bool) -> Demand:
    """Return what the run writes from here on, before what is on disk is known; every rank calls it.

    Raises:
        CheckpointError: The state cannot be saved; on every rank.
    """
    nbytes = checkpoint_bytes(parts) if saves else 0
    limit = parts.config.training.save_total_limit
    return Demand(nbytes, model_bytes(parts.model), saves, evaluations, limit, has_best=has_best)


def free_bytes(path: Path) -> int | None:
    """Return the bytes that this user can write at an existing path; None if its file system does not say."""
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return usage.free if usage.total else None  # some network file systems have 0 of 0


def require_room(
    needed: Demand, checkpoints: Target | None, models: Target, free: Callable[[Path], int | None] = free_bytes
) -> tuple[str, ...]:
    """Compare what the run writes with what is free; on rank 0.

    Args:
        needed: What the run writes.
        checkpoints: Where checkpoints go; None: to an object store, which has no end.
        models: Where models go.
        free: Returns the free bytes at an existing path; None: unknown, which is not checked.

    Returns:
        Notes for the user: one if all that may be kept at once does not fit.

    Raises:
        CheckpointError: Not even the first checkpoint and the first model fit.
    """
    notes: list[str] = []
    for targets in _by_device([checkpoints, models]):
        path = next(target.path for target in targets if target is not None)
        there = free(_existing(path))
        if there is None:
            continue
        there += sum(_bytes_freed(target.replaced) for target in targets if target is not None)
        first = max(_sum(moment, targets) for moment in needed.certain)
        counts = needed.most
        most = _sum((counts[0] * needed.checkpoint, counts[1] * needed.model), targets)
        shown = f"{path} has room for {format_bytes(there)}"
        if there < first:
            ways = "free some, or set another output_dir"
            if targets[0] is not None and needed.saves:
                ways += ", training.checkpoints_to or training.save_strategy=no"
            raise CheckpointError(
                f"{shown}, and the first files of this run need {format_bytes(first)}: {_sizes(needed, targets)}. No "
                f"step was taken: {ways}."
            )
        if there < most:
            ways = ": a lower training.save_total_limit keeps fewer checkpoints" if targets[0] and counts[0] > 1 else ""
            notes.append(
                f"{shown}, and this run may need {format_bytes(most)}: {_sizes(needed, targets, counts)}; "
                f"the disk may be full before it ends{ways}"
            )
    return tuple(notes)


def _by_device(targets: Sequence[Target | None]) -> list[list[Target | None]]:
    """Return the targets of each disk, each at its own index, with None for the others."""
    devices = [None if target is None else _existing(target.path).stat().st_dev for target in targets]
    different = dict.fromkeys(device for device in devices if device is not None)
    return [
        [target if device == one else None for target, device in zip(targets, devices, strict=True)]
        for one in different
    ]


def _existing(path: Path) -> Path:
    """Return the nearest parent that exists, or the path itself."""
    path = path.absolute()
    return next(one for one in (path, *path.parents) if one.exists())


def _sum(values: tuple[int, int], targets: Sequence[Target | None]) -> int:
    return sum(value for value, target in zip(values, targets, strict=True) if target is not None)


def _sizes(needed: Demand, targets: Sequence[Target | None], counts: tuple[int, int] = (1, 1)) -> str:
    """Return the sizes of what goes to the targets, such as ``2 checkpoints of 1.0 GB and 1 model of 0.3 GB``."""
    kinds = ((counts[0] if needed.saves else 0, "checkpoint", needed.checkpoint), (counts[1], "model", needed.model))
    return " and ".join(
        f"{count} {name}{'s' if count > 1 else ''} of {format_bytes(nbytes)}"
        for (count, name, nbytes), target in zip(kinds, targets, strict=True)
        if target is not None and count
    )


def _bytes_freed(paths: Iterable[Path]) -> int:
    """Return the bytes that deleting these directories frees: files with other names, such as published ones, stay."""
    files = (file for path in paths for file in path.rglob("*"))
    sizes = [file.lstat() for file in files if file.is_file() and not file.is_symlink()]
    return sum(size.st_size for size in sizes if size.st_nlink == 1)
