"""The front door: ``fully_shard`` and the functions beside it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fullshard.comm import Device, Mesh, as_mesh, device_memory_bytes, device_of, same_ranks
from fullshard.engine.full.model_class import plain_class, sharded_class
from fullshard.engine.full.table import UnitTable, unit_table
from fullshard.engine.registry import attach, detach, is_sharded, runtime_of
from fullshard.engine.setup.build import UnitBuilder, move_buffers
from fullshard.engine.setup.fill import fill, give_memory, open_weights
from fullshard.engine.setup.identity import check_same_model
from fullshard.engine.setup.initial import FirstValues, Initializer
from fullshard.engine.setup.source import WeightSource
from fullshard.engine.setup.wrap import (
    NoRepeatedBlocksError,
    UnitSpec,
    assign_parameters,
    check_parameters,
    find_units,
    merge_tiny,
    modules_kept,
)
from fullshard.engine.step import fused
from fullshard.engine.step.buffers import Account
from fullshard.engine.step.hooks import UnitHooks, keep_in_float32
from fullshard.engine.step.precision import dtypes_of
from fullshard.engine.step.recorder import Recorder
from fullshard.engine.step.runtime import Runtime
from fullshard.engine.step.unit import Unit
from fullshard.errors import ConfigError, ProcessGroupError, ShardingError, WrapError
from fullshard.layout.names import plain_name
from fullshard.policy import (
    FROZEN,
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    Prefetch,
    ShardingStrategy,
    UnitPolicy,
    WrapPolicy,
)
from fullshard.version import __version__

_REPLICATED_SHARE = 0.25
"""``frozen="auto"`` replicates frozen parameters that take at most this share of the smallest rank's memory."""


