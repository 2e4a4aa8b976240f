"""Hugging Face's weight files of one model: ``model.safetensors``, or numbered files and an index."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType

import torch

from fullshard.errors import ConfigError
from fullshard.state.storage.atomic import publish
from fullshard.state.storage.safetensors_writer import SafetensorsWriter, TensorSpec
from fullshard.state.storage.weight_files import ADAPTER_NAME

WEIGHTS_NAME = "model.safetensors"
WEIGHTS_INDEX_NAME = "model.safetensors.index.json"

_WEIGHTS = (WEIGHTS_NAME, WEIGHTS_INDEX_NAME, ADAPTER_NAME)
_ENTRY_FILES = (*_WEIGHTS, "adapter_config.json", "config.json", "generation_config.json")
"""In the order of their removal: weights first. An adapter's configuration left next to a complete model, or a model's
next to an adapter, would be read as part of it."""

_PARTS = "model-*-of-*.safetensors"
_UNITS = {"TB": 10**12, "GB": 10**9, "MB": 10**6, "KB": 10**3}


def parse_size(size: int | str) -> int:
    """Return the bytes of a size in Hugging Face's notation; any rank.

    Args:
        size: Bytes, or a number and one of TB, GB, MB, KB (powers of 1,000), such as ``"5GB"``.

    Raises:
        ConfigError: It is not a size, or less than one byte.

    Examples:
        >>> parse_size("1.5 gb"), parse_size(300)
        (1500000000, 300)
    """
    nbytes = size if isinstance(size, int) else 0
    if isinstance(size, str):
        number, unit = size.strip()[:-2], size.strip()[-2:].upper()
        with suppress(ValueError, OverflowError):
            nbytes = int(float(number) * _UNITS.get(unit, 0))
    if nbytes < 1:
        raise ConfigError(f"A size must be a number of bytes above 0, or text such as '5GB' or '300MB'; got {size!r}.")
    return nbytes


def split_into_files(specs: Sequence[TensorSpec], max_file_bytes: int) -> dict[str, list[TensorSpec]]:
    """Assign tensors to files as Hugging Face's ``save_pretrained`` does; any rank.

    Args:
        specs: All tensors, in the order of the model's ``state_dict()``.
        max_file_bytes: Most bytes of tensors in a file; a larger tensor gets a file of its own.

    Returns:
        The tensors of each file, by file name: one file, or several numbered ones.
    """
    files: list[list[TensorSpec]] = []
    current: list[TensorSpec] = []
    size = 0
    for spec in specs:
        if spec.size_bytes > max_file_bytes:
            files.append([spec])
            continue
        if size + spec.size_bytes > max_file_bytes:
            files.append(current)
            current, size = [], 0
        current.append(spec)
        size += spec.size_bytes
    if current or not files:
        files.append(current)
    if len(files) == 1:
        return {WEIGHTS_NAME: files[0]}
    return {f"model-{i:05d}-of-{len(files):05d}.safetensors": file for i, file in enumerate(files, start=1)}


class WeightsWriter:
    """The weight files of one model, filled run by run; a context manager, on one rank.

    Leaving it without an error requires that every element was written; the files are then on disk. Write into an
    :func:`~fullshard.state.storage.atomic_directory`.
    """

    def __init__(self, directory: Path, specs: Sequence[TensorSpec], *, max_file_bytes: int, parameters: int) -> None:
        """Plan the files; they are created on entry.

        Args:
            directory: Existing directory.
            specs: Every tensor, a tied one once, in the order of the model's ``state_dict()``, with its dtype in the
                file.
            max_file_bytes: See :func:`split_into_files`.
            parameters: Elements of the model's parameters, for the index of several files.
        """
        self._directory = directory
        self._files = split_into_files(specs, max_file_bytes)
        self._total_bytes = sum(spec.size_bytes for spec in specs)
        self._parameters = parameters
        self._open = ExitStack()
        self._writers: dict[str, SafetensorsWriter] = {}

    def __enter__(self) -> WeightsWriter:
        """Create the files.

        Raises:
            CheckpointError: A name occurs twice in a file or a dtype has no safetensors code.
            OSError: The file system refused.
        """
        with ExitStack() as opening:
            for name, specs in self._files.items():
                writer = opening.enter_context(SafetensorsWriter(self._directory / name, specs))
                self._writers |= {spec.name: writer for spec in specs}
            self._open = opening.pop_all()
        return self

    def write_run(self, name: str, start: int, flat: torch.Tensor) -> None:
        """Write a run of a tensor in ``specs``; see :meth:`SafetensorsWriter.write_run`."""
        self._writers[name].write_run(name, start, flat)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the files; without an error, flush them to disk and, if there are several, write the index.

        Raises:
            CheckpointError: Elements were never written.
            OSError: The file system refused.
        """
        self._open.__exit__(kind, error, trace)
        if kind is None and len(self._files) > 1:
            index = {
                "metadata": {"total_parameters": self._parameters, "total_size": self._total_bytes},
                "weight_map": {spec.name: file for file, specs in self._files.items() for spec in specs},
            }
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (self._directory / WEIGHTS_INDEX_NAME).write_text(text, encoding="utf-8")


def publish_model(source: Path, target: Path) -> None:
    """Replace the model in the directory ``target``, which may hold other files, by a saved one; on one rank.

    After a kill at any time, ``target`` holds the new model or none.

    Raises:
        CheckpointError: The file system refused; ``source`` is still complete.
    """
    publish(source, target, entries=_ENTRY_FILES, parts=_PARTS)


def holds_model(directory: Path) -> bool:
    """Return True if a directory holds a model's weights as Hugging Face names them, or an adapter's as peft does."""
    return any((directory / name).exists() for name in _WEIGHTS)
