"""Choice of a run's checkpoint (latest, best or a step), and its export to a Hugging Face or peft directory.

One process, with little memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from fullshard.core.policy import dtype_name
from fullshard.errors import CheckpointError, ConfigError
from fullshard.state.saving.lora import (
    ADAPTER_CONFIG_NAME,
    TIED_NAME,
    ExportedTensor,
    LowRank,
    NewRows,
    OverBase,
    adapter_tensors,
    holds_adapter,
    merged_tensors,
)
from fullshard.state.saving.pieces import AVERAGE, MODEL
from fullshard.state.saving.read_back import read_back
from fullshard.state.storage import (
    ADAPTER_NAME,
    CHECKPOINTS_NAME,
    FINISHED_NAME,
    Base,
    CheckpointReader,
    Kind,
    Piece,
    Place,
    SafetensorsWriter,
    Survey,
    TensorEntry,
    TensorSpec,
    WeightsWriter,
    as_place,
    atomic_directory,
    changed_small_files,
    copy_small_files,
    dtype_of,
    find_completions,
    instead_of,
    is_shard_name,
    kind_of,
    parse_size,
    rank_by_metric,
    read_completion,
    read_index,
    read_json,
    step_directory,
    survey,
)

RUN_BYTES = 16 << 20
"""Most bytes of a tensor in memory at once, in float32 if an adapter is added to it."""

CONFIG_NAME = "config.json"
SUMMARY_NAME = "summary.json"
"""File of a finished run with the step of its model."""
_MODEL_ONLY = (CONFIG_NAME, "generation_config.json")
"""Small files that are not part of an adapter's directory."""


@dataclass(frozen=True)
class ExportOptions:
    """How a checkpoint is exported."""

    dtype: str | None = None  # dtype of floating tensors in the files, as text; None: each one's own
    max_shard_size: int | str = "50GB"  # most bytes of tensors in a file, or text such as ``"5GB"``
    # whether an adapter is merged into the model or exported alone; None: there is none
    lora: Literal["merge", "adapter"] | None = None
    base: Path | None = None  # where a quantised base model is now; None: where the run read it


