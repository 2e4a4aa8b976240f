"""The model of the best evaluation so far on disk, kept consistent with the checkpoints.

A checkpoint's record names the best evaluation at that time. A killed run resumes from the checkpoint and may need
that evaluation's model at the end, even if there was a better one before the kill. So a model that a checkpoint
names is moved aside when a better one replaces it, and deleted once a later checkpoint is on disk::

    best/                    the best so far; its fullshard/evaluation.json identifies the evaluation
    best.step-00000012/      an earlier best that a checkpoint names
    best.next/               being written, will become best/
    best.last/               being deleted
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from fullshard.core.comm import Comm, together, together_in_background
from fullshard.errors import CheckpointError
from fullshard.program.train.evaluation.trained import BEST_NAME
from fullshard.program.train.reporting.reports import EvaluationReport
from fullshard.state.saving import save
from fullshard.state.storage import write_text

LABEL = Path("fullshard", "evaluation.json")
"""In its own directory, so that it is not published with the model in ``output_dir``."""


class BestModel:
    """The directory ``best/`` and its siblings; every rank has one, rank 0 moves and deletes the files.

    Attributes:
        directory: The path of ``best/``.
    """

    def __init__(self, output_dir: Path, comm: Comm) -> None:
        """Change nothing yet."""
        self.directory = output_dir / BEST_NAME
        self._comm = comm
        self._named: dict[int, int] = {}  # of the last two checkpoints: step -> step of the best model they name
        self._in_snapshots: list[int] = []  # steps of the best models that the last two snapshots name

    def keep(self, model: Any, tokenizer: Any, report: EvaluationReport) -> None:
        """Save the model as the best so far; every rank calls it.

        Raises:
            CheckpointError: Rank 0 could not write; on every rank.
        """
        following = self._sibling("next")
        save(model, following, tokenizer=_Labelled(tokenizer, report))

        def place() -> None:
            if self._comm.rank == 0:
                label = _read_label(self.directory)
                named = label is not None and label["step"] in self._still_named()
                self._replace(following, aside=f"step-{label['step']:08d}" if label and named else "last")

        together_in_background(self._comm, place)

    def named(self, checkpoint_step: int, best: EvaluationReport | None) -> None:
        """Record that a checkpoint being saved names ``best``."""
        if best is not None:
            self._named[checkpoint_step] = best.step

    def named_by_snapshot(self, best: EvaluationReport | None) -> None:
        """Record that a snapshot being taken names ``best``; two snapshots exist at any time."""
        self._in_snapshots = [*self._in_snapshots, 0 if best is None else best.step][-2:]

    def committed(self, checkpoint_step: int) -> None:
        """Delete models that only checkpoints before ``checkpoint_step`` name; any rank calls it, rank 0 deletes."""
        self._named = {step: best for step, best in self._named.items() if step >= checkpoint_step}
        if self._comm.rank == 0:
            kept = {f"{self.directory.name}.step-{best:08d}" for best in self._still_named()}
            self._delete(path for path in self._asides() if path.name not in kept)

    def restore(self, checkpoint_step: int, best: EvaluationReport | None) -> bool:
        """Make ``best/`` the model that the record of the checkpoint of ``checkpoint_step`` names; every rank calls it.

        Returns:
            True if the model was found or the record names none.

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
        """Delete everything, on rank 0: a new run must not publish an earlier run's model."""
        self._delete([self.directory])
        self.clear()

    def clear(self) -> None:
        """Delete everything except ``best/`` itself; any rank calls it, rank 0 deletes."""
        if self._comm.rank == 0:
            self._delete([*self._asides(), *(self._sibling(name) for name in ("next", "last", "lost"))])

    def _still_named(self) -> set[int]:
        """Return the steps of the best models that the run may still need."""
        return {*self._named.values(), *self._in_snapshots}

    def _replace(self, path: Path, *, aside: str) -> None:
        """Rename ``path`` to ``best/`` and the previous one to a sibling; delete the siblings ``last`` and ``lost``."""
        before = self._sibling(aside)
        try:
            if before.exists():
                shutil.rmtree(before)
            if self.directory.exists():
                os.rename(self.directory, before)
            os.rename(path, self.directory)
        except OSError as error:
            raise CheckpointError(f"{path} could not be renamed to {self.directory}: {error}.") from error
        self._delete([self._sibling("last"), self._sibling("lost")])

    def _sibling(self, suffix: str) -> Path:
        return self.directory.with_name(f"{self.directory.name}.{suffix}")

    def _asides(self) -> list[Path]:
        return sorted(self.directory.parent.glob(f"{self.directory.name}.step-*"))

    def _delete(self, paths: Any) -> None:
        """Delete directories; a failure only wastes disk space, and is retried next time."""
        for path in paths:
            shutil.rmtree(path, ignore_errors=True)


class _Labelled:
    """Wraps a tokenizer to also save which evaluation the model belongs to."""

    def __init__(self, tokenizer: Any, report: EvaluationReport) -> None:
        self._tokenizer = tokenizer
        self._report = report

    def save_pretrained(self, directory: Path) -> None:
        """Write the tokenizer and the label."""
        self._tokenizer.save_pretrained(directory)
        (directory / LABEL).parent.mkdir()
        write_text(directory / LABEL, json.dumps(_label(self._report)) + "\n")


def _label(report: EvaluationReport) -> dict[str, Any]:
    """Return the values that identify an evaluation: all but the time it took."""
    values = report.as_dict()
    del values["kind"], values["seconds"]
    return values


def _read_label(directory: Path) -> dict[str, Any] | None:
    """Return the label of a saved model, or None."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads((directory / LABEL).read_text(encoding="utf-8"))
    return None