def fully_shard(  # noqa: PLR0913 (the front door: each argument is a policy)
    model: nn.Module | Sequence[nn.Module],
    mesh: Any = None,
    *,
    wrap: WrapPolicy = "auto",
    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD,
    reshard_after_forward: bool | None = None,
    mp_policy: MixedPrecision | None = None,
    prefetch: BackwardPrefetch | Prefetch = BackwardPrefetch.BACKWARD_PRE,
    offload_policy: CPUOffload | None = None,
    frozen: str = "shard",
    ignored_params: Iterable[nn.Parameter] = (),
    device: torch.device | None = None,
    weights: WeightSource | None = None,
    first_values: FirstValues | None = None,
) -> Any:
    """Shard ``model`` over the ranks of ``mesh``, in place. Every rank calls it, with the same model.

    Afterwards each parameter of the model is this rank's shard: whole rows, shape ``(rows here, *rest)``, possibly
    none. Build the optimizer on ``model.parameters()`` as usual. Forward and backward gather one unit at a time; after
    ``backward()`` each shard's ``.grad`` is the mean over ranks of the gradient.

    Call it once on the root with a wrap policy, or bottom up: on blocks, each with policies of its own, then on the
    root, which takes them in and makes a unit of what is left. Only the root may be called then.

    Args:
        model: Any module, on CPU, on the device, or on the meta device (units are initialised as they are sharded). Of
            several modules, which run one after the other, one unit is made, for a later call on the root.
        mesh: Ranks to shard over: None (all), a ``ProcessGroup``, a 1-D ``DeviceMesh`` or a ``Comm``; for two axes,
            replicate and shard, a 2-D ``DeviceMesh`` or a pair of Comms.
        wrap: Which modules are units: ``"auto"`` (the model's repeated blocks, small neighbours merged),
            :class:`TransformerBlocks`, :class:`MinNumel`, :class:`Named`, a predicate over modules, or None (the
            whole model is one unit). After calls on blocks, ``"auto"`` makes no further units but the root. A module
            without repeated blocks becomes one unit under ``"auto"``, to be taken in by a later call on the root;
            called as a model of its own it raises ``WrapError``, because all of it would be gathered at once: say
            ``wrap=None`` if that is meant.
        strategy: What is sharded.
        reshard_after_forward: FSDP2's word: False makes FULL_SHARD into SHARD_GRAD_OP (and so for the hybrid ones).
        mp_policy: Compute, reduce and other dtypes; None: the parameters' own.
        prefetch: What is gathered ahead, and when. Of the root's call.
        offload_policy: Whether shards, gradients and the optimizer's state live in host memory.
        frozen: Where frozen parameters live: ``"shard"`` them, ``"replicate"`` them on every rank (no communication
            for them), or ``"auto"``: replicate where they take at most a quarter of the smallest rank's memory.
        ignored_params: Parameters left as they are, on every rank; ``module.parameters()`` leaves out a module.
        device: What units compute on; None: the accelerator of this rank, else CPU.
        weights: Where all parameters and persistent buffers take their values from, such as
            ``fullshard.Pretrained(path)``: each rank reads its own elements to their place, and nothing is initialised,
            gathered or whole in memory on the way. Meant for a model on the meta device. Buffers that are not saved get
            their values from their modules. An ignored parameter with values keeps them where the source has none; one
            on the meta device is replaced by one with memory.
        first_values: How units on the meta device are initialised, and whether all ranks take rank 0's values. Like
            everything before the cut it is done unit by unit: one is whole in memory beside the shards, never two.

    Returns:
        The same object.

    Raises:
        ProcessGroupError: There is no process group, or the mesh does not fit.
        WrapError: The policy does not fit the model; nothing has changed then.
        MismatchError: Ranks hold different models; raised on every rank, nothing has changed then.
        ShardingError: The model is sharded already.
        ConfigError: Policies contradict each other, or the device cannot compute in the dtype.
        CheckpointError: The weights do not fit, and nothing has changed; or they cannot be read to their end, and the
            model is sharded with part of them. On every rank, with the same text.
    """
    strategy = _reshard(strategy, after_forward=reshard_after_forward)
    ranks = as_mesh(mesh, strategy, device)
    runtime_device = device_of(device or ranks.device)
    policy = UnitPolicy(strategy, mp_policy or MixedPrecision(), offload_policy, frozen)
    _check_policy(policy, runtime_device)
    root, wrap = (model, wrap) if isinstance(model, nn.Module) else (nn.ModuleList(model), None)
    members = (root,) if isinstance(model, nn.Module) else tuple(model)
    first = first_values or FirstValues()
    _check_weights(weights, first_values, whole=root is model)
    if len(set(members)) < len(members):
        raise ShardingError("A list of modules that become one unit names one of them twice.")
    inner = _sharded_inside(root, ranks)
    ignored = frozenset(ignored_params)
    policy = _place_frozen(policy, root, ranks)
    specs, unwrapped = _specs(root, wrap, ignored, inner, policy)
    specs[0].modules = members
    check_parameters(specs, sharded=sum(len(u.params) for runtime in inner for u in runtime.units))
    policies = (policy, prefetch, weights is not None, first.from_rank0)
    check_same_model(ranks, specs, policies, __version__, compare_values=weights is None and not first.from_rank0)
    reader = None if weights is None else open_weights(root, ranks, weights, ignored)
    inside = {id(m) for runtime in inner for top in runtime.root.modules for m in top.modules()}
    own = [module for module in root.modules() if id(module) not in inside]
    kept = [module for module in modules_kept(root, policy.precision.keep_fp32) if id(module) not in inside]
    kept_ids = frozenset(id(part) for module in kept for part in module.modules())
    account = Account()
    builder = UnitBuilder(ranks, policy, account, runtime_device, kept_ids)
    initializer = Initializer(root, ranks, builder.device, first)
    if reader is not None:
        ignored = give_memory(root, ignored, builder.device, reader)
        initializer.prepare_rest()  # while parameters have no memory: their initial values cost nothing
    move_buffers(own, builder.device, None)
    units = _build_units(specs, builder, None if reader is not None else initializer)
    if builder.device.type != "meta":
        initializer.prepare_rest()
    initializer.share_buffers(own)
    move_buffers((m for m in own if id(m) not in kept_ids), builder.device, policy.precision.buffer)
    keep_in_float32(kept, policy.precision, units[0])
    for unit in units:
        unit.hooks = UnitHooks(unit, kept_ids)
        fused.install(unit.hooks)
    units[0].casts_output = True
    units = _take_in(root, units, inner, ranks, account)
    runtime = Runtime(units, ranks, _as_prefetch(prefetch), account, runtime_device, frozenset(map(id, ignored)))
    runtime.unwrapped = unwrapped
    for member in members:
        attach(member, runtime)
        member.__class__ = sharded_class(type(member))  # pyright: ignore[reportAttributeAccessIssue]
    if reader is not None:
        fill(root, reader)
    return model


