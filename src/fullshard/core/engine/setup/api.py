"""The library's entry point: ``fully_shard``; and what it changes of modules and of ``torch.autograd.backward``.

``backward(inputs=…)`` with shards is not known to torch's graph, which has the full parameters. torch has no hook
there, so ``torch.autograd.backward`` is replaced for as long as a sharded model lives. Not only in its passes: a graph
may be kept (``retain_graph=True``) and asked for other inputs later, and torch would silently give none.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import warnings
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn

from fullshard.core.comm import Comm, Device, Mesh, as_mesh, device_memory_bytes, device_of, hides_messages, together
from fullshard.core.engine.extension.extension_lane import ExtensionParam, even_layout
from fullshard.core.engine.full.model_class import sharded_class
from fullshard.core.engine.full.stream import warn_if_buffers_differ
from fullshard.core.engine.parallel.parallel import Parallel, check_axes, check_ties, everyone
from fullshard.core.engine.parallel.parallel_lane import ParallelParam
from fullshard.core.engine.registry import attach, follow_tree, refuse_added
from fullshard.core.engine.setup.build import (
    UnitBuilder,
    check_sharers,
    include,
    keep_in_float32,
    move_buffers,
    sharded_inside,
    sharers_in,
)
from fullshard.core.engine.setup.initial import (
    Differing,
    FirstValues,
    Initializer,
    check_same_model,
    different_values,
    refuse_different_copies,
    refuse_different_values,
)
from fullshard.core.engine.setup.weights import WeightSource, fill, give_memory, open_weights, quantize_of
from fullshard.core.engine.setup.wrap import (
    NoRepeatedBlocksError,
    UnitSpec,
    assign_parameters,
    check_parameters,
    find_units,
    merge_tiny,
    modules_kept,
)
from fullshard.core.engine.step.hooks import EmbeddingSite, LinearSite, UnitHooks
from fullshard.core.engine.step.lane import BufferTracker
from fullshard.core.engine.step.precision import dtypes_of
from fullshard.core.engine.step.runtime import Runtime
from fullshard.core.engine.step.unit import Unit, is_plain_embedding, plain_type
from fullshard.core.engine.tables.table_param import TableEmbeddingSite, TableLinearSite, TableParam
from fullshard.core.policy import (
    FROZEN,
    TABLES,
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    Prefetch,
    ShardingStrategy,
    UnitPolicy,
    WrapPolicy,
)
from fullshard.core.quantized import QuantizedLayers
from fullshard.errors import ConfigError, ShardingError, WrapError
from fullshard.version import __version__

_SITE = "_fullshard_site"  # in a module's __dict__


def fuse(hooks: UnitHooks) -> None:
    """Make the plain linear and embedding modules of a unit write their weight gradients into the lane."""
    own_forward = (ExtensionParam, ParallelParam)  # theirs computes with their class
    for param in hooks.unit.params:
        for module, key in param.slots:
            if key != "weight" or "forward" in module.__dict__ or isinstance(param, own_forward):
                continue
            home = isinstance(param, TableParam)
            if plain_type(module) is nn.Linear:
                _replace_forward(module, (TableLinearSite if home else LinearSite)(hooks, param, module))
            elif is_plain_embedding(module):
                _replace_forward(module, (TableEmbeddingSite if home else EmbeddingSite)(hooks, param, module))


def _replace_forward(module: nn.Module, site: LinearSite | EmbeddingSite) -> None:
    module.__dict__[_SITE] = site
    module.forward = MethodType(_forward, module)


def _forward(module: nn.Module, input: torch.Tensor) -> torch.Tensor:
    # One function for all modules, not each module's site: the compiler would take another ``forward`` for another kind
    # of block, compile each block anew, and give up after the eighth.
    if torch.compiler.is_compiling():
        return type(module).forward(module, input)
    return module.__dict__[_SITE](input)


_lock = threading.RLock()  # a model may be freed by a garbage collection in any line here
_living: set[int] = set()
_replaced: list[Any] = []
"""What is replaced, and by what; empty while nothing is."""


def accept_shards_while_alive(model: object) -> None:
    """Let ``backward(inputs=…)`` take shards until ``model`` is freed; in any thread."""
    with _lock:
        _living.add(id(model))
        weakref.finalize(model, _freed, id(model)).atexit = False
        if not _replaced:
            torchs = torch.autograd.backward

            @functools.wraps(torchs)
            def backward(*args: Any, **kwargs: Any) -> None:
                inputs = kwargs.get("inputs")
                if inputs is not None:
                    given = [inputs] if isinstance(inputs, torch.Tensor) else inputs
                    kwargs["inputs"] = [_in_graph(one) for one in given]
                torchs(*args, **kwargs)

            _replaced[:] = torchs, backward
            torch.autograd.backward = backward


def _freed(model: int) -> None:
    with _lock:
        _living.discard(model)
        # If somebody has wrapped ours meanwhile, it stays, and only passes on.
        if not _living and _replaced and torch.autograd.backward is _replaced[1]:
            torch.autograd.backward = _replaced[0]
            _replaced.clear()


def _in_graph(tensor: Any) -> Any:
    """Return the full parameter of a shard, not refused as freed: its unit is gathered before it is read."""
    full = getattr(tensor, "__dict__", {}).get("full_parameter")
    if full is None:
        return tensor
    full().__class__ = full().watcher().plain_class
    return full()


_REPLICATED_SHARE = 0.25
"""``frozen="auto"`` replicates frozen parameters that take at most this share of the smallest rank's memory."""


