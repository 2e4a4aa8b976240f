"""Export of a sharded checkpoint to a Hugging Face or peft directory, in one process, a few megabytes at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from fullshard.errors import CheckpointError, ConfigError
from fullshard.policy import dtype_name
from fullshard.saving.lora import (
    ADAPTER_CONFIG_NAME,
    ExportedTensor,
    LowRank,
    adapter_tensors,
    holds_adapter,
    merged_tensors,
)
from fullshard.saving.pieces import MODEL
from fullshard.storage import (
    ADAPTER_NAME,
    CHECKPOINTS_NAME,
    CheckpointReader,
    Completion,
    Kind,
    Piece,
    SafetensorsWriter,
    TensorEntry,
    TensorSpec,
    WeightsWriter,
    atomic_directory,
    changed_small_files,
    dtype_of,
    find_checkpoints,
    find_completions,
    instead_of,
    is_shard_name,
    kind_of,
    parse_size,
    rank_by_metric,
    read_completion,
    read_index,
)

RUN_BYTES = 16 << 20
"""Most bytes of a tensor in memory at once, in float32 if an adapter is added to it."""

CONFIG_NAME = "config.json"
_MODEL_ONLY = (CONFIG_NAME, "generation_config.json")
"""Small files that are not part of an adapter's directory."""


@dataclass(frozen=True)
class ExportOptions:
    """How a checkpoint is exported.

    Attributes:
        dtype: Dtype of floating tensors in the files, as text; None: each one's own.
        max_shard_size: Most bytes of tensors in a file, or text such as ``"5GB"``.
        lora: Whether an adapter is merged into the model or exported alone; None: there is none.
    """

    dtype: str | None = None
    max_shard_size: int | str = "50GB"
    lora: Literal["merge", "adapter"] | None = None


@dataclass(frozen=True)
class ExportReport:
    """Result of an export.

    Attributes:
        checkpoint: The exported checkpoint's directory.
        step: Optimizer steps taken.
        directory: The directory written.
        tensors: Number of tensors.
        nbytes: Bytes of all tensors in the files.
        files: Names of all files.
        notes: Notes for the user.
    """

    checkpoint: Path
    step: int
    directory: Path
    tensors: int
    nbytes: int
    files: tuple[str, ...]
    notes: tuple[str, ...]

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


def choose_checkpoint(path: Path, which: str | None = None) -> Path:
    """Return the checkpoint that a path and ``--checkpoint`` select; one process.

    Args:
        path: A run, a directory of checkpoints, or one checkpoint.
        which: ``latest``, ``best`` (by the metric; among equal ones the newest) or a step; None: the latest.

    Raises:
        ConfigError: ``path`` is one checkpoint and ``which`` is given, or ``which`` is none of these.
        CheckpointError: There is no such checkpoint, or it is not complete.
    """
    kind = kind_of(path)
    if kind is Kind.WEIGHTS and is_shard_name(path.name):
        raise CheckpointError(f"{path} is one rank's part of the checkpoint {path.parent}: export the checkpoint.")
    if kind in (Kind.MODEL, Kind.WEIGHTS):
        raise CheckpointError(f"{path} already has weights in Hugging Face's format; only checkpoints are exported.")
    if kind is Kind.CHECKPOINT:
        if which is not None:
            raise ConfigError(f"{path} is one checkpoint; --checkpoint {which} chooses among those of a run.")
        return path
    directory = path / CHECKPOINTS_NAME if kind is Kind.RUN else path
    completions = find_completions(directory)
    found = {done.step: one for done, one in completions}
    if not found:
        raise CheckpointError(
            f"There is no complete checkpoint in {directory}; `fullshard verify {path}` lists what is there. A run's "
            "best/ directory, if there is one, is already a model in Hugging Face's format and needs no export."
        )
    if which is None or which == "latest":
        return list(found.values())[-1]  # saved last
    if which == "best":
        return _best(directory, completions)
    if not which.isdecimal():
        raise ConfigError(f"--checkpoint must be latest, best or a step; got {which!r}.")
    if int(which) not in found:
        steps = ", ".join(str(step) for step in sorted(found))
        raise CheckpointError(
            f"There is no complete checkpoint of step {int(which)} in {directory}; there are {steps}."
        )
    return found[int(which)]


def incomplete_after(checkpoint: Path) -> list[str]:
    """Return the names of later checkpoints in the same directory that are not complete, and so were not chosen."""
    complete = find_checkpoints(checkpoint.parent)
    later = (path for path in sorted(checkpoint.parent.glob("step-*")) if path.name > checkpoint.name)
    return [path.name for path in later if path not in complete and path.suffix == ""]


def _best(directory: Path, found: Sequence[tuple[Completion, Path]]) -> Path:
    ranked = rank_by_metric(found).paths
    if not ranked:
        raise CheckpointError(
            f"None of the {len(found)} checkpoints in {directory} was saved with a metric, so none is the best. Choose "
            "one by its step. A run's best/ directory, if there is one, holds its best model."
        )
    return ranked[0]


def assumed_of(best: Path) -> list[str]:
    """Return notes on what was assumed when a checkpoint was chosen as the best of its directory."""
    if rank_by_metric(find_completions(best.parent)).recorded:
        return []
    return [
        f"{best.name} has the greatest metric. Whether greater is better was not recorded by the earlier version that "
        "saved it; for a loss it is not: choose another one with --checkpoint STEP"
    ]


