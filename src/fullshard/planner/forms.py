"""Outputs of operators without their memory: their forms, and what a kernel copies, writes and computes."""

from __future__ import annotations

import functools
import math
import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

KNOWN_NUMEL = 1 << 18
"""Elements up to which whole numbers (token ids, masks, checksums) keep their values: programs branch on them."""

LARGE_BYTES = 1 << 30
"""Size from which on a tensor has address space only, in bytes."""

_NORESERVE = 0x4000
"""Linux's ``MAP_NORESERVE``, which Python's mmap does not name before 3.13."""

_LOSSES = {"aten::mse_loss": 2, "aten::smooth_l1_loss": 2, "aten::binary_cross_entropy": 1, "aten::huber_loss": 1}
"""Losses, and how many tensors of all elements their kernel makes before the sum or mean."""
_LOSSES_KEPT = _LOSSES.keys() - {"aten::huber_loss"}
"""Those whose sum or mean keeps the storage of one of these tensors."""

_REDUCTIONS = {f"aten::{name}" for name in ("sum", "prod", "mean", "cumsum", "cumprod", "linalg_vector_norm")}
"""Operators that first copy their input to the dtype that they compute in."""

_SCATTERED = {f"aten::{name}" for name in ("scatter", "scatter_add", "scatter_reduce")}
_SCATTERED |= {f"{name}_" for name in _SCATTERED}
"""Operators that copy the tensor that they write to into float32 if it is in 16 bits."""

_PRODUCTS = {"aten::mm", "aten::addmm"}
"""Operators that copy a matrix whose elements are neither row by row nor column by column, such as expanded ones."""

_CONSTANTS = {"aten::ones", "aten::zeros", "aten::full", "aten::arange", "aten::scalar_tensor"}
CONSTANTS_LIKE = {"aten::ones_like", "aten::zeros_like", "aten::full_like"}
CONSTANTS_LIKE |= {"aten::new_ones", "aten::new_zeros", "aten::new_full"}
_CONSTANT_NUMEL = 1 << 16
"""Elements up to which floats from these operators keep their values: masks of ones are made of them."""


class Form(NamedTuple):
    """A tensor without its memory."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    nbytes: int  # of its storage

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Form:
        """Return the form of a tensor."""
        storage = tensor.untyped_storage().nbytes()
        offset = int(tensor.storage_offset())
        return cls(tensor.size(), tensor.stride(), offset, tensor.dtype, tensor.device, storage)

    def empty(self) -> torch.Tensor:
        """Return a tensor without memory; a large one in address space that the system does not promise memory for."""
        if self.device.type == "meta" or self.nbytes < LARGE_BYTES:
            return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)
        # Not torch's allocator: Linux refuses a single allocation above the memory of the machine.
        space = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        return torch.frombuffer(space, dtype=self.dtype).as_strided(self.size, self.stride)

    def view_of(self, owner: torch.Tensor) -> torch.Tensor:
        """Return ``owner`` itself, or its view of this form."""
        if owner.size() == self.size and owner.stride() == self.stride:
            return owner
        return torch.as_strided(owner, self.size, self.stride, self.offset + owner.storage_offset())


@dataclass(frozen=True)
class Shapes:
    """The outputs of an operator without their memory, and what depends on its inputs' forms alone."""

    leaves: list[Any]  # forms and other values
    owners: list[int | None]  # for each, the index of the input whose memory it shares
    spec: Any  # how they are nested
    small: bool  # whether it is computed where what it reads is known
    temporary_bytes: int  # that its kernel holds beside them
    kept_bytes: int  # of the storage of its only output, where that is larger than its elements; else 0


def tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors among an operator's arguments or results. Called for each; pytree took a third of the time."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(value)
    return found


def is_small(func: Any, leaves: list[Any], given: list[torch.Tensor]) -> bool:
    """Return whether an operator that reads ``given`` is to be computed: few elements, no weights or activations."""
    made = [leaf for leaf in leaves if isinstance(leaf, Form)]
    numels = [math.prod(form.size) for form in made]
    if max((*numels, *(tensor.numel() for tensor in given)), default=0) > KNOWN_NUMEL:
        return False
    if any(form.device.type == "meta" for form in made) or any(tensor.is_meta for tensor in given):
        return False
    # Bytes are codes of quantised weights, whose buffers the engine fills and frees like those of numbers.
    if given or not any(form.dtype.is_floating_point or form.dtype == torch.uint8 for form in made):
        return True
    constants = func._schema.name in _CONSTANTS | CONSTANTS_LIKE
    return constants and all(numel <= _CONSTANT_NUMEL for numel in numels)


def temporary_bytes(func: Any, given: list[torch.Tensor], leaves: Sequence[Any] = ()) -> int:
    """Return the bytes that a kernel for the CPU holds beside inputs and outputs, as far as they grow with these.

    Beside the kinds above: a pointwise operator computes on one dtype, an embedding's gradient is added from rows in
    order, and logsumexp subtracts the maximum first.
    """
    name = func._schema.name
    if func is torch.ops.aten.embedding_dense_backward.default:
        return 0 if given[0].is_contiguous() else given[0].numel() * given[0].itemsize
    if name == "aten::logsumexp":
        return given[0].numel() * given[0].itemsize
    if name in _REDUCTIONS and leaves:
        computed = torch.float32 if name == "aten::mean" and leaves[0].dtype.itemsize == 2 else leaves[0].dtype
        return 0 if given[0].dtype == computed else given[0].numel() * computed.itemsize
    if name in _SCATTERED:
        return 4 * given[0].numel() if given[0].itemsize == 2 else 0
    if name in _PRODUCTS:
        return sum(one.numel() * one.itemsize for one in given[-2:] if not _has_rows(one))
    if torch.Tag.pointwise not in func.tags:
        return 0
    numbers = [tensor for tensor in given if tensor.dtype != torch.bool and tensor.dim()]
    if len({tensor.dtype for tensor in numbers}) < 2:
        return 0
    common = functools.reduce(torch.promote_types, (tensor.dtype for tensor in numbers))
    return sum(tensor.numel() * common.itemsize for tensor in numbers if tensor.dtype != common)


def _has_rows(matrix: torch.Tensor) -> bool:
    """Return whether the elements of each row or each column of a matrix are side by side, as BLAS needs it."""
    (rows, columns), (down, right) = matrix.shape, matrix.stride()
    return (right == 1 and down >= max(1, columns)) or (down == 1 and right >= max(1, rows))


def loss_bytes(func: Any, given: list[torch.Tensor], leaves: list[Any]) -> tuple[int, int]:
    """Return the bytes of a reduced loss's storage that its kernel makes for all elements, and of what it holds beside.

    In 16 bits the latter is that of a mean; a sum would take less.
    """
    made = _LOSSES.get(func._schema.name)
    if made is None or leaves[0].size:
        return 0, 0
    numel, itemsize = torch.broadcast_shapes(*(tensor.shape for tensor in given)).numel(), leaves[0].dtype.itemsize
    kept = numel * itemsize if func._schema.name in _LOSSES_KEPT else 0
    return kept, numel * (made * itemsize + 4 * (itemsize == 2)) - kept


def written_by(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the tensors that an operator writes to."""
    return tensors_in(args[index] if index < len(args) else kwargs.get(name) for index, name in _written_places(func))


@functools.cache
def _written_places(func: Any) -> list[tuple[int, str]]:
    """Return place and name of the arguments that an operator writes to."""
    places = enumerate(func._schema.arguments)
    return [(index, one.name) for index, one in places if one.alias_info is not None and one.alias_info.is_write]