@dataclass(frozen=True)
class _Request:
    """What a call asks for."""

    root: nn.Module  # the model
    members: tuple[nn.Module, ...]  # the modules that become the root's unit
    wrap: WrapPolicy
    ranks: Mesh
    policy: UnitPolicy  # of the units
    prefetch: BackwardPrefetch | Prefetch
    ignored: frozenset[nn.Parameter]  # they stay unsharded
    weights: WeightSource | None
    first: FirstValues
    inner: list[Runtime]  # the parts of the model that were sharded before


@dataclass(frozen=True)
class _Agreed:
    """What all ranks agreed to build."""

    policy: UnitPolicy  # of the units, with frozen="auto" resolved
    specs: list[UnitSpec]
    unwrapped: WrapError | None  # the error to raise if the root is used as a complete model
    own: list[nn.Module]  # modules that were not sharded before
    kept: list[nn.Module]  # modules of ``own`` that compute in float32
    differing: Differing
    everyone: Mesh  # all ranks that hold parts of the model

    @property
    def kept_ids(self) -> frozenset[int]:
        """Ids of all modules that compute in float32."""
        return frozenset(id(part) for module in self.kept for part in module.modules())


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
    tables: str = "gather",
    ignored_params: Iterable[nn.Parameter] = (),
    device: torch.device | None = None,
    weights: WeightSource | None = None,
    first_values: FirstValues | None = None,
) -> Any:
    """Shard ``model`` over the ranks of ``mesh``, in place. Every rank calls it with the same model.

    Afterwards each parameter of the model is this rank's shard: complete rows, shape ``(rows here, *rest)``, possibly
    none. Build the optimizer on ``model.parameters()`` as usual. Forward and backward gather one unit at a time; after
    ``backward()`` each shard's ``.grad`` is the mean over ranks of the gradient.

    A parameter whose class has ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``, as torch's FSDP2 defines them, is
    gathered as these say. Its shard is a new Parameter of the plain tensor inside.

    Call it once on the root with a wrap policy, or bottom up: on blocks, each with its own policies, then on the root,
    which includes them and makes one unit of the rest. After that only the root may be called.

    Args:
        model: Any module, on CPU, on the device, or on the meta device (units are initialized as they are sharded). A
            list of modules that run one after the other becomes one unit, for a later call on the root.
        mesh: Ranks to shard over: None (all), a ``ProcessGroup``, a 1-D ``DeviceMesh`` or a ``Comm``; for two axes,
            replicate and shard, a 2-D ``DeviceMesh`` or a pair of Comms. A block sharded before may have the same
            ranks, or some of them: each such group then holds values of its own, as experts do.
        wrap: Which modules are units: ``"auto"`` (the model's repeated blocks, small neighbours merged),
            :class:`TransformerBlocks`, :class:`MinNumel`, :class:`Named`, a predicate over modules, or None (one unit
            for the entire model). After calls on blocks, ``"auto"`` makes no units but the root. A module without
            repeated blocks, and without any that is alone in a ``ModuleList``, becomes one unit under ``"auto"``, to be
            included by a later call on the root. If it has more than 1,000,000 parameters, its own forward raises
            ``WrapError``, because it would be gathered at once: pass ``wrap=None`` if you want that.
        strategy: What is sharded.
        reshard_after_forward: FSDP2's name: False turns FULL_SHARD into SHARD_GRAD_OP, and the hybrid ones likewise.
        mp_policy: Compute, reduce and other dtypes; None: the parameters' own.
        prefetch: Which units are gathered ahead, and when; only the root's call uses it.
        offload_policy: Whether shards, gradients and optimizer states are in host memory.
        frozen: Placement of frozen parameters: ``"shard"``, ``"replicate"`` (on every rank, without communication), or
            ``"auto"``: replicate if they take at most a quarter of the smallest rank's memory.
        tables: Use of large embeddings and heads outside the blocks: ``"gather"`` (like the rest), ``"auto"``
            (tokens travel to their rows, in lookups and in :func:`vocab_parallel_loss`, where that sends fewer bytes),
            or ``"home"`` (always). A table that anything else reads is gathered for it.
        ignored_params: Parameters that stay unsharded, on every rank; ``module.parameters()`` excludes a module.
        device: Device that units compute on; None: this rank's accelerator, else CPU.
        weights: Source of all parameters and persistent buffers, such as ``fullshard.Pretrained(path)``: each rank
            reads its own elements, and no parameter is initialized, gathered or complete in memory. Meant for a model
            on the meta device. Buffers that are not saved are initialized by their modules. An ignored parameter
            keeps its values if the source has none; one on the meta device is allocated.
        first_values: How units on the meta device are initialized, and whether all ranks take rank 0's values. One unit
            at a time is complete in memory in addition to the shards.

    Returns:
        The same object.

    Raises:
        ProcessGroupError: There is no process group, or the mesh does not fit.
        WrapError: The policy does not fit the model, or a tensor subclass cannot be taken apart; nothing has changed.
        MismatchError: Ranks hold different models; raised on every rank, nothing has changed.
        ShardingError: The model is sharded already.
        ConfigError: Policies contradict each other, or the device cannot compute in the dtype.
        CheckpointError: The weights do not fit, and nothing has changed; or they cannot be read completely, and the
            model is sharded with part of them. Raised on every rank with the same text.
    """
    strategy = _reshard(strategy, after_forward=reshard_after_forward)
    ranks = as_mesh(mesh, strategy, device)
    runtime_device = _device_for(ranks, device)
    policy = UnitPolicy(strategy, mp_policy or MixedPrecision(), offload_policy, frozen, tables)
    _check_policy(policy, runtime_device)
    root, members, wrap = _root_of(model, wrap)
    first = first_values or FirstValues()
    _check_weights(weights, first_values, is_model=root is model)
    inner = sharded_inside(root, ranks)
    ignored = frozenset(ignored_params)
    request = _Request(root, members, wrap, ranks, policy, prefetch, ignored, weights, first, inner)
    quantised = together(ranks, lambda: QuantizedLayers(root, quantize_of(weights)))
    with quantised.undone_on_error():
        agreed = _agree(request)
        reader = None if weights is None else open_weights(root, agreed.everyone, weights, ignored)
    tracker = BufferTracker()
    builder = UnitBuilder(ranks, agreed.policy, tracker, runtime_device, agreed.kept_ids)
    initializer = Initializer(root, ranks, agreed.everyone, builder.device, first, agreed.differing)
    if reader is not None:
        ignored = give_memory(root, ignored, builder.device, reader)
        initializer.prepare_rest()  # while parameters have no memory: their initial values cost nothing
    units = _build(agreed, builder, initializer, values=reader is None)
    units = include(root, units, inner, ranks, tracker)
    ahead = prefetch if isinstance(prefetch, Prefetch) else Prefetch(backward=prefetch)
    runtime = Runtime(units, ranks, ahead, tracker, runtime_device, frozenset(map(id, ignored)))
    accept_shards_while_alive(runtime)
    runtime.unwrapped = agreed.unwrapped
    runtime.check_buffers = warn_if_buffers_differ
    runtime.follow_tree, runtime.on_added = follow_tree, refuse_added
    _warn_of_ignored(ignored, ranks)
    for member in members:
        attach(member, runtime)
        member.__class__ = sharded_class(type(member))  # pyright: ignore[reportAttributeAccessIssue]
    if reader is not None:
        fill(root, reader)
    # The freed full parameters lie between the shards, in pieces too small for a step's activations: kept, they made a
    # Llama-3-8B with LoRA reserve 61.8 GB for 32.1 GB of tensors (benchmarks/fragments.py). Trimming waits for the
    # device and returns every free segment, which the next unit would allocate again: bottom up, the root does it once.
    if len(units) > 1:
        runtime_device.trim()
    return model


