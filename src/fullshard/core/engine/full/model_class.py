"""The class of a sharded model: a subclass of the model's class with its own state_dict and generate.

Generation is in lockstep: ranks run the same number of forwards, whatever number of tokens each needs.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from fullshard.core.comm import settle
from fullshard.core.engine.full.state import load_full_state
from fullshard.core.engine.full.table import unit_table
from fullshard.core.engine.full.unsharded import root_unsharded
from fullshard.core.engine.registry import runtime_of
from fullshard.core.engine.step.hooks import UnitHooks
from fullshard.core.engine.step.param import COPY_REFUSED
from fullshard.core.engine.step.runtime import Runtime
from fullshard.core.engine.step.unit import Keep
from fullshard.core.torch_private import DDP_ASKS, incompatible_keys, is_ddp
from fullshard.errors import ShardingError

_Inputs = tuple[tuple[Any, ...], dict[str, Any]]

_INPUT_NAMES = ("decoder_input_ids", "input_ids", "inputs_embeds")


class Lockstep:
    """Context in which every rank of a sharded model generates its own rows, and the root stays gathered.

    Every token is a forward, which gathers units, so all ranks must run it together. Before each forward, ranks
    exchange whether they still generate. A rank that is finished runs forwards of one dummy token until all are.
    Inside ``unsharded(model)`` nothing is gathered, and a rank may generate alone.
    """

    def __init__(self, model: nn.Module) -> None:
        """Follow the forwards of ``model``, or of the model inside a peft adapter, which runs once for each token."""
        runtime = runtime_of(model)
        self._mesh = runtime.mesh
        self._writer = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
        self._root = root_unsharded(model)
        unsharded = runtime.root.summoned is not None or Keep.CONTEXT in runtime.root.keep
        self._follows = self._mesh.size > 1 and not unsharded
        self._idle: _Inputs = (), {}

    def __enter__(self) -> None:
        """Meet the other ranks, gather the root, and start counting ranks before each forward."""
        if self._follows:
            # Before anything is gathered: another rank that trains meanwhile would mistake it for its own collective.
            self._count("the start of generate()", writes=True)
        self._root.__enter__()
        if self._follows:
            self._hook = self._writer.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        """Run dummy forwards until all ranks are finished; not after an error, which is reported to the other ranks."""
        try:
            if self._follows:
                self._hook.remove()
                with torch.no_grad():
                    while kind is None and int(self._count("whether a rank still generates", writes=False)):
                        args, inputs = self._idle
                        self._writer(*args, **inputs)
        finally:
            self._idle = (), {}
            self._root.__exit__(None, None, None)

    def _before(self, _module: nn.Module, args: tuple[Any, ...], inputs: dict[str, Any]) -> None:
        self._idle = _one_token(args, inputs)
        self._count("whether a rank still generates", writes=True)  # not read: that would make a GPU wait

    def _count(self, what: str, *, writes: bool) -> torch.Tensor:
        """Return how many ranks generate. All-gathers of different purposes do not meet, unlike all-reduces."""
        shards, replicas = self._mesh.shard_group, self._mesh.replica_group
        ranks = torch.empty(shards.size, device=shards.device)
        shards.announce(what)
        mine = torch.tensor([float(writes)], device=shards.device)
        work = shards.all_gather(ranks, mine)
        work.wait()
        settle(work)  # until then other ranks may read ``mine``
        count = ranks.sum()
        if replicas.size > 1:  # the ranks of a mesh run the same forwards; the checksum of their order covers all
            replicas.announce(what)
            replicas.all_reduce(count).wait()
        return count


def _one_token(args: tuple[Any, ...], inputs: dict[str, Any]) -> _Inputs:
    """Return the inputs of a dummy forward that runs the same units: the last token, without the cache.

    For a model whose inputs have other names than transformers', all inputs of this forward.
    """
    name = next((name for name in _INPUT_NAMES if inputs.get(name) is not None), None)
    if args or name is None:
        return args, inputs
    call = {name: inputs[name][:, -1:]}
    if "use_cache" in inputs:
        call["use_cache"] = False
    if inputs.get("encoder_outputs") is not None:
        call |= {"encoder_outputs": inputs["encoder_outputs"], "attention_mask": inputs.get("attention_mask")}
    return (), call


class _RefusesDDP:
    """An attribute that is missing, unless DistributedDataParallel asks for it."""

    def __get__(self, model: nn.Module | None, cls: type[nn.Module]) -> object:
        if model is not None and is_ddp(sys._getframe(1)):
            raise ShardingError(
                f"DistributedDataParallel around a sharded {cls.__name__} would give all ranks rank 0's rows. Leave it "
                "out: fully_shard reduces gradients itself, and a mesh (replicate, shard) makes replicas. Trainer and "
                "Accelerate add it to models that they do not know as sharded: import them from fullshard.compat."
            )
        raise AttributeError


def sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Make a subclass of the model's class with the same name."""

    def __repr__(self: nn.Module) -> str:
        runtime = runtime_of(self)
        return f"{cls.__repr__(self)}\n{unit_table(runtime.units, runtime.mesh.shard_group.size)}"

    def state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if Keep.CONTEXT in runtime_of(self).root.keep:  # inside unsharded(model); views would not outlive it
            return {name: value.clone() for name, value in cls.state_dict(self, *args, **kwargs).items()}
        if (others := runtime_of(self).state_dict) is not None:
            return others[0](self, *args, **kwargs)
        raise ShardingError(
            f"state_dict() of a sharded {cls.__name__} would hold only this rank's rows. Write the full model with "
            "fullshard.save(model, directory), or stream it with fullshard.full_tensors(model)."
        )

    def load_state_dict(
        self: nn.Module,
        state_dict: Mapping[str, torch.Tensor],
        strict: bool = True,  # noqa: FBT001, FBT002 (torch's signature)
        assign: bool = False,  # noqa: FBT001, FBT002
    ) -> Any:
        return _load(self, cls, state_dict, strict=strict, assign=assign)

    def generate(self: nn.Module, *args: object, **kwargs: object) -> object:
        with Lockstep(self):
            return cls.generate(self, *args, **kwargs)  # type: ignore[attr-defined]

    overrides: dict[str, Any] = {
        "__copy__": shallow_copy,
        "__reduce_ex__": refuse_pickling,
        "__repr__": __repr__,
        "state_dict": state_dict,
        "load_state_dict": load_state_dict,
        "__module__": cls.__module__,
        DDP_ASKS: _RefusesDDP(),
    }
    if hasattr(cls, "generate"):
        overrides["generate"] = generate
    made = type(cls.__name__, (cls,), overrides)
    made.__qualname__ = cls.__qualname__
    return made


