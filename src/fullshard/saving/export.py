"""A sharded checkpoint as a Hugging Face directory, or as peft's, without ranks: a few megabytes at a time."""

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
from fullshard.saving.lora import ADAPTER_CONFIG_NAME, LowRank, Part, adapter_parts, holds_adapter, merged_parts
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
"""Most bytes of a tensor that are in memory at once, in float32 where something is added to it."""

CONFIG_NAME = "config.json"
_MODEL_ONLY = (CONFIG_NAME, "generation_config.json")
"""Small files that an adapter's directory has not."""


@dataclass(frozen=True)
class ExportOptions:
    """How a checkpoint is exported.

    Attributes:
        dtype: Of floating tensors in the files, as text; None: each one's own.
        max_shard_size: Most bytes of tensors in a file, or a text such as ``"5GB"``.
        lora: What becomes of a LoRA adapter: merged into the model, or exported alone; None: there is none.
    """

    dtype: str | None = None
    max_shard_size: int | str = "50GB"
    lora: Literal["merge", "adapter"] | None = None


@dataclass(frozen=True)
class ExportReport:
    """What was exported.

    Attributes:
        checkpoint: From which directory.
        step: Optimizer steps taken.
        directory: Where to.
        tensors: How many.
        nbytes: Of all tensors in the files.
        files: Names of all files.
        notes: What the user should know.
    """

    checkpoint: Path
    step: int
    directory: Path
    tensors: int
    nbytes: int
    files: tuple[str, ...]
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """What ``--json`` prints."""
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
    """The checkpoint that is meant; one process.

    Args:
        path: A run, a directory of checkpoints, or one checkpoint.
        which: ``latest``, ``best`` (by the metric, of equal ones the newest) or a step; None: the latest.

    Raises:
        ConfigError: ``path`` is one checkpoint and ``which`` is given, or ``which`` is none of these.
        CheckpointError: There is no such checkpoint, or none that is whole.
    """
    kind = kind_of(path)
    if kind is Kind.WEIGHTS and is_shard_name(path.name):
        raise CheckpointError(f"{path} is one rank's part of the checkpoint {path.parent}: export that.")
    if kind in (Kind.MODEL, Kind.WEIGHTS):
        raise CheckpointError(
            f"{path} holds weights as Hugging Face reads them already; only checkpoints are exported."
        )
    if kind is Kind.CHECKPOINT:
        if which is not None:
            raise ConfigError(f"{path} is one checkpoint; --checkpoint {which} chooses among those of a run.")
        return path
    directory = path / CHECKPOINTS_NAME if kind is Kind.RUN else path
    completions = find_completions(directory)
    found = {done.step: one for done, one in completions}
    if not found:
        raise CheckpointError(
            f"There is no whole checkpoint in {directory}; `fullshard verify {path}` says what is there. A run's best/ "
            "directory, if there is one, is a model as Hugging Face reads it and needs no export."
        )
    if which is None or which == "latest":
        return list(found.values())[-1]  # saved last
    if which == "best":
        return _best(directory, completions)
    if not which.isdecimal():
        raise ConfigError(f"--checkpoint is latest, best or a step; got {which!r}.")
    if int(which) not in found:
        steps = ", ".join(str(step) for step in sorted(found))
        raise CheckpointError(f"There is no whole checkpoint of step {int(which)} in {directory}; there are {steps}.")
    return found[int(which)]


def torn_after(checkpoint: Path) -> list[str]:
    """Names of later checkpoints beside one that are not whole, and so were not chosen."""
    whole = find_checkpoints(checkpoint.parent)
    later = (path for path in sorted(checkpoint.parent.glob("step-*")) if path.name > checkpoint.name)
    return [path.name for path in later if path not in whole and path.suffix == ""]


def _best(directory: Path, found: Sequence[tuple[Completion, Path]]) -> Path:
    ranked = rank_by_metric(found).paths
    if not ranked:
        raise CheckpointError(
            f"None of the {len(found)} checkpoints in {directory} was saved with a metric, so none is the best. Choose "
            "one by its step. A run's best/ directory, if there is one, holds its best model."
        )
    return ranked[0]


def assumed_of(best: Path) -> list[str]:
    """What was assumed when a checkpoint was chosen as the best of its directory, for people."""
    if rank_by_metric(find_completions(best.parent)).recorded:
        return []
    return [
        f"{best.name} has the greatest metric; whether that is the best was not recorded by the earlier version that "
        "saved it, and of a loss it is not: name another one with --checkpoint STEP"
    ]


