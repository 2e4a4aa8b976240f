"""AdamW whose moments are kept in fewer bits than they are computed in: what its kinds have in common."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fullshard.errors import ConfigError
from fullshard.optim.shards import copied, refuse_turns

_WIDE = (torch.float32, torch.float64)


class NarrowAdamW(Optimizer):
    """AdamW, decoupled weight decay (https://arxiv.org/abs/1711.05101), in float32 whatever its tensors are kept in.

    For each element, with the gradient g, step t and the moments m and v as they were kept:
    ``m = b1 m + (1 - b1) g``, ``v = b2 v + (1 - b2) g^2``, ``w = w (1 - lr wd)``,
    ``w = w - lr / (1 - b1^t) m / (sqrt(v) / sqrt(1 - b2^t) + eps)``. The weight is updated from the moments as they are
    before they are narrowed again.

    Every operation is one of IEEE's, rounded by itself. How torch's fused ones round is left open, by element and by
    machine: a last bit that depended on where a shard was cut would make a narrowed value jump.
    """

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        """Check the defaults, among them lr, betas, eps and weight_decay."""
        numbers = {key: defaults[key] for key in ("lr", "eps", "weight_decay")}
        wrong = [f"{key} = {value}" for key, value in numbers.items() if not value >= 0]
        if wrong or len(defaults["betas"]) != 2 or not all(0 <= beta < 1 for beta in defaults["betas"]):
            raise ConfigError(
                "lr, eps and weight_decay must be zero or more, and betas two numbers from 0 to below 1; got "
                f"{numbers} and betas = {defaults['betas']}."
            )
        super().__init__(params, defaults)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the parameters too, as the shards that they are."""
        return copied(self, memo)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group.

        Raises:
            ConfigError: It has an option that is not computed here.
        """
        refuse_turns(param_group, type(self).__name__)
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient; every rank calls it.

        Args:
            closure: Computes the loss again, with gradients.

        Returns:
            The closure's result; None without one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update_all()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what ``state_dict()`` gave; tensors move to the parameter's device and keep their own dtype.

        torch's own would make all floating ones, and the codes, of the parameter's dtype.

        Raises:
            ConfigError: A group has an option that is not computed here; nothing has changed then.
        """
        loaded: dict[nn.Parameter, dict[str, Any]] = {}

        def without_state(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
            # All of it before anything changes: what is refused leaves the optimizer as it was.
            for group in state["param_groups"]:
                refuse_turns(group, type(self).__name__)
            numbers = chain.from_iterable(group["params"] for group in state["param_groups"])
            for number, param in zip(numbers, self._params(), strict=False):  # torch refuses other groups, after this
                if number in state["state"]:
                    loaded[param] = self._loaded_state(param, state["state"][number])
            return {**state, "state": {}}

        # Registered last: it sees what the users' own hooks have made of the state.
        handle = self.register_load_state_dict_pre_hook(without_state)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        for param, state in loaded.items():
            self.state[param] = state

    @abstractmethod
    def _update_all(self) -> None:
        """One step of all parameters that have a gradient."""

    @abstractmethod
    def _loaded_state(self, param: nn.Parameter, state: Mapping[str, Any]) -> dict[str, Any]:
        """A parameter's state from a state dict's."""

    def _params(self) -> Iterator[nn.Parameter]:
        return chain.from_iterable(group["params"] for group in self.param_groups)

    def _to_update(self) -> Iterable[tuple[int, nn.Parameter, dict[str, Any]]]:
        """Each parameter that has a gradient, and elements here, with its number in the optimizer and its group."""
        groups = ((param, group) for group in self.param_groups for param in group["params"])
        for number, (param, group) in enumerate(groups):
            if param.grad is not None and param.numel():
                yield number, param, group


def advance(
    first: torch.Tensor, second: torch.Tensor, grad: torch.Tensor, betas: tuple[float, float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Take a gradient into the moments, in place; all float32, of one shape."""
    first.mul_(betas[0]).add_(grad * (1 - betas[0]))
    second.mul_(betas[1]).add_(grad.square().mul_(1 - betas[1]))
    return first, second


def descend(
    weights: torch.Tensor, first: torch.Tensor, second: torch.Tensor, group: Mapping[str, Any], step: int
) -> None:
    """Update ``weights``, float32 or float64, in place, from the moments with the gradient of step ``step``."""
    beta1, beta2 = group["betas"]
    if group["weight_decay"]:
        weights.mul_(1 - group["lr"] * group["weight_decay"])
    scale = second.sqrt().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
    weights.sub_(torch.div(first, scale).mul_(group["lr"] / (1 - beta1**step)))


def widened(weights: torch.Tensor) -> torch.Tensor:
    """``weights``, or a float32 copy where they are narrower."""
    return weights if weights.dtype in _WIDE else weights.float()


def flat(param: nn.Parameter) -> torch.Tensor:
    """A parameter's elements, (n,), to be changed in place.

    Raises:
        ConfigError: They are not contiguous.
    """
    if not param.is_contiguous():
        raise ConfigError(
            f"Optimizers of narrow states need contiguous parameters; one of shape {tuple(param.shape)} has strides "
            f"{param.stride()}. Call param.data = param.data.contiguous() before the optimizer is made."
        )
    return param.detach().view(-1)
