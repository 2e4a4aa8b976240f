"""The checkpoints of a run: what they contain, restoring a run from one, and the best model beside them.

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
import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fullshard.core.comm import Comm, together, together_in_background
from fullshard.errors import CheckpointError, ConfigError
from fullshard.program.config import PROMPT_NAME, prompt_text
from fullshard.program.metrics import higher_is_better, needs_text
from fullshard.program.models import save_tokenizer
from fullshard.program.train.evaluation.trained import BEST_NAME
from fullshard.program.train.reporting.reports import CheckpointReport, EvaluationReport
from fullshard.program.train.reporting.sinks import Sink
from fullshard.program.train.run.assemble import Assembly
from fullshard.program.train.run.record import Record
from fullshard.program.train.setup.devices import decided_settings, recorded_choices
from fullshard.program.train.setup.resume import EVALUATION_NAME, StartingPoint
from fullshard.state.saving import Checkpoints, SaveReport, save
from fullshard.state.saving.full import write_assets
from fullshard.state.storage import Place, add_small_file, read_completion, read_index, survey, write_text


class PromptedTokenizer:
    """Takes the tokenizer's place where a model or a checkpoint is saved."""

    def __init__(self, parts: Assembly) -> None:
        self._parts = parts

    def save_pretrained(self, directory: Path) -> None:
        """Write the tokenizer and ``fullshard_prompt.json``; on rank 0."""
        parts = self._parts
        save_tokenizer(parts.tokenizer, directory)
        labels = None if parts.evaluation is None else parts.evaluation.rows.labels
        labels = labels if isinstance(labels, Mapping) else None
        text = prompt_text(parts.config, parts.system_turns, labels, conversations=bool(parts.system_turns))
        write_text(directory / PROMPT_NAME, text)


LABEL = Path("fullshard", "evaluation.json")
"""In its own directory, so that it is not published with the model in ``output_dir``."""


class BestModel:
    """The directory ``best/`` and its siblings; every rank has one, rank 0 moves and deletes the files.

    Attributes:
        directory: The path of ``best/``.
    """

    def __init__(self, output_dir: Path, comm: Comm) -> None:
        self.directory = output_dir / BEST_NAME
        self._comm = comm
        self._named: dict[int, int] = {}  # of the last two checkpoints: step -> step of the best model they name
        self._in_snapshots: list[int] = []  # steps of the best models that the last three snapshots name

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
        """Record that a snapshot being taken names ``best``; the two before it may exist until it is complete."""
        self._in_snapshots = [*self._in_snapshots, 0 if best is None else best.step][-3:]

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
    with contextlib.suppress(OSError, ValueError):
        return json.loads((directory / LABEL).read_text(encoding="utf-8"))
    return None


