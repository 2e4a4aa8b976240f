"""Where a run starts: from scratch or from a checkpoint, and whether its settings match what that saved."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, isfinite
from pathlib import Path
from typing import Any, Literal

from fullshard.directory_lock import CHECKPOINTS_NAME as CHECKPOINTS_NAME
from fullshard.errors import CheckpointError, ConfigError, DataError
from fullshard.program.config import RUN_NAME, RunConfig, option_of, options
from fullshard.program.config.section import EVALUATION, STATE, Option
from fullshard.program.data import split_lists
from fullshard.program.train.reporting.reports import EndedBy
from fullshard.program.train.setup.prepare import source_spec
from fullshard.program.train.setup.steps import BatchPartition, began_with
from fullshard.state.storage import (
    FINISHED_NAME,
    Place,
    Survey,
    as_place,
    backend_of,
    changed_small_files,
    content_of,
    directory_content,
    find_checkpoints,
    instead_of,
    is_url,
    read_completion,
    read_index,
    read_json,
    shown,
    survey,
)

EVALUATION_NAME = "evaluation.json"
"""File that an evaluation after a checkpoint's step adds to the checkpoint: the run so far, with the evaluation."""


@dataclass(frozen=True)
class Rules:
    """What settings mean in a run: as in this version, or as in the earlier one that began it."""

    # parameters with weight decay: by names, as in Hugging Face's Trainer, or those with two or more dimensions
    weight_decay: Literal["names", "dimensions"] = "names"
    # what limits the steps if ``training.max_steps`` is set: that alone, or the epochs too
    steps: Literal["max_steps", "smaller"] = "max_steps"

    @classmethod
    def of(cls, values: Mapping[str, Any] | None) -> Rules:
        """Return the rules of a run that continues with these values of a checkpoint; None: it starts here."""
        if values is None:
            return cls()
        return cls(**values["rules"]) if "rules" in values else _EARLIER

    def settled(self, config: RunConfig, steps_per_epoch: int) -> RunConfig:
        """Return the settings with the limit on steps that holds: without ``max_steps`` where epochs end earlier."""
        training = config.training
        epochs = ceil(steps_per_epoch * training.num_train_epochs)
        if self.steps == "max_steps" or training.max_steps is None or training.max_steps <= epochs:
            return config
        return config.model_copy(update={"training": training.model_copy(update={"max_steps": None})})


THIS_VERSION = Rules()
"""The rules of runs that begin now."""

_EARLIER = Rules(weight_decay="dimensions", steps="smaller")
"""The rules of runs whose checkpoints record none."""


def read_values(path: Place) -> tuple[int, Mapping[str, Any]]:
    """Return step and values of a run's checkpoint.

    Raises:
        CheckpointError: It is damaged, or was not saved by a run.
    """
    index = read_index(path)
    values = index.values
    if "settings" not in values:
        raise CheckpointError(f"{path} was not saved by fullshard train: it has no settings of a run.")
    rows, scaler = values.get("group_rows"), values.get("scaler")
    numbers = [value for value in scaler.values() if isinstance(value, float)] if isinstance(scaler, Mapping) else []
    problems = {
        "settings": not isinstance(values["settings"], Mapping),
        "record": not isinstance(values.get("record"), Mapping),
        "group_rows": type(rows) is not int or rows < 1,
        "rules": "rules" in values and not _are_rules(values["rules"]),
        "chosen": not _are_choices(values.get("chosen", {})),
        "scaler": not isinstance(scaler, Mapping | None) or not all(isfinite(value) for value in numbers),
    }
    wrong = [name for name, is_wrong in problems.items() if is_wrong]
    if wrong:
        raise CheckpointError(
            f"{path / 'index.json'} has values that no run saves: {wrong[0]} is {shown(values.get(wrong[0]))}. "
            f"{instead_of(path)}"
        )
    # Checkpoints of older versions, which had only AdamW, tokenized first and knew quotes of CSV alone, do not name
    # these. Whether files without such quotes give other rows now is seen by the rows' hash.
    older = {key: option.before for key, option in options().items() if option.before is not None}
    settings = {**older, **values["settings"]}
    return index.step, {**values, **_added_values(path), "settings": settings}


def _added_values(path: Place) -> Mapping[str, Any]:
    """Return what the evaluation after a complete checkpoint's step added to it."""
    # A file that a killed run wrote but did not list is not part of the checkpoint.
    done = read_completion(path)
    if EVALUATION_NAME not in done.files:
        return {}
    try:
        for name, text in changed_small_files(path, done):
            if name == EVALUATION_NAME:
                raise ValueError(text)
        return {"record": read_json(path / EVALUATION_NAME)["record"]}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path / EVALUATION_NAME} cannot be read: {error}. {instead_of(path)}") from error


