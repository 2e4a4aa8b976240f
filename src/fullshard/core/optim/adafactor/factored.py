"""Optimizers whose second moment is kept as statistics of rows and columns, over shards of any layout.

The common part of both conventions of Adafactor (Shazeer and Stern 2018, https://arxiv.org/abs/1804.04235): which sums
a rank computes alone, which ones the owners of a parameter add up, in which order, and what is kept in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import sqrt
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fullshard.core.comm import Comm
from fullshard.core.layout import ShardMeta, StatePart
from fullshard.core.optim.adafactor.matrices import Matrices, matrices_of
from fullshard.core.optim.owner_reduce import PooledOwnerReduce
from fullshard.core.optim.shards import by_comm, copied, is_split, meta_of, require_same_parameters
from fullshard.core.shards import on_rows
from fullshard.errors import ConfigError


@dataclass
class ParamStep:
    """One parameter in one step, on a rank that holds elements of it."""

    param: nn.Parameter  # this rank's shard
    group: dict[str, Any]  # its parameter group
    meta: ShardMeta  # its shape and place
    matrices: Matrices | None  # this rank's view of its matrices; None for a vector or a number
    state: dict[str, Any]  # its state; empty before its first step
    # the mean of the row statistics of each matrix here, (matrices,), once it is known
    mean_of_rows: torch.Tensor | None = None
    rms: torch.Tensor | None = None  # root mean square of the full parameter before the step, 0-d, once it is known

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of computation and statistics: float32, or float64 for a float64 parameter."""
        return wide_dtype(self.param)

    @property
    def stepped(self) -> bool:
        """True if there is a gradient; the same on all ranks that hold elements."""
        return self.param.grad is not None

    @property
    def grad(self) -> torch.Tensor:
        """This rank's part of the gradient in the wide dtype.

        It is the gradient itself if that has the wide dtype, so it must not be changed.

        Raises:
            ConfigError: It is sparse or complex.
        """
        grad = self.param.grad
        assert grad is not None
        if grad.is_sparse or grad.is_complex():
            kind = "sparse" if grad.is_sparse else "complex"
            raise ConfigError(
                f"Adafactor takes dense real gradients; that of {self.meta.name or 'a parameter'}, "
                f"{self.meta.global_shape}, is {kind}. Use an nn.Embedding without sparse=True, or another optimizer."
            )
        if type(grad) is not torch.Tensor:
            grad = grad.as_subclass(torch.Tensor)  # compat's gradients compute norms over ranks
        return grad if grad.dtype == self.dtype else grad.to(self.dtype)

    def statistic(self, key: str) -> torch.Tensor:
        """Return a tensor of the state, after moving it to the wide dtype and the parameter's device."""
        found: torch.Tensor = self.state[key]
        if found.dtype != self.dtype or found.device != self.param.device:
            self.state[key] = found = found.to(self.param.device, self.dtype)
        return found


