"""Gradients whose norm is that of the full gradient, so that torch's own clipping is correct.

FSDP2 scripts call ``torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)``, which is correct in torch because
gradients are DTensors. On plain rows it would silently compute a different norm on every rank. So gradients of modules
that FSDP2's ``fully_shard`` was called on are tensors that compute norms over all ranks.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._foreach_utils import _foreach_supported_types

from fullshard.comm import Comm
from fullshard.engine.step.param import ShardedParam
from fullshard.errors import ConfigError, ShardingError
from fullshard.layout import ShardMeta
from fullshard.saving.shard_tensor import gather_full


class ShardedGradient(torch.Tensor):
    """This rank's rows of a reduced gradient, (rows here, *rest).

    It is an ordinary tensor except that norms of all elements are over all ranks, as with a DTensor, and so must be
    computed on every rank: ``torch.linalg.vector_norm``, ``torch.linalg.norm``, ``torch.norm``, ``Tensor.norm``,
    ``torch._foreach_norm``, and with these ``torch.nn.utils.clip_grad_norm_`` and ``get_total_norm``. torch's
    ``GradScaler`` also finds an infinity on another rank. Results of other operations are plain tensors, except copies
    (``detach``, ``clone``, ``to``, ``float``).

    Attributes:
        shard_comm: The ranks that share the parameter.
        shard_meta: Place of these rows in the parameter.
    """

    shard_comm: Comm
    shard_meta: ShardMeta

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute norms over all ranks, and everything else on these rows."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _OVER_RANKS:
                return _OVER_RANKS[func](*args, **kwargs)
            result = func(*args, **kwargs)
            source = args[0] if args and func in _COPIES else None
            if isinstance(source, ShardedGradient) and isinstance(result, torch.Tensor) and result is not source:
                return as_gradient(source.shard_comm, source.shard_meta, result)
        return result

    def full_tensor(self) -> torch.Tensor:
        """Return the full gradient on the device of collectives; every rank that shares the parameter calls it."""
        rows = self.as_subclass(torch.Tensor)
        meta = self.shard_meta
        return gather_full(self.shard_comm, meta.global_shape, meta.element_range[0], rows.reshape(-1))

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return a plain copy of these rows."""
        return self.as_subclass(torch.Tensor).clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle these rows as a plain tensor."""
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


_foreach_supported_types.append(ShardedGradient)  # otherwise clipping computes norms one gradient at a time


def as_gradient(comm: Comm, meta: ShardMeta, rows: torch.Tensor) -> torch.Tensor:
    """Return ``rows``, shared by the ranks of ``comm``, as a :class:`ShardedGradient` of the same memory."""
    gradient = rows.as_subclass(ShardedGradient)
    gradient.shard_comm, gradient.shard_meta = comm, meta
    return gradient


def gradient_of(param: ShardedParam, rows: torch.Tensor) -> torch.Tensor:
    """Return a new gradient of ``param`` as a :class:`ShardedGradient`; called by the engine."""
    return as_gradient(param.lane.mesh.shard_group, param.meta, rows)


class FullTensor:
    """The method ``param.full_tensor()`` of a parameter that FSDP2's ``fully_shard`` sharded.

    It is an attribute of the Parameter: with a Parameter subclass optimizers would not use their fused kernels.
    """

    def __init__(self, param: ShardedParam) -> None:
        """Create the method of ``param``, with a weak reference to it."""
        self._param = weakref.ref(param)

    def __call__(self) -> torch.Tensor:
        """Return the full parameter on the device of collectives, detached; every rank that shares it calls it.

        Raises:
            ShardingError: The model was deleted.
        """
        param = self._param()
        if param is None:
            raise ShardingError("full_tensor() of a parameter whose model was deleted. Keep a reference to the model.")
        start, _ = param.meta.element_range
        return gather_full(
            param.lane.mesh.shard_group, param.meta.global_shape, start, param.sharded.detach().reshape(-1)
        )


def _norms(gradients: Sequence[torch.Tensor], order: float) -> list[torch.Tensor]:
    """Return the norm of each full gradient, 0-d, float32 or wider; one collective per group of ranks."""
    if not order > 0:
        raise ConfigError(f"The order of a norm over ranks must be above zero; got {order}.")
    found: list[torch.Tensor] = [torch.empty(())] * len(gradients)
    comms = {id(g.shard_comm): g.shard_comm for g in gradients if isinstance(g, ShardedGradient)}
    for key, comm in comms.items():
        places = [i for i, g in enumerate(gradients) if id(getattr(g, "shard_comm", None)) == key]
        for place, norm in zip(places, _norms_of([gradients[i] for i in places], order, comm), strict=True):
            found[place] = norm
    for place, gradient in enumerate(gradients):
        if not isinstance(gradient, ShardedGradient):  # of an ignored parameter, the same on every rank
            found[place] = torch.linalg.vector_norm(gradient, order, dtype=_wide(gradient.dtype))
    return found


def _norms_of(gradients: Sequence[torch.Tensor], order: float, comm: Comm) -> list[torch.Tensor]:
    plain = [g.as_subclass(torch.Tensor) for g in gradients]
    wide = [_wide(g.dtype) for g in plain]
    local = [_local_norm(g, order, dtype) for g, dtype in zip(plain, wide, strict=True)]
    widest = torch.float64 if torch.float64 in wide else torch.float32
    stacked = torch.stack([norm.to(comm.device, widest) for norm in local])
    comm.announce("norms of gradients")
    if math.isinf(order):
        # The maximum over ranks may lose a nan, so a nan flag is reduced along with it.
        both = torch.stack([stacked, stacked.isnan().to(stacked.dtype)])
        comm.all_reduce(both, "max").wait()
        norms = both[0].masked_fill(both[1] > 0, math.nan)
    else:
        norms = stacked.pow(order)
        comm.all_reduce(norms).wait()
        norms = norms.pow(1.0 / order)
    return [norm.to(g.device, dtype) for norm, g, dtype in zip(norms, plain, wide, strict=True)]


def _local_norm(rows: torch.Tensor, order: float, dtype: torch.dtype) -> torch.Tensor:
    if rows.numel() == 0:  # an infinite norm of nothing is an error in torch
        return rows.new_zeros((), dtype=dtype)
    return torch.linalg.vector_norm(rows, order, dtype=dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _full_norm(
    gradient: torch.Tensor,
    ord: Any = 2.0,
    dim: Any = None,
    keepdim: bool = False,  # noqa: FBT001, FBT002 (torch's signature)
    **kwargs: Any,
) -> torch.Tensor:
    """Return the norm of all elements over all ranks, in place of torch's norm functions."""
    order = kwargs.pop("p", ord)
    order = 2.0 if order in (None, "fro") else order
    if dim is not None or keepdim or kwargs.get("out") is not None or isinstance(order, str):
        raise ConfigError(
            "This gradient is this rank's rows, and only the norm of all elements over all ranks is supported, "
            f"norm(gradient, p); got dim={dim}, keepdim={keepdim}, order={order!r}. For norms of this rank's rows call "
            "it on gradient.as_subclass(torch.Tensor)."
        )
    return _norms([gradient], float(order))[0].to(kwargs.get("dtype") or _wide(gradient.dtype))


