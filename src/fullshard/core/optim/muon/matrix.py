"""One matrix in a step of Muon: the elementwise operations on this rank's elements."""

from __future__ import annotations

import math
from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn

from fullshard.core.optim.muon.balance import SplitMatrix, newton_schulz_flops
from fullshard.core.optim.muon.newton_schulz import newton_schulz
from fullshard.core.optim.shards import comm_of, meta_of
from fullshard.errors import ConfigError

NS_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
"""Dtypes that Newton-Schulz can be computed in, by their name in parameter groups."""


class MuonMatrix:
    """A matrix in one step of Muon on this rank, which may hold all of it, a part, or nothing."""

    def __init__(self, param: nn.Parameter, group: dict[str, Any], states: MutableMapping[Any, Any]) -> None:
        """Step ``param`` with the options of ``group`` and the optimizer's ``states``."""
        self.meta = meta_of(param)
        self.shape = self.meta.global_shape
        self.dtype = NS_DTYPES[group["ns_dtype"]]
        self._param = param
        self._group = group
        self._states = states
        # Equal for matrices that are orthogonalised in one batch.
        self.settings = (self.shape, self.dtype, tuple(group["ns_coefficients"]), group["ns_steps"], group["eps"])

    @property
    def has_gradient(self) -> bool:
        """True if it is stepped here; the same on all ranks that hold parts of it."""
        return self._param.grad is not None and self._param.numel() > 0

    @property
    def work(self) -> int:
        """Floating-point operations to orthogonalise it."""
        return newton_schulz_flops(self.shape[0], self.shape[1], self._group["ns_steps"])

    def as_split(self) -> SplitMatrix:
        """Return its ranks, pieces and work for the plan."""
        ranges = [self.meta.layout.local_range(self.meta.placement, rank) for rank in self.meta.owners]
        return SplitMatrix(self.meta.owners.start, tuple(stop - start for start, stop in ranges), self.work)

    def update(self) -> torch.Tensor:
        """Step the momentum, and return this rank's elements of the matrix to orthogonalise; once a step.

        Returns:
            Flat, in the dtype of Newton-Schulz, on the device of the ranks' collectives; zeros if there is no gradient,
            and the momentum is then unchanged.
        """
        param, device = self._param, comm_of(self._param).device
        if param.grad is None:
            return torch.zeros(param.numel(), dtype=self.dtype, device=device)
        grad, momentum = dense_gradient(param), self._group["momentum"]
        state = self._states[param]
        if "momentum_buffer" not in state:
            wide = torch.promote_types(param.dtype, grad.dtype)
            state["momentum_buffer"] = torch.zeros_like(grad, dtype=wide)
        buffer: torch.Tensor = state["momentum_buffer"]
        grad = grad.to(buffer.dtype)
        buffer.lerp_(grad, 1 - momentum)
        update = grad.lerp(buffer, momentum) if self._group["nesterov"] else buffer
        return update.reshape(-1).to(self.dtype).to(device, non_blocking=True)

    def apply(self, direction: torch.Tensor) -> None:
        """Decay this rank's elements, and move them along their part of the orthogonal matrix.

        Args:
            direction: This rank's elements of the orthogonal matrix, floating, on any device.
        """
        if not self.has_gradient:
            return
        param, lr = self._param, float(self._group["lr"])
        param.mul_(1 - lr * self._group["weight_decay"])
        param.add_(direction.to(param.device).view(param.shape), alpha=-lr * self._ratio())

    def _ratio(self) -> float:
        """Return the learning rate of this shape over the group's, as torch.optim.Muon adjusts it."""
        rows, columns = self.shape
        if self._group["adjust_lr_fn"] == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1, rows / columns))


def dense_gradient(param: nn.Parameter) -> torch.Tensor:
    """Return a parameter's gradient as a plain tensor.

    Raises:
        ConfigError: It is sparse.
    """
    assert param.grad is not None
    if param.grad.is_sparse:
        raise ConfigError(
            f"Muon steps dense gradients; that of {meta_of(param).name or 'a parameter'}, {tuple(param.shape)}, is "
            "sparse. Make the embedding with sparse=False."
        )
    return param.grad.as_subclass(torch.Tensor)  # compat's gradients compute norms over ranks


def batches_of_equal_settings(matrices: Iterable[MuonMatrix], max_bytes: int) -> list[list[MuonMatrix]]:
    """Return the matrices in batches of one shape and settings, each of at most ``max_bytes`` or of one matrix."""
    batches: dict[tuple[Any, ...], list[list[MuonMatrix]]] = {}
    for matrix in matrices:
        full = max(1, max_bytes // max(1, math.prod(matrix.shape) * matrix.dtype.itemsize))
        of_kind = batches.setdefault(matrix.settings, [[]])
        if len(of_kind[-1]) == full:
            of_kind.append([])
        of_kind[-1].append(matrix)
    return [batch for of_kind in batches.values() for batch in of_kind]


def orthogonalised(batch: Sequence[MuonMatrix], pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run Newton-Schulz on a batch of matrices of one shape and settings.

    Args:
        batch: At least one matrix.
        pieces: Their updates, flat, one matrix after the other, each in any number of pieces.

    Returns:
        The orthogonal matrices, flattened.
    """
    shape, _, coefficients, steps, eps = batch[0].settings
    joined = torch.cat(list(pieces)) if len(pieces) > 1 else pieces[0]
    stacked = joined.view(shape if len(batch) == 1 else (len(batch), *shape))
    return list(newton_schulz(stacked, coefficients, steps, eps).reshape(len(batch), -1))