def export(
    checkpoint: Path,
    directory: Path,
    options: ExportOptions,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ExportReport:
    """Write a checkpoint's model as ``from_pretrained`` loads it; one process, no GPU, some 64 MB of memory.

    Every block that is read is compared with its checksum. The directory appears at the end and at once.

    Args:
        checkpoint: One checkpoint's directory.
        directory: Where the model shall be; empty or not there.
        options: How.
        progress: Called now and then with the bytes written and the bytes in all.

    Raises:
        ConfigError: The options do not fit the checkpoint, or ``directory`` is not empty.
        CheckpointError: The checkpoint is damaged, or ``directory`` cannot be written; nothing appears then.
    """
    dtype = dtype_name(options.dtype)
    max_file_bytes = parse_size(options.max_shard_size)
    _require_room(directory)
    index = read_index(checkpoint)
    _require_small_files(checkpoint)
    tensors = {name.removeprefix(MODEL): e for name, e in index.tensors.items() if name.startswith(MODEL)}
    assets = checkpoint / "model"
    parts = _choose_parts(tensors, options.lora, assets)
    specs = [_spec(part, index.tensors[part.source], dtype) for part in parts]
    total = sum(spec.size_bytes for spec in specs)
    with atomic_directory(directory) as temporary:
        _copy_assets(assets, temporary, options.lora, dtype)
        if options.lora == "adapter":
            writer = SafetensorsWriter(temporary / ADAPTER_NAME, specs)
        else:
            # The checkpoint does not tell buffers from parameters.
            numel = sum(spec.numel for spec in specs if spec.dtype.is_floating_point)
            writer = WeightsWriter(temporary, specs, max_file_bytes=max_file_bytes, parameters=numel)
        source = CheckpointReader(checkpoint, index)
        done = 0
        with writer:
            for part, spec in zip(parts, specs, strict=True):
                for start, run in _runs(source, part):
                    writer.write_run(part.name, start, run)
                    done += run.numel() * spec.dtype.itemsize
                    progress(done, total)
        files = tuple(sorted(str(file.relative_to(temporary)) for file in temporary.rglob("*") if file.is_file()))
    notes = _notes(assets, files, options.lora)
    return ExportReport(checkpoint, index.step, directory, len(specs), total, files, notes)


def _require_small_files(checkpoint: Path) -> None:
    """What is copied beside the tensors must be as it was written, like every block of them."""
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
        raise ConfigError(f"{directory} is not empty, and an export replaces nothing. Empty it or name another one.")


def _choose_parts(tensors: Mapping[str, TensorEntry], lora: str | None, assets: Path) -> list[Part]:
    """What is exported, in the order of the index."""
    if not tensors:
        raise CheckpointError("The checkpoint holds no tensors of a model.")
    if not holds_adapter(tensors):
        if lora is not None:
            raise ConfigError(f"--{lora} is for a model with an adapter; this checkpoint has none. Leave it out.")
        return [Part(name, MODEL + name) for name in tensors]
    if lora is None:
        raise ConfigError(
            "The checkpoint's model has an adapter. Choose --merge (the base model with the adapter in it) or "
            "--adapter (the adapter alone, for peft)."
        )
    config = _read_json(assets / ADAPTER_CONFIG_NAME)
    if config is None:
        raise CheckpointError(
            f"{assets / ADAPTER_CONFIG_NAME} is missing, which says how the adapter is scaled. Checkpoints.save writes "
            "it where `assets` is left out, and fullshard.write_assets does."
        )
    if lora == "adapter":
        return adapter_parts(tensors, config)
    return merged_parts(tensors, config, _read_json(assets / CONFIG_NAME) or {})


def _spec(part: Part, entry: TensorEntry, dtype: str | None) -> TensorSpec:
    own = dtype_of(entry)
    return TensorSpec(part.name, entry.shape, getattr(torch, dtype) if dtype and own.is_floating_point else own)


def _runs(source: CheckpointReader, part: Part) -> Iterator[tuple[int, torch.Tensor]]:
    """A tensor's runs as they are exported: along the stored ones, so that each block is read once."""
    entry = source.entry(part.source)
    dtype = dtype_of(entry)
    summed = torch.promote_types(dtype, torch.float32)
    update = None if part.update is None else _Update(source, part.update, summed)
    numel = RUN_BYTES // (dtype if update is None else summed).itemsize
    for stored in entry.pieces:
        for start in range(stored.start, stored.stop, numel):
            run = torch.empty(min(numel, stored.stop - start), dtype=dtype)
            source.read(Piece(part.source, entry.shape, start, run))
            yield start, run if update is None else update.added(run, start)


class _Update:
    """The two factors of an update, read whole: they are small."""

    def __init__(self, source: CheckpointReader, update: LowRank, dtype: torch.dtype) -> None:
        left, right = (_whole(source, name, dtype) for name in (update.left, update.right))
        self._left, self._right = (left.t(), right.t()) if update.transposed else (left, right)
        self._scaling = update.scaling

    def added(self, run: torch.Tensor, start: int) -> torch.Tensor:
        """A run of the tensor with the update, in the dtype of the factors."""
        columns = self._right.shape[1]
        first, last = start // columns, -(-(start + run.numel()) // columns)
        delta = (self._left[first:last] @ self._right).mul_(self._scaling).view(-1)
        return delta[start - first * columns :][: run.numel()].add_(run)


def _whole(source: CheckpointReader, name: str, dtype: torch.dtype) -> torch.Tensor:
    """A stored matrix."""
    entry = source.entry(name)
    tensor = torch.empty(entry.numel, dtype=dtype)
    source.read(Piece(name, entry.shape, 0, tensor))
    return tensor.view(entry.shape)


def _copy_assets(assets: Path, target: Path, lora: str | None, dtype: str | None) -> None:
    """The small files of the checkpoint, but those that are not of this kind of export."""
    if not assets.is_dir():
        return
    left_out = {"adapter": _MODEL_ONLY, "merge": (ADAPTER_CONFIG_NAME,), None: ()}[lora]
    shutil.copytree(assets, target, dirs_exist_ok=True, ignore=lambda _, names: [n for n in names if n in left_out])
    config = _read_json(target / CONFIG_NAME)
    if config is not None and dtype is not None:
        config["dtype"] = dtype
        (target / CONFIG_NAME).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object; None where there is no file."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object.")
    return content


def _notes(assets: Path, files: tuple[str, ...], lora: str | None) -> tuple[str, ...]:
    if lora != "adapter" and CONFIG_NAME not in files:
        return (f"{assets} has no {CONFIG_NAME}, which from_pretrained needs: only weights were written",)
    return ()
