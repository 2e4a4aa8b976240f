"""Optimizers whose second moment is kept as statistics of rows and columns, over shards of any layout.

What both conventions of Adafactor (Shazeer and Stern 2018, https://arxiv.org/abs/1804.04235) have in common: which
sums a rank can make by itself, which ones it shares and with whom, in which order, and what is kept meanwhile.
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

from fullshard.comm import Comm
from fullshard.errors import ConfigError
from fullshard.layout import ShardMeta, StatePart
from fullshard.optim.adafactor.matrices import Matrices, matrices_of
from fullshard.optim.owner_reduce import PooledOwnerReduce
from fullshard.optim.shards import by_comm, copied, is_split, meta_of, require_same_parameters


@dataclass
class Turn:
    """One parameter in one step, on a rank that holds elements of it.

    Attributes:
        param: This rank's shard.
        group: Its parameter group.
        meta: Its shape and place.
        matrices: How the rank sees its matrices; None of a vector or a number.
        state: Its state; empty and to be made before its first step.
        mean_of_rows: The mean of the row statistics of each matrix here, (matrices,), once it is known.
        rms: Root mean square of the whole parameter before the step, 0-d, once it is known.
    """

    param: nn.Parameter
    group: dict[str, Any]
    meta: ShardMeta
    matrices: Matrices | None
    state: dict[str, Any]
    mean_of_rows: torch.Tensor | None = None
    rms: torch.Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """What is computed and kept in: float32, or float64 where the parameter is."""
        return wide_dtype(self.param)

    @property
    def stepped(self) -> bool:
        """Whether there is a gradient; on all ranks that hold elements, or on none."""
        return self.param.grad is not None

    @property
    def grad(self) -> torch.Tensor:
        """This rank's part of the gradient in the wide dtype; itself where it is wide, so it must not be changed.

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
            grad = grad.as_subclass(torch.Tensor)  # compat's compute norms over ranks
        return grad if grad.dtype == self.dtype else grad.to(self.dtype)

    def statistic(self, key: str) -> torch.Tensor:
        """A tensor of the state, in the wide dtype and on the parameter's device from now on."""
        found: torch.Tensor = self.state[key]
        if found.dtype != self.dtype or found.device != self.param.device:
            self.state[key] = found = found.to(self.param.device, self.dtype)
        return found