def _are_choices(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(part, str) for pair in value.items() for part in pair)


def _are_rules(value: object) -> bool:
    """Return whether a value is of the fields of :class:`Rules`."""
    decay, steps = ("names", "dimensions"), ("max_steps", "smaller")
    return value in [{"weight_decay": one, "steps": other} for one in decay for other in steps]


GLOBAL_BATCH = "global batch (ranks x training.per_device_train_batch_size x training.gradient_accumulation_steps)"

TITLE_LISTS = "WikiHow's title lists (beside data.train_file)"

_STEPS = ("training.max_steps", "training.num_train_epochs")
"""The settings that say how many steps a run has."""

_DATASET_FILES = ("**/*.arrow", "**/*.json")
"""What ``save_to_disk`` writes."""

_OF_OTHERS = {GLOBAL_BATCH: STATE, TITLE_LISTS: EVALUATION}
"""What is compared besides the options, and how."""


@dataclass(frozen=True)
class StartingPoint:
    """Where a run starts."""

    settings: Mapping[str, Any]  # settings that affect training, by dotted key; saved in the run's checkpoints
    asked: BatchPartition  # partition of a step that the settings request on the current ranks
    began: BatchPartition  # the same at the run's start
    path: Place | None = None  # the checkpoint to resume from; None: the run starts from scratch
    values: Mapping[str, Any] | None = None  # the values that the run saved in that checkpoint
    comparable: bool = True  # whether evaluations before that checkpoint can be compared with later ones
    superseded: tuple[Place, ...] = ()  # checkpoints to delete before the first step
    damaged: tuple[Place, ...] = ()  # damaged checkpoints to rename before the first step: later runs ignore them
    notes: tuple[str, ...] = ()  # notes for the user
    step: int = 0  # optimizer steps taken before
    in_memory: bool = False  # whether ``path`` is this rank's snapshot

    @property
    def group(self) -> int:
        """Rows, or micro-batches, that are sorted by length together, as at the run's start."""
        return self.began.group if self.values is None else self.values["group_rows"]

    @property
    def chosen(self) -> Mapping[str, str]:
        """What the run chose by itself at its start, by setting; empty of earlier versions, which did not record it."""
        return {} if self.values is None else self.values.get("chosen", {})

    @property
    def rules(self) -> Rules:
        """What settings mean, as at the run's start, unless the user now asks for another number of steps."""
        rules = Rules.of(self.values)
        if self.values is None or all(self.settings.get(k) == self.values["settings"].get(k) for k in _STEPS):
            return rules
        return replace(rules, steps="max_steps")

    @property
    def partition(self) -> BatchPartition:
        """Partition of a step's rows over the current ranks.

        Raises:
            ConfigError: They cannot be divided equally.
        """
        return self.began.on(self.asked.ranks)

    def with_values(self, values: Mapping[str, Any]) -> StartingPoint:
        """Return the start with the values of a checkpoint, which may come from other ranks.

        Raises:
            ConfigError: Its global batch cannot be divided over the current ranks.
        """
        return replace(self, values=values).keeping(BatchPartition.began(values) or self.began)

    def keeping(self, began: BatchPartition) -> StartingPoint:
        """Return the start with the global batch of a run that began partitioned otherwise, unless settings changed."""
        start = replace(self, began=began_with(self.asked, began))
        settings = {**self.settings, GLOBAL_BATCH: start.partition.global_batch}
        notes = dict.fromkeys((*self.notes, *start._partition_notes()))
        return replace(start, settings=settings, notes=tuple(notes))

    def _partition_notes(self) -> tuple[str, ...]:
        now, unit = self.partition, "tokens" if self.began.by_tokens else "rows"
        if now == self.asked:
            return ()
        return (
            f"the run began on {self.began.ranks} ranks: on {now.ranks} a step of {now.global_batch:,} {unit} is "
            f"{now.accumulation} micro-batches of {now.each} on each",
        )


def checkpoints_directory(config: RunConfig) -> Place:
    """Return where a run saves its checkpoints: in its directory, or in an object store."""
    return as_place(config.training.checkpoints_to or Path(config.output_dir, CHECKPOINTS_NAME))


