"""Rules of random numbers and of ``torch.nn.init``: the same results as on the full tensor."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch.nn import init

from fullshard.core.shards.shard import Shard, as_shard, refusal
from fullshard.core.torch_private import fan_in_and_out, plain_functions

_INITIALISERS = (
    *("trunc_normal_", "eye_", "dirac_", "xavier_uniform_", "xavier_normal_", "kaiming_normal_", "orthogonal_"),
    *("sparse_",),
)
"""Functions of ``torch.nn.init`` that read the shape of the tensor without asking its class."""


def _full_like(shard: torch.Tensor, func: Any) -> torch.Tensor:
    """Return an uninitialised plain tensor of the full shape and this rank's dtype and device."""
    assert isinstance(shard, Shard)
    shape = shard.cut.full_shape(shard)
    if shape is None or shard.cut.parts:
        raise refusal(getattr(func, "__name__", str(func)), (shard,))
    return torch.empty(shape, dtype=shard.dtype, device=shard.device)


def _rows(full: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor of the full shape, in the shape of the rows here."""
    assert isinstance(shard, Shard)
    start = shard.cut.first_element(shard)
    return full.reshape(-1)[start : start + torch.Tensor.numel(shard)].view(shard.shape)


def drawn(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Fill a shard in place as the full tensor would be filled; returns the shard.

    Each rank draws the full tensor and keeps its rows: if ranks' random states are equal, they get the rows of one draw
    and the states stay equal. Needs memory for the full tensor for a moment.
    """
    kwargs = dict(kwargs)
    shard, rest = (args[0], args[1:]) if args else (kwargs.pop("tensor"), ())
    if not isinstance(shard, Shard) or any(isinstance(one, Shard) for one in (*rest, *kwargs.values())):
        raise refusal(func.__name__, (args, kwargs))
    full = _full_like(shard, func)
    with torch.no_grad():
        func(full, *rest, **kwargs)
    # Initialisers, Python functions (torch's, or those that transformers substitutes while it initialises), write into
    # Parameters; torch refuses normal_(), copy_() and similar outside of no_grad.
    with torch.set_grad_enabled(torch.is_grad_enabled() and not isinstance(func, FunctionType)):
        shard.copy_(_rows(full, shard))
    return shard


def drawn_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Compute ``randn_like`` and similar: the rows here of the result for the full tensor."""
    shard = args[0]
    kwargs = {key: value for key, value in kwargs.items() if key != "memory_format"}
    full = func(_full_like(shard, func), *args[1:], **kwargs)
    return as_shard(_rows(full, shard).clone().requires_grad_(full.requires_grad), shard.cut)


def _for_shards(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return an initialiser of ``torch.nn.init`` that treats shards by :func:`drawn`."""

    @functools.wraps(function)
    def initialise(*args: Any, **kwargs: Any) -> Any:
        tensor = args[0] if args else kwargs.get("tensor")
        if not isinstance(tensor, Shard):
            return function(*args, **kwargs)
        with plain_functions():
            return drawn(function, args, kwargs)

    return initialise


def _fans(tensor: torch.Tensor) -> tuple[int, int]:
    """Return fan-in and fan-out of the full shape, as torch does."""
    if isinstance(tensor, Shard):
        tensor = torch.empty(tensor.global_shape, device="meta")
    return fan_in_and_out(tensor)


# Also replaced where they were imported by name before this module.
if hasattr(init, "_calculate_fan_in_and_fan_out"):
    init._calculate_fan_in_and_fan_out = _fans
for _name in _INITIALISERS:
    setattr(init, _name, _for_shards(getattr(init, _name)))