def _reshard(strategy: ShardingStrategy, *, after_forward: object) -> ShardingStrategy:
    """FSDP2's word for the same."""
    if after_forward is None:
        return strategy
    if not isinstance(after_forward, bool):
        raise ConfigError(
            f"reshard_after_forward is True or False; got {after_forward!r}. To gather inside a smaller group, "
            "shard inside it: strategy=ShardingStrategy.HYBRID_SHARD with a mesh of 2 axes."
        )
    kept = {
        ShardingStrategy.FULL_SHARD: ShardingStrategy.SHARD_GRAD_OP,
        ShardingStrategy.HYBRID_SHARD: ShardingStrategy.HYBRID_SHARD_ZERO2,
    }
    if after_forward and strategy in (*kept.values(), ShardingStrategy.NO_SHARD):
        raise ConfigError(f"reshard_after_forward=True contradicts strategy={strategy.name}; give one of them.")
    return strategy if after_forward else kept.get(strategy, strategy)


def _check_weights(weights: WeightSource | None, first_values: FirstValues | None, *, whole: bool) -> None:
    """Refuse a source of weights beside what it does not go with; ``whole``: a model is sharded, not a list."""
    if weights is not None and not whole:
        raise ConfigError("weights= fills a whole model, and a list of modules is none: give it to the root's call.")
    if weights is not None and first_values is not None:
        raise ConfigError("weights= gives the model all its values, so that first_values= has none to give: drop one.")


def _build_units(specs: Sequence[UnitSpec], builder: UnitBuilder, initializer: Initializer | None) -> list[Unit]:
    """Initialise and cut one unit after the other; no initializer: shards hold zeros, for a source to fill."""
    others = frozenset(module for spec in specs for module in spec.modules)
    units: list[Unit] = []
    for index, spec in enumerate(specs):
        if initializer is not None:
            initializer.prepare_unit(index, spec, others)
        units.append(builder.build(spec, values=initializer is not None))
    return units


def _as_prefetch(prefetch: BackwardPrefetch | Prefetch) -> Prefetch:
    return prefetch if isinstance(prefetch, Prefetch) else Prefetch(backward=prefetch)


def _check_policy(policy: UnitPolicy, device: Device) -> None:
    """Refuse what this device cannot do, before anything changes."""
    if policy.frozen not in FROZEN:
        raise ConfigError(f"frozen is one of {', '.join(FROZEN)}; got {policy.frozen!r}.")
    for keyword, given, kind in (
        ("mp_policy", policy.precision, MixedPrecision),
        ("offload_policy", policy.offload, CPUOffload),
    ):
        if given is not None and not isinstance(given, kind):
            raise ConfigError(
                f"{keyword} is a fullshard.{kind.__name__}; got {type(given).__module__}.{type(given).__name__}. The "
                "policies of torch's FSDP go to fullshard.compat.torch_fsdp, which has its fully_shard and its "
                "FullyShardedDataParallel."
            )
    if "bfloat16" in (policy.precision.param, policy.precision.reduce):
        native, why = device.supports_bf16()
        if not native and device.device.type == "cuda":
            raise ConfigError(
                f"mp_policy asks for bfloat16, but {why} Use float16 with a ShardedGradScaler, or float32."
            )