def choose_starting_point(
    config: RunConfig, world_size: int, *, begun: int = 0, in_memory: bool = False
) -> StartingPoint:
    """Decide where a run starts, without changing anything; on rank 0, under the lock on the checkpoints.

    ``begun`` is the number of readers (ranks, or groups that share rows) of the first attempt of the same launcher that
    has passed its start; 0: none has. After that, all checkpoints are the run's own, whatever ``resume`` says, and
    damaged ones are passed over. If there are none, the run starts again from the checkpoint that ``resume`` names.
    With a snapshot ``in_memory``, damaged checkpoints are passed over even if there is no other one.

    Raises:
        ConfigError: The settings differ from the checkpoint's.
        CheckpointError: The requested checkpoint is damaged or was not saved by a run, or the newest one is damaged and
            ``resume`` is not ``previous``.
        DataError: A file that the settings name cannot be read.
    """
    asked = BatchPartition.of(config, world_size)
    fresh = StartingPoint(deciding_settings(config, world_size), asked, asked)
    found = survey(checkpoints_directory(config), parse_newest=True)
    complete = [path for _, path in found.complete]
    # The first attempt started from a checkpoint in another directory and none was saved since: start there again.
    own = complete or config.resume in ("auto", "previous", "never")
    resume = "previous" if begun and own else config.resume
    if resume == "never":
        doomed = (*complete, *(one.path for one in found.damaged))
        names = ", ".join(path.name for path in doomed)
        notes = (f"resume=never: {names} in {found.directory} deleted",) if doomed else ()
        return replace(fresh, superseded=doomed, notes=notes)
    if resume not in ("auto", "previous"):
        return _at(as_place(config.resume), fresh, found)
    finished = found.directory / FINISHED_NAME
    if finished.exists() and not begun:  # an attempt may also be lost after the run has finished
        further = f", resume={complete[-1]} with a higher {_limit_of(finished)}" if complete else ""
        raise ConfigError(
            f"{config.output_dir} holds a finished run{_other_data(config, fresh.settings)}. Set another output_dir"
            f"{further}, or resume=never to start from scratch, which deletes checkpoints now and its model at the end."
        )
    passed_over = resume == "previous" and (complete or in_memory)
    aside = found.newer_damaged() if passed_over else ()
    found = replace(found, damaged=tuple(one for one in found.damaged if one not in aside))
    newest = found.newest()
    if newest is None:
        damaged = tuple(one.path for one in aside)
        fresh = replace(fresh, damaged=damaged, notes=tuple(_aside_notes(damaged)))
        return fresh.keeping(replace(asked, ranks=begun)) if begun else fresh
    return _newest(newest, fresh, found, tuple(one.path for one in aside), _other_data(config, fresh.settings))


def delete_superseded(start: StartingPoint, config: RunConfig) -> None:
    """Delete the checkpoints that the run replaces, set damaged ones aside, and delete the mark of a finished run.

    On rank 0, under the lock.

    Raises:
        CheckpointError: The file system refused.
    """
    finished = checkpoints_directory(config) / FINISHED_NAME
    try:
        # Order matters if this is killed in between: the next run must neither resume a finished run nor take a resumed
        # one for finished. A resuming run removes its mark first, a replaced run loses its checkpoints first.
        if start.path is not None:
            finished.unlink(missing_ok=True)
        for path in start.superseded:
            backend_of(path).remove(path)
        for path in start.damaged:
            backend_of(path).set_aside(path)
        finished.unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"An earlier run's checkpoints could not be deleted or renamed: {error}.") from error


def mark_finished(config: RunConfig, steps: int, ended_by: EndedBy) -> None:
    """Mark the run as finished, with the setting that ended it; on rank 0.

    Raises:
        CheckpointError: The file system refused.
    """
    noted = {"steps": steps, "limit": _limit(config, steps, ended_by)}
    finished = checkpoints_directory(config) / FINISHED_NAME
    backend_of(finished).write_text(finished, json.dumps(noted) + "\n")


def _limit(config: RunConfig, steps: int, ended_by: EndedBy) -> str:
    if ended_by == "steps":
        return "training.max_steps" if steps == config.training.max_steps else "training.num_train_epochs"
    return {"time": "training.max_train_minutes", "early_stopping": "training.early_stopping_patience"}[ended_by]


