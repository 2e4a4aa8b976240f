"""Adafactor for sharded models, in transformers' and in torch's convention (Shazeer and Stern 2018).

First a rank's view of a parameter as matrices whose rows and columns have statistics, then the step that both
conventions share: which sums a rank computes alone, which ones the owners of a parameter add up, in which order, and
what is kept in between. Then the two optimizers.

Parameters of two dimensions or more are matrices of their last two, R rows of C columns, one for each index of the
earlier dimensions. Shards are runs of full rows of dimension 0 wherever possible, so a rank holds, of one parameter,
one of:

- complete matrices: of a parameter on one rank, or one of three dimensions or more split by full rows;
- full rows of one matrix: two dimensions, split by full rows;
- a run of elements that may begin or end inside a row, or inside a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod, sqrt
from typing import Any, Literal

import torch
from torch import nn

from fullshard.core.comm import Comm
from fullshard.core.layout import ShardMeta, StatePart, along_rows, on_all_owners
from fullshard.core.optim.exchange import PooledOwnerReduce
from fullshard.core.optim.shards import RowsOptimizer, as_rows, by_comm, is_split, meta_of, require_same_parameters
from fullshard.core.shards import on_rows
from fullshard.errors import ConfigError

Factor = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class RowBlock:
    """The same rows of each of some consecutive matrices."""

    values: torch.Tensor  # this rank's elements of them, (k, r, C)
    first_row: int  # index of the first row among those that have a statistic here; k * r rows follow each other
    first_matrix: int  # index of the first matrix among those whose columns have statistics here

    def rows_of(self, statistic: torch.Tensor) -> torch.Tensor:
        """Return the rows' elements of a row statistic, (k, r, 1), a view."""
        count, rows, _ = self.values.shape
        return statistic.view(-1)[self.first_row : self.first_row + count * rows].view(count, rows, 1)

    def columns_of(self, statistic: torch.Tensor) -> torch.Tensor:
        """Return the matrices' elements of a column or matrix statistic, (k, 1, C or 1), a view."""
        count, _, columns = self.values.shape
        width = columns if statistic.ndim > 1 else 1
        flat = statistic.view(-1, width)
        return flat[self.first_matrix : self.first_matrix + count].view(count, 1, width)


