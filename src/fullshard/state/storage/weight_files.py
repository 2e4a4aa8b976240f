"""A model's weights on disk, in one file or several as Hugging Face names them, read by element ranges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fullshard.errors import CheckpointError
from fullshard.file_names import stays_inside
from fullshard.state.storage.json_file import read_json
from fullshard.state.storage.rules import shown
from fullshard.state.storage.safetensors_reader import STAGING_BYTES, SafetensorsFile, StoredTensor
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
        weight_map = _read_index(index)
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


def _read_index(path: Path) -> dict[str, str]:
    """Return the name of the file that holds each tensor."""
    try:
        content: Any = read_json(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON ({error}). Fetch or save it again.") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map from tensors to files. Fetch or save it again.")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or "/" in name or not stays_inside(name):
            raise CheckpointError(
                f"{path} lists {shown(tensor)} in {shown(name)}, which is not the name of a file next to it."
            )
    return weight_map
