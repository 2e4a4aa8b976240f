"""A trial of a class of optimizers: whether it steps parts of a parameter as it steps the whole."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from enum import Enum
from threading import RLock
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

_SIDE = 96
"""Rows and columns of the matrix that is tried. Both parts of it have 4096 elements or more, from which on optimizers
of 8 bits quantise, and the cut is within a block of theirs."""
_STEPS = 12
_one_at_a_time = RLock()  # ranks that are threads of one process share the random state

Make = Callable[[list[nn.Parameter]], Optimizer]


class Cut(Enum):
    """How a parameter is held in parts: shape of the whole, shape of a part, elements of the first part."""

    ROWS = ((_SIDE, _SIDE), (-1, _SIDE), 52 * _SIDE)
    WITHIN_ROWS = ((_SIDE, _SIDE), (-1, 32), 157 * 32)
    VECTOR = ((_SIDE * _SIDE,), (-1,), 4999)
    FLATTENED = ((_SIDE, _SIDE), (-1,), 4999)


@torch.enable_grad()
def steps_parts_alike(make: Make, cut: Cut) -> bool:
    """Step a parameter, and its two parts by an optimizer each as ranks would, some times with equal gradients.

    On the CPU, in float32, 10 to 20 milliseconds. torch's random state is left as it was.

    Args:
        make: Makes the optimizer for a list of one parameter; what it raises is raised here.
        cut: How the parts are cut.

    Raises:
        RuntimeError: The class does otherwise each time, as where it draws random numbers: nothing can be told.
    """
    shape, of_part, first = cut.value
    # Neither symmetric nor of one size, so that the two parts have other norms, means and maxima than the whole.
    values = torch.linspace(-1, 1.5, _SIDE * _SIDE, dtype=torch.float32, device="cpu")
    gradients = [torch.sin(values * (5 + step)) * (0.1 + values**2) / 10 ** (step % 3) for step in range(_STEPS)]
    with _one_at_a_time, torch.random.fork_rng(devices=[]):
        whole, again = (_stepped(make, values, gradients, shape) for _ in range(2))
        split = [first, len(values) - first]
        by_part = zip(values.split(split), *(gradient.split(split) for gradient in gradients), strict=True)
        parts = torch.cat([_stepped(make, part, of, of_part) for part, *of in by_part])
    if not _close(whole, again):
        raise RuntimeError("it steps the same values otherwise each time")
    return _close(whole, parts)


def _stepped(make: Make, values: torch.Tensor, gradients: list[torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
    """What becomes of a parameter of these values, flattened."""
    param = nn.Parameter(values.reshape(shape).clone())
    optimizer = make([param])
    for group in optimizer.param_groups:
        group["lr"] = 0.1  # so that a difference is larger than rounding
    for gradient in gradients:
        param.grad = gradient.reshape(shape).clone()
        optimizer.step()
    return param.detach().flatten()


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-4, atol=1e-5, equal_nan=True)


def maker_like(kind: type[Optimizer], defaults: Mapping[str, Any]) -> Make:
    """What makes optimizers like one that exists, of its class and ``defaults``."""
    taken = {key: value for key, value in defaults.items() if key in _option_names(kind)}

    def make(params: list[nn.Parameter]) -> Optimizer:
        made = kind(params, **taken)  # type: ignore[call-arg]
        for group in made.param_groups:
            group.update(_copied(defaults))  # also those that the constructor calls otherwise
        return made

    return make


def _option_names(kind: type[Optimizer]) -> set[str]:
    """Names of the options of a class; where it hands on any others, also its base's."""
    names: set[str] = set()
    for base in kind.__mro__:
        if "__init__" not in vars(base):
            continue
        parameters = inspect.signature(base.__init__).parameters.values()
        names.update(parameter.name for parameter in parameters)
        if all(parameter.kind is not inspect.Parameter.VAR_KEYWORD for parameter in parameters):
            break
    return names


def _copied(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with copies of tensors, in which some classes count."""
    return {k: v.detach().clone() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