def _foreach_norm(gradients: Sequence[torch.Tensor], ord: Any = 2.0, **_kwargs: Any) -> list[torch.Tensor]:
    return _norms(list(gradients), float(ord))


def _unscale(gradients: list[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """Unscale gradients as torch's GradScaler does; an infinity or nan on any rank sets ``found_inf`` on all."""
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inv_scale)  # pyright: ignore[reportPrivateImportUsage]
    for comm in {id(g.shard_comm): g.shard_comm for g in gradients if isinstance(g, ShardedGradient)}.values():
        flag = found_inf.to(comm.device).reshape(1)
        comm.announce("whether a gradient is inf or nan")
        comm.all_reduce(flag, "max").wait()
        found_inf.copy_(flag.reshape(()))


_OVER_RANKS: dict[Any, Callable[..., Any]] = {
    torch._foreach_norm: _foreach_norm,  # pyright: ignore[reportPrivateImportUsage]
    torch._amp_foreach_non_finite_check_and_unscale_: _unscale,  # pyright: ignore[reportPrivateImportUsage]
    torch.linalg.vector_norm: _full_norm,
    torch.linalg.norm: _full_norm,
    torch.norm: _full_norm,
    torch.Tensor.norm: _full_norm,
}

_COPIES = frozenset({
    torch.Tensor.detach, torch.Tensor.clone, torch.Tensor.to, torch.Tensor.float, torch.Tensor.double,
    vars(torch._C.TensorBase)["data"].__get__, torch.detach, torch.clone,
})  # fmt: skip
