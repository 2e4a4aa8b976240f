"""``Accelerator``: the accelerate library's, with fullshard in place of its FSDP.

Methods in which the library uses torch's FSDP, and their implementation here:

=====================================  ==================================================================
``__init__``                           FSDP is hidden from the library's, so that it creates no torch plugin; ours is
                                       set afterwards
``prepare``, ``prepare_model``         ours, with the library's checks and its autocast around ``forward``
``no_sync``, ``accumulate``            the engine's ``no_sync``
``clip_grad_norm_``                    ours, over shards, of any parameters
``clip_grad_value_``                   the library's for one process: clipping by element needs no communication
``unwrap_model``                       the library's, after removing our wrapper
``get_state_dict``, ``save_model``     streamed to rank 0
``save_state``, ``load_state``         ours for models and optimizers, the library's for the rest
=====================================  ==================================================================
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import accelerate
import torch
from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch import nn
from torch.optim import Optimizer

from fullshard.compat.accelerate import saving
from fullshard.compat.accelerate.plugin import FullyShardedDataParallelPlugin
from fullshard.compat.accelerate.prepare import (
    BY_PLUGIN,
    blocks_of,
    is_sharded,
    make_collective,
    shard,
    takes_rank_0s_values,
    unwrapped,
    upcast_trainable,
)
from fullshard.compat.accelerate.private import (
    forget_ranks,
    is_prepared,
    mark_prepared,
    prepare_one,
    prepared_by,
    shared_states,
)
from fullshard.core.comm import Comm, axes_of, join_alone
from fullshard.core.engine import full_state_dict, no_sync
from fullshard.core.engine.setup.wrap import refuse_distributed
from fullshard.core.optim import Places, ShardedGradScaler, clip_grad_norm_, repoint
from fullshard.errors import ConfigError

_library: Any = accelerate  # untyped: its annotations allow None where it is never None here
_FSDP = DistributedType.FSDP
_USE_FSDP = "ACCELERATE_USE_FSDP"
_USE_PARALLELISM = "ACCELERATE_USE_PARALLELISM_CONFIG"
_OTHERS = ("deepspeed_plugin", "deepspeed_plugins", "megatron_lm_plugin", "torch_tp_plugin")
_OTHERS_BY_ENVIRONMENT = {"ACCELERATE_USE_DEEPSPEED": "DeepSpeed", "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM"}


class _State(AcceleratorState):
    """The library's state, shared by all Accelerators of a process, with a plugin of this Accelerator only."""

    __slots__ = ("fsdp_plugin",)