def _device_for(ranks: Mesh, device: torch.device | None) -> Device:
    """Return the device that units compute on, with as many reduces under way as its collectives can hide."""
    runtime_device = device_of(device or ranks.device)
    if hides_messages(ranks.shard_group):
        runtime_device.reduces_behind = max(1, runtime_device.reduces_behind)
    return runtime_device


def _root_of(
    model: nn.Module | Sequence[nn.Module], wrap: WrapPolicy
) -> tuple[nn.Module, tuple[nn.Module, ...], WrapPolicy]:
    """Return the root, the modules that the caller passed, and the wrap policy: a list of modules is one unit."""
    if isinstance(model, nn.Module):
        return model, (model,), wrap
    members = tuple(model)
    if len(set(members)) < len(members):
        raise ShardingError("A list of modules that become one unit contains a module twice.")
    return nn.ModuleList(members), members, None


def _reshard(strategy: ShardingStrategy, *, after_forward: object) -> ShardingStrategy:
    """Apply FSDP2's ``reshard_after_forward`` to the strategy."""
    if after_forward is None:
        return strategy
    if not isinstance(after_forward, bool):
        raise ConfigError(
            f"reshard_after_forward must be True or False; got {after_forward!r}. To gather inside a smaller group, "
            "shard inside it: strategy=ShardingStrategy.HYBRID_SHARD with a mesh of 2 axes."
        )
    if after_forward and (strategy.keeps_after_forward or not strategy.shards):
        raise ConfigError(f"reshard_after_forward=True contradicts strategy={strategy.name}; give one of them.")
    if after_forward or not strategy.shards:
        return strategy
    same = (one for one in ShardingStrategy if one.shards and one.needs_two_axes is strategy.needs_two_axes)
    return next(one for one in same if one.keeps_after_forward)


