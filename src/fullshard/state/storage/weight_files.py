"""A model's weights on disk, in one file or several as Hugging Face names them: read and written by runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated

import torch
from annotated_types import Len

from fullshard.errors import CheckpointError, ConfigError
from fullshard.file_names import stays_inside
from fullshard.state.storage.atomic import publish
from fullshard.state.storage.json_file import SMALL, parse, read_bounded
from fullshard.state.storage.object_path import Place
from fullshard.state.storage.rules import rule
from fullshard.state.storage.safetensors_file import (
    STAGING_BYTES,
    SafetensorsFile,
    SafetensorsWriter,
    StoredTensor,
    TensorSpec,
)
from fullshard.state.storage.torch_reader import TorchFile

INDEX_SUFFIX = ".index.json"

ADAPTER_NAME = "adapter_model.safetensors"
"""Name of the weight file in a directory written by peft."""

WEIGHTS_IN_DIRECTORY = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""Files looked for in a directory, in order of preference."""

_TORCH_SUFFIXES = (".bin", ".pt", ".pth")


class WeightFiles:
    """The tensors of a model on disk, by their stored names; each rank opens its own.

    Attributes:
        path: The given directory or file.
        tensors: All stored tensors, by name.
        bytes_read: Bytes of tensors read so far.
    """

    def __init__(self, path: Path) -> None:
        """Find the files and read their headers, but no values.

        Args:
            path: A Hugging Face directory (safetensors first, then ``.bin``, one file or several with an index), an
                index, or one ``.safetensors``, ``.bin``, ``.pt`` or ``.pth`` file.

        Raises:
            CheckpointError: There is no such file, one is damaged, or the index does not match the files.
        """
        self.path = path
        self.bytes_read = 0
        self._file_of: dict[str, SafetensorsFile | TorchFile] = {}
        found = _find(path)
        if found.name.endswith(INDEX_SUFFIX):
            self._open_indexed(found)
        else:
            one = _open(found)
            self._file_of = dict.fromkeys(one.tensors, one)
        self.tensors: dict[str, StoredTensor] = {name: file.tensors[name] for name, file in self._file_of.items()}

    def _open_indexed(self, index: Path) -> None:
        """Open every file that an index names; tensors that the index omits are included, so that they are reported."""
        weight_map = read_weight_map(index)
        files: dict[str, SafetensorsFile | TorchFile] = {}
        for name in sorted(set(weight_map.values())):
            if not (index.parent / name).is_file():
                raise CheckpointError(
                    f"{index} names {name}, which is not next to it. Fetch the missing file, or save the model again."
                )
            files[name] = _open(index.parent / name)
            self._file_of |= dict.fromkeys(files[name].tensors, files[name])
        for tensor, name in weight_map.items():
            if tensor not in files[name].tensors:
                raise CheckpointError(
                    f"{index} lists {tensor!r} in {name}, which does not contain it. Fetch both again, or save the "
                    "model again."
                )
            self._file_of[tensor] = files[name]

    def read(self, name: str, start: int, out: torch.Tensor) -> None:
        """Fill ``out`` with a run of the elements of a tensor.

        Args:
            name: Its stored name.
            start: First element, counted in the flattened tensor.
            out: (numel,), contiguous, on any device; of the stored dtype, or both are floating.

        Raises:
            CheckpointError: The file changed, ends early, or cannot be read.
        """
        if out.numel():
            self._file_of[name].read(name, start, out)
            self.bytes_read += out.numel() * self.tensors[name].dtype.itemsize

    def equal(self, one: str, other: str) -> bool:
        """Return whether two stored tensors are equal; both are read once, unless they are known to be one tensor.

        Raises:
            CheckpointError: A file cannot be read.
        """
        a, b = self.tensors[one], self.tensors[other]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return False
        file = self._file_of[one]
        if isinstance(file, TorchFile) and file is self._file_of[other] and file.same(one, other):
            return True
        numel = torch.Size(a.shape).numel()
        step = STAGING_BYTES // a.dtype.itemsize
        for low in range(0, numel, step):
            parts = [torch.empty(min(step, numel - low), dtype=a.dtype) for _ in range(2)]
            for name, part in zip((one, other), parts, strict=True):
                self.read(name, low, part)
            if not torch.equal(parts[0].view(torch.uint8), parts[1].view(torch.uint8)):
                return False
        return True


def _open(path: Path) -> SafetensorsFile | TorchFile:
    return TorchFile(path) if path.suffix in _TORCH_SUFFIXES else SafetensorsFile(path)


def _find(path: Path) -> Path:
    """Return the file to open first."""
    if path.is_dir():
        for name in WEIGHTS_IN_DIRECTORY:
            if (path / name).is_file():
                return path / name
        raise CheckpointError(f"{path} holds no weights: none of {', '.join(WEIGHTS_IN_DIRECTORY)}.")
    if not path.exists():
        raise CheckpointError(f"There is no {path}. Weights are read from a local directory or file.")
    if path.suffix not in (".safetensors", *_TORCH_SUFFIXES) and not path.name.endswith(INDEX_SUFFIX):
        raise CheckpointError(
            f"{path} is not a weight file: .safetensors, {', '.join(_TORCH_SUFFIXES)} or an index, *{INDEX_SUFFIX}."
        )
    return path


_NextTo = Annotated[
    str, rule("it is not the name of a file next to it", lambda name: "/" not in name and stays_inside(name))
]


@dataclass(frozen=True)
class _WeightsIndex:
    """An index as Hugging Face writes it: the name of the file that holds each tensor."""

    weight_map: Annotated[dict[str, _NextTo], Len(1)]


def read_weight_map(path: Place) -> dict[str, str]:
    """Return the name of the file that holds each tensor, from an index.

    Raises:
        CheckpointError: It cannot be read, or names files that are not next to it.
    """
    try:
        return parse(_WeightsIndex, read_bounded(path, SMALL.nbytes), SMALL).weight_map
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not an index of weight files: {error}. Fetch or save it again.") from error


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
