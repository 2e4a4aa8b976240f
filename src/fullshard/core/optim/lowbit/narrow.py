"""AdamW whose moments are kept in fewer bits than they are computed in: the common part of its kinds."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fullshard.core.optim.shards import copied, refuse_torch_options
from fullshard.core.shards import on_rows
from fullshard.core.torch_private import plain_functions
from fullshard.errors import ConfigError

_WIDE = (torch.float32, torch.float64)


class NarrowAdamW(Optimizer):
    """AdamW with decoupled weight decay, computed in float32 whatever its states are kept in.

    For each element, with the gradient g, step t and the stored moments m and v: ``m = b1 m + (1 - b1) g``,
    ``v = b2 v + (1 - b2) g^2``, ``w = w (1 - lr wd)``, ``w = w - lr / (1 - b1^t) m / (sqrt(v) / sqrt(1 - b2^t) + eps)``
    (https://arxiv.org/abs/1711.05101). The weight is updated from the moments before they are narrowed again.

    Every operation is a single IEEE operation. The rounding of torch's fused kernels is unspecified and depends on the
    element's position and the machine: a last bit that depended on where a shard begins would make a narrowed value
    jump.
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
        """Copy the parameters too, marked as the shards that they are."""
        return copied(self, memo)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group.

        Raises:
            ConfigError: It has an option that is not implemented.
        """
        refuse_torch_options(param_group, type(self).__name__)
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient; every rank calls it.

        Args:
            closure: Computes the loss again, with gradients.

        Returns:
            The result of ``closure``; None without one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with plain_functions():  # it computes with rows
            self._update_all()
        return loss

    @on_rows
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict()`` returned; tensors move to the parameter's device and keep their own dtype.

        torch's implementation would cast floating-point tensors, and the codes, to the parameter's dtype.

        Raises:
            ConfigError: A group has an option that is not implemented; nothing has changed then.
        """
        loaded: dict[nn.Parameter, dict[str, Any]] = {}

        def without_state(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
            # All checks come before any change: a refused state must leave the optimizer as it was, on every rank.
            for group in state["param_groups"]:
                refuse_torch_options(group, type(self).__name__)
            numbers = chain.from_iterable(group["params"] for group in state["param_groups"])
            for number, param in zip(numbers, self._params(), strict=False):  # torch checks the groups after this
                if number in state["state"]:
                    loaded[param] = self._loaded_state(param, state["state"][number])
            return {**state, "state": {}}

        # Registered last, so that it receives the state after the user's own hooks.
        handle = self.register_load_state_dict_pre_hook(without_state)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        for param, state in loaded.items():
            self.state[param] = state

    @abstractmethod
    def _update_all(self) -> None:
        """Step all parameters that have a gradient."""

    @abstractmethod
    def _loaded_state(self, param: nn.Parameter, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a parameter's state from that of a state dict."""

    def _params(self) -> Iterator[nn.Parameter]:
        return chain.from_iterable(group["params"] for group in self.param_groups)

    def _to_update(self) -> Iterable[tuple[int, nn.Parameter, dict[str, Any]]]:
        """Yield each parameter with a gradient and elements here, with its index in the optimizer and its group."""
        groups = ((param, group) for group in self.param_groups for param in group["params"])
        for number, (param, group) in enumerate(groups):
            if param.grad is not None and param.numel():
                yield number, param, group


def advance(
    first: torch.Tensor, second: torch.Tensor, grad: torch.Tensor, betas: tuple[float, float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Update the moments with a gradient, in place; all float32, of one shape."""
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
    """Return ``weights``, or a float32 copy if they are narrower."""
    return weights if weights.dtype in _WIDE else weights.float()


def flat(param: nn.Parameter) -> torch.Tensor:
    """Return a parameter's elements, (n,), to be changed in place.

    Raises:
        ConfigError: They are not contiguous.
    """
    if not param.is_contiguous():
        raise ConfigError(
            f"Optimizers with narrow states need contiguous parameters; one of shape {tuple(param.shape)} has strides "
            f"{param.stride()}. Call param.data = param.data.contiguous() before making the optimizer."
        )
    return param.detach().view(-1)
