"""Any elementwise optimizer, stepped on a few flat tensors instead of parameter by parameter."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fullshard.errors import ConfigError
from fullshard.optim.guard.guard import is_of_blocks, remedy_for, why_not_elementwise
from fullshard.optim.guard.trial import MakeOptimizer, Split, steps_parts_equally
from fullshard.optim.lane.runs import ParamRun, find_runs, local, parts
from fullshard.shards import on_rows

_REFUSED = ("capturable", "differentiable")
_NOT_OPTIONS = ("params", "param_names")

# The values of a parameter's state that were returned to the caller, with the version of those that are copies.
_Given = dict[str, tuple[Any, int]]


class LaneOptimizer(Optimizer):
    """An elementwise ``torch.optim`` class that steps a few long tensors instead of every parameter.

    The shards of a unit's parameters are adjacent in memory, and so are their reduced gradients. An elementwise
    optimizer does not depend on where a parameter ends, so neighbors are passed to it as one flat tensor: a unit takes
    a few kernels, with ``fused=True`` one, and Python's share of the step does not grow with the number of parameters.
    Results are those of the class, except that torch's CPU kernels may round the last elements of a tensor differently
    (1.2e-7).

    Usage is that of the class::

        optimizer = LaneOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-3, fused=True)

    ``param_groups`` holds the model's parameters, and ``state[param]`` the class's state under its keys: schedules,
    clipping, checkpoints and exports work, and state dicts can be exchanged with the class. Elementwise tensors are
    views of the stepped memory; single numbers are copies, and changes to them take effect at the next step.

    A run of neighbors ends at the end of a unit's lane, at another parameter group, a frozen parameter, or one that
    once had no gradient in a step (it is not stepped then, and has its own count of steps from there on). Equal weight
    decay for all parameters makes the longest runs. A gradient that is not adjacent to its neighbors', because it was
    replaced or has another dtype, is copied. The class's optimizer is built again when parameters, their memory or
    states that were read have changed; counters in its own attributes, outside of ``state`` and ``param_groups``, then
    restart.

    Each rank makes and steps its own, without communication. Make it after ``fully_shard``, or before and pass it to
    :func:`~fullshard.optim.repoint` if it has state. It can be saved by ``state_dict()``, not copied or pickled.
    """

    def __init__(
        self,
        optimizer_class: type[Optimizer],
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]] | Iterable[tuple[str, nn.Parameter]],
        **options: Any,
    ) -> None:
        """Make ``optimizer_class`` for the runs of ``params``; every rank calls it.

        Args:
            optimizer_class: ``torch.optim.AdamW``, ``SGD``, ``Adagrad``…, or another library's elementwise class.
            params: Parameters, named parameters or groups, as the class takes them.
            options: The class's options.

        Raises:
            ConfigError: The class is not elementwise (it is tried on a matrix, in full and in two parts), or
                ``options`` set ``capturable`` or ``differentiable``.
        """
        refused = [name for name in _REFUSED if options.get(name)]
        if refused:
            raise ConfigError(
                f"LaneOptimizer does not take {refused[0]}=True: runs are formed in Python, by which parameters have "
                f"a gradient. Remove it, or use {optimizer_class.__name__} itself."
            )
        params = list(params)  # type: ignore[arg-type]
        self._class = optimizer_class
        self._options = options
        _require_elementwise(optimizer_class, options)
        template = optimizer_class([nn.Parameter(torch.zeros(1))], **options)
        super().__init__(params, dict(template.defaults))  # type: ignore[arg-type]
        self._build()

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:  # type: ignore[override]
        """The state of each parameter that was stepped, by the keys of the class."""
        if self._given is None:
            self._read_states()
        return self._states

    @state.setter
    def state(self, state: Mapping[torch.Tensor, Any]) -> None:
        self._states: defaultdict[torch.Tensor, Any] = defaultdict(dict, state)
        self._given: dict[torch.Tensor, _Given] | None = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Step every parameter that has a gradient; any rank, no communication.

        Args:
            closure: Computes the loss and its gradients again, as in torch; on every rank or none.

        Returns:
            The result of ``closure``.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    @on_rows
    def _step(self) -> None:
        """Step the runs, and return to the parameters what the step left in the groups."""
        if self._was_changed():
            self._build()
        for group, runs, inner in zip(self.param_groups, self._runs, self._inner.param_groups, strict=True):
            inner.update(_options_of(group))
            self._take_gradients(runs, inner["params"])
        self._inner.step()
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            group.update(_options_of(inner))  # some classes keep counters in their groups
            for flat in inner["params"]:
                flat.grad = None
        self._given = None

    def _take_gradients(self, runs: list[ParamRun], flats: list[nn.Parameter]) -> None:
        """Set the gradients of a group's flat parameters; a run with only some gradients is split, in place."""
        for at in range(len(runs) - 1, -1, -1):
            gradients = [param.grad for param in runs[at].params]
            present = [gradient for gradient in gradients if gradient is not None]
            if len(present) == len(gradients):
                flats[at].grad = _flat_gradient(runs[at], present, flats[at])
            elif present:
                pieces = runs[at].split([gradient is not None for gradient in gradients])
                runs[at : at + 1] = [piece for piece, _ in pieces]
                flats[at : at + 1] = self._split_state(flats[at], pieces)
                for piece, flat in zip(runs[at : at + len(pieces)], flats[at:], strict=False):
                    found = [param.grad for param in piece.params if param.grad is not None]
                    flat.grad = _flat_gradient(piece, found, flat) if found else None

    def _split_state(self, flat: nn.Parameter, pieces: Sequence[tuple[ParamRun, int]]) -> list[nn.Parameter]:
        """Return flat parameters for the pieces of a run, and divide its state among them."""
        state = self._inner.state.pop(flat, {})
        made: list[nn.Parameter] = []
        for piece, base in pieces:
            made.append(nn.Parameter(piece.flat()))
            if not state:
                continue
            of_piece: dict[str, Any] = {}
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.shape == flat.shape:
                    of_piece[key] = value[base : base + piece.numel].view(piece.shape)
                else:
                    of_piece[key] = value.clone() if isinstance(value, torch.Tensor) else value
            self._inner.state[made[-1]] = of_piece
        return made

    # Conversion between the parameters' states and those of the runs

    @on_rows
    def _build(self) -> None:
        """Find the runs, and make the class's optimizer for them with the parameters' current states."""
        states = self.state
        numbers = _single_numbers(states)
        self._params = [list(group["params"]) for group in self.param_groups]
        self._addresses = [param.data_ptr() for param in chain.from_iterable(self._params)]
        self._runs: list[list[ParamRun]] = []
        for params in self._params:
            found = find_runs(params)
            kinds = {p: _kind(p, states.get(p, {}), numbers) for run in found for p in run.params}
            self._runs.append([piece for run in found for piece, _ in run.split([kinds[p] for p in run.params])])
        groups: list[dict[str, Any]] = []
        joined: dict[nn.Parameter, dict[str, Any]] = {}
        for group, runs in zip(self.param_groups, self._runs, strict=True):
            flats = [nn.Parameter(run.flat()) for run in runs]
            groups.append({**_options_of(group), "params": flats})
            joined |= {flat: _join(run, states, numbers) for flat, run in zip(flats, runs, strict=True)}
        self._inner = self._class(groups, **self._options)
        for flat, state in joined.items():
            if state:
                self._inner.state[flat] = state
        self._given = None

    @on_rows
    def _read_states(self) -> None:
        """Update the parameters' states from those of the runs."""
        self._given = {}
        for runs, inner in zip(self._runs, self._inner.param_groups, strict=True):
            for run, flat in zip(runs, inner["params"], strict=True):
                state = self._inner.state.get(flat)
                if not state:
                    continue
                for index, param in enumerate(run.params):
                    new = {key: _of_param(run, index, value) for key, value in state.items()}
                    self._states[param].clear()
                    self._states[param].update(new)
                    self._given[param] = {key: (value, _version(value)) for key, value in new.items()}

    @on_rows
    def _was_changed(self) -> bool:
        """Return whether parameters, their memory or states that were read have changed since the runs were built."""
        now = [group["params"] for group in self.param_groups]
        if len(now) != len(self._params):
            return True
        for old, new in zip(self._params, now, strict=True):
            if len(old) != len(new) or not all(map(operator.is_, old, new)):
                return True
        if [param.data_ptr() for param in chain.from_iterable(now)] != self._addresses:
            return True
        return self._given is not None and not _is_as_given(self._states, self._given)

    @on_rows
    def __setstate__(self, state: dict[str, Any]) -> None:
        """Load the state read by ``load_state_dict``, through the class's own ``__setstate__``."""
        self._inner.__setstate__({"state": state["state"], "param_groups": state["param_groups"]})
        super().__setstate__({"param_groups": self._inner.param_groups})
        self.state = self._inner.state
        self._build()

    def __getstate__(self) -> dict[str, Any]:
        """Refuse to be copied or pickled: the copy would step the same memory.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(
            "A LaneOptimizer cannot be copied or pickled: it steps the memory of the model's shards. Save "
            "state_dict(), or save it with the model by fullshard.Checkpoints."
        )


def _require_elementwise(kind: type[Optimizer], options: Mapping[str, Any]) -> None:
    """Refuse a class that steps a matrix differently from its parts.

    Raises:
        ConfigError: It does, or cannot be tried.
    """
    known, problem, remedy = why_not_elementwise(kind), "", remedy_for(kind)
    if known is not None:
        problem = f"it uses {known}"
    elif hasattr(kind, "state_part"):
        problem, remedy = "some of its states are not elementwise", f"{kind.__name__} itself"
    else:
        try:
            problem = _found_on_trial(lambda params: kind(params, **options))  # type: ignore[call-arg]
        except Exception as error:
            # A class of another library may raise anything; its message tells the user what is wrong.
            raise ConfigError(
                f"LaneOptimizer tested whether {kind.__name__} is elementwise, and the test failed "
                f"({type(error).__name__}: {error}). Pass a class and options that can step a matrix on the CPU, or "
                f"use {remedy}."
            ) from error
    if problem:
        raise ConfigError(
            "LaneOptimizer steps many parameters as one flat tensor, which requires an elementwise optimizer; "
            f"{kind.__name__} is not elementwise: {problem}. Use {remedy}."
        )


def _found_on_trial(make: MakeOptimizer) -> str:
    """Return why a class is not elementwise; empty if it is."""
    if is_of_blocks(make([nn.Parameter(torch.zeros(1))])):
        return "it quantises blocks of elements"
    equal = steps_parts_equally(make, Split.FLATTENED)
    return "" if equal else "in a trial a matrix and its parts were stepped differently"


def _options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _NOT_OPTIONS}


def _flat_gradient(run: ParamRun, gradients: Sequence[torch.Tensor], flat: nn.Parameter) -> torch.Tensor:
    """Return the gradients of a run's parameters as one tensor in the parameters' dtype."""
    one = run.as_one(gradients)
    if one is not None:
        return one.to(flat.dtype)
    one = torch.zeros_like(flat)
    for index, gradient in enumerate(gradients):
        run.part(one, index).copy_(gradient)
    return one


def _single_numbers(states: Mapping[torch.Tensor, Mapping[str, Any]]) -> set[str]:
    """Return the keys whose values are one number for each parameter, even if the parameter is a single number too."""
    keys = {"step"}
    for param, state in states.items():
        if local(param).ndim:
            keys.update(key for key, value in state.items() if isinstance(value, torch.Tensor) and not value.ndim)
    return keys


def _is_elementwise(param: torch.Tensor, key: str, value: Any, numbers: set[str]) -> bool:
    return (
        isinstance(value, torch.Tensor) and value.shape == local(param).shape and (value.ndim > 0 or key not in numbers)
    )


def _kind(param: nn.Parameter, state: Mapping[str, Any], numbers: set[str]) -> Hashable:
    """Return a key that neighbors must have in common to be stepped as one.

    Raises:
        ConfigError: The state is not this shard's.
    """
    found: list[Hashable] = []
    for key, value in state.items():
        if _is_elementwise(param, key, value, numbers):
            found.append((key, value.dtype, value.device))
        elif not isinstance(value, torch.Tensor):
            found.append((key, value if isinstance(value, Hashable) else id(value)))
        elif value.numel() == 1:
            found.append((key, value.item()))
        else:
            name = getattr(getattr(param, "shard_meta", None), "name", "a parameter")
            raise ConfigError(
                f"The state {key!r} of {name} has shape {tuple(value.shape)} and this rank's part of the parameter "
                f"{tuple(local(param).shape)}. Pass an optimizer with state that was made before fully_shard to "
                "repoint(optimizer, places) after it."
            )
    return frozenset(found)


def _join(run: ParamRun, states: Mapping[torch.Tensor, dict[str, Any]], numbers: set[str]) -> dict[str, Any]:
    """Return the state of a run from its parameters' states, whose tensors become views of it."""
    joined: dict[str, Any] = {}
    first = run.params[0]
    for key, value in list(states.get(first, {}).items()):
        if not _is_elementwise(first, key, value, numbers):
            joined[key] = value.clone() if isinstance(value, torch.Tensor) else value
        elif len(run.params) == 1:
            joined[key] = value
        else:
            joined[key] = value.new_zeros(run.numel)
            for param, view in parts(run, joined[key]):
                view.copy_(states[param][key])
                states[param][key] = view  # frees the parameter's own tensor
    return joined


def _of_param(run: ParamRun, index: int, value: Any) -> Any:
    """Return a parameter's part of a value of its run's state."""
    if not isinstance(value, torch.Tensor):
        return value
    return run.part(value, index) if tuple(value.shape) == run.shape and value.ndim else value.clone()


def _version(value: Any) -> int:
    """Return a number that grows when a copied value is changed in place."""
    return value._version if isinstance(value, torch.Tensor) and value.numel() == 1 else 0


def _is_as_given(states: Mapping[torch.Tensor, Mapping[str, Any]], given: Mapping[torch.Tensor, _Given]) -> bool:
    """Return whether the parameters' states are unchanged since they were read."""
    if any(state and param not in given for param, state in states.items()):
        return False
    for param, values in given.items():
        state = states.get(param, {})
        if state.keys() != values.keys():
            return False
        if any(state[key] is not value or _version(value) != version for key, (value, version) in values.items()):
            return False
    return True
