"""A trial of an optimizer class: does it step parts of a parameter as it steps the full parameter?"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from enum import Enum
from threading import RLock
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fullshard.core.comm import DONE, SoloComm, Work
from fullshard.core.shards import RowSplit, ShardParameter, as_shard

_SIDE = 96
"""Rows and columns of the trial's matrix. Both parts of it have at least 4096 elements, from which on 8-bit
optimizers quantise, and the boundary lies inside one of their blocks."""
STEPS = 12
"""Steps of a trial: its limit, so that no result depends on how fast the machine is."""
_LEAST_MOVE = 1e-4
"""If no value moves further, equal results decide nothing: differences would be below the tolerance. Classes begin so
that find their rate by sums over all parameters (Prodigy, D-Adaptation, DoG)."""

_one_at_a_time = RLock()  # ranks that are threads of one process share the random state

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]


class Split(Enum):
    """How a parameter is divided: shape of the full parameter, shape of a part, elements of the first part."""

    ROWS = ((_SIDE, _SIDE), (-1, _SIDE), 52 * _SIDE)
    WITHIN_ROWS = ((_SIDE, _SIDE), (-1, 32), 157 * 32)
    VECTOR = ((_SIDE * _SIDE,), (-1,), 4999)


@torch.enable_grad()
def steps_parts_equally(make: MakeOptimizer, split: Split) -> bool:
    """Return whether a parameter, and its two parts with an optimizer each, are equal after some steps.

    The gradients are equal. Takes 10 to 20 milliseconds on the CPU, in float32. torch's random state is restored.

    Args:
        make: Makes the optimizer for a list of one parameter; its errors are raised here.
        split: How the parameter is divided.

    Raises:
        RuntimeError: The class is not deterministic (it draws random numbers) or moves too little, so the trial decides
            nothing.
    """
    shape, of_part, first = split.value
    values, gradients = _numbers()
    sizes = [first, len(values) - first]
    parts = list(zip(values.split(sizes), *(gradient.split(sizes) for gradient in gradients), strict=True))

    def stepped(step: _Stepper) -> tuple[torch.Tensor, ...]:
        full, again = (step([(values, gradients)], shape) for _ in range(2))
        return full, again, torch.cat([step([(part, list(of))], of_part) for part, *of in parts])

    return _alike(make, stepped)


def steps_params_alone(make: MakeOptimizer) -> bool:
    """Return whether two parameters in one optimizer are stepped like two with an optimizer each.

    False if it sums over all gradients, such as for a largest norm: each rank would sum different parameters.

    Raises:
        RuntimeError: See :func:`steps_parts_equally`.
    """
    values, gradients = _numbers()
    both = [(values, gradients), (values.flip(0), [3 * gradient for gradient in gradients])]
    shape = (_SIDE, _SIDE)

    def stepped(step: _Stepper) -> tuple[torch.Tensor, ...]:
        together, again = (step(both, shape) for _ in range(2))
        return together, again, torch.cat([step([one], shape) for one in both])

    return _alike(make, stepped)


class _Echo(SoloComm):
    """Two ranks, of which the other one sends what this one sends."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.size = 2

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> Work:
        full.view(2, -1).copy_(shard.view(-1))
        return DONE