class FactoredOptimizer(Optimizer):
    """The part of Adafactor that knows about shards; a convention says how statistics are kept and used.

    A step takes each parameter of one rank in one go, without communication. Of parameters that are split over ranks,
    these exchange, with nobody else and all parameters at once: sums over columns (and over rows where those are
    split), the sum of the row statistics and the sum of squares of the parameter; then the sum of squares of the
    update. The update is computed again for the second one: at no time more than one parameter's is in memory.

    Attributes:
        row_key: Name of the row statistics in the state.
        column_key: Name of the column statistics.
        full_key: Name of the second moment of vectors and numbers.
        keepdim: Whether statistics have a dimension of one where they have no elements.
    """

    row_key: str
    column_key: str
    full_key: str
    keepdim: bool

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update all parameters; every rank calls it, also with no gradients of its own.

        Parameters without a gradient, and those that do not require one, stay as they are.

        Args:
            closure: Computes the gradients; called once, before anything else.

        Returns:
            What ``closure`` returned, or None.

        Raises:
            ConfigError: The optimizer has other parameters on other ranks, on every rank; or a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._agree()
        group_of = {param: group for group in self.param_groups for param in group["params"] if param.requires_grad}
        rounds: list[_Round] = []
        split: set[nn.Parameter] = set()
        for comm, params in by_comm(group_of):
            of_comm = [param for param in params if is_split(param)]
            if of_comm:
                split.update(of_comm)
                rounds.append(_Round(self, comm, [(param, group_of[param]) for param in of_comm]))
        for param, group in group_of.items():
            if param.grad is not None and param.numel() and param not in split:
                self._step_alone(self._turn(param, group))
        for one in rounds:
            one.share_updates()
        for one in rounds:
            one.finish()
        return loss

    def state_kinds(self, param: nn.Parameter, group: Mapping[str, Any]) -> dict[str, None]:
        """The keys that the state of a parameter of such a group has once it is stepped."""
        factored = matrices_of(meta_of(param)) is not None
        return dict.fromkeys(("step", *((self.row_key, self.column_key) if factored else (self.full_key,))))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the parameters too, as the shards that they are."""
        return copied(self, memo)

    def _agree(self) -> None:
        agreed: list[Comm] = self.__dict__.setdefault("_agreed", [])
        for comm, params in by_comm(param for group in self.param_groups for param in group["params"]):
            if not any(comm is known for known in agreed):
                require_same_parameters(comm, params, type(self).__name__)
                agreed.append(comm)

    def _turn(self, param: nn.Parameter, group: dict[str, Any]) -> Turn:
        meta = meta_of(param)
        return Turn(param, group, meta, matrices_of(meta), self.state[param])

    def _step_alone(self, turn: Turn) -> None:
        self._know(turn, self._begin(turn))
        update = self._update(turn)
        self._write(turn, update, sum_of_squares(update, turn.dtype))

    def _begin(self, turn: Turn) -> torch.Tensor:
        """Count the step, take in what this rank knows by itself; returns what the owners have to add up, (n,)."""
        matrices = turn.matrices
        if not turn.state:
            self._make_state(turn)
        turn.state["step"] += 1
        sums: list[torch.Tensor] = []
        if matrices is None:
            self._take_in(turn, self.full_key, turn.grad.square())
        else:
            rows, columns = matrices.sums_of_squares(turn.grad)
            if matrices.held == "elements":
                sums += [rows, columns.view(-1)]
            else:
                self._take_in(turn, self.row_key, rows.div_(matrices.shape[-1]))
            if matrices.held == "rows":
                sums += [turn.state[self.row_key].sum().view(1), columns.view(-1)]
            elif matrices.held == "matrices":
                self._take_in(turn, self.column_key, columns.div_(matrices.shape[-2]))
        sums.append(sum_of_squares(turn.param, turn.dtype).view(1))
        return torch.cat(sums) if len(sums) > 1 else sums[0]

    def _know(self, turn: Turn, totals: torch.Tensor) -> None:
        """Take in what :meth:`_begin` returned, added up over the owners."""
        matrices = turn.matrices
        if matrices is not None:
            height, width = turn.meta.global_shape[-2:]
            if matrices.held == "elements":
                rows, columns = totals[:-1].split([matrices.row_count, matrices.matrix_count * width])
                self._take_in(turn, self.row_key, rows / width)
                self._take_in(turn, self.column_key, columns / height)
            elif matrices.held == "rows":
                self._take_in(turn, self.column_key, totals[1:-1] / height)
            if matrices.held == "rows":
                turn.mean_of_rows = totals[:1] / height
            else:
                turn.mean_of_rows = turn.state[self.row_key].view(matrices.matrix_count, height).mean(1)
        turn.rms = self._root_mean(turn, totals[-1])

    def _update(self, turn: Turn) -> torch.Tensor:
        """The gradient over the root of its second moment, a new tensor of the shard's shape."""
        if turn.matrices is None:
            return self._factor_of_moment(turn, turn.state[self.full_key]).mul_(turn.grad)
        assert turn.mean_of_rows is not None
        columns = turn.state[self.column_key].view(turn.matrices.matrix_count, -1)
        statistics = (turn.state[self.row_key], columns, turn.mean_of_rows)
        return turn.matrices.scaled(turn.grad, statistics, partial(self._factor_of_statistics, turn))

    def _write(self, turn: Turn, update: torch.Tensor, total: torch.Tensor) -> None:
        """Change the parameter by its update, of which ``total`` is the sum of squares over the owners."""
        param = turn.param.detach()
        wide = param if param.dtype == turn.dtype else param.to(turn.dtype)
        self._apply(turn, wide, update, self._root_mean(turn, total))
        if wide is not param:
            param.copy_(wide)

    def _root_mean(self, turn: Turn, total: torch.Tensor) -> torch.Tensor:
        return total.sqrt() / sqrt(turn.meta.placement.numel)

    def _make_state(self, turn: Turn) -> None:
        """Fill the empty state of a parameter."""
        raise NotImplementedError

    def _take_in(self, turn: Turn, key: str, squares: torch.Tensor) -> None:
        """Move a statistic towards the mean ``squares`` of this step, of as many elements; may change ``squares``."""
        raise NotImplementedError

    def _factor_of_statistics(
        self, turn: Turn, rows: torch.Tensor, columns: torch.Tensor, mean: torch.Tensor
    ) -> torch.Tensor:
        """One over the root of the second moment: (k, r, 1), (k, 1, C) and the rows' mean, (k, 1, 1), to (k, r, C)."""
        raise NotImplementedError

    def _factor_of_moment(self, turn: Turn, moment: torch.Tensor) -> torch.Tensor:
        """One over the root of the second moment, a new tensor."""
        raise NotImplementedError

    def _apply(self, turn: Turn, param: torch.Tensor, update: torch.Tensor, rms: torch.Tensor) -> None:
        """Change the wide ``param``; ``rms`` is that of the whole update, 0-d. May change ``update``."""
        raise NotImplementedError

    def _new_statistics(self, turn: Turn) -> dict[str, torch.Tensor]:
        """Zeros for the second moment of a parameter."""
        make = partial(torch.zeros, dtype=turn.dtype, device=turn.param.device)
        if turn.matrices is None:
            return {self.full_key: make(turn.param.shape)}
        rows, columns = self._shapes(turn.matrices.shape)
        return {self.row_key: make(rows), self.column_key: make(columns)}

    def _shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the statistics of rows and of columns of a parameter of ``shape``."""
        one = (1,) if self.keepdim else ()
        return (*shape[:-1], *one), (*shape[:-2], *one, shape[-1])

    def communicates(self, param: nn.Parameter) -> bool:
        """Whether ranks exchange something about a parameter in a step."""
        return is_split(param)

    def state_part(self, param: nn.Parameter, key: str) -> StatePart | None:
        """Where a tensor of a parameter's state on this rank lies in the unsharded optimizer's; any rank.

        Args:
            param: One of the optimizer's.
            key: Name of the value in the state.

        Returns:
            None for what has an element for each of the parameter's, and for single numbers.
        """
        matrices = matrices_of(meta_of(param))
        if matrices is None or key not in (self.row_key, self.column_key):
            return None
        rows, columns = self._shapes(matrices.meta.global_shape)
        return matrices.part_of_rows(rows) if key == self.row_key else matrices.part_of_columns(columns)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what ``state_dict()`` gave on the same rank of a world of the same size; each rank its own.

        Unlike torch's, it leaves the statistics of half-precision parameters in float32.

        Args:
            state_dict: This optimizer's, or, where nothing is split, that of the unsharded one it is named after.
        """
        given: list[Mapping[str, Any]] = []
        # Registered last: it sees what the users' own hooks have made of the state.
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

    def _loaded(self, param: nn.Parameter, key: str, value: Any) -> Any:
        """A value of a state that is loaded, on the parameter's device and in the dtype that it is computed with."""
        if key == "step":
            return self._count(value)
        return value.to(param.device, wide_dtype(param)) if isinstance(value, torch.Tensor) else value

    def _count(self, steps: Any) -> Any:
        """The number of steps as this convention keeps it, not shared with what was loaded."""
        raise NotImplementedError