def _other_data(config: RunConfig, now: Mapping[str, Any]) -> str:
    """Return which data the run in ``output_dir`` was of if it is not that of the settings; otherwise nothing.

    ``now`` are the deciding settings, in which a file is its content.
    """
    try:
        recorded = read_json(Path(config.output_dir, RUN_NAME))
        content, given = recorded["content"], recorded["config"]["data"]
        sets = {f"data.sets.{name}.{key}": value for name, one in given["sets"].items() for key, value in one.items()}
        then = {**{f"data.{key}": value for key, value in given.items()}, **sets}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # nothing is recorded, or it is damaged
        return ""
    named = [key for key in dict.fromkeys((*then, *now)) if option_of(key).names in ("file", "dataset")]
    here = config.as_flat()
    changed = [
        f"{key} was {_named_text(then.get(key), content.get(key))} and is {_named_text(here.get(key), now.get(key))}"
        for key in named
        if content.get(key, then.get(key)) != now.get(key)
    ]
    return f" of other data ({'; '.join(changed)})" if changed else ""


def _named_text(given: Any, content: Any) -> str:
    """Return a file or dataset and its content, if that is known."""
    return _value_text(given) if content in (None, given) else f"{given} ({content})"


def _limit_of(finished: Place) -> str:
    """Return the setting that ended a finished run, from its mark."""
    try:
        return str(read_json(finished)["limit"])
    except (OSError, ValueError, TypeError, KeyError):  # damaged, or of an older version without a limit
        return "training.num_train_epochs"


def deciding_settings(config: RunConfig, world_size: int) -> dict[str, Any]:
    """Return the settings that affect a step's weights or an evaluation's metric, by dotted key; on one rank.

    Files are represented by their content, not their path.

    Raises:
        DataError: A file cannot be read.
    """
    settings = {key: value for key, value in config.as_flat().items() if option_of(key).resume != "free"}
    for key, value in settings.items():
        if option_of(key).draws_rows:
            # Earlier versions took the first rows: their runs must not go on with others.
            settings[key] = value and f"{value} drawn by hash"
        elif option_of(key).holds_out and config.data.held_out_by != "source":
            # Runs of earlier versions hold out other rows, by the source alone, and must not train on them now.
            settings[key] = value and f"{value} (data.held_out_by: {config.data.held_out_by})"
    settings |= {key: _content(key, path) for key, path in _named_places(config).items()}
    specs = [source_spec(part) for part in config.data.parts.values()]
    lists = [f"{path.name} {_content(TITLE_LISTS, path)}" for spec in specs for path in split_lists(spec)]
    if lists:
        settings[TITLE_LISTS] = "; ".join(lists)
    return {**settings, GLOBAL_BATCH: BatchPartition.of(config, world_size).global_batch}


def _named_places(config: RunConfig) -> dict[str, Path]:
    """Return the files and directories that deciding settings name; of a model on the Hub there is only the id."""
    exists = {"file": Path.exists, "model": Path.exists, "dataset": Path.is_dir}
    named = {key: (option_of(key), value) for key, value in config.as_flat().items() if value is not None}
    return {
        key: Path(value)
        for key, (option, value) in named.items()
        if option.resume != "free" and option.names in exists and exists[option.names](Path(value))
    }


def _newest(
    path: Place, fresh: StartingPoint, found: Survey, aside: tuple[Place, ...], other_data: str
) -> StartingPoint:
    """Resume from the newest good checkpoint of the output directory, only with the same settings."""
    step, values = read_values(path)
    start = fresh.with_values(values)
    different = _differences(start, values["settings"])
    if different:
        raise ConfigError(
            f"The run {'of' if is_url(path) else 'in'} {path.parent if is_url(path) else path.parent.parent} was "
            f"interrupted and would resume from {path.name}, but these settings have changed:\n"
            + "\n".join(f"  {line}" for line in different.values())
            + (f"\nIt is a run{other_data}." if other_data else "")
            + f"\nTo resume, {_restoring(different, values['settings'], path)}. "
            "To start from scratch, set resume=never, which deletes the "
            f"checkpoints there, or another output_dir. To resume with the new settings, set resume={path}; the "
            "model, the optimizer and the global batch must be the same even then."
        )
    older = tuple(f"{one.problem} It is older than {path.name} and is not used." for one in found.damaged)
    notes = (f"resuming after step {step:,} from {path}", *start.notes, *_aside_notes(aside), *older)
    return replace(start, path=path, damaged=aside, notes=notes, step=step)