class Accelerator(_library.Accelerator):
    """Accelerate's ``Accelerator`` whose models are sharded by fullshard.

    Models are always sharded, even where the library would not: as ``fsdp_plugin`` sets, or else the ``FSDP_*``
    environment variables, or else with the plugin's defaults. One process is a world of one rank. The rest is
    inherited from the library and documented there. Start scripts with torchrun, ``accelerate launch`` or ``fullshard
    launch``; they run on GPUs, or without any or with ``cpu=True`` on CPUs.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Create it with the library's arguments; ``fsdp_plugin`` is this package's plugin or Accelerate's.

        Without a plugin, a later Accelerator of this process uses that of the first.

        Raises:
            ConfigError: Another kind of sharding or fp8 is requested; or ``parallelism_config`` has other axes than
                ``dp_replicate`` and ``dp_shard``, or not as many ranks as there are.
        """
        given = inspect.signature(accelerate.Accelerator.__init__).bind(self, *args, **kwargs).arguments
        given.pop("self")
        _refuse_others(given)
        plugin = _plugin(given.pop("fsdp_plugin", None))
        parallelism = _parallelism(given.pop("parallelism_config", None))
        if not torch.cuda.is_available():
            given["cpu"] = True  # otherwise the library treats torchrun's ranks as single processes
            if shared_states()[0].get("backend", "") is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
                forget_ranks()  # it does so already, as TrainingArguments() without use_cpu asked it to
        with _hidden_from_the_library():
            super().__init__(**given)
        if self.mixed_precision == "fp8":
            raise ConfigError("mixed_precision must be no, bf16 or fp16; fp8 is not supported.")
        if self.ddp_handler is not None:
            warnings.warn("DistributedDataParallelKwargs has no effect: models are sharded, not DDP.", stacklevel=2)
        os.environ[_USE_FSDP] = "true"
        self._ranks = join_alone(self.device)
        for state in shared_states():
            state["distributed_type"] = _FSDP
        shared_states()[1].setdefault("fsdp_plugin", plugin)
        self.state: Any = _State()
        self.state.fsdp_plugin = plugin
        self._mesh = self._mesh_of(parallelism)
        if self.mixed_precision != "no":
            plugin.set_mixed_precision(self.mixed_precision)
        self.native_amp = self.mixed_precision != "no"
        self.scaler = None
        if self.mixed_precision == "fp16":
            options = self.scaler_handler.to_kwargs() if self.scaler_handler is not None else {}
            self.scaler = ShardedGradScaler(self.device.type, **options)
        self._places: list[Places] = []
        self._by_class = BY_PLUGIN

    def _mesh_of(self, parallelism: ParallelismConfig | None) -> tuple[Comm, Comm] | None:
        """Return the axes ``dp_replicate`` and ``dp_shard``; None: all ranks shard, or as the plugin says.

        Every rank calls it.
        """
        if parallelism is None:
            return None
        size = parallelism.data_parallel_size
        if size != self._ranks.size:
            raise ConfigError(
                f"parallelism_config has {parallelism.dp_replicate_size} x {parallelism.dp_shard_size} = {size} ranks "
                f"(dp_replicate_size x dp_shard_size), and there are {self._ranks.size}. Change a size, or start "
                f"{size} ranks."
            )
        self.state.parallelism_config = parallelism
        self.state.device_mesh = parallelism.get_device_mesh(self.device.type)
        if not parallelism.dp_replicate_enabled:
            return None
        return axes_of(self._ranks, parallelism.dp_shard_size or 1)

    @property
    def should_save_model(self) -> bool:
        """True on the first process of each machine, also with a ``parallelism_config``."""
        return self.state.is_local_main_process

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Shard models, point optimizers at the shards, and prepare the rest as the library does; every rank calls it.

        Objects may be in any order. Several models and optimizers are supported, in one call or in several; an
        optimizer may be prepared before or after its model.

        Raises:
            ConfigError: An optimizer has parameters that no prepared model has.
        """
        if device_placement is not None and len(device_placement) != len(args):
            raise ConfigError(f"device_placement has {len(device_placement)} entries for {len(args)} objects.")
        place = device_placement or [None] * len(args)
        result = list(args)
        for models in (True, False):
            for index, one in enumerate(args):
                if isinstance(one, nn.Module) is models:
                    result[index] = prepare_one(self, one, first_pass=True, device_placement=place[index])
        result = [prepare_one(self, one, device_placement=where) for one, where in zip(result, place, strict=True)]
        kept = prepared_by(self)
        prepared = [*kept.dataloaders, *kept.models, *kept.optimizers, *kept.schedulers]
        for one in result:
            if any(one is other for other in prepared):
                mark_prepared(one)
        return tuple(result) if len(result) > 1 else result[0]

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,  # noqa: FBT001 (Accelerate's signature)
        evaluation_mode: bool = False,  # noqa: FBT001, FBT002
    ) -> nn.Module:
        """Shard one model; every rank calls it. A model that is sharded already is only registered.

        Args:
            model: The model.
            device_placement: Whether an ``evaluation_mode`` model moves to the device; None: the Accelerator's own
                setting.
            evaluation_mode: Leave the model unsharded.

        Returns:
            The wrapper (``fsdp_version=1``), or the model itself (2).

        Raises:
            WrapError: torch has divided its parameters already, as ``from_pretrained(distributed_config=…)`` does.
        """
        if evaluation_mode or is_prepared(model):
            place = self.device_placement if device_placement is None else device_placement
            return super().prepare_model(model, device_placement=place, evaluation_mode=evaluation_mode)
        refuse_distributed(model.named_parameters())
        plugin = self.state.fsdp_plugin
        self._places.append(Places(model))
        inner = unwrapped(model)
        ready = is_sharded(model)
        if not ready and self.mixed_precision != "no":
            counts = self.is_main_process or not takes_rank_0s_values(plugin)
            upcast_trainable(model, warn=self.is_main_process, values=counts)
        with self._compiling_blocks(model, plugin, ready=ready):
            super().prepare_model(inner, device_placement=False, evaluation_mode=True)
        sharded = model if ready else shard(inner, plugin, self._ranks, self._mesh, self._by_class)
        prepared_by(self).models[-1] = sharded
        make_collective(unwrapped(sharded), writes=self.is_main_process)
        for optimizer in prepared_by(self).optimizers:
            self._repoint(optimizer.optimizer, prepared_before=True)
        mark_prepared(sharded)
        return sharded

    @contextmanager
    def _compiling_blocks(
        self, model: nn.Module, plugin: FullyShardedDataParallelPlugin, *, ready: bool
    ) -> Iterator[None]:
        """Compile each unit's block, in place of the library's compilation around the sharded model."""
        dynamo = self.state.dynamo_plugin
        none = type(dynamo.backend).NO
        if dynamo.backend == none:
            yield
            return
        blocks = [] if ready else blocks_of(model, plugin)
        if not blocks:
            raise ConfigError(
                "A dynamo backend compiles each unit's block, but this model has no units inside. Name their classes: "
                f"{self._by_class}; or compile blocks with module.compile() before prepare."
            )
        options = {key: value for key, value in dynamo.to_kwargs().items() if key != "use_regional_compilation"}
        for block in blocks:
            block.compile(**options)
        backend, dynamo.backend = dynamo.backend, none
        try:
            yield
        finally:
            dynamo.backend = backend

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:  # noqa: FBT001
        """Point an optimizer at the shards of prepared models and wrap it as the library does; every rank calls it."""
        if not is_prepared(optimizer):
            self._repoint(optimizer, prepared_before=False)
            device_placement = False  # its state is on the shards' device
        return super().prepare_optimizer(optimizer, device_placement=device_placement)

    def _repoint(self, optimizer: Optimizer, *, prepared_before: bool) -> None:
        """Point an optimizer at the shards, unless its model is not prepared yet."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        known = [param for param in params if any(place.now_of(param) is not None for place in self._places)]
        if known and (len(known) == len(params) or not prepared_before):
            repoint(optimizer, self._places)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Accumulate gradients of ``model`` without communication; every rank enters it."""
        inner = unwrapped(model)
        if not is_sharded(inner):
            yield
            return
        with no_sync(inner):
            yield

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Scale gradients to a norm of at most ``max_norm`` over all ranks; every rank calls it.

        Args:
            parameters: All or some parameters of one or several models.
            max_norm: Largest norm.
            norm_type: Order of the norm, above zero; may be infinity.

        Returns:
            The norm before clipping, 0-d.
        """
        self.unscale_gradients()
        return clip_grad_norm_(_as_list(parameters), max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip each element of the gradients to ``[-clip_value, clip_value]``; every rank calls it."""
        self.unscale_gradients()
        torch.nn.utils.clip_grad_value_(_as_list(parameters), clip_value)

    def unwrap_model(
        self,
        model: nn.Module,
        keep_fp32_wrapper: bool = True,  # noqa: FBT001, FBT002 (Accelerate's signature)
        keep_torch_compile: bool = True,  # noqa: FBT001, FBT002
    ) -> nn.Module:
        """Return the module inside the wrappers; it stays sharded."""
        return super().unwrap_model(unwrapped(model), keep_fp32_wrapper, keep_torch_compile)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:  # noqa: FBT001, FBT002
        """Return the full state dict in host memory on rank 0 and ``{}`` on others; every rank calls it."""
        inner = unwrapped(model)
        if is_sharded(inner):
            return full_state_dict(inner)
        return (self.unwrap_model(model) if unwrap else model).state_dict()

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> Any:  # noqa: FBT001, FBT002
        """Write models, optimizers, schedules, loaders, random states and registered objects; every rank calls it.

        With ``SHARDED_STATE_DICT`` models and optimizers are written in torch's distributed format, with
        ``FULL_STATE_DICT`` as one file each; any number of ranks can read both.

        Raises:
            CheckpointError: A file cannot be written; raised on every rank.
        """
        return saving.save_state(self, output_dir, safe_serialization=safe_serialization, options=kwargs)

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Load what ``save_state`` wrote into the prepared models and optimizers; every rank calls it.

        Raises:
            CheckpointError: It cannot be read or does not match; raised on every rank.
        """
        saving.load_state(self, input_dir, load_kwargs, kwargs)

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Raise a ConfigError: LOMO is not supported."""
        raise ConfigError(
            "LOMO needs full gradients in backward, which a sharded model does not keep. To step the optimizer in "
            "backward use fullshard.step_in_backward(model, make_optimizer)."
        )

    def free_memory(self, *objects: Any) -> Any:
        """Release all prepared objects."""
        self._places = []
        return super().free_memory(*objects)


def _as_list(parameters: Any) -> list[Any]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def _plugin(given: Any) -> FullyShardedDataParallelPlugin:
    """Return the given plugin, that of the first Accelerator, or one made from the environment."""
    if given is None:
        return shared_states()[1].get("fsdp_plugin") or FullyShardedDataParallelPlugin()
    if isinstance(given, FullyShardedDataParallelPlugin):
        return given
    if not isinstance(given, accelerate.FullyShardedDataParallelPlugin):
        raise ConfigError(f"fsdp_plugin must be a FullyShardedDataParallelPlugin; got {type(given).__name__}.")
    return FullyShardedDataParallelPlugin.of(given)


def _parallelism(given: ParallelismConfig | None) -> ParallelismConfig | None:
    """Return the given config, or that of the environment; None if it has one rank, as in Accelerate.

    Raises:
        ConfigError: It has other axes than those of data parallelism.
    """
    if given is None and os.environ.get(_USE_PARALLELISM, "false").lower() == "true":
        given = ParallelismConfig()
    if given is None or given.total_size == 1:
        return None
    others = [f"{axis}_size={size}" for axis in ("tp", "cp", "sp") if (size := getattr(given, f"{axis}_size")) > 1]
    if others:
        raise ConfigError(
            f"fullshard's Accelerator shards and replicates models: parallelism_config takes dp_shard_size and "
            f"dp_replicate_size; got {', '.join(others)}. Leave that out."
        )
    return given


def _refuse_others(given: dict[str, Any]) -> None:
    found = [f"{name}=" for name in _OTHERS if given.get(name) is not None]
    found += [what for name, what in _OTHERS_BY_ENVIRONMENT.items() if os.environ.get(name, "false").lower() == "true"]
    if found:
        raise ConfigError(
            f"fullshard's Accelerator shards models itself and does not support {', '.join(found)}. Leave it out; to "
            "shard inside each machine and replicate across machines use sharding_strategy='HYBRID_SHARD'."
        )


@contextmanager
def _hidden_from_the_library() -> Iterator[None]:
    """Hide from the library that FSDP and a parallelism config are requested."""
    before = {name: os.environ.pop(name) for name in (_USE_FSDP, _USE_PARALLELISM) if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(before)