class RunCheckpoints:
    """Saves and restores a run's checkpoints, and reports them to the sinks; every rank calls every method.

    Attributes:
        newest: Step and directory of the newest checkpoint of this run; step 0 before the first. It may still be
            written.
        complete: Step of the newest complete checkpoint in the run's directory that all ranks know of; 0 for none.
    """

    def __init__(
        self, parts: Assembly, start: StartingPoint, checkpoints: Checkpoints, best: BestModel, sinks: Sequence[Sink]
    ) -> None:
        self.newest: tuple[int, Place | None] = (0, None)
        self.complete = 0
        # What an evaluation may write depends on the data too, which is known only now.
        self._comparable = start.comparable and _same_length(start.values, parts)
        self._extendable = self._comparable
        self._parts = parts
        self._start = start
        self._checkpoints = checkpoints
        self._best = best
        self._sinks = sinks

    def restore(self) -> tuple[int, Record, tuple[str, ...]]:
        """Load the checkpoint that the run resumes from, if it resumes.

        Returns:
            The steps trained before, their record, and notes for the user; ``(0, Record(), ())`` for a new run.

        Raises:
            ConfigError: The checkpoint is from after the last step of the run.
            CheckpointError: It is damaged or cannot be read.
        """
        start, parts, comm = self._start, self._parts, self._parts.comm
        if self._checkpoints.in_memory is not None:
            self._checkpoints.in_memory.note_made(parts.model)
        if start.path is None or start.values is None:
            return 0, Record(), ()
        self._require_same_separator()
        self._require_same_base()
        options = [{k: v for k, v in group.items() if k != "params"} for group in parts.optimizer.param_groups]
        restored = self._checkpoints.load(parts.model, parts.optimizer, path=start.path, average=parts.average)
        assert restored is not None, "a path was given"
        # The optimizer's options come from the settings, because the user may have changed them on purpose.
        for group, given in zip(parts.optimizer.param_groups, options, strict=True):
            group.update(given)
        if restored.step > parts.schedule.total_steps:
            raise ConfigError(
                f"{start.path} was saved after step {restored.step:,}, but with these settings the run has only "
                f"{parts.schedule.total_steps:,} steps: raise training.num_train_epochs or training.max_steps."
            )
        if not restored.rng_restored:
            # The number of ranks has changed, so that this rank's random state cannot be restored: a new one.
            drawn = hashlib.sha256(f"{parts.config.seed} {comm.rank} {restored.step}".encode()).digest()[:8]
            torch.manual_seed(int.from_bytes(drawn) >> 1)
        if parts.scaler is not None and start.values["scaler"] is not None:
            parts.scaler.load_state_dict(start.values["scaler"])
        if restored.path.parent.resolve() == self._checkpoints.directory.resolve():
            self.newest = (restored.step, restored.path)
        try:
            record = Record.from_values(start.values["record"], rank=comm.rank, world_size=comm.size)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"The record of the run in {start.path} is damaged: {error!r}.") from error
        return restored.step, record, self._restore_best(restored.step, record)

    def kept(self) -> tuple[int, ...]:
        """Return the steps of the complete checkpoints that the run keeps, in the order they were saved in; on rank 0.

        Raises:
            CheckpointError: The object store cannot be reached.
        """
        found = survey(self._checkpoints.directory).complete
        return tuple(completion.step for completion, path in found if path not in self._start.superseded)

    def _require_same_base(self) -> None:
        """Check that the model's frozen weights were read from the files that the checkpoint names.

        Raises:
            CheckpointError: They were read from others.
        """
        path, ours, comm = self._start.path, self._parts.base, self._parts.comm
        assert path is not None, "the run resumes"

        def check() -> None:
            theirs = read_index(path).base
            if theirs is None or ours is None or theirs.content == ours.content:
                return
            raise CheckpointError(
                f"{path} is of an adapter over {theirs.name} ({theirs.content}), and {ours.directory} has other files "
                f"({ours.content}). Set model.path to the model that the run began with, or start with resume=never."
            )

        together_in_background(comm, check)

    def _require_same_separator(self) -> None:
        """Check that source and target are separated as at the start of the run, unless the user asked for a change.

        Raises:
            ConfigError: The checkpoint is of a version that chose another separator.
        """
        start, key = self._start, "data.separator"
        assert start.values is not None, "the run resumes"
        # Versions without the option put nothing between them.
        before, now = start.values.get("separator", ""), self._parts.config.data.separator
        asked = start.settings.get(key) != start.values["settings"].get(key)
        if now is not None and before != now and not asked:
            raise ConfigError(
                f"{start.path} was trained with {before!r} between source and target; without data.separator it would "
                f"be {now!r} from here on. To resume, set resume={start.path} and "
                f"'data.separator={json.dumps(before)}'; to start from scratch, resume=never."
            )

    def _restore_best(self, step: int, record: Record) -> tuple[str, ...]:
        """Restore the best model so far, or drop it from the record if it is lost or cannot be compared any more."""
        best = record.best
        if best is None:
            return ()
        why = "was evaluated with other settings"
        if self._comparable:
            if self._best.restore(step, best):
                return ()
            why = "is no longer there"
        # Any evaluation that was due after this step is made again.
        record.best, record.evaluated_step, record.stale_evaluations = None, 0, 0
        return (f"the best model so far, of step {best.step:,}, {why}: the best from here on is kept",)

    def save(self, step: int, record: Record, train_seconds: float, *, background: bool = True) -> None:
        """Save a checkpoint after ``step`` steps; the previous one must have been reported by ``report(wait=True)``.

        ``background``: write while training continues; :meth:`report` reports it once it is on disk.

        Raises:
            CheckpointError: It could not be written; on every rank.
        """
        parts = self._parts
        values = self._values(record, train_seconds, parts.comm.all_gather_object(record.peak_bytes))
        started = time.monotonic()
        path = self._checkpoints.save(
            parts.model,
            parts.optimizer,
            step=step,
            values=values,
            background=background,
            average=parts.average,
            assets=partial(_write_assets, parts),
            base=parts.base,
        )
        self.newest = (step, path)
        self._extendable = True
        self._best.named(step, record.best)
        if not background:
            self.complete = step
            seconds = time.monotonic() - started
            self._committed(step, path, seconds, stall_seconds=seconds)

    def _values(self, record: Record, train_seconds: float, peaks: Sequence[int]) -> dict[str, Any]:
        parts = self._parts
        return {
            "settings": self._start.settings,
            "separator": parts.config.data.separator,
            "group_rows": self._start.group,
            "max_new_tokens": _longest_text(parts.config.as_flat()),
            "rules": asdict(self._start.rules),
            "chosen": recorded_choices(parts.chosen),
            "decided": decided_settings(parts.config),
            "division": asdict(self._start.began),
            "total_steps": parts.schedule.total_steps,
            "scaler": None if parts.scaler is None else parts.scaler.state_dict(),
            "record": record.as_values(train_seconds=train_seconds, peaks=peaks),
        }

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of snapshots in this process's memory, which a plan has apart from a step's tensors."""
        kept = self._checkpoints.in_memory
        return 0 if kept is None else kept.nbytes

    def snapshot_is_due(self, step: int) -> bool:
        """Return True if a launcher keeps snapshots and one follows this step; no communication."""
        kept = self._checkpoints.in_memory
        return kept is not None and kept.due(step)

    def snapshot(self, step: int, record: Record, train_seconds: float) -> None:
        """Take a snapshot in memory if a launcher keeps them; it is completed while training continues."""
        kept, parts = self._checkpoints.in_memory, self._parts
        if kept is None:
            return
        # Each rank keeps its own record, so that no communication is needed.
        values = self._values(record, train_seconds, [record.peak_bytes] * parts.comm.size)
        if kept.take(parts.model, parts.optimizer, step=step, values=values, average=parts.average):
            self._best.named_by_snapshot(record.best)

    def begun(self) -> None:
        """Record that what the run replaces is deleted, so that later attempts continue it."""
        kept = self._checkpoints.in_memory
        if kept is not None:
            kept.leave_out_made(self._parts.model)
            together(self._parts.comm, lambda: kept.mark_begun(self._start.began.ranks))

    def step_over(self) -> None:
        """Record that a step is over, to measure the time between snapshots."""
        if self._checkpoints.in_memory is not None:
            self._checkpoints.in_memory.tick()

    def add_evaluation(self, evaluation: EvaluationReport, record: Record, train_seconds: float) -> None:
        """Add an evaluation to the checkpoint of its step, if there is one, so that a resumed run does not repeat it.

        Raises:
            CheckpointError: It could not be written; on every rank.
        """
        step, path = self.newest
        # If the run resumed with other evaluation settings, the checkpoint keeps its own evaluation.
        if path is None or step != evaluation.step or not self._extendable:
            return
        comm = self._parts.comm
        values = record.as_values(train_seconds=train_seconds, peaks=comm.all_gather_object(record.peak_bytes))
        text, greater = json.dumps({"record": values}) + "\n", higher_is_better(evaluation.metric)

        def add() -> None:
            if comm.rank == 0:
                add_small_file(path, EVALUATION_NAME, text, metric=evaluation.value, greater_is_better=greater)

        together_in_background(comm, add)
        self._best.named(step, record.best)
        self._best.committed(step)

    def report(self, *, wait: bool = False) -> None:
        """Report a checkpoint saved in the background, once it is on disk; with ``wait``, wait until it is.

        Raises:
            CheckpointError: It could not be written; on every rank.
        """
        report: SaveReport | None = self._checkpoints.wait() if wait else self._checkpoints.committed()
        if wait:
            self.complete = self.newest[0] or self.complete
        if report is not None:
            self._committed(report.step, report.path, report.seconds, report.stall_seconds)

    def _committed(self, step: int, path: Place, seconds: float, stall_seconds: float) -> None:
        self._best.committed(step)
        if self._sinks:
            nbytes = sum(read_completion(path).files.values())
            for sink in self._sinks:
                sink.checkpoint(CheckpointReport(step, str(path), nbytes, seconds, stall_seconds))


def _write_assets(parts: Assembly, directory: Path) -> None:
    write_assets(parts.model, directory, tokenizer=PromptedTokenizer(parts))


def _longest_text(settings: Mapping[str, Any]) -> Any:
    """Return how many tokens of a row an evaluation writes at most, by the settings; None: they do not say."""
    return settings.get("evaluation.max_new_tokens") or settings.get("data.max_target_length")


def _same_length(values: Mapping[str, Any] | None, parts: Assembly) -> bool:
    """Return whether evaluations may write as many tokens as those before the checkpoint with these values."""
    config = parts.config
    if values is None or not needs_text(config.evaluation.every_metric):
        return True
    # Earlier versions did not record it: without the setting they wrote up to data.max_target_length.
    before = values.get("max_new_tokens") or _longest_text(values["settings"])
    return before == _longest_text(config.as_flat())