def _check_weights(weights: WeightSource | None, first_values: FirstValues | None, *, is_model: bool) -> None:
    """Refuse combinations with ``weights``; ``is_model``: a model is sharded, not a list of modules."""
    if weights is not None and not is_model:
        raise ConfigError("weights= fills a model, not a list of modules: pass it when you shard the model itself.")
    if weights is not None and first_values is not None:
        raise ConfigError("weights= sets all values of the model, so first_values= has no effect: pass one of them.")


def _agree(request: _Request) -> _Agreed:
    """Decide what to build, and compare it over ranks. Every rank calls it; nothing changes."""
    request = dataclasses.replace(request, policy=_place_frozen(request))
    policy, inner = request.policy, request.inner
    specs, unwrapped = _specs(request)
    specs[0].modules = request.members
    parallels = _parallels(request, specs)
    check_axes(parallels, request.ranks)
    for extension in (member.extension for spec in specs for member in spec.params):
        if extension is not None:
            # Both refuse before anything changes.
            layout = even_layout(extension, request.ranks.shard_group.size)
            rows = layout.shard_numel // layout.placements[0].row_numel
            extension.try_cut((rows, *extension.values.shape[1:]))
    check_parameters(specs, sharded=sum(len(u.params) for runtime in inner for u in runtime.units))
    inside = {id(m) for runtime in inner for top in runtime.root.modules for m in top.modules()}
    own = [module for module in request.root.modules() if id(module) not in inside]
    differing = _compare_ranks(request, specs, own)
    every = everyone(request.ranks, parallels[0] if parallels else None)
    if parallels:
        check_ties(request.root, every)
    if parallels and request.weights is None:
        refuse_different_copies(request.ranks, every, parallels[0].comm, specs, request.root)
    kept = [module for module in modules_kept(request.root, policy.precision.keep_fp32) if id(module) not in inside]
    return _Agreed(policy, specs, unwrapped, own, kept, differing, every)


