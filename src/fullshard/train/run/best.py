"""The model after the best evaluation so far, on disk, in step with the checkpoints.

A checkpoint's record names the best evaluation so far. A run that is killed goes on from there and may need the model
of that very evaluation at its end, although a better one had come before the kill: so a model that a checkpoint names
is moved aside when a better one replaces it, and deleted when a later checkpoint is on the disk::

    best/                    the best so far; its fullshard/evaluation.json says of which evaluation
    best.step-00000012/      an earlier best that a checkpoint names
    best.next/               on its way to be best/
    best.last/               on its way to be deleted
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from fullshard.comm import Comm, together, together_in_background
from fullshard.errors import CheckpointError
from fullshard.saving import save
from fullshard.storage import write_text
from fullshard.train.reporting.reports import EvaluationReport

LABEL = Path("fullshard", "evaluation.json")
"""In a directory of its own, so that it is not placed beside the model in ``output_dir``."""


class BestModel:
    """Keeps ``best/``; made by every rank, the files are rank 0's.

    Attributes:
        directory: ``best/`` itself.
    """

    def __init__(self, output_dir: Path, comm: Comm) -> None:
        """Change nothing yet."""
        self.directory = output_dir / "best"
        self._comm = comm
        self._named: dict[int, int] = {}  # of the last two checkpoints: their step, and that of the best they name

    def keep(self, model: Any, tokenizer: Any, report: EvaluationReport) -> None:
        """Save the model as the best; every rank calls it.

        Raises:
            CheckpointError: Rank 0 could not write; on every rank.
        """
        following = self._sibling("next")
        save(model, following, tokenizer=_Labelled(tokenizer, report))

        def place() -> None:
            if self._comm.rank == 0:
                label = _read_label(self.directory)
                named = label is not None and label["step"] in self._named.values()
                self._replace(following, aside=f"step-{label['step']:08d}" if label and named else "last")

        together_in_background(self._comm, place)

    def named(self, checkpoint_step: int, best: EvaluationReport | None) -> None:
        """A checkpoint is being saved whose record names ``best``."""
        if best is not None:
            self._named[checkpoint_step] = best.step

    def committed(self, checkpoint_step: int) -> None:
        """A checkpoint is on the disk: what only earlier ones name may go. Any rank; rank 0 deletes."""
        self._named = {step: best for step, best in self._named.items() if step >= checkpoint_step}
        if self._comm.rank == 0:
            kept = {f"{self.directory.name}.step-{best:08d}" for best in self._named.values()}
            self._delete(path for path in self._asides() if path.name not in kept)

    def restore(self, checkpoint_step: int, best: EvaluationReport | None) -> bool:
        """Go on from a checkpoint: have ``best/`` be the model that its record names; every rank calls it.

        Args:
            checkpoint_step: Of the checkpoint.
            best: What its record names.

        Returns:
            Whether it was found; True where the record names none.

        Raises:
            CheckpointError: The file system refused.
        """
        if best is None:
            return True
        self.named(checkpoint_step, best)

        def place() -> bool:
            if self._comm.rank != 0:
                return False
            candidates = (self.directory, self._sibling("next"), self._sibling("last"), *self._asides())
            found = next((path for path in candidates if _read_label(path) == _label(best)), None)
            if found is not None and found != self.directory:
                self._replace(found, aside="lost")
            return found is not None

        return self._comm.all_gather_object(together(self._comm, place))[0]

    def discard(self) -> None:
        """Delete it all: the run starts anew, and an earlier one's must not pass for its own; on rank 0."""
        self._delete([self.directory])
        self.clear()

    def clear(self) -> None:
        """Delete everything beside ``best/`` itself; any rank, rank 0 deletes."""
        if self._comm.rank == 0:
            self._delete([*self._asides(), *(self._sibling(name) for name in ("next", "last", "lost"))])

    def _replace(self, path: Path, *, aside: str) -> None:
        """Rank 0: make ``path`` the best, and put the one before aside; ``last`` and ``lost`` are deleted."""
        before = self._sibling(aside)
        try:
            if before.exists():
                shutil.rmtree(before)
            if self.directory.exists():
                os.rename(self.directory, before)
            os.rename(path, self.directory)
        except OSError as error:
            raise CheckpointError(f"{path} could not take the place of {self.directory}: {error}.") from error
        self._delete([self._sibling("last"), self._sibling("lost")])

    def _sibling(self, suffix: str) -> Path:
        return self.directory.with_name(f"{self.directory.name}.{suffix}")

    def _asides(self) -> list[Path]:
        return sorted(self.directory.parent.glob(f"{self.directory.name}.step-*"))

    def _delete(self, paths: Any) -> None:
        """What cannot be deleted costs space and no more: the next time tries again."""
        for path in paths:
            shutil.rmtree(path, ignore_errors=True)


class _Labelled:
    """A tokenizer that saves beside itself which evaluation the model is of."""

    def __init__(self, tokenizer: Any, report: EvaluationReport) -> None:
        self._tokenizer = tokenizer
        self._report = report

    def save_pretrained(self, directory: Path) -> None:
        """Write both."""
        self._tokenizer.save_pretrained(directory)
        (directory / LABEL).parent.mkdir()
        write_text(directory / LABEL, json.dumps(_label(self._report)) + "\n")


def _label(report: EvaluationReport) -> dict[str, Any]:
    """What tells one evaluation from another: all but the time it took."""
    values = report.as_dict()
    del values["kind"], values["seconds"]
    return values


def _read_label(directory: Path) -> dict[str, Any] | None:
    """The label of a saved model; None where there is none."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads((directory / LABEL).read_text(encoding="utf-8"))
    return None