def export(
    checkpoint: Path,
    directory: Path,
    options: ExportOptions,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ExportReport:
    """Write a checkpoint's model for ``from_pretrained``; one process, no GPU, about 64 MB of memory.

    Every block that is read is compared with its checksum. The directory appears atomically at the end.

    Args:
        checkpoint: One checkpoint's directory.
        directory: The directory to write, empty or not existing.
        options: How to export.
        progress: Called after each run with the bytes written and the total bytes.

    Raises:
        ConfigError: The options do not fit the checkpoint, or ``directory`` is not empty.
        CheckpointError: The checkpoint is damaged, or ``directory`` cannot be written; it does not appear then.
    """
    dtype = dtype_name(options.dtype)
    max_file_bytes = parse_size(options.max_shard_size)
    _require_room(directory)
    index = read_index(checkpoint)
    _require_small_files(checkpoint)
    tensors = {name.removeprefix(MODEL): e for name, e in index.tensors.items() if name.startswith(MODEL)}
    assets = checkpoint / "model"
    exported = _choose_tensors(tensors, options.lora, assets)
    specs = [_spec(one, index.tensors[one.source], dtype) for one in exported]
    total = sum(spec.size_bytes for spec in specs)
    with atomic_directory(directory) as temporary:
        _copy_assets(assets, temporary, options.lora, dtype)
        if options.lora == "adapter":
            writer = SafetensorsWriter(temporary / ADAPTER_NAME, specs)
        else:
            # The checkpoint does not distinguish buffers from parameters.
            numel = sum(spec.numel for spec in specs if spec.dtype.is_floating_point)
            writer = WeightsWriter(temporary, specs, max_file_bytes=max_file_bytes, parameters=numel)
        source = CheckpointReader(checkpoint, index)
        done = 0
        with writer:
            for one, spec in zip(exported, specs, strict=True):
                for start, run in _runs(source, one):
                    writer.write_run(one.name, start, run)
                    done += run.numel() * spec.dtype.itemsize
                    progress(done, total)
        files = tuple(sorted(str(file.relative_to(temporary)) for file in temporary.rglob("*") if file.is_file()))
    notes: tuple[str, ...] = ()
    if options.lora != "adapter" and CONFIG_NAME not in files:
        notes = (f"{assets} has no {CONFIG_NAME}, which from_pretrained needs: only weights were written",)
    return ExportReport(checkpoint, index.step, directory, len(specs), total, files, notes)


def _require_small_files(checkpoint: Path) -> None:
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


def _choose_tensors(tensors: Mapping[str, TensorEntry], lora: str | None, assets: Path) -> list[ExportedTensor]:
    """Return the tensors to export, in the order of the index."""
    if not tensors:
        raise CheckpointError("The checkpoint has no tensors of a model.")
    if not holds_adapter(tensors):
        if lora is not None:
            raise ConfigError(f"--{lora} is for a model with an adapter; this checkpoint has none. Leave it out.")
        return [ExportedTensor(name, MODEL + name) for name in tensors]
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
    if lora == "adapter":
        return adapter_tensors(tensors, config)
    return merged_tensors(tensors, config, _read_json(assets / CONFIG_NAME) or {})


def _spec(exported: ExportedTensor, entry: TensorEntry, dtype: str | None) -> TensorSpec:
    own = dtype_of(entry)
    return TensorSpec(exported.name, entry.shape, getattr(torch, dtype) if dtype and own.is_floating_point else own)


def _runs(source: CheckpointReader, exported: ExportedTensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield a tensor's runs to export, cut along the stored ones so that each block is read once."""
    entry = source.entry(exported.source)
    dtype = dtype_of(entry)
    summed = torch.promote_types(dtype, torch.float32)
    update = None if exported.update is None else _Update(source, exported.update, summed)
    numel = RUN_BYTES // (dtype if update is None else summed).itemsize
    for stored in entry.pieces:
        for start in range(stored.start, stored.stop, numel):
            run = torch.empty(min(numel, stored.stop - start), dtype=dtype)
            source.read(Piece(exported.source, entry.shape, start, run))
            yield start, run if update is None else update.added(run, start)


class _Update:
    """The two factors of a low-rank update, read completely: they are small."""

    def __init__(self, source: CheckpointReader, update: LowRank, dtype: torch.dtype) -> None:
        left, right = (_read_matrix(source, name, dtype) for name in (update.left, update.right))
        self._left, self._right = (left.t(), right.t()) if update.transposed else (left, right)
        self._scaling = update.scaling

    def added(self, run: torch.Tensor, start: int) -> torch.Tensor:
        """Return a run of the tensor with the update added, in the dtype of the factors."""
        columns = self._right.shape[1]
        first, last = start // columns, -(-(start + run.numel()) // columns)
        delta = (self._left[first:last] @ self._right).mul_(self._scaling).view(-1)
        return delta[start - first * columns :][: run.numel()].add_(run)


def _read_matrix(source: CheckpointReader, name: str, dtype: torch.dtype) -> torch.Tensor:
    entry = source.entry(name)
    tensor = torch.empty(entry.numel, dtype=dtype)
    source.read(Piece(name, entry.shape, 0, tensor))
    return tensor.view(entry.shape)


def _copy_assets(assets: Path, target: Path, lora: str | None, dtype: str | None) -> None:
    """Copy the checkpoint's small files, except those that do not belong to this kind of export."""
    if not assets.is_dir():
        return
    left_out = {"adapter": _MODEL_ONLY, "merge": (ADAPTER_CONFIG_NAME,), None: ()}[lora]
    shutil.copytree(assets, target, dirs_exist_ok=True, ignore=lambda _, names: [n for n in names if n in left_out])
    config = _read_json(target / CONFIG_NAME)
    if config is not None and dtype is not None:
        config["dtype"] = dtype
        (target / CONFIG_NAME).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON object; None if there is no file."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object.")
    return content