def refuse_pickling(self: nn.Module, protocol: object) -> Any:
    """Refuse before pickle looks the class up by name, where it would find the unsharded model's.

    Raises:
        ShardingError: Always.
    """
    raise ShardingError(COPY_REFUSED)


def shallow_copy(self: nn.Module) -> nn.Module:
    """Copy as ``copy.copy`` does without ``__reduce_ex__``: another module with the same parameters and buffers."""
    made = object.__new__(type(self))  # not the class's own __new__, which may need arguments
    made.__dict__.update(self.__dict__)
    return made


def _load(
    model: nn.Module, cls: type[nn.Module], state_dict: Mapping[str, torch.Tensor], *, strict: bool, assign: bool
) -> Any:
    if (others := runtime_of(model).state_dict) is not None:
        return others[1](model, state_dict, strict, assign)
    if assign:
        raise ShardingError(
            "load_state_dict(assign=True) would replace the shards by full tensors. Omit assign: each rank copies its "
            "rows."
        )
    if Keep.CONTEXT in runtime_of(model).root.keep:  # inside unsharded(model): at its end the shards take the values
        return cls.load_state_dict(model, state_dict, strict)
    return incompatible_keys(*load_full_state(model, state_dict, strict=strict))


def plain_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the class that :func:`sharded_class` made ``cls`` from."""
    return cls.__mro__[1]


def on_state_dict(model: nn.Module, make: Callable[..., dict[str, Any]], load: Callable[..., Any]) -> None:
    """Replace ``state_dict()`` and ``load_state_dict()`` of a sharded model; any rank, no communication.

    Args:
        model: A sharded model.
        make: Called as ``make(model, *args, **kwargs)`` with the arguments of ``state_dict()``.
        load: Called as ``load(model, state_dict, strict, assign)``.
    """
    runtime_of(model).state_dict = make, load


def register_forward_method(model: nn.Module, name: str) -> None:
    """Let a method other than ``forward`` compute with full parameters; called once, on every rank.

    Its first call in a step begins a forward pass, as ``model(...)`` does. Needed only for methods that use parameters
    directly (``F.linear(x, self.weight)``): modules that a method calls gather automatically.

    Args:
        model: A sharded model.
        name: Name of the method, with a path for one of a submodule (``"encoder.encode"``).

    Raises:
        ShardingError: The model is not sharded, or there is no such method.
    """
    runtime = runtime_of(model)
    path, _, method = name.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        raise ShardingError(f"{type(model).__name__} has no method {name} to register.") from None
    wrap_forward_method(_hooks_around(runtime, model, path), module, method)


def wrap_forward_method(hooks: UnitHooks, module: nn.Module, method: str) -> None:
    """Wrap one method of ``module`` so that ``hooks`` treat it like forward.

    Raises:
        ShardingError: There is no such method.
    """
    original = getattr(module, method, None)
    if original is None:
        raise ShardingError(f"{type(module).__name__} has no method {method} to register.")

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if hooks.passing or hooks.unit.open_calls:  # called from inside the unit's own forward
            return original(*args, **kwargs)
        args, kwargs = hooks.before_forward(module, args, kwargs)
        hooks.passing = True
        try:
            output = original(*args, **kwargs)
        except BaseException:
            hooks.passing = False
            hooks.after_failure(module, args, None)
            raise
        hooks.passing = False
        output = hooks.after_forward(module, args, output)
        hooks.after_failure(module, args, output)
        return output

    setattr(module, method, wrapped)


def _hooks_around(runtime: Runtime, model: nn.Module, path: str) -> UnitHooks:
    """Return the hooks of the innermost unit around the module at ``path``."""
    of_module = {id(module): unit for unit in runtime.units for module in unit.modules}
    parts = path.split(".") if path else []
    for depth in range(len(parts), -1, -1):
        unit = of_module.get(id(model.get_submodule(".".join(parts[:depth]))))
        if unit is not None:
            return unit.hooks
    return runtime.root.hooks
