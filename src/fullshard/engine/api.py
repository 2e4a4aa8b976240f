"""The front door: ``fully_shard`` and the functions beside it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fullshard.comm import Mesh, as_mesh
from fullshard.engine import fused
from fullshard.engine.buffers import Account
from fullshard.engine.build import UnitBuilder, move_buffers
from fullshard.engine.hooks import RootHeld, UnitHooks
from fullshard.engine.identity import check_same_model
from fullshard.engine.runtime import Policy, Runtime
from fullshard.engine.table import UnitTable, make_row
from fullshard.engine.torch_private import in_backward
from fullshard.engine.wrap import assign_parameters, check_parameters, find_units
from fullshard.errors import ShardingError
from fullshard.policy import BackwardPrefetch, MixedPrecision, ShardingStrategy, WrapPolicy
from fullshard.version import __version__

_ATTRIBUTE = "_fullshard_runtime"


def runtime_of(model: nn.Module) -> Runtime:
    """The runtime of a sharded model.

    Raises:
        ShardingError: The module is not the root that ``fully_shard`` was called on.
    """
    runtime = model.__dict__.get(_ATTRIBUTE)
    if runtime is None:
        raise ShardingError(
            f"{type(model).__name__} is not sharded: call fully_shard(model) first, and pass that model."
        )
    return runtime


def fully_shard(  # noqa: PLR0913 (the front door: each argument is a policy)
    model: nn.Module,
    mesh: Any = None,
    *,
    wrap: WrapPolicy = "auto",
    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD,
    mp_policy: MixedPrecision | None = None,
    prefetch: BackwardPrefetch = BackwardPrefetch.BACKWARD_PRE,
    ignored_params: Iterable[nn.Parameter] = (),
    device: torch.device | None = None,
) -> nn.Module:
    """Shard ``model`` over the ranks of ``mesh``, in place. Every rank calls it once, with the same model.

    Afterwards each parameter of the model is this rank's shard: whole rows, shape ``(rows here, *rest)``, possibly
    none. Build the optimizer on ``model.parameters()`` as usual. Forward and backward gather one unit at a time; after
    ``backward()`` each shard's ``.grad`` is the mean over ranks of the gradient.

    Args:
        model: Any module, on CPU, on the device, or on the meta device (units are initialised as they are sharded).
        mesh: Ranks to shard over: None (all), a ``ProcessGroup``, a 1-D ``DeviceMesh`` or a ``Comm``.
        wrap: Which modules are units: ``"auto"`` (the model's repeated blocks), :class:`TransformerBlocks`, a predicate
            over modules, or None (the whole model is one unit).
        strategy: What is sharded.
        mp_policy: Compute and reduce dtypes; None: the parameters' own.
        prefetch: When backward issues the next all-gather.
        ignored_params: Parameters left as they are, on every rank.
        device: Where shards live; None: the accelerator of this rank, else CPU.

    Returns:
        The same object.

    Raises:
        ProcessGroupError: There is no process group, or the mesh does not fit.
        WrapError: The policy does not fit the model; nothing has changed then.
        MismatchError: Ranks hold different models; raised on every rank, nothing has changed then.
        ShardingError: The model, or a part of it, is sharded already.
    """
    for name, module in model.named_modules():
        if _ATTRIBUTE in module.__dict__:
            raise ShardingError(
                f"{name or type(model).__name__} is sharded already; call fully_shard once, on the root."
            )
    policy = Policy(strategy, mp_policy or MixedPrecision(), prefetch)
    ranks = as_mesh(mesh, strategy, device)
    ignored = frozenset(ignored_params)
    specs = assign_parameters(model, find_units(model, wrap), ignored)
    check_parameters(specs)
    check_same_model(ranks, specs, policy, __version__)
    account = Account()
    builder = UnitBuilder(model, ranks, strategy, policy.precision, account, device or ranks.device)
    move_buffers(model, builder.device)
    units = [builder.build(index, spec) for index, spec in enumerate(specs)]
    if builder.device.type != "meta":
        builder.initialize_rest()
    runtime = Runtime(units, ranks, policy, account, frozenset(id(p) for p in ignored))
    for unit in units:
        UnitHooks(runtime, unit)
        fused.install(runtime, unit)
        for param in unit.params:
            param.shard.shard_comm = ranks.shard  # type: ignore[attr-defined]
    model.__dict__[_ATTRIBUTE] = runtime
    model.__class__ = _sharded_class(type(model))
    return model


def _sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    """A subclass of the model's class with the same name, whose few overrides keep a sharded model from harm."""

    def __repr__(self: nn.Module) -> str:
        return f"{cls.__repr__(self)}\n{units(self)}"

    def state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if runtime_of(self).root.held:  # inside unsharded(model) it is whole; views of it would not outlive that
            return {name: value.clone() for name, value in cls.state_dict(self, *args, **kwargs).items()}
        raise ShardingError(
            f"state_dict() of a sharded {cls.__name__} would hold this rank's rows only. Write the whole model with "
            "fullshard.save(model, directory), or stream it with fullshard.full_tensors(model)."
        )

    def generate(self: nn.Module, *args: object, **kwargs: object) -> object:
        with RootHeld(runtime_of(self)):
            return cls.generate(self, *args, **kwargs)  # type: ignore[attr-defined]

    overrides: dict[str, Any] = {"__repr__": __repr__, "state_dict": state_dict, "__module__": cls.__module__}
    if hasattr(cls, "generate"):
        overrides["generate"] = generate
    made = type(cls.__name__, (cls,), overrides)
    made.__qualname__ = cls.__qualname__
    return made


def units(model: nn.Module) -> UnitTable:
    """The unit table of a sharded model; any rank, no communication."""
    runtime = runtime_of(model)
    return UnitTable(tuple(make_row(unit) for unit in runtime.units), runtime.mesh.shard.size)


def memory_summary(model: nn.Module) -> dict[str, int]:
    """Bytes of this rank's part of a sharded model; no communication.

    Returns:
        ``parameters`` (shards), ``gradients`` (of the shards, as they are now), ``gathered_peak`` (gathered buffers at
        most at once so far) and ``gradient_buffer_peak`` (unsharded gradients at most at once so far).
    """
    runtime = runtime_of(model)
    grads = [p.shard.grad for _, p in runtime.all_params() if p.shard.grad is not None]
    return {
        "parameters": runtime.account.live["shards"],
        "gradients": sum(g.nbytes for g in grads),
        "gathered_peak": runtime.account.peak["gathered"],
        "gradient_buffer_peak": runtime.account.peak["gradients"],
    }


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulate gradients without communication: backward adds to unsharded gradients and reduces nothing.

    Saves reduce-scatters at the price of an unsharded gradient of every unit. The first backward after the context
    reduces the sum. All ranks enter it together.
    """
    runtime = runtime_of(model)
    before, runtime.syncing = runtime.syncing, False
    try:
        yield
    finally:
        runtime.syncing = before


@contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """Show full parameters, in the compute dtype, on every rank; all ranks enter it together.

    In-place changes of parameters made inside are kept (each rank keeps its own rows of what it wrote: write the same
    on every rank). Memory: the whole gathered model.

    Raises:
        ShardingError: Entered during backward.
    """
    runtime = runtime_of(model)
    if in_backward():
        raise ShardingError("unsharded(model) cannot be entered during backward: units come and go there.")
    runtime.forward_event()
    for unit in runtime.units:
        if not unit.held and not unit.open_calls:
            runtime.release(unit)  # what is gathered may be older than the shards
        runtime.gather(unit)
        unit.held += 1
    try:
        yield
    finally:
        for unit in runtime.units:
            unit.held -= 1
        if not runtime.root.held:
            for unit in runtime.units:
                unit.write_back()
        for unit in runtime.units:
            if not unit.open_calls:
                runtime.release(unit)


def full_tensors(model: nn.Module) -> Iterator[tuple[str, dict[str, torch.Tensor | None]]]:
    """Stream the whole model to rank 0, one unit at a time; every rank iterates to the end.

    Yields:
        The unit's name, and for each of its parameters the first name and, on rank 0, the full tensor on CPU in the
        shard's dtype (valid until the next step of the iteration); None on other ranks. Parameters that were left out
        of sharding and persistent buffers come last, under the names ``(ignored)`` and ``(buffers)``.
    """
    runtime = runtime_of(model)
    comm, writes = runtime.mesh.shard, runtime.mesh.rank == 0
    for unit in runtime.units:
        tensors: dict[str, torch.Tensor | None] = {}
        for lane in unit.lanes:
            full = None
            if writes:
                full = torch.empty(
                    lane.lane.world_size * lane.lane.shard_numel, dtype=lane.shard.dtype, device=lane.shard.device
                )
            if runtime.mesh.replicate.rank == 0:  # copies have the same to tell
                comm.gather(lane.shard, full).wait()
            full = None if full is None else full.cpu()
            for param in unit.params:
                if param.state is lane:
                    start, numel = param.meta.placement.start, param.meta.placement.numel
                    view = None if full is None else full[start : start + numel].view(param.meta.global_shape)
                    tensors[param.meta.name] = view
        yield unit.name, tensors
    left_out = {id(p.full) for _, p in runtime.all_params()}
    ignored = {n: p for n, p in model.named_parameters() if not hasattr(p, "shard_meta") and id(p) not in left_out}
    yield "(ignored)", {name: (p.detach().cpu() if writes else None) for name, p in ignored.items()}
    yield "(buffers)", {name: (b.cpu() if writes else None) for name, b in persistent_buffers(model)}


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and value of each buffer that belongs to the model's saved state; any rank."""
    for path, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                yield f"{path}.{key}" if path else key, buffer


def mesh_of(model: nn.Module) -> Mesh:
    """The ranks that share a sharded model."""
    return runtime_of(model).mesh


def reset(model: nn.Module) -> None:
    """Drop what a failed forward or backward left behind, on every rank; the next root forward does so by itself."""
    runtime_of(model).reset()
    warnings.warn("The model was reset: gradients of the failed step are gone, shards are as they were.", stacklevel=2)