@dataclass(frozen=True)
class ExportReport:
    """Result of an export."""

    checkpoint: Place  # the exported checkpoint's directory
    step: int  # optimizer steps taken
    directory: Path  # the directory written
    tensors: int
    nbytes: int  # bytes of all tensors in the files
    files: tuple[str, ...]  # names of all files
    notes: tuple[str, ...]  # notes for the user

    def as_dict(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        return {
            "checkpoint": str(self.checkpoint),
            "step": self.step,
            "directory": str(self.directory),
            "tensors": self.tensors,
            "bytes": self.nbytes,
            "files": list(self.files),
            "notes": list(self.notes),
        }


def choose_checkpoint(path: str | Path, which: str | None = None) -> Place:
    """Return the checkpoint that a path and ``--checkpoint`` select; one process.

    Args:
        path: A run, a directory of checkpoints, or one checkpoint; or a URL of one of the last two.
        which: ``latest``, ``best`` (by the metric; among equal ones the newest) or a step; None: of a finished run that
            was evaluated, the one of its own model, which is that of its best step; else the latest.

    Raises:
        ConfigError: ``path`` is one checkpoint and ``which`` is given, or ``which`` is none of these.
        CheckpointError: There is no such checkpoint, or it is not complete.
    """
    place = as_place(path)
    return _choose(place, kind_of(place), which)


def _choose(path: Place, kind: Kind, which: str | None) -> Place:
    """Return the checkpoint among those of a place."""
    if kind is Kind.WEIGHTS and is_shard_name(path.name):
        raise CheckpointError(f"{path} is one rank's part of the checkpoint {path.parent}: export the checkpoint.")
    if kind in (Kind.MODEL, Kind.WEIGHTS):
        raise CheckpointError(f"{path} already has weights in Hugging Face's format; only checkpoints are exported.")
    if kind is Kind.CHECKPOINT:
        if which is not None:
            raise ConfigError(f"{path} is one checkpoint; --checkpoint {which} chooses among those of a run.")
        return path
    directory = path / CHECKPOINTS_NAME if kind is Kind.RUN else path
    found = survey(directory, parse_newest=True)
    if not found.complete and not found.damaged:
        raise CheckpointError(
            f"There is no checkpoint in {directory}. A run's best/ directory, if there is one, is already a model in "
            "Hugging Face's format and needs no export."
        )
    if which is None and kind is Kind.RUN and (published := _published(path)) is not None:
        return _of_published(found, path, *published)
    if which is None or which == "latest":
        newest = found.newest()
        assert newest is not None, "there is one, or an error"
        return newest
    if which == "best":
        return _best(found)
    if not which.isdecimal():
        raise ConfigError(f"--checkpoint must be latest, best or a step; got {which!r}.")
    return _of_step(found, int(which))


def describe_choice(checkpoint: Place) -> str:
    """Return a checkpoint's step and metric, and whether it is the best or the latest of its directory; one process."""
    found = find_completions(checkpoint.parent)
    done = read_completion(checkpoint)
    ranked = rank_by_metric(found).paths
    named = _published(checkpoint.parent.parent) if checkpoint.parent.name == CHECKPOINTS_NAME else None
    best = ranked[0].name if ranked else None
    if named is not None:
        best = step_directory(checkpoint.parent, named[0]).name
    roles = ["the best"] if best == checkpoint.name else []
    roles += ["the latest"] if found and found[-1][1].name == checkpoint.name else []
    text = " and ".join(roles)
    if best is not None and best != checkpoint.name:
        text += f"{', ' if text else ''}not the best, which is {best}"
    value = "" if done.metric is None else f"{named[1] if named else 'metric'} {done.metric:.4g}"
    remarks = "; ".join(part for part in (value, text) if part)
    return f"step {done.step:,}{f' ({remarks})' if remarks else ''}"


def _published(run: Place) -> tuple[int, str] | None:
    """Return the step of a finished run's own model and the metric that chose it; None if it is not of the best step.

    Raises:
        CheckpointError: The run's summary cannot be read.
    """
    if not (run / CHECKPOINTS_NAME / FINISHED_NAME).exists():
        return None
    summary = _read_json(run / SUMMARY_NAME) or {}
    if summary.get("metric") is None:
        return None
    return int(summary["best_step"]), str(summary["metric"])


def _of_published(found: Survey, run: Place, step: int, metric: str) -> Place:
    path = step_directory(found.directory, step)
    if any(other == path for _, other in found.complete):
        return path
    steps = ", ".join(str(done.step) for done, _ in found.complete) or "none"
    damaged = "".join(f" {one.problem}" for one in found.damaged if one.path == path)
    raise CheckpointError(
        f"{run} is finished, and its model is that of step {step}, the best by {metric}, of which there is no complete "
        f"checkpoint; there are {steps}.{damaged} That model is in {run} itself, in Hugging Face's format. To export "
        "another step's, give --checkpoint latest or a step."
    )


def _best(found: Survey) -> Place:
    best = found.best()
    if best is None:
        raise CheckpointError(
            f"None of the {len(found.complete)} checkpoints in {found.directory} was saved with a metric, so none is "
            "the best. Choose one by its step. A run's best/ directory, if there is one, holds its best model."
        )
    return best


def _of_step(found: Survey, step: int) -> Place:
    steps = {done.step: path for done, path in found.complete}
    if step in steps:
        return steps[step]
    damaged = [one.problem for one in found.damaged if one.path == step_directory(found.directory, step)]
    raise CheckpointError(
        f"There is no complete checkpoint of step {step} in {found.directory}; there are "
        f"{', '.join(str(step) for step in sorted(steps)) or 'none'}.{''.join(f' {problem}' for problem in damaged)}"
    )


def assumed_of(best: Place) -> list[str]:
    """Return notes on what was assumed when a checkpoint was chosen as the best of its directory."""
    if rank_by_metric(find_completions(best.parent)).recorded:
        return []
    return [
        f"{best.name} has the greatest metric. Whether greater is better was not recorded by the earlier version that "
        "saved it; for a loss it is not: choose another one with --checkpoint STEP"
    ]


def export(
    checkpoint: Place,
    directory: Path,
    options: ExportOptions,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ExportReport:
    """Write a checkpoint's model for ``from_pretrained``; one process, no GPU, about 64 MB of memory.

    If the checkpoint has an average of the weights, that is written in their place, as a run with it publishes it.

    A merged model over a quantised base takes memory for a few copies of its largest weight instead: the base is read
    from its own files, quantised and dequantised as in the run, and saved in bfloat16 unless a dtype is given.

    Every block of the checkpoint that is read is compared with its checksum. The directory appears atomically at the
    end.

    Args:
        checkpoint: One checkpoint's directory.
        directory: The directory to write, empty or not existing.
        options: How to export.
        progress: Called after each run with the bytes written and the total bytes.

    Raises:
        ConfigError: The options do not fit the checkpoint, or ``directory`` is not empty.
        CheckpointError: The checkpoint is damaged, its base model is not there or has changed, ``directory`` cannot be
            written, or ``from_pretrained`` would not give its model; it does not appear then.
    """
    dtype = dtype_name(options.dtype)
    max_file_bytes = parse_size(options.max_shard_size)
    _require_room(directory)
    index = read_index(checkpoint)
    _require_small_files(checkpoint)
    source = _Published(checkpoint, index)
    tensors = {name.removeprefix(MODEL): source.entry(name) for name in index.tensors if name.startswith(MODEL)}
    assets = checkpoint / "model"
    parts = _parts(source, tensors, index.base, options, assets)
    if isinstance(parts, _OfBase):
        dtype = dtype or "bfloat16"  # the base was rounded to 4 or 8 bits: float32 would hold no more
    cast = None if dtype is None else getattr(torch, dtype)
    specs = [replace(one, dtype=cast) if cast and one.dtype.is_floating_point else one for one in parts.specs]
    total = sum(spec.size_bytes for spec in specs)
    with atomic_directory(directory) as temporary:
        _copy_assets(checkpoint, temporary, options.lora, dtype)
        if options.lora == "adapter":
            writer = SafetensorsWriter(temporary / ADAPTER_NAME, specs)
        else:
            # The checkpoint does not distinguish buffers from parameters.
            numel = sum(spec.numel for spec in specs if spec.dtype.is_floating_point)
            writer = WeightsWriter(temporary, specs, max_file_bytes=max_file_bytes, parameters=numel)
        done = 0
        with writer:
            for spec in specs:
                for start, run in parts.runs(spec.name):
                    writer.write_run(spec.name, start, run)
                    done += run.numel() * spec.dtype.itemsize
                    progress(done, total)
        read_back(temporary, base_values=_read_json(assets / CONFIG_NAME))
        files = tuple(sorted(str(file.relative_to(temporary)) for file in temporary.rglob("*") if file.is_file()))
    notes = ("the trained weights are their moving average, which the checkpoint has",) if source.averaged else ()
    if options.lora != "adapter" and CONFIG_NAME not in files:
        notes = (*notes, f"{assets} has no {CONFIG_NAME}, which from_pretrained needs: only weights were written")
    if isinstance(parts, _OfBase) and index.base is not None:
        notes = (*notes, f"the base {index.base.name} was dequantised ({index.base.quantisation})")
    elif options.lora == "merge":
        notes = (*notes, *_rounded_base(parts.specs))
    return ExportReport(checkpoint, index.step, directory, len(specs), total, files, notes)


def _rounded_base(specs: Sequence[TensorSpec]) -> list[str]:
    """Return a note if a checkpoint has the frozen base in 16 bits: a run in bf16 or fp16 keeps no wider copy of it."""
    held = {spec.dtype for spec in specs if spec.dtype.is_floating_point and spec.dtype.itemsize < 4}
    if not held:
        return []
    names = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in held))
    return [
        f"the base model's weights are those of the checkpoint, in {names}, as the run computed with them; to merge "
        "into the base's own files, export with --adapter and merge with peft"
    ]