def _parallels(request: _Request, specs: Sequence[UnitSpec]) -> list[Parallel]:
    """Return how tensor parallelism divides parameters, those that were sharded before included."""
    found = [p.parallel for one in request.inner for _, p in one.all_params() if isinstance(p, ParallelParam)]
    return found + [member.parallel for spec in specs for member in spec.params if member.parallel is not None]


def _compare_ranks(request: _Request, specs: Sequence[UnitSpec], own: Iterable[nn.Module]) -> Differing:
    """Compare the model over ranks, and return where their values differ and rank 0's are taken.

    Args:
        request: What every rank asks for; every rank calls it.
        specs: The model's units.
        own: The modules in the root that were not sharded before; their buffers are compared.
    """
    ranks, first = request.ranks, request.first
    has_weights, quantize = request.weights is not None, quantize_of(request.weights)
    asked = (request.policy, request.prefetch, quantize, has_weights, first.from_rank0, first.from_rank0_if_different)
    counts = not has_weights and not first.from_rank0
    sharers = sharers_in(request.root)
    about = f"fullshard {__version__}, torch {torch.__version__}", _shared_rows(sharers), repr(asked)
    units = check_same_model(ranks, specs, about, compare_values=counts)
    check_sharers(type(request.root).__name__, sharers, ranks)
    if not counts or not first.from_rank0_if_different:
        refuse_different_values(ranks, specs, units)
        return Differing()
    ids = {id(module) for module in own}
    buffers = {
        f"{path}.{key}" if path else key: buffer
        for path, module in request.root.named_modules()
        for key, buffer in module._buffers.items()
        if buffer is not None and id(module) in ids
    }
    return different_values(ranks, specs, units, buffers)


def _shared_rows(sharers: Sequence[Comm]) -> str:
    """Return what :func:`sequence_parallel` did, in which ranks must not differ."""
    if not sharers:
        return "rows of its own (without sequence_parallel)"
    sizes = " and ".join(str(comm.size) for comm in sharers)
    return f"rows that a group of {sizes} shares (of sequence_parallel, whose groups have one size)"


def _build(agreed: _Agreed, builder: UnitBuilder, initializer: Initializer, *, values: bool) -> list[Unit]:
    """Shard the units one after the other, and move buffers; without ``values`` shards hold zeros to be filled."""
    own, precision = agreed.own, agreed.policy.precision
    move_buffers(own, builder.device, None)
    units = _build_units(agreed.specs, builder, initializer if values else None)
    if builder.device.type != "meta":
        initializer.prepare_rest()
    initializer.share_buffers(own)
    move_buffers((m for m in own if id(m) not in agreed.kept_ids), builder.device, precision.buffer)
    keep_in_float32(agreed.kept, precision, units[0])
    _hook(units, agreed.kept_ids)
    return units


def _build_units(specs: Sequence[UnitSpec], builder: UnitBuilder, initializer: Initializer | None) -> list[Unit]:
    """Initialize and shard one unit after the other; without initializer, shards hold zeros for a source to fill."""
    others = frozenset(module for spec in specs for module in spec.modules)
    units: list[Unit] = []
    for index, spec in enumerate(specs):
        if initializer is not None:
            initializer.prepare_unit(index, spec, others)
        units.append(builder.build(spec, values=initializer is not None))
    return units