@dataclass(frozen=True)
class Matrices:
    """The matrices of one parameter on one rank.

    Attributes:
        meta: Of the parameter, which has two dimensions or more.
        held: ``matrices``: complete matrices; ``rows``: full rows of the only one; ``elements``: a run of elements.
        shape: Shape of what the statistics here cover: this rank's part, or the full parameter if all its matrices are
            here or this rank holds a run of elements. Without the last dimension it is the shape of the row statistics,
            without the last but one that of the column statistics.
    """

    meta: ShardMeta
    held: Literal["matrices", "rows", "elements"]
    shape: tuple[int, ...]

    @property
    def row_count(self) -> int:
        """Rows that have a statistic here."""
        return prod(self.shape[:-1])

    @property
    def matrix_count(self) -> int:
        """Matrices whose columns have statistics here."""
        return prod(self.shape[:-2])

    @property
    def shared_numel(self) -> int:
        """Number of partial sums that the owners add up: over split rows or columns, and over row statistics."""
        if self.held == "elements":
            return self.row_count + self.matrix_count * self.shape[-1]
        return 1 + self.shape[-1] if self.held == "rows" else 0

    def sums_of_squares(self, local: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return sums of the squares of this rank's elements.

        Args:
            local: The elements, in any shape.

        Returns:
            Over each row, (rows,), and over each column of each matrix, (matrices, C), of those that have a statistic
            here; zero where this rank has no element.
        """
        if self.held != "elements":
            squares = local.reshape(-1, *self.shape[-2:]).square()
            return squares.sum(2).view(-1), squares.sum(1)
        rows = local.new_zeros(self.row_count)
        columns = local.new_zeros(self.matrix_count, self.shape[-1])
        for block in self._blocks(local):
            squares = block.values.square()
            block.rows_of(rows).copy_(squares.sum(2, keepdim=True))
            block.columns_of(columns).copy_(squares.sum(1, keepdim=True))
        return rows, columns

    def scaled(self, local: torch.Tensor, statistics: tuple[torch.Tensor, ...], factor: Factor) -> torch.Tensor:
        """Return this rank's elements times ``factor`` of the statistics of their row, column and matrix.

        Args:
            local: The elements, in any shape.
            statistics: Of the rows, (rows,), of the columns, (matrices, C), and of the matrices, (matrices,).
            factor: Called with blocks of these, (k, r, 1), (k, 1, C) and (k, 1, 1); returns a new tensor (k, r, C).

        Returns:
            A new tensor of the shape of ``local``.
        """
        rows, columns, matrices = statistics
        if self.held != "elements":
            height, width = self.shape[-2:]
            made = factor(rows.view(-1, height, 1), columns.view(-1, 1, width), matrices.view(-1, 1, 1))
            return made.mul_(local.reshape(made.shape)).view(local.shape)
        parts = [
            factor(block.rows_of(rows), block.columns_of(columns), block.columns_of(matrices)).mul_(block.values)
            for block in self._blocks(local)
        ]
        flat = parts[0].view(-1) if len(parts) == 1 else torch.cat([part.view(-1) for part in parts])
        before = self.meta.element_range[0] % self.shape[-1]
        return flat[before : before + local.numel()].view(local.shape)

    def _blocks(self, local: torch.Tensor) -> Iterator[RowBlock]:
        """Yield a run of elements block by block, in order; incomplete rows are filled up with zeros."""
        height, width = self.shape[-2:]
        rows, at = as_rows(self.meta, local)
        end = at + len(rows)
        while at < end:
            matrix, inside = divmod(at, height)
            left = end - at
            count = (
                1 if inside or left < height else left // height
            )  # part of a matrix, or all complete ones that follow
            taken = min(left, height - inside) if count == 1 else count * height
            start = at - end + len(rows)
            yield RowBlock(rows[start : start + taken].view(count, -1, width), at, matrix)
            at += taken

    def part_of_rows(self, shape: tuple[int, ...]) -> StatePart:
        """Return which part of the full parameter's row statistics, of ``shape``, this rank has."""
        if self._all_here:
            return on_all_owners(self.meta, shape)
        return along_rows(self.meta, shape)

    def part_of_columns(self, shape: tuple[int, ...]) -> StatePart:
        """Return which part of the full parameter's column statistics, of ``shape``, this rank has."""
        if self._all_here or self.held == "rows":
            return on_all_owners(self.meta, shape)
        return along_rows(self.meta, shape)

    @property
    def _all_here(self) -> bool:
        """True if each owner of the parameter has the statistics of all of it."""
        return self.held == "elements" or len(self.meta.owners) < 2


def matrices_of(meta: ShardMeta) -> Matrices | None:
    """Return a rank's view of a parameter's matrices; None for fewer than two dimensions."""
    if len(meta.global_shape) < 2:
        return None
    if len(meta.owners) < 2:
        return Matrices(meta, "matrices", meta.global_shape)
    if meta.row_range is None:
        return Matrices(meta, "elements", meta.global_shape)
    return Matrices(meta, "rows" if len(meta.global_shape) == 2 else "matrices", meta.local_shape)


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


class FactoredOptimizer(RowsOptimizer):
    """The shard-aware part of Adafactor; a subclass (a convention) defines how statistics are kept and used.

    A step computes each parameter that is complete on one rank without communication. The owners of a split parameter
    exchange, for all parameters at once and with no other rank: sums over columns (and over rows if those are split),
    the sum of the row statistics and the sum of squares of the parameter; then the sum of squares of the update.
    """

    row_key: str  # name of the row statistics in the state
    column_key: str  # name of the column statistics
    full_key: str  # name of the second moment of vectors and numbers
    keepdim: bool  # whether statistics keep the reduced dimension with size one

    def _update_all(self) -> None:
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

    def _step_alone(self, step: ParamStep) -> None:
        """Step a parameter of which this rank has everything; its update is freed before the next one is computed."""
        self._use_totals(step, self._begin(step))
        update = self._update(step)
        self._write(step, update, sum_of_squares(update, step.dtype))

    def state_kinds(self, param: nn.Parameter, group: Mapping[str, Any]) -> dict[str, None]:
        """Return the keys of a parameter's state after a step."""
        factored = matrices_of(meta_of(param)) is not None
        return dict.fromkeys(("step", *((self.row_key, self.column_key) if factored else (self.full_key,))))

    def _require_same_parameters(self) -> None:
        agreed: list[Comm] = self.__dict__.setdefault("_agreed", [])
        for comm, params in by_comm(self._params()):
            if not any(comm is known for known in agreed):
                require_same_parameters(comm, params, type(self).__name__)
                agreed.append(comm)

    def _param_step(self, param: nn.Parameter, group: dict[str, Any]) -> ParamStep:
        meta = meta_of(param)
        return ParamStep(param, group, meta, matrices_of(meta), self.state[param])

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
        for number, param in zip(numbers, self._params(), strict=True):
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
        for name, value, rule, holds in (
            ("lr", lr, "one number >= 0", one_lr and bool(lr >= 0)),
            ("beta2_decay", beta2_decay, "<= 0", beta2_decay <= 0),
            ("eps", eps, "None or >= 0, and >= 0", (eps[0] is None or eps[0] >= 0) and eps[1] >= 0),
            ("d", d, ">= 1", d >= 1),
            ("weight_decay", weight_decay, ">= 0", weight_decay >= 0),
        ):
            if not holds:
                raise ConfigError(f"TorchAdafactor's {name} must be {rule}; got {value}.")
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
