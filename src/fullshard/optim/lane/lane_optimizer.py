"""Any elementwise optimizer, stepped on whole lanes of memory instead of parameter by parameter."""

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
from fullshard.optim.guard.trial import Cut, Make, steps_parts_alike
from fullshard.optim.lane.runs import Run, find_runs, local, parts

_REFUSED = ("capturable", "differentiable")
_NOT_OPTIONS = ("params", "param_names")

# What was handed out of a parameter's state: each value, and the version of those that are copies.
_Given = dict[str, tuple[Any, int]]


class LaneOptimizer(Optimizer):
    """An elementwise ``torch.optim`` class whose step sees a few long tensors instead of every parameter.

    The shards of a unit's parameters lie side by side in memory, and so do their reduced gradients. An elementwise
    optimizer does not care where a parameter ends, so that neighbours are given to it as one flat tensor: a unit takes
    a handful of kernels, and with ``fused=True`` one; Python's share of the step no longer grows with what an optimizer
    does for each parameter. Results are those of the class itself.

    Used as the class would be::

        optimizer = LaneOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-3, fused=True)

    ``param_groups`` holds the model's parameters, and ``state[param]`` what the class would have there, under its keys:
    schedules, clipping, checkpoints and exports work, and state dicts are exchanged with the class. Tensors with an
    element for each of the parameter's are views of what is stepped; single numbers are copies, and what is changed of
    a state is taken over by the next step.

    What parts a run of neighbours: the end of a unit's lane, another parameter group, a frozen parameter, one that once
    had no gradient in a step (it is not stepped then, and its count of steps is its own from there on). Decaying all
    parameters alike makes the longest runs. A gradient that does not lie beside its neighbours', because it was
    replaced or arrived in another dtype, is copied. The class's optimizer is made anew when parameters, their memory or
    states that were handed out have changed: what it counts in attributes of its own, outside of ``state`` and
    ``param_groups``, begins anew then.

    Each rank makes and steps its own, without communication. Make it after ``fully_shard``, or before and give it to
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
            options: The class's.

        Raises:
            ConfigError: The class is not elementwise (it is tried on a matrix, whole and in two parts), or ``options``
                ask for ``capturable`` or ``differentiable``.
        """
        refused = [name for name in _REFUSED if options.get(name)]
        if refused:
            raise ConfigError(
                f"LaneOptimizer does not take {refused[0]}=True: runs are cut in Python, by which parameters have a "
                f"gradient. Leave it out, or use {optimizer_class.__name__} itself."
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
            self._show()
        return self._states

    @state.setter
    def state(self, state: Mapping[torch.Tensor, Any]) -> None:
        self._states: defaultdict[torch.Tensor, Any] = defaultdict(dict, state)
        self._given: dict[torch.Tensor, _Given] | None = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Step every parameter that has a gradient; any rank, no communication.

        Args:
            closure: Computes the loss and its gradients anew, as in torch; on every rank or none.

        Returns:
            What ``closure`` returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._was_changed():
            self._build()
        for group, runs, inner in zip(self.param_groups, self._runs, self._inner.param_groups, strict=True):
            inner.update(_options_of(group))
            self._take_gradients(runs, inner["params"])
        self._inner.step()
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            group.update(_options_of(inner))  # some classes count in their groups
            for flat in inner["params"]:
                flat.grad = None
        self._given = None
        return loss

    def _take_gradients(self, runs: list[Run], flats: list[nn.Parameter]) -> None:
        """Give the flat parameters of a group their gradients; runs that have some of theirs are cut, in place."""
        for at in range(len(runs) - 1, -1, -1):
            gradients = [param.grad for param in runs[at].params]
            present = [gradient for gradient in gradients if gradient is not None]
            if len(present) == len(gradients):
                flats[at].grad = _flat_gradient(runs[at], present, flats[at])
            elif present:
                pieces = runs[at].cut([gradient is not None for gradient in gradients])
                runs[at : at + 1] = [piece for piece, _ in pieces]
                flats[at : at + 1] = self._cut_state(flats[at], pieces)
                for piece, flat in zip(runs[at : at + len(pieces)], flats[at:], strict=False):
                    found = [param.grad for param in piece.params if param.grad is not None]
                    flat.grad = _flat_gradient(piece, found, flat) if found else None

    def _cut_state(self, flat: nn.Parameter, pieces: Sequence[tuple[Run, int]]) -> list[nn.Parameter]:
        """Flat parameters of the pieces of a run, with their parts of its state."""
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

    # From the parameters' states to those of the runs, and back

    def _build(self) -> None:
        """Find the runs, and make the class's optimizer for them with the states that the parameters have."""
        states = self.state
        numbers = _single_numbers(states)
        self._params = [list(group["params"]) for group in self.param_groups]
        self._addresses = [param.data_ptr() for param in chain.from_iterable(self._params)]
        self._runs: list[list[Run]] = []
        for params in self._params:
            whole = find_runs(params)
            kinds = {p: _kind(p, states.get(p, {}), numbers) for run in whole for p in run.params}
            self._runs.append([piece for run in whole for piece, _ in run.cut([kinds[p] for p in run.params])])
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

    def _show(self) -> None:
        """Bring the parameters' states up to what the class has made of the runs'."""
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

    def _was_changed(self) -> bool:
        """Whether parameters were added, exchanged or given other memory, or a state that was handed out changed."""
        now = [group["params"] for group in self.param_groups]
        if len(now) != len(self._params):
            return True
        for old, new in zip(self._params, now, strict=True):
            if len(old) != len(new) or not all(map(operator.is_, old, new)):
                return True
        if [param.data_ptr() for param in chain.from_iterable(now)] != self._addresses:
            return True
        return self._given is not None and not _is_as_given(self._states, self._given)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what ``load_state_dict`` has read, with what the class itself does to it."""
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
    """Refuse a class that steps a matrix otherwise than its parts.

    Raises:
        ConfigError: It does, or cannot be tried.
    """
    known, problem, remedy = why_not_elementwise(kind), "", remedy_for(kind)
    if known is not None:
        problem = f"it looks at {known}"
    elif hasattr(kind, "state_part"):
        problem, remedy = "it has states that lie otherwise than its parameters' elements", f"{kind.__name__} itself"
    else:
        try:
            problem = _found_on_trial(lambda params: kind(params, **options))  # type: ignore[call-arg]
        except Exception as error:
            # Whatever a class of another library raises, a user's question is answered by it.
            raise ConfigError(
                f"LaneOptimizer tried whether {kind.__name__} is elementwise, and it failed ({type(error).__name__}: "
                f"{error}). Give a class and options that can step a matrix on the CPU, or use {remedy}."
            ) from error
    if problem:
        raise ConfigError(
            f"LaneOptimizer steps many parameters as one flat tensor, which takes an elementwise optimizer; "
            f"{kind.__name__} is none: {problem}. Use {remedy}."
        )


def _found_on_trial(make: Make) -> str:
    """What speaks against a class; empty: nothing."""
    if is_of_blocks(make([nn.Parameter(torch.zeros(1))])):
        return "it quantises blocks of elements"
    alike = steps_parts_alike(make, Cut.FLATTENED)
    return "" if alike else "on trial a matrix and its parts were stepped differently"


def _options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _NOT_OPTIONS}


def _flat_gradient(run: Run, gradients: Sequence[torch.Tensor], flat: nn.Parameter) -> torch.Tensor:
    """The gradients of a run's parameters as one tensor in the parameters' dtype."""
    one = run.as_one(gradients)
    if one is not None:
        return one.to(flat.dtype)
    one = torch.zeros_like(flat)
    for index, gradient in enumerate(gradients):
        run.part(one, index).copy_(gradient)
    return one


def _single_numbers(states: Mapping[torch.Tensor, Mapping[str, Any]]) -> set[str]:
    """Keys whose values are one number a parameter, also where the parameter is one number itself."""
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
    """What neighbours must have in common to be stepped as one.

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
                f"{tuple(local(param).shape)}. An optimizer with state that was made before fully_shard must be given "
                "to repoint(optimizer, places) after it."
            )
    return frozenset(found)


def _join(run: Run, states: Mapping[torch.Tensor, dict[str, Any]], numbers: set[str]) -> dict[str, Any]:
    """The state of a run, of its parameters' states, whose tensors become views of it."""
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
                states[param][key] = view  # and what was there is freed
    return joined


def _of_param(run: Run, index: int, value: Any) -> Any:
    """A parameter's part of a value of its run's state."""
    if not isinstance(value, torch.Tensor):
        return value
    return run.part(value, index) if tuple(value.shape) == run.shape and value.ndim else value.clone()


def _version(value: Any) -> int:
    """A number that grows when a copied value is changed in place."""
    return value._version if isinstance(value, torch.Tensor) and value.numel() == 1 else 0


def _is_as_given(states: Mapping[torch.Tensor, Mapping[str, Any]], given: Mapping[torch.Tensor, _Given]) -> bool:
    """Whether the parameters' states are what was handed out."""
    if any(state and param not in given for param, state in states.items()):
        return False
    for param, values in given.items():
        state = states.get(param, {})
        if state.keys() != values.keys():
            return False
        if any(state[key] is not value or _version(value) != version for key, (value, version) in values.items()):
            return False
    return True