class _Round:
    """The split parameters of one group of ranks in one step."""

    def __init__(
        self, optimizer: FactoredOptimizer, comm: Comm, params: Sequence[tuple[nn.Parameter, dict[str, Any]]]
    ) -> None:
        """Take in this rank's part of the gradients and start adding up what no rank knows by itself.

        Args:
            optimizer: Whose step it is.
            comm: The ranks.
            params: All split parameters that require a gradient, also those that this rank holds none of.
        """
        self.optimizer = optimizer
        self.comm = comm
        self.dtype = torch.float64 if any(wide_dtype(p) == torch.float64 for p, _ in params) else torch.float32
        self.turns = [optimizer._turn(param, group) for param, group in params if param.numel()]
        values = [optimizer._begin(turn) if turn.stepped else _nothing(turn) for turn in self.turns]
        self._pooled = self._pool(values, "statistics of split gradients")

    def share_updates(self) -> None:
        """Take in the totals and start adding up the squares of the updates."""
        squares: list[torch.Tensor] = []
        for turn, totals in zip(self.turns, self._pooled.wait(), strict=True):
            if turn.stepped:
                self.optimizer._know(turn, totals)
                squares.append(sum_of_squares(self.optimizer._update(turn), turn.dtype).view(1))
            else:
                squares.append(torch.zeros(1, dtype=turn.dtype, device=turn.param.device))
        self._pooled = self._pool(squares, "squares of split updates", at_once=True)

    def finish(self) -> None:
        """Take in these totals and change the parameters."""
        for turn, total in zip(self.turns, self._pooled.wait(), strict=True):
            if turn.stepped:
                self.optimizer._write(turn, self.optimizer._update(turn), total[0])

    def _pool(self, values: Sequence[torch.Tensor], what: str, *, at_once: bool = False) -> PooledOwnerReduce:
        owned = [(turn.meta.owners, value) for turn, value in zip(self.turns, values, strict=True)]
        return PooledOwnerReduce(self.comm, owned, self.dtype, what, at_once=at_once)


def _nothing(turn: Turn) -> torch.Tensor:
    """Zeros for a parameter without a gradient, as many as there would be values."""
    count = 1 if turn.matrices is None else turn.matrices.shared_numel + 1
    return torch.zeros(count, dtype=turn.dtype, device=turn.param.device)


def wide_dtype(param: torch.Tensor) -> torch.dtype:
    """What a parameter's step is computed in."""
    return torch.float64 if param.dtype == torch.float64 else torch.float32


def sum_of_squares(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Of all elements, 0-d, in ``dtype``."""
    return torch.linalg.vector_norm(tensor, dtype=dtype).square()