def _hook(units: Sequence[Unit], kept: frozenset[int]) -> None:
    """Register the engine's hooks on ``units``; ``kept``: ids of modules that compute in float32."""
    for unit in units:
        unit.hooks = UnitHooks(unit, kept)
        fuse(unit.hooks)
    units[0].options = dataclasses.replace(units[0].options, casts_output=True)


def _warn_of_ignored(ignored: Iterable[nn.Parameter], ranks: Mesh) -> None:
    """Warn that each rank trains its own values of trainable ignored parameters."""
    trainable = sum(param.requires_grad for param in ignored)
    if trainable and ranks.size > 1:
        warnings.warn(
            f"{trainable} of ignored_params are trainable: their gradients are not reduced, so each of {ranks.size} "
            "ranks would train its own values. Call fullshard.average_ignored_gradients(model) after backward, or "
            "freeze them.",
            stacklevel=3,
        )


def _check_policy(policy: UnitPolicy, device: Device) -> None:
    """Refuse policies that are malformed or that this device does not support, before anything changes."""
    if policy.frozen not in FROZEN:
        raise ConfigError(f"frozen must be one of {', '.join(FROZEN)}; got {policy.frozen!r}.")
    if policy.tables not in TABLES:
        raise ConfigError(f"tables must be one of {', '.join(TABLES)}; got {policy.tables!r}.")
    for keyword, given, kind in (
        ("mp_policy", policy.precision, MixedPrecision),
        ("offload_policy", policy.offload, CPUOffload),
    ):
        if given is not None and not isinstance(given, kind):
            raise ConfigError(
                f"{keyword} is a fullshard.{kind.__name__}; got {type(given).__module__}.{type(given).__name__}. For "
                "policies of torch's FSDP, use fully_shard or FullyShardedDataParallel of fullshard.compat.torch_fsdp."
            )
    if "bfloat16" in (policy.precision.param, policy.precision.reduce):
        native, why = device.supports_bf16()
        if not native and device.device.type == "cuda":
            raise ConfigError(
                f"mp_policy asks for bfloat16, but {why} Use float16 with a ShardedGradScaler, or float32."
            )


def _specs(request: _Request) -> tuple[list[UnitSpec], WrapError | None]:
    """Return the units to build, and the error to raise if they are used as a complete model, or None."""
    root, inner = request.root, request.inner
    slots = {(id(m), key) for runtime in inner for _, p in runtime.all_params() for m, key in p.slots}
    sharded = frozenset(p.sharded for runtime in inner for _, p in runtime.all_params())
    for path, module in root.named_modules():
        for key, param in module._parameters.items():
            if param in sharded and (id(module), key) not in slots:
                raise WrapError(
                    f"{path}.{key} is tied to a parameter of a block that was sharded on its own. A tied parameter "
                    "belongs to a unit around all its registrations: call fully_shard once, on the root, with a policy."
                )
    chosen = request.wrap if not (inner and request.wrap == "auto") else None
    found, unwrapped = [], None
    try:
        found = find_units(root, chosen)
    except NoRepeatedBlocksError as error:
        unwrapped = error  # fine for a block that a later call includes, an error for a complete model
    specs = assign_parameters(root, found, request.ignored | sharded)
    if chosen == "auto":
        specs = merge_tiny(specs, frozen_too=request.policy.frozen == "shard")
    for spec in specs:
        for member in spec.params:
            member.take_apart()
    return specs, unwrapped


def _place_frozen(request: _Request) -> UnitPolicy:
    """Resolve ``frozen="auto"``, identically on all ranks."""
    policy, ranks = request.policy, request.ranks
    if policy.frozen != "auto":
        return policy
    frozen = [param for param in request.root.parameters() if not param.requires_grad]
    nbytes = sum(p.numel() * dtypes_of(policy.precision, p, kept=False).compute.itemsize for p in frozen)
    smallest = min(ranks.all_gather_object(device_memory_bytes(ranks.device)))
    place = "replicate" if nbytes <= _REPLICATED_SHARE * smallest else "shard"
    return dataclasses.replace(policy, frozen=place)
