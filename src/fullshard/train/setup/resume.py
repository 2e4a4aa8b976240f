"""Where a run starts: anew, or at a checkpoint; and whether its settings are those the checkpoint was made with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fullshard.config import RunConfig
from fullshard.data import split_lists
from fullshard.errors import CheckpointError, ConfigError, DataError
from fullshard.storage import check_completion, find_checkpoints, read_index, remove_checkpoint, write_text
from fullshard.train.reporting.reports import EndedBy
from fullshard.train.setup.prepare import source_spec

CHECKPOINTS_NAME = "checkpoints"
FINISHED_NAME = "finished.json"
"""In the directory of the checkpoints, of a run that came to its end."""

GLOBAL_BATCH = "global batch (ranks x training.per_device_train_batch_size x training.gradient_accumulation_steps)"

TITLE_LISTS = "WikiHow's title lists (beside data.train_file)"

_FREE_SETTINGS = (
    "output_dir",
    "nproc",
    "resume",
    "sharding.",
    "evaluation.num_samples_shown",
    "data.cache_dir",
    "training.per_device_",
    "training.gradient_",
    "training.early_stopping_",
    "training.eval_",
    "training.logging_",
    "training.max_train_minutes",
    "training.report_to",
    "training.run_name",
    "training.save_",
)
"""How the settings begin that may change between a checkpoint and the run that goes on: with these the same rows make
the same steps, and the same evaluation the same metric."""

_STATE_SETTINGS = ("model.", "global batch", "training.optimizer")
"""How the settings begin without which a checkpoint cannot be gone on from at all."""

_EVALUATION_SETTINGS = frozenset(
    (
        "data.max_eval_samples",
        "data.validation_file",
        "data.validation_fraction",
        "data.validation_split",
        TITLE_LISTS,
        "evaluation.length_penalty",
        "evaluation.max_new_tokens",
        "evaluation.metric",
        "evaluation.min_new_tokens",
        "evaluation.no_repeat_ngram_size",
        "evaluation.num_beams",
    )
)
"""Where one of these has changed, evaluations from before cannot be compared with those to come."""

_MODEL_FILES = ("*.safetensors", "*.bin", "*.model", "*.txt", "*config.json", "*token*.json", "*vocab*.json")
_SAMPLE_BYTES = 1 << 20
_SAMPLES = 64


@dataclass(frozen=True)
class Origin:
    """Where a run starts.

    Attributes:
        settings: What decides the training, by dotted key; goes into its checkpoints.
        path: The checkpoint to go on from; None: the run starts anew.
        values: What the run put into that checkpoint.
        comparable: Whether the evaluations before that checkpoint were made as those to come.
        doomed: Checkpoints to delete before the first step.
        notes: What the user should know about this.
    """

    settings: Mapping[str, Any]
    path: Path | None = None
    values: Mapping[str, Any] | None = None
    comparable: bool = True
    doomed: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()


def choose_origin(config: RunConfig, world_size: int) -> Origin:
    """Find out where a run starts, and change nothing; on rank 0, under the lock on the checkpoints.

    Args:
        config: The run's settings.
        world_size: Number of ranks.

    Returns:
        The origin.

    Raises:
        ConfigError: The settings are not those of the checkpoint.
        CheckpointError: The checkpoint that was asked for, or every one there is, is not whole or not of a run.
        DataError: A file that the settings name cannot be read.
    """
    settings = deciding_settings(config, world_size)
    directory = Path(config.output_dir, CHECKPOINTS_NAME)
    found = find_checkpoints(directory)
    if config.resume == "never":
        names = ", ".join(path.name for path in found)
        notes = (f"resume=never: {names} in {directory} deleted",) if found else ()
        return Origin(settings, doomed=tuple(found), notes=notes)
    if isinstance(config.resume, Path):
        return _at(config.resume, settings, directory, found)
    if (directory / FINISHED_NAME).exists():
        further = f", resume={found[-1]} with a higher {_limit_of(directory / FINISHED_NAME)}" if found else ""
        raise ConfigError(
            f"{config.output_dir} holds a finished run, which is not replaced by accident. Set another output_dir"
            f"{further}, or resume=never to start anew, which deletes its checkpoints and in the end its model."
        )
    if found:
        return _where_it_was_cut_short(found[-1], settings)
    _require_none_torn(directory)
    return Origin(settings)


def prepare(origin: Origin, config: RunConfig) -> None:
    """Delete what the run must not find later: checkpoints of a run that it does not go on; on rank 0, under the lock.

    Raises:
        CheckpointError: The file system refused.
    """
    finished = Path(config.output_dir, CHECKPOINTS_NAME, FINISHED_NAME)
    try:
        # Killed in between, the next run must neither go on from a finished one nor take one that goes on for finished.
        if origin.path is not None:
            finished.unlink(missing_ok=True)
        for path in origin.doomed:
            remove_checkpoint(path)
        finished.unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"An earlier run's checkpoints could not be deleted: {error}.") from error


def mark_finished(config: RunConfig, steps: int, ended_by: EndedBy) -> None:
    """Note that the run came to its end, and what ended it; on rank 0.

    Raises:
        CheckpointError: The file system refused.
    """
    noted = {"steps": steps, "limit": _limit(config, steps, ended_by)}
    write_text(Path(config.output_dir, CHECKPOINTS_NAME, FINISHED_NAME), json.dumps(noted) + "\n")


def _limit(config: RunConfig, steps: int, ended_by: EndedBy) -> str:
    """The setting that ended a run."""
    if ended_by == "steps":
        return "training.max_steps" if steps == config.training.max_steps else "training.num_train_epochs"
    return {"time": "training.max_train_minutes", "early_stopping": "training.early_stopping_patience"}[ended_by]


def _limit_of(finished: Path) -> str:
    """The setting that ended a finished run, as it noted."""
    try:
        return json.loads(finished.read_text(encoding="utf-8"))["limit"]
    except (OSError, ValueError, TypeError, KeyError):  # damaged, or from before it was noted: what it is most often
        return "training.num_train_epochs"


def global_batch(config: RunConfig, world_size: int) -> int:
    """Rows of one optimizer step; with a token budget its tokens, padding included."""
    settings = config.training
    each = settings.per_device_train_batch_tokens or settings.per_device_train_batch_size
    return world_size * each * settings.gradient_accumulation_steps


def deciding_settings(config: RunConfig, world_size: int) -> dict[str, Any]:
    """What decides the weights of each step and the metric of each evaluation, by dotted key; on one rank.

    Files are what they hold, wherever they are.

    Args:
        config: The run's settings.
        world_size: Number of ranks.

    Raises:
        DataError: A file cannot be read.
    """
    flat = config.as_flat()
    settings = {key: value for key, value in flat.items() if not key.startswith(_FREE_SETTINGS)}
    for key in ("data.train_file", "data.validation_file", "model.path"):
        # A model on the Hub is what its id says.
        if settings[key] is not None and Path(settings[key]).exists():
            settings[key] = _content(Path(settings[key]))
    dataset = settings["data.dataset_name"]
    if dataset is not None and Path(dataset).is_dir():
        settings["data.dataset_name"] = _dataset_content(Path(dataset))
    lists = [f"{path.name} {_content(path)}" for path in split_lists(source_spec(config))]
    if lists:
        settings[TITLE_LISTS] = "; ".join(lists)
    return {**settings, GLOBAL_BATCH: global_batch(config, world_size)}


def _where_it_was_cut_short(path: Path, settings: Mapping[str, Any]) -> Origin:
    """Go on from the newest checkpoint of this directory, with the same settings only."""
    step, values = _read_values(path)
    different = _differences(settings, values["settings"])
    if different:
        raise ConfigError(
            f"The run in {path.parent.parent} was cut short and would go on from {path.name}, but these settings "
            "are not those it was made with:\n"
            + "\n".join(f"  {line}" for line in different.values())
            + "\nTo go on, give the earlier settings back. To start anew, set resume=never, which deletes the "
            f"checkpoints there, or another output_dir. To go on all the same, set resume={path}; the model, the "
            "optimizer and the global batch must be the same even then."
        )
    torn = [other.name for other in sorted(path.parent.glob("step-*")) if other.name > path.name]
    skipped = (f"{', '.join(torn)} skipped: not whole",) if torn else ()
    return Origin(settings, path, values, notes=(f"going on after step {step:,} from {path}", *skipped))


def _at(path: Path, settings: Mapping[str, Any], directory: Path, found: list[Path]) -> Origin:
    """Go on from a checkpoint that the user names; of this directory's those after it are deleted."""
    if path.is_file():
        raise ConfigError(
            f"resume is auto, never or a checkpoint's directory; {path} is a file. Give its directory, such as "
            f"resume={path.parent}."
        )
    if not path.is_dir():
        raise ConfigError(f"resume is auto, never or a checkpoint's directory; there is no {path}.")
    inside = find_checkpoints(path) or find_checkpoints(path / CHECKPOINTS_NAME)
    if inside:
        raise ConfigError(f"{path} holds several checkpoints; name one of them, such as resume={inside[-1]}.")
    step, values = _read_values(path)
    different = _differences(settings, values["settings"])
    fatal = [line for key, line in different.items() if key.startswith(_STATE_SETTINGS)]
    if fatal:
        raise ConfigError(
            f"{path} is of another model, optimizer or global batch, and cannot be gone on from:\n"
            + "\n".join(f"  {line}" for line in fatal)
            + "\nGive the earlier settings back, or start anew from its weights: fullshard export, then model.path."
        )
    notes = (f"going on after step {step:,} from {path}", *(f"changed: {line}" for line in different.values()))
    mine = [other for other in found if other.resolve() == path.resolve()]
    earlier = found[: found.index(mine[0]) + 1] if mine else []
    doomed = tuple(other for other in found if other not in earlier)
    if doomed:
        notes = (*notes, f"{', '.join(other.name for other in doomed)} in {directory} deleted")
    return Origin(settings, path, values, _EVALUATION_SETTINGS.isdisjoint(different), doomed, notes)


