"""Adafactor over shards, in transformers' convention and in torch's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import sqrt
from typing import Any

import torch
from torch import nn

from fullshard.core.optim.adafactor.factored import FactoredOptimizer, ParamStep
from fullshard.errors import ConfigError

Params = Iterable[nn.Parameter] | Iterable[dict[str, Any]] | Iterable[tuple[str, nn.Parameter]]


class Adafactor(FactoredOptimizer):
    """``transformers.optimization.Adafactor`` for sharded models: the same arguments, groups, state and results.

    Build it from ``model.parameters()`` on every rank, before or after ``fully_shard``; it also works unsharded. Second
    moments of matrices are kept as one number for each row and each column (Shazeer and Stern 2018,
    https://arxiv.org/abs/1804.04235); those of vectors in full.

    As in transformers, gradients and parameters in half precision are computed with in float32 and statistics are
    float32. Differences: a closure is called with gradients enabled; parameters that do not require a gradient are not
    stepped even if they have one; ``load_state_dict`` keeps the statistics of half-precision parameters in float32.

    It works with ``transformers.optimization.AdafactorSchedule``.
    """

    row_key, column_key, full_key, keepdim = "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq", False

    def __init__(  # noqa: PLR0913 (transformers' signature)
        self,
        params: Params,
        lr: float | None = None,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: float | None = None,
        weight_decay: float = 0.0,
        scale_parameter: bool = True,  # noqa: FBT001, FBT002
        relative_step: bool = True,  # noqa: FBT001, FBT002
        warmup_init: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        """Make the optimizer; on every rank with the same arguments.

        Args:
            params: Parameters, groups of them, or names and parameters.
            lr: Learning rate, if ``relative_step`` is off; with ``scale_parameter`` times the parameter's scale.
            eps: Added to squares of gradients; smallest scale of a parameter.
            clip_threshold: Largest root mean square of an update.
            decay_rate: The second moment of step t decays by ``1 - t**decay_rate``.
            beta1: Decay of the first moment; None: no first moment, and no memory for it.
            weight_decay: Decoupled weight decay, times the learning rate.
            scale_parameter: Whether the learning rate is multiplied by the parameter's root mean square.
            relative_step: Whether the learning rate is computed from the number of steps.
            warmup_init: Whether the computed learning rate rises from 1e-6 instead of starting at 1e-2.

        Raises:
            ConfigError: ``lr``, ``relative_step`` and ``warmup_init`` contradict each other.
        """
        _check_learning_rate(lr, relative_step=relative_step, warmup_init=warmup_init)
        defaults = {
            "lr": lr,
            "eps": eps,
            "clip_threshold": clip_threshold,
            "decay_rate": decay_rate,
            "beta1": beta1,
            "weight_decay": weight_decay,
            "scale_parameter": scale_parameter,
            "relative_step": relative_step,
            "warmup_init": warmup_init,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; every rank calls it.

        Raises:
            ConfigError: Its options contradict each other.
        """
        options = {**self.defaults, **param_group}
        if (options["lr"] is None) != bool(options["relative_step"]):
            raise ConfigError(
                f"A parameter group of Adafactor has lr={options['lr']} and relative_step={options['relative_step']}: "
                "the learning rate is either computed or set. Set lr and relative_step=False, or neither."
            )
        super().add_param_group(param_group)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse a learning rate schedule if the learning rate is computed.

        torch's schedulers store the learning rate of each group as ``initial_lr`` and wrap ``step``; next they would
        multiply None. ``AdafactorSchedule``, which only reads, stores a number.

        Raises:
            ConfigError: A scheduler wraps ``step`` and a group has no learning rate.
        """
        groups = self.__dict__.get("param_groups", [])
        if name == "step" and any(group.get("initial_lr", 0.0) is None for group in groups):
            for group in groups:
                group.pop("initial_lr", None)
            raise ConfigError(
                "Adafactor with relative_step=True computes its learning rate, so there is none to schedule. Remove "
                "the schedule, set lr=… and relative_step=False, or, to read the rate, use transformers' "
                "AdafactorSchedule."
            )
        super().__setattr__(name, value)

    @staticmethod
    def _get_lr(param_group: dict[str, Any], param_state: dict[str, Any]) -> Any:
        """Return the learning rate of a parameter's latest step; transformers' ``AdafactorSchedule`` calls it.

        Args:
            param_group: The parameter's group.
            param_state: Its state, empty on a rank that holds no rows of it.

        Returns:
            A number, or a 0-d tensor on the parameter's device; 0.0 without state.
        """
        if not param_state:
            return 0.0
        step, rms = param_state["step"], param_state["RMS"]
        lr: Any = param_group["lr"]
        if param_group["relative_step"]:
            lr = min(1e-6 * step if param_group["warmup_init"] else 1e-2, 1.0 / sqrt(step))
        if not param_group["scale_parameter"]:
            return lr
        smallest = param_group["eps"][1]
        return (at_least(rms, smallest) if isinstance(rms, torch.Tensor) else max(rms, smallest)) * lr

    def state_kinds(self, param: nn.Parameter, group: Mapping[str, Any]) -> dict[str, None]:
        """Return the keys of a parameter's state after a step."""
        others = ("RMS",) if group["beta1"] is None else ("RMS", "exp_avg")
        return super().state_kinds(param, group) | dict.fromkeys(others)

    def _make_state(self, step: ParamStep) -> None:
        step.state["step"] = 0
        if step.group["beta1"] is not None:
            step.state["exp_avg"] = torch.zeros_like(step.param, dtype=step.dtype)
        step.state |= self._new_statistics(step)
        step.state["RMS"] = 0

    def _update_statistic(self, step: ParamStep, key: str, squares: torch.Tensor) -> None:
        decay = 1.0 - step.state["step"] ** step.group["decay_rate"]
        statistic = step.statistic(key)
        squares.add_(step.group["eps"][0])
        statistic.mul_(decay).add_(squares.view(statistic.shape), alpha=1.0 - decay)

    def _factor_of_statistics(
        self, step: ParamStep, rows: torch.Tensor, columns: torch.Tensor, mean: torch.Tensor
    ) -> torch.Tensor:
        return (rows / mean).rsqrt_() * columns.rsqrt()

    def _factor_of_moment(self, step: ParamStep, moment: torch.Tensor) -> torch.Tensor:
        return moment.rsqrt()

    def _apply(self, step: ParamStep, param: torch.Tensor, update: torch.Tensor, rms: torch.Tensor) -> None:
        group, state = step.group, step.state
        state["RMS"] = step.rms
        lr = self._get_lr(group, state)
        update.div_((rms / group["clip_threshold"]).clamp_(min=1.0)).mul_(lr)
        if group["beta1"] is not None:
            update = step.statistic("exp_avg").mul_(group["beta1"]).add_(update, alpha=1 - group["beta1"])
        if group["weight_decay"] != 0:
            decay = group["weight_decay"] * lr
            if isinstance(decay, torch.Tensor):  # alpha=decay would wait for the device
                param.addcmul_(param, decay, value=-1)
            else:
                param.add_(param, alpha=-decay)
        param.sub_(update)

    def _count(self, steps: Any) -> int:
        return int(steps)


def _check_learning_rate(lr: float | None, *, relative_step: bool, warmup_init: bool) -> None:
    """Refuse options that contradict each other."""
    if lr is not None and relative_step:
        raise ConfigError(
            f"Adafactor computes its learning rate if relative_step is on, the default; got lr={lr}. Leave lr "
            "out, or add relative_step=False."
        )
    if warmup_init and not relative_step:
        raise ConfigError(
            "Adafactor's warmup_init applies to the learning rate that it computes, and relative_step is off. "
            "Leave warmup_init out and use a learning rate schedule, or set relative_step=True."
        )
    if lr is None and not relative_step:
        raise ConfigError(
            "Adafactor with relative_step=False needs a learning rate, and lr is None. Set lr, or leave "
            "relative_step on."
        )


class TorchAdafactor(FactoredOptimizer):
    """``torch.optim.Adafactor`` for sharded models: the same arguments, groups, state and results.

    Build it from ``model.parameters()`` on every rank, before or after ``fully_shard``; it also works unsharded.

    torch computes with half-precision parameters, and keeps their statistics, in their own precision; this class uses
    float32, with torch's ``eps`` for that precision. There is no ``foreach``: it would hold all updates at once.
    Parameters that do not require a gradient are not stepped even if they have one.
    """

    row_key, column_key, full_key, keepdim = "row_var", "col_var", "variance", True

    def __init__(
        self,
        params: Params,
        lr: float | torch.Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        """Make the optimizer; on every rank with the same arguments.

        Args:
            params: Parameters, groups of them, or names and parameters.
            lr: Largest relative step, and the factor of weight decay; a tensor of one element is read in each step.
            beta2_decay: The second moment of step t decays by ``1 - t**beta2_decay``.
            eps: Smallest root of a second moment, None: that of the parameter's dtype; smallest scale of a parameter.
            d: Largest root mean square of an update.
            weight_decay: Decoupled weight decay, times the learning rate.
            maximize: Whether to ascend along the gradient.

        Raises:
            ConfigError: A number is out of range.
        """
        one_lr = not isinstance(lr, torch.Tensor) or lr.numel() == 1
        _refuse_unless(
            lr=(lr, "one number >= 0", one_lr and bool(lr >= 0)),
            beta2_decay=(beta2_decay, "<= 0", beta2_decay <= 0),
            eps=(eps, "None or >= 0, and >= 0", (eps[0] is None or eps[0] >= 0) and eps[1] >= 0),
            d=(d, ">= 1", d >= 1),
            weight_decay=(weight_decay, ">= 0", weight_decay >= 0),
        )
        defaults = {
            "lr": lr,
            "beta2_decay": beta2_decay,
            "eps": eps,
            "d": d,
            "weight_decay": weight_decay,
            "foreach": None,  # a key of torch's groups
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def _make_state(self, step: ParamStep) -> None:
        step.state["step"] = self._count(0)
        step.state |= self._new_statistics(step)

    def _update_statistic(self, step: ParamStep, key: str, squares: torch.Tensor) -> None:
        statistic = step.statistic(key)
        statistic.lerp_(squares.view(statistic.shape), float(step.state["step"]) ** step.group["beta2_decay"])

    def _factor_of_statistics(
        self, step: ParamStep, rows: torch.Tensor, columns: torch.Tensor, mean: torch.Tensor
    ) -> torch.Tensor:
        smallest = _smallest_root(step)
        moment = (rows * columns).div_(mean.clamp(min=smallest))
        return moment.clamp_(min=smallest * smallest).rsqrt_()

    def _factor_of_moment(self, step: ParamStep, moment: torch.Tensor) -> torch.Tensor:
        return moment.clamp(min=_smallest_root(step) ** 2).rsqrt_()

    def _apply(self, step: ParamStep, param: torch.Tensor, update: torch.Tensor, rms: torch.Tensor) -> None:
        group = step.group
        assert step.rms is not None
        lr = float(group["lr"])
        step_size = min(lr, 1 / sqrt(float(step.state["step"])))
        scale = at_least(step.rms, group["eps"][1]) * (step_size if group["maximize"] else -step_size)
        if group["weight_decay"] != 0:
            param.mul_(1 - lr * group["weight_decay"])
        param.add_(update.mul_(scale / at_least(rms / group["d"], 1.0)))

    def _count(self, steps: Any) -> torch.Tensor:
        return torch.tensor(
            float(steps), dtype=torch.float32, device="cpu"
        )  # as in torch: reading it does not wait for a device


def at_least(value: torch.Tensor, smallest: float) -> torch.Tensor:
    """Return ``max(smallest, value)`` without waiting for a device; ``smallest`` if ``value`` is nan, as in Python."""
    return torch.where(value > smallest, value, smallest)


def _smallest_root(step: ParamStep) -> float:
    smallest = step.group["eps"][0]
    return torch.finfo(step.param.dtype).eps if smallest is None else smallest


def _refuse_unless(**given: tuple[Any, str, bool]) -> None:
    for name, (value, rule, holds) in given.items():
        if not holds:
            raise ConfigError(f"TorchAdafactor's {name} must be {rule}; got {value}.")
