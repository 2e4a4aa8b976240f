"""Reader of one file of ``torch.save`` (``.bin``, ``.pt``, ``.pth``) by element ranges.

The file is mapped into memory: pages that a rank has read count as its memory until the mapping is released, in
addition to its shards, though the system may drop them at any time. Files from before torch 1.6 cannot be mapped.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fullshard.errors import CheckpointError
from fullshard.sizes import format_bytes
from fullshard.state.storage.safetensors_file import STAGING_BYTES, StoredTensor

_ZIP_MAGIC = b"PK\x03\x04"


class TorchFile:
    """A state dict in torch's own format; each rank opens its own.

    Attributes:
        path: The file.
        tensors: Its tensors, by name.
    """

    def __init__(self, path: Path) -> None:
        """Map the file; a legacy one is read completely.

        Raises:
            CheckpointError: The file cannot be read, is damaged, holds more than tensors, or is not a state dict.
        """
        self.path = path
        self._values = _load(path)
        self.tensors = {name: StoredTensor(tuple(t.shape), t.dtype, 0) for name, t in self._values.items()}

    def read(self, name: str, start: int, out: torch.Tensor) -> None:
        """Fill ``out``, (numel,), on any device, with a run of the flattened elements of a tensor, from ``start`` on.

        A tensor that was saved as a transposed view is copied completely for each read.
        """
        flat = self._values[name].detach().reshape(-1)
        step = STAGING_BYTES // flat.dtype.itemsize
        with torch.no_grad():
            for low in range(0, out.numel(), step):
                part = out[low : low + step]
                part.copy_(flat[start + low : start + low + part.numel()])

    def same(self, one: str, other: str) -> bool:
        """Return True if two names refer to one tensor: tied parameters are saved under each of their names."""
        a, b = self._values[one], self._values[other]
        return (a.data_ptr(), a.shape, a.stride()) == (b.data_ptr(), b.shape, b.stride())


def _load(path: Path) -> dict[str, torch.Tensor]:
    try:
        with path.open("rb") as file:
            mapped = file.read(4) == _ZIP_MAGIC
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
    except Exception as error:  # unpickling damaged bytes can raise nearly anything
        raise CheckpointError(_load_problem(path, error)) from error
    values = _state_dict(path, content)
    if not mapped:
        warnings.warn(
            f"{path} cannot be mapped into memory (torch's format from before 1.6): every rank reads all of its "
            f"{format_bytes(sum(value.nbytes for value in values.values()))} and holds them while it loads. Convert it "
            "once to safetensors.",
            stacklevel=2,
        )
    return values


def load_plain(path: Path, *, mmap: bool = False) -> Any:
    """Load a file of ``torch.save`` on the CPU: tensors, plain values and classes that the user allowed.

    Raises:
        CheckpointError: It cannot be read, is damaged, or holds other objects; none of their code was run.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
    except Exception as error:  # unpickling damaged bytes can raise nearly anything
        if refused_name(error) is not None:
            raise CheckpointError(f"{path} is not a file of tensors and plain values: {why_refused(error)}") from error
        raise CheckpointError(_damage(path, error)) from error


def refused_name(error: Exception) -> str | None:
    """Return the class or function in a file that ``torch.load`` refused; None if that is not why it raised."""
    found = re.search(r"GLOBAL (\S+)", str(error)) or re.search(r"Unsupported class (\S+)", str(error))
    return None if found is None else found[1]


def why_refused(error: Exception) -> str:
    """Describe why a file was not loaded, to follow its name; without torch's advice to load it unsafely."""
    name = refused_name(error)
    if name is None:
        return f"it is damaged ({_reason(error)}). Fetch or save it again."
    return (
        f"it names {name}, whose code would run, so it was not loaded. If you trust its origin, allow the class first "
        "with torch.serialization.add_safe_globals."
    )


def _reason(error: Exception) -> str:
    text = str(error).rpartition("WeightsUnpickler error: ")[2]
    return text.strip().partition("\n")[0][:200].rstrip(". ") or type(error).__name__


def _load_problem(path: Path, error: Exception) -> str:
    if refused_name(error) is not None:
        return (
            f"{path} holds Python objects in addition to tensors; loading them would run code that the file names, so "
            "it was not loaded. If you trust its origin, convert it once: "
            'safetensors.torch.save_file(torch.load(path, weights_only=False), "model.safetensors").'
        )
    return _damage(path, error)


def _damage(path: Path, error: Exception) -> str:
    return f"{path} is not a complete file of torch.save ({_reason(error)}). Fetch or save it again."


def _state_dict(path: Path, content: Any) -> dict[str, torch.Tensor]:
    if not isinstance(content, Mapping):
        raise CheckpointError(
            f"{path} holds a {type(content).__name__}; a state dict is needed: torch.save(model.state_dict(), path)."
        )
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            raise CheckpointError(
                f"{path}: entry {name!r} is a {type(value).__name__}; a state dict of names and strided tensors is "
                "needed: torch.save(model.state_dict(), path)."
            )
    return dict(content)