@torch.enable_grad()
def why_not_on_shards(make: MakeOptimizer, split: Split) -> str | None:
    """Return why a class cannot step shards, whose functions know what they are given; None if it can.

    Tried are a rank with the first part of the parameter and one without rows.
    """
    shape, of_part, first = split.value
    values, gradients = _numbers()
    row = max(1, of_part[-1])
    full = shape[1:] == of_part[1:]
    row_split = RowSplit("a parameter", _Echo(), "trial", 0, len(values) // row, None if full else shape, full)
    try:
        with _one_at_a_time, torch.random.fork_rng(devices=[]):
            for numel in (first, 0):
                rows = (numel // row, *of_part[1:])
                param = nn.Parameter(values[:numel].view(rows).clone())
                param.__class__, param.row_split = ShardParameter, row_split  # type: ignore[attr-defined]
                optimizer = make([param])
                for gradient in gradients:
                    param.grad = as_shard(gradient[:numel].view(rows).clone(), row_split)
                    optimizer.step()
    except Exception as error:
        return f"{type(error).__name__}: {error}".partition(". ")[0][:200]
    return None


_Stepper = Callable[[list[tuple[torch.Tensor, list[torch.Tensor]]], tuple[int, ...]], torch.Tensor]


def _numbers() -> tuple[torch.Tensor, list[torch.Tensor]]:
    # Neither symmetric nor of one size, so that parts have other norms, means and maxima than the full matrix.
    values = torch.linspace(-1, 1.5, _SIDE * _SIDE, dtype=torch.float32, device="cpu")
    return values, [torch.sin(values * (5 + step)) * (0.1 + values**2) / 10 ** (step % 3) for step in range(STEPS)]


def _alike(make: MakeOptimizer, stepped: Callable[[_Stepper], tuple[torch.Tensor, ...]]) -> bool:
    """Return whether the first and the last of three results are equal; the first two must be."""
    with _one_at_a_time, torch.random.fork_rng(devices=[]):
        one, again, other = stepped(lambda params, shape: _stepped(make, params, shape))
    if not _close(one, again):
        raise RuntimeError("it steps the same values differently each time")
    if not _close(one, other):
        return False
    moved = one.abs().max().item()
    if moved < _LEAST_MOVE:
        raise RuntimeError(
            f"in {STEPS} steps it moves values by at most {moved:.1g}, and a trial compares moves from {_LEAST_MOVE:g} "
            "on: does it find its rate by sums over all parameters?"
        )
    return True


def _stepped(
    make: MakeOptimizer, given: list[tuple[torch.Tensor, list[torch.Tensor]]], shape: tuple[int, ...]
) -> torch.Tensor:
    """Return by how much parameters of these values change in steps with these gradients, one after the other."""
    params = [nn.Parameter(values.reshape(shape).clone()) for values, _ in given]
    optimizer = make(params)
    for group in optimizer.param_groups:
        group["lr"] = 0.1  # so that a difference is larger than rounding
    for number in range(STEPS):
        for param, (_, gradients) in zip(params, given, strict=True):
            param.grad = gradients[number].reshape(shape).clone()
        optimizer.step()
    return torch.cat([param.detach().flatten() - values for param, (values, _) in zip(params, given, strict=True)])


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    # Values up to 2.5 are rounded by 3e-7 in each of the steps.
    return torch.allclose(one, other, rtol=1e-3, atol=1e-5, equal_nan=True)


def maker_like(kind: type[Optimizer], defaults: Mapping[str, Any]) -> MakeOptimizer:
    """Return a function that makes optimizers of the class ``kind`` with ``defaults``."""
    taken = {key: value for key, value in defaults.items() if key in _option_names(kind)}

    def make(params: list[nn.Parameter]) -> Optimizer:
        made = kind(params, **taken)  # type: ignore[call-arg]
        for group in made.param_groups:
            # Also options that the constructor takes under another name. Some classes count in tensors: copy them.
            group.update({k: v.detach().clone() if isinstance(v, torch.Tensor) else v for k, v in defaults.items()})
        return made

    return make


def _option_names(kind: type[Optimizer]) -> set[str]:
    """Return the names of a class's options, including its base's if it passes on keyword arguments."""
    names: set[str] = set()
    for base in kind.__mro__:
        if "__init__" not in vars(base):
            continue
        parameters = inspect.signature(base.__init__).parameters.values()
        names.update(parameter.name for parameter in parameters)
        if all(parameter.kind is not inspect.Parameter.VAR_KEYWORD for parameter in parameters):
            break
    return names