def _require_small_files(checkpoint: Place) -> None:
    """Raise if a small file that is copied changed after it was written."""
    try:
        changed = list(changed_small_files(checkpoint, read_completion(checkpoint)))
    except OSError as error:
        raise CheckpointError(f"{checkpoint} cannot be read: {error}.") from error
    if changed:
        name, text = changed[0]
        raise CheckpointError(f"{checkpoint / name} is damaged: it {text}. {instead_of(checkpoint)}")


def _require_room(directory: Path) -> None:
    try:
        taken = directory.is_dir() and any(directory.iterdir())
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read: {error}.") from error
    if taken:
        raise ConfigError(
            f"{directory} is not empty, and an export replaces nothing. Empty it or choose another directory."
        )


def _parts(
    source: CheckpointReader,
    tensors: Mapping[str, TensorEntry],
    base: Base | None,
    options: ExportOptions,
    assets: Place,
) -> _OfCheckpoint | _OfBase:
    """Return the tensors to export, in the order of the index or of the base model's files."""
    lora = options.lora
    if not tensors:
        raise CheckpointError("The checkpoint has no tensors of a model.")
    if options.base is not None and (base is None or lora != "merge"):
        raise ConfigError(
            "--base applies to merging an adapter into a quantised base model that the checkpoint names: "
            + ("add --merge." if base is not None else "this checkpoint has all its weights. Leave it out.")
        )
    if not holds_adapter(tensors):
        if lora is not None:
            raise ConfigError(f"--{lora} is for a model with an adapter; this checkpoint has none. Leave it out.")
        return _OfCheckpoint(source, [ExportedTensor(name, MODEL + name) for name in tensors])
    if lora is None:
        raise ConfigError(
            "The checkpoint's model has an adapter. Choose --merge (the base model with the adapter in it) or "
            "--adapter (the adapter alone, for peft)."
        )
    config = _read_json(assets / ADAPTER_CONFIG_NAME)
    if config is None:
        raise CheckpointError(
            f"{assets / ADAPTER_CONFIG_NAME} is missing, which specifies how the adapter is scaled. Checkpoints.save "
            "writes it if `assets` is left out, and so does fullshard.write_assets."
        )
    tied = _tied_copies(assets, tensors)
    if lora == "adapter":
        copies = [ExportedTensor(alias, MODEL + name) for alias, name in tied.items()]
        return _OfCheckpoint(source, [*adapter_tensors(tensors, config), *copies])
    model_config = _read_json(assets / CONFIG_NAME) or {}
    if tied:  # the trained copies are tied as the layers are, so that these stay equal when the copies replace them
        model_config["tie_word_embeddings"] = False
    if base is not None:
        return _OfBase(source, OverBase(base, options.base, tensors, config, model_config))
    return _OfCheckpoint(source, merged_tensors(tensors, config, model_config))