def _restoring(different: Mapping[str, str], then: Mapping[str, Any], path: Place) -> str:
    """Return how a run resumes whose settings differ from the checkpoint's."""
    first_rows = [key for key in different if option_of(key).draws_rows and isinstance(then.get(key), int)]
    if not first_rows:
        return "restore the earlier settings"
    rest = (
        "" if len(first_rows) == len(different) else " and restore the other settings if you do not mean to change them"
    )
    return (
        f"set resume={path}{rest}: an earlier version took the first rows for {' and '.join(first_rows)}, which this "
        "one cannot; the run goes on with rows drawn by hash"
    )


def or_snapshot(start: StartingPoint, path: Place | None) -> StartingPoint:
    """Return the start from a snapshot if its step is later, otherwise ``start``; any rank, with its own snapshot.

    Raises:
        ConfigError: The run file was changed meanwhile.
    """
    step, values = (0, {}) if path is None else read_values(path)
    if path is None or step <= start.step:
        return start
    start = start.with_values(values)
    different = _differences(start, values["settings"])
    if different:
        raise ConfigError(
            "The run was started again, but these settings have changed meanwhile:\n"
            + "\n".join(f"  {line}" for line in different.values())
            + "\nRestore the earlier settings, and give the command again."
        )
    note = f"resuming after step {step:,} from the snapshot in memory ({path.parent.parent})"
    notes = (note, *(line for line in start.notes if not line.startswith("resuming ")))
    # Its evaluations were made with these settings.
    return replace(start, comparable=True, notes=notes, step=step, path=path, in_memory=True)


def _aside_notes(paths: Sequence[Place]) -> list[str]:
    aside = [(path.name, backend_of(path).set_aside_text(path)) for path in paths]
    return [f"{name} is damaged and is {text}; delete that if you do not need it" for name, text in aside]


def _at(path: Place, fresh: StartingPoint, found: Survey) -> StartingPoint:
    """Resume from a checkpoint that the user names; later ones in the output directory are deleted or set aside."""
    if path.is_file():
        raise ConfigError(
            f"resume must be auto, previous, never or the directory of a checkpoint; {path} is a file. Give its "
            f"directory: resume={path.parent}."
        )
    if not path.is_dir():
        raise ConfigError(
            f"resume must be auto, previous, never or the directory of a checkpoint; {path} does not exist."
        )
    inside = find_checkpoints(path) or find_checkpoints(path / CHECKPOINTS_NAME)
    if inside:
        raise ConfigError(f"{path} holds several checkpoints; name one of them, such as resume={inside[-1]}.")
    step, values = read_values(path)
    start = fresh.with_values(values)
    different = _differences(start, values["settings"])
    fatal = [line for key, line in different.items() if _option(key).resume == "state"]
    if fatal:
        raise ConfigError(
            f"The run cannot resume from {path}: the model, the optimizer or the global batch has changed:\n"
            + "\n".join(f"  {line}" for line in fatal)
            + "\nRestore the earlier settings, or start a new run from its weights: fullshard export, then model.path."
        )
    notes = (
        f"resuming after step {step:,} from {path}",
        *start.notes,
        *(f"changed: {line}" for line in different.values()),
    )
    complete = [other for _, other in found.complete]
    mine = [number for number, other in enumerate(complete) if other.resolve() == path.resolve()]
    superseded = tuple(complete[mine[0] + 1 :] if mine else complete)
    chosen = found.complete[mine[0]][0] if mine else None
    aside = tuple(one.path for one in found.damaged if chosen is None or one.may_be_newer(chosen))
    if superseded:
        notes = (*notes, f"{', '.join(other.name for other in superseded)} in {found.directory} deleted")
    comparable = all(_option(key).resume != "evaluation" for key in different)
    notes = (*notes, *_aside_notes(aside))
    return replace(
        start, path=path, comparable=comparable, superseded=superseded, damaged=aside, notes=notes, step=step
    )


def _option(key: str) -> Option:
    """Return what resuming does with something that is compared, an option or not."""
    return _OF_OTHERS.get(key) or option_of(key)


def _differences(start: StartingPoint, then: Mapping[str, Any]) -> dict[str, str]:
    """Return a line with both values for each setting that differs, by key."""
    now = start.settings
    return {
        key: f"{key}: {_value_text(now.get(key))}; in the checkpoint {_value_text(then.get(key))}"
        for key in [*now, *(key for key in then if key not in now)]
        if now.get(key) != then.get(key)
    }


def _value_text(value: Any) -> str:
    return "not set" if value is None else str(value)


def _content(key: str, path: Path) -> str:
    try:
        is_dataset = _option(key).names == "dataset"
        return directory_content(path, _DATASET_FILES) if is_dataset else content_of(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}.") from error