def _sharded_inside(root: nn.Module, ranks: Mesh) -> list[Runtime]:
    """The runtimes of parts of ``root`` that were sharded before it, in tree order.

    Raises:
        ShardingError: ``root`` itself is sharded.
        ProcessGroupError: A part was sharded over other ranks.
    """
    if is_sharded(root):
        raise ShardingError(f"{type(root).__name__} is sharded already; call fully_shard on a module once.")
    found: dict[int, Runtime] = {}
    inside = {id(module) for module in root.modules()}
    for name, module in root.named_modules():
        if is_sharded(module):
            runtime = runtime_of(module)
            found[id(runtime)] = runtime
            if not inside.issuperset(map(id, runtime.root.modules)):
                raise ShardingError(
                    f"{name} was sharded as one unit with modules outside of {type(root).__name__}. Shard first what "
                    "lies inside, then what is around all of it."
                )
            if not same_ranks(runtime.mesh, ranks):
                theirs, ours = (f"{m.replica_group.size} x {m.shard_group.size}" for m in (runtime.mesh, ranks))
                raise ProcessGroupError(
                    f"{name} was sharded over {theirs} ranks, and the call on {type(root).__name__} names {ours} or "
                    "other ranks. "
                    "Pass one mesh to every call of fully_shard."
                )
    return list(found.values())


def _specs(
    root: nn.Module, wrap: WrapPolicy, ignored: frozenset[nn.Parameter], inner: list[Runtime], policy: UnitPolicy
) -> tuple[list[UnitSpec], WrapError | None]:
    """Units to be made, of what is neither ignored nor sharded before, and what is wrong with them as a whole model."""
    slots = {(id(m), key) for runtime in inner for _, p in runtime.all_params() for m, key in p.slots}
    sharded = frozenset(p.sharded for runtime in inner for _, p in runtime.all_params())
    for path, module in root.named_modules():
        for key, param in module._parameters.items():
            if param in sharded and (id(module), key) not in slots:
                raise WrapError(
                    f"{path}.{key} is tied to a parameter of a block that was sharded on its own. A tied parameter "
                    "belongs to a unit around all its places: call fully_shard once, on the root, with a wrap policy."
                )
    chosen = wrap if not (inner and wrap == "auto") else None
    found, unwrapped = [], None
    try:
        found = find_units(root, chosen)
    except NoRepeatedBlocksError as error:
        unwrapped = error  # right for a block that a later call takes in, wrong for a model
    specs = assign_parameters(root, found, ignored | sharded)
    if chosen == "auto":
        specs = merge_tiny(specs, frozen_too=policy.frozen == "shard")
    return specs, unwrapped


def _place_frozen(policy: UnitPolicy, root: nn.Module, ranks: Mesh) -> UnitPolicy:
    """Decide ``frozen="auto"``, alike on all ranks."""
    if policy.frozen != "auto":
        return policy
    frozen = [param for param in root.parameters() if not param.requires_grad]
    nbytes = sum(p.numel() * dtypes_of(policy.precision, p, kept=False).compute.itemsize for p in frozen)
    smallest = min(ranks.all_gather_object(device_memory_bytes(ranks.device)))
    place = "replicate" if nbytes <= _REPLICATED_SHARE * smallest else "shard"
    return UnitPolicy(policy.strategy, policy.precision, policy.offload, place)


def _take_in(root: nn.Module, units: list[Unit], inner: list[Runtime], ranks: Mesh, account: Account) -> list[Unit]:
    """Units made now and those of parts that were sharded before, root first, the others in tree order."""
    if not inner:
        return units
    paths: dict[int, list[str]] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        paths.setdefault(id(module), []).append(plain_name(path))
    order = {key: place for place, key in enumerate(paths)}
    for runtime in inner:
        for module in runtime.root.modules:
            detach(module)
            module.__class__ = plain_class(type(module))
        for unit in runtime.units:
            unit.join(paths, ranks, account)
        units += runtime.units
    return [units[0], *sorted(units[1:], key=lambda unit: order[id(unit.modules[0])])]