def _tied_copies(assets: Place, tensors: Mapping[str, TensorEntry]) -> dict[str, str]:
    """Return the tensor of each further name in an adapter's file; see ``tied_copies``."""
    tied = _read_json(assets / TIED_NAME) or {}
    if any(name not in tensors for name in map(str, tied.values())):
        raise CheckpointError(f"{assets / TIED_NAME} names tensors that the checkpoint does not have.")
    return tied


class _Published(CheckpointReader):
    """Reads a checkpoint in which the average of a weight, if there is one, stands for the weight."""

    @property
    def averaged(self) -> bool:
        """Whether there is an average."""
        return any(name.startswith(AVERAGE) for name in self.index.tensors)

    def entry(self, name: str) -> TensorEntry:
        return super().entry(self._name(name))

    def read(self, *pieces: Piece) -> None:
        super().read(*(replace(piece, name=self._name(piece.name)) for piece in pieces))

    def _name(self, name: str) -> str:
        average = AVERAGE + name.removeprefix(MODEL)
        return average if name.startswith(MODEL) and average in self.index.tensors else name


class _OfCheckpoint:
    """Tensors that are all in the checkpoint."""

    def __init__(self, source: CheckpointReader, exported: list[ExportedTensor]) -> None:
        self._source = source
        self._exported = {one.name: one for one in exported}

    @property
    def specs(self) -> list[TensorSpec]:
        """Names, shapes and dtypes of the tensors."""
        entries = [(one.name, self._source.entry(one.source)) for one in self._exported.values()]
        return [TensorSpec(name, entry.shape, dtype_of(entry)) for name, entry in entries]

    def runs(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield a tensor's runs."""
        return _runs(self._source, self._exported[name])


class _OfBase:
    """Tensors of the base model's files, with the updates of the checkpoint's adapter."""

    def __init__(self, source: CheckpointReader, base: OverBase) -> None:
        self._source, self._base = source, base

    @property
    def specs(self) -> list[TensorSpec]:
        """Names, shapes and dtypes of the tensors."""
        return [TensorSpec(name, self._base.shape(name), one.dtype) for name, one in self._base.files.tensors.items()]

    def runs(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield a tensor's only run: a weight at a time."""
        if name in self._base.trained:
            yield 0, _read_matrix(self._source, self._base.trained[name], torch.float32).view(-1)
            return
        values, update = self._base.read(name), self._base.updates.get(name)
        yield 0, values if update is None else _read_update(self._source, update, torch.float32).added(values, 0)


def _runs(source: CheckpointReader, exported: ExportedTensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield a tensor's runs to export, cut along the stored ones so that each block is read once.

    Of stored columns a run has some of each block, so that blocks are read again: long runs do so least.
    """
    entry = source.entry(exported.source)
    dtype = dtype_of(entry)
    summed = torch.promote_types(dtype, torch.float32)
    update = None if exported.update is None else _read_update(source, exported.update, summed)
    numel = RUN_BYTES // (dtype if update is None else summed).itemsize
    cuts = [(one.start, one.stop) for one in entry.pieces] if entry.order is None else [(0, entry.numel)]
    for first, stop in cuts:
        for start in range(first, stop, numel):
            run = torch.empty(min(numel, stop - start), dtype=dtype)
            source.read(Piece(exported.source, entry.shape, start, run))
            yield start, run if update is None else update.added(run, start)


def _read_update(source: CheckpointReader, update: LowRank | NewRows, dtype: torch.dtype) -> _Update | _Rows:
    return _Update(source, update, dtype) if isinstance(update, LowRank) else _Rows(source, update, dtype)


class _Rows:
    """Trained rows of a table, read completely."""

    def __init__(self, source: CheckpointReader, rows: NewRows, dtype: torch.dtype) -> None:
        self._values, self._indices = _read_matrix(source, rows.values, dtype), rows.indices

    def added(self, run: torch.Tensor, start: int) -> torch.Tensor:
        """Return a run of the table with the trained rows in place of its own, in their dtype."""
        run, columns = run.to(self._values.dtype), self._values.shape[1]
        for index, values in zip(self._indices, self._values, strict=True):
            first = index * columns - start
            begin, end = max(first, 0), min(first + columns, run.numel())
            if begin < end:
                run[begin:end] = values[begin - first : end - first]
        return run


class _Update:
    """The two factors of a low-rank update, read completely: they are small."""

    def __init__(self, source: CheckpointReader, update: LowRank, dtype: torch.dtype) -> None:
        left, right = (_read_matrix(source, name, dtype) for name in (update.left, update.right))
        self._left, self._right = (left.t(), right.t()) if update.transposed else (left, right)
        self._scaling = update.scaling
        self._magnitude = None if update.magnitude is None else _read_matrix(source, update.magnitude, dtype)

    def added(self, run: torch.Tensor, start: int) -> torch.Tensor:
        """Return a run of the tensor with the update added, in the dtype of the factors; with magnitudes, all of it."""
        columns = self._right.shape[1]
        first, last = start // columns, -(-(start + run.numel()) // columns)
        delta = (self._left[first:last] @ self._right).mul_(self._scaling).view(-1)
        merged = delta[start - first * columns :][: run.numel()].add_(run)
        if self._magnitude is not None:
            rows = merged.view(-1, columns)
            rows.mul_((self._magnitude / torch.linalg.norm(rows, dim=1)).unsqueeze(1))
        return merged


def _read_matrix(source: CheckpointReader, name: str, dtype: torch.dtype) -> torch.Tensor:
    entry = source.entry(name)
    tensor = torch.empty(entry.numel, dtype=dtype)
    source.read(Piece(name, entry.shape, 0, tensor))
    return tensor.view(entry.shape)


def _copy_assets(checkpoint: Place, target: Path, lora: str | None, dtype: str | None) -> None:
    """Copy the checkpoint's small files, except those that do not belong to this kind of export."""
    left_out = {"adapter": (*_MODEL_ONLY, TIED_NAME), "merge": (ADAPTER_CONFIG_NAME, TIED_NAME), None: ()}[lora]
    copy_small_files(checkpoint, target, left_out)
    config = _read_json(target / CONFIG_NAME)
    if config is not None and dtype is not None:
        config["dtype"] = dtype
        (target / CONFIG_NAME).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _read_json(path: Place) -> dict[str, Any] | None:
    """Read a JSON object; None if there is no file."""
    try:
        content = read_json(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object.")
    return content