def _read_values(path: Path) -> tuple[int, Mapping[str, Any]]:
    """Step and values of a run's checkpoint."""
    index = read_index(path)
    if "settings" not in index.values:
        raise CheckpointError(f"{path} was not saved by fullshard train: it does not say where the run was.")
    # From before there was a choice.
    settings = {"training.optimizer": "adamw", **index.values["settings"]}
    return index.step, {**index.values, "settings": settings}


def _require_none_torn(directory: Path) -> None:
    """Starting anew because nothing is there is one thing, because all is damaged another."""
    for path in sorted(directory.glob("step-*"), reverse=True):
        try:
            check_completion(path)
        except CheckpointError as error:
            raise CheckpointError(
                f"No checkpoint in {directory} is whole. {error} resume=never starts anew."
            ) from error


def _differences(now: Mapping[str, Any], then: Mapping[str, Any]) -> dict[str, str]:
    """For each setting that differs, by key, both values."""
    return {
        key: f"{key}: {_shown(now.get(key))}; in the checkpoint {_shown(then.get(key))}"
        for key in [*now, *(key for key in then if key not in now)]
        if now.get(key) != then.get(key)
    }


def _shown(value: Any) -> str:
    return "not set" if value is None else str(value)


def _content(path: Path) -> str:
    """A file's, or a model directory's, content in short."""
    try:
        if path.is_dir():
            files = sorted({file for pattern in _MODEL_FILES for file in path.glob(pattern)})
            parts = [f"{file.name} {file.stat().st_size} {_sampled_hash(file)}" for file in files]
            digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
            return f"{len(files)} files, {sum(file.stat().st_size for file in files):,} bytes, hash {digest[:16]}"
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return f"{path.stat().st_size:,} bytes, hash {digest[:16]}"
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}.") from error


def _dataset_content(directory: Path) -> str:
    """What datasets' save_to_disk noted of a dataset's splits: their files, and a hash of what they came from."""
    try:
        noted = [file.read_bytes() for file in sorted(directory.glob("**/state.json"))]
    except OSError as error:
        raise DataError(f"{directory} cannot be read: {error}.") from error
    return f"{len(noted)} splits, hash {hashlib.sha256(b''.join(noted)).hexdigest()[:16]}"


def _sampled_hash(path: Path) -> str:
    """Hash of a file, of a large one of 64 places in it: weights differ everywhere, and reading them all takes long."""
    size = path.stat().st_size
    digest = hashlib.sha256()
    with path.open("rb") as file:
        if size <= _SAMPLES * _SAMPLE_BYTES:
            digest.update(file.read())
        else:
            for sample in range(_SAMPLES):
                file.seek(sample * (size - _SAMPLE_BYTES) // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