def units(model: nn.Module) -> UnitTable:
    """The unit table of a sharded model; any rank, no communication."""
    runtime = runtime_of(model)
    return unit_table(runtime.units, runtime.mesh.shard_group.size)


def check_wrapped(model: nn.Module) -> None:
    """Tell now, not at the first forward, that ``"auto"`` found no blocks; any rank.

    Raises:
        WrapError: All of the model is one unit, and nobody said so.
    """
    unwrapped = runtime_of(model).unwrapped
    if unwrapped is not None:
        raise unwrapped


def memory_summary(model: nn.Module) -> dict[str, int]:
    """Bytes of this rank's part of a sharded model; no communication.

    Returns:
        ``parameters`` (shards), ``gradients`` (of the shards, as they are now), ``gathered_peak`` (gathered buffers at
        most at once so far) and ``gradient_buffer_peak`` (unsharded gradients at most at once so far).
    """
    runtime = runtime_of(model)
    grads = [p.sharded.grad for _, p in runtime.all_params() if p.sharded.grad is not None]
    return {
        "parameters": runtime.account.live["shards"],
        "gradients": sum(g.nbytes for g in grads),
        "gathered_peak": runtime.account.peak["gathered"],
        "gradient_buffer_peak": runtime.account.peak["gradients"],
    }


@contextmanager
def record(model: nn.Module) -> Iterator[Recorder]:
    """Record what the engine does: a step, or part of one; any rank, no communication.

    Yields:
        The recorder; its ``events`` and ``samples`` are there when the context is left.
    """
    runtime = runtime_of(model)
    recorder = Recorder(runtime.device.device, runtime.account, {u.name: u.gradient_bytes() for u in runtime.units})
    runtime.watch(recorder)
    try:
        yield recorder
    finally:
        runtime.watch(None)
        recorder.stop()


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulate gradients without communication: backward adds to unsharded gradients and reduces nothing.

    Saves reduce-scatters at the price of an unsharded gradient of every unit. The first backward after the context
    reduces the sum. All ranks enter it together. What waits is not in ``.grad``: ``zero_grad()`` does not drop it,
    ``reset(model)`` does.
    """
    runtime = runtime_of(model)
    before, runtime.syncing = runtime.syncing, False
    try:
        yield
    finally:
        runtime.syncing = before


@contextmanager
def no_all_reduce(model: nn.Module) -> Iterator[None]:
    """Under the hybrid strategies, accumulate inside the shard group; every rank enters it around the same backwards.

    Gradients are reduce-scattered as always, but replicas add up theirs in the first backward outside only: one
    all-reduce for several micro-batches, at the price of a gradient's shard. With one axis it changes nothing.
    """
    runtime = runtime_of(model)
    before, runtime.across = runtime.across, runtime.mesh.replica_group.size == 1
    try:
        yield
    finally:
        runtime.across = before


def unreduced(model: nn.Module) -> list[str]:
    """Units whose gradients wait to be reduced or added up over replicas: a step is not complete. No communication."""
    waiting = (
        unit
        for unit in runtime_of(model).units
        if unit.holds_gradient or any(lane.partial is not None for lane in unit.lanes)
    )
    return [unit.name for unit in waiting]


def mesh_of(model: nn.Module) -> Mesh:
    """The ranks that share a sharded model."""
    return runtime_of(model).mesh


def reset(model: nn.Module) -> None:
    """Drop what a failed forward or backward left behind, on every rank; the next root forward does so by itself."""
    runtime_of(model).reset()
    warnings.warn("The model was reset: gradients of the failed step are gone, shards are as they were.", stacklevel=2)