class FactoredOptimizer(Optimizer):
    """The shard-aware part of Adafactor; a subclass (a convention) defines how statistics are kept and used.

    A step computes each parameter that is complete on one rank without communication. The owners of a split parameter
    exchange, for all parameters at once and with no other rank: sums over columns (and over rows if those are split),
    the sum of the row statistics and the sum of squares of the parameter; then the sum of squares of the update.
    """

    row_key: str  # name of the row statistics in the state
    column_key: str  # name of the column statistics
    full_key: str  # name of the second moment of vectors and numbers
    keepdim: bool  # whether statistics keep the reduced dimension with size one

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update all parameters; every rank calls it, also without gradients.

        Parameters without a gradient, and those that do not require one, are not changed.

        Args:
            closure: Computes the gradients; called once, before anything else.

        Returns:
            The result of ``closure``, or None.

        Raises:
            ConfigError: The optimizer has other parameters on other ranks, on every rank; or a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    @on_rows
    def _step(self) -> None:
        """Update all parameters."""
        self._require_same_parameters()
        group_of = {param: group for group in self.param_groups for param in group["params"] if param.requires_grad}
        rounds: list[_SplitSteps] = []
        split: set[nn.Parameter] = set()
        for comm, params in by_comm(group_of):
            of_comm = [param for param in params if is_split(param)]
            if of_comm:
                split.update(of_comm)
                rounds.append(_SplitSteps(self, comm, [(param, group_of[param]) for param in of_comm]))
        for param, group in group_of.items():
            if param.grad is not None and param.numel() and param not in split:
                self._step_alone(self._param_step(param, group))
        for one in rounds:
            one.share_updates()
        for one in rounds:
            one.finish()

    def state_kinds(self, param: nn.Parameter, group: Mapping[str, Any]) -> dict[str, None]:
        """Return the keys of a parameter's state after a step."""
        factored = matrices_of(meta_of(param)) is not None
        return dict.fromkeys(("step", *((self.row_key, self.column_key) if factored else (self.full_key,))))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the parameters too, marked as the shards that they are."""
        return copied(self, memo)

    def _require_same_parameters(self) -> None:
        agreed: list[Comm] = self.__dict__.setdefault("_agreed", [])
        for comm, params in by_comm(param for group in self.param_groups for param in group["params"]):
            if not any(comm is known for known in agreed):
                require_same_parameters(comm, params, type(self).__name__)
                agreed.append(comm)

    def _param_step(self, param: nn.Parameter, group: dict[str, Any]) -> ParamStep:
        meta = meta_of(param)
        return ParamStep(param, group, meta, matrices_of(meta), self.state[param])

    def _step_alone(self, step: ParamStep) -> None:
        self._use_totals(step, self._begin(step))
        update = self._update(step)
        self._write(step, update, sum_of_squares(update, step.dtype))

    def _begin(self, step: ParamStep) -> torch.Tensor:
        """Count the step, update statistics that need no other rank, and return the sums to add up, (n,)."""
        matrices = step.matrices
        if not step.state:
            self._make_state(step)
        step.state["step"] += 1
        sums: list[torch.Tensor] = []
        if matrices is None:
            self._update_statistic(step, self.full_key, step.grad.square())
        else:
            rows, columns = matrices.sums_of_squares(step.grad)
            if matrices.held == "elements":
                sums += [rows, columns.view(-1)]
            else:
                self._update_statistic(step, self.row_key, rows.div_(matrices.shape[-1]))
            if matrices.held == "rows":
                sums += [step.state[self.row_key].sum().view(1), columns.view(-1)]
            elif matrices.held == "matrices":
                self._update_statistic(step, self.column_key, columns.div_(matrices.shape[-2]))
        sums.append(sum_of_squares(step.param, step.dtype).view(1))
        return torch.cat(sums) if len(sums) > 1 else sums[0]

    def _use_totals(self, step: ParamStep, totals: torch.Tensor) -> None:
        """Update the other statistics from the result of :meth:`_begin`, added up over the owners."""
        matrices = step.matrices
        if matrices is not None:
            height, width = step.meta.global_shape[-2:]
            if matrices.held == "elements":
                rows, columns = totals[:-1].split([matrices.row_count, matrices.matrix_count * width])
                self._update_statistic(step, self.row_key, rows / width)
                self._update_statistic(step, self.column_key, columns / height)
            elif matrices.held == "rows":
                self._update_statistic(step, self.column_key, totals[1:-1] / height)
            if matrices.held == "rows":
                step.mean_of_rows = totals[:1] / height
            else:
                step.mean_of_rows = step.state[self.row_key].view(matrices.matrix_count, height).mean(1)
        step.rms = self._root_mean(step, totals[-1])

    def _update(self, step: ParamStep) -> torch.Tensor:
        """Return the gradient over the root of its second moment, a new tensor of the shard's shape."""
        if step.matrices is None:
            return self._factor_of_moment(step, step.state[self.full_key]).mul_(step.grad)
        assert step.mean_of_rows is not None
        columns = step.state[self.column_key].view(step.matrices.matrix_count, -1)
        statistics = (step.state[self.row_key], columns, step.mean_of_rows)
        return step.matrices.scaled(step.grad, statistics, partial(self._factor_of_statistics, step))

    def _write(self, step: ParamStep, update: torch.Tensor, total: torch.Tensor) -> None:
        """Change the parameter by its update; ``total`` is the update's sum of squares over the owners."""
        param = step.param.detach()
        wide = param if param.dtype == step.dtype else param.to(step.dtype)
        self._apply(step, wide, update, self._root_mean(step, total))
        if wide is not param:
            param.copy_(wide)

    def _root_mean(self, step: ParamStep, total: torch.Tensor) -> torch.Tensor:
        return total.sqrt() / sqrt(step.meta.placement.numel)

    def _make_state(self, step: ParamStep) -> None:
        """Fill the empty state of a parameter."""
        raise NotImplementedError

    def _update_statistic(self, step: ParamStep, key: str, squares: torch.Tensor) -> None:
        """Move a statistic towards this step's mean ``squares``, of as many elements; may change ``squares``."""
        raise NotImplementedError

    def _factor_of_statistics(
        self, step: ParamStep, rows: torch.Tensor, columns: torch.Tensor, mean: torch.Tensor
    ) -> torch.Tensor:
        """Return one over the root of the second moment, (k, r, C), from (k, r, 1), (k, 1, C) and (k, 1, 1)."""
        raise NotImplementedError

    def _factor_of_moment(self, step: ParamStep, moment: torch.Tensor) -> torch.Tensor:
        """Return one over the root of the second moment, a new tensor."""
        raise NotImplementedError

    def _apply(self, step: ParamStep, param: torch.Tensor, update: torch.Tensor, rms: torch.Tensor) -> None:
        """Change the wide ``param``; ``rms`` is that of the full update, 0-d. May change ``update``."""
        raise NotImplementedError

    def _new_statistics(self, step: ParamStep) -> dict[str, torch.Tensor]:
        """Return zeros for the second moment of a parameter."""
        make = partial(torch.zeros, dtype=step.dtype, device=step.param.device)
        if step.matrices is None:
            return {self.full_key: make(step.param.shape)}
        rows, columns = self._shapes(step.matrices.shape)
        return {self.row_key: make(rows), self.column_key: make(columns)}

    def _shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of the row and column statistics of a parameter of ``shape``."""
        one = (1,) if self.keepdim else ()
        return (*shape[:-1], *one), (*shape[:-2], *one, shape[-1])

    def communicates(self, param: nn.Parameter) -> bool:
        """Return whether ranks communicate about a parameter in a step."""
        return is_split(param)

    @on_rows
    def state_part(self, param: nn.Parameter, key: str) -> StatePart | None:
        """Return which part of the unsharded optimizer's state a tensor of a parameter's state is; any rank.

        Args:
            param: One of the optimizer's parameters.
            key: Name of the value in the state.

        Returns:
            None for an elementwise tensor and for single numbers.
        """
        matrices = matrices_of(meta_of(param))
        if matrices is None or key not in (self.row_key, self.column_key):
            return None
        rows, columns = self._shapes(matrices.meta.global_shape)
        return matrices.part_of_rows(rows) if key == self.row_key else matrices.part_of_columns(columns)

    @on_rows
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict()`` returned on the same rank of a world of the same size; each rank its own.

        Unlike torch's, it leaves the statistics of half-precision parameters in float32.

        Args:
            state_dict: This optimizer's, or, if nothing is split, that of the unsharded one of the same name.
        """
        given: list[Mapping[str, Any]] = []
        # Registered last, so that it receives the state after the user's own hooks.
        handle = self.register_load_state_dict_pre_hook(lambda _optimizer, state: given.append(state))
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        numbers = [number for group in given[-1]["param_groups"] for number in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for number, param in zip(numbers, params, strict=True):
            for key, value in given[-1]["state"].get(number, {}).items():
                self.state[param][key] = self._loaded(param, key, value)

    @on_rows
    def _loaded(self, param: nn.Parameter, key: str, value: Any) -> Any:
        """Return a loaded value of a state, on the parameter's device and in the dtype of its statistics."""
        if key == "step":
            return self._count(value)
        return value.to(param.device, wide_dtype(param)) if isinstance(value, torch.Tensor) else value

    def _count(self, steps: Any) -> Any:
        """Return the number of steps as this convention stores it, not shared with the loaded state."""
        raise NotImplementedError


class _SplitSteps:
    """The split parameters of one group of ranks in one step."""

    def __init__(
        self, optimizer: FactoredOptimizer, comm: Comm, params: Sequence[tuple[nn.Parameter, dict[str, Any]]]
    ) -> None:
        """Use this rank's part of the gradients and start adding up the sums over the owners.

        Args:
            optimizer: The optimizer.
            comm: The ranks.
            params: All split parameters that require a gradient, also those that this rank holds none of.
        """
        self.optimizer = optimizer
        self.comm = comm
        self.dtype = torch.float64 if any(wide_dtype(p) == torch.float64 for p, _ in params) else torch.float32
        self.steps = [optimizer._param_step(param, group) for param, group in params if param.numel()]
        values = [optimizer._begin(step) if step.stepped else _nothing(step) for step in self.steps]
        self._pooled = self._pool(values, "statistics of split gradients")

    def share_updates(self) -> None:
        """Use the totals and start adding up the squares of the updates."""
        squares: list[torch.Tensor] = []
        for step, totals in zip(self.steps, self._pooled.wait(), strict=True):
            if step.stepped:
                self.optimizer._use_totals(step, totals)
                squares.append(sum_of_squares(self.optimizer._update(step), step.dtype).view(1))
            else:
                squares.append(torch.zeros(1, dtype=step.dtype, device=step.param.device))
        self._pooled = self._pool(squares, "squares of split updates", at_once=True)

    def finish(self) -> None:
        """Use these totals and change the parameters."""
        # Computed a second time instead of kept during the exchange: no tensor as large as all gradients exists.
        for step, total in zip(self.steps, self._pooled.wait(), strict=True):
            if step.stepped:
                self.optimizer._write(step, self.optimizer._update(step), total[0])

    def _pool(self, values: Sequence[torch.Tensor], what: str, *, at_once: bool = False) -> PooledOwnerReduce:
        owned = [(step.meta.owners, value) for step, value in zip(self.steps, values, strict=True)]
        return PooledOwnerReduce(self.comm, owned, self.dtype, what, at_once=at_once)


def _nothing(step: ParamStep) -> torch.Tensor:
    """Return zeros for a parameter without a gradient, as many as it would have sums."""
    count = 1 if step.matrices is None else step.matrices.shared_numel + 1
    return torch.zeros(count, dtype=step.dtype, device=step.param.device)


def wide_dtype(param: torch.Tensor) -> torch.dtype:
    """Return the dtype in which a parameter's step is computed."""
    return torch.float64 if param.dtype == torch.float64 else torch.float32


def sum_of_squares(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the sum of squares of all elements, 0-d, in ``dtype``."""
    return torch.linalg.vector_norm(tensor, dtype=dtype).square()
