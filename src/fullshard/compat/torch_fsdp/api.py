"""Arguments of ``FullyShardedDataParallel``, torch's own enums and settings, and a model's state-dict settings.

``sharding`` turns the former into the engine's policies.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto

from torch import nn
from torch.distributed.fsdp import OptimStateKeyType as OptimStateKeyType, api as _theirs
from torch.distributed.fsdp.api import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]
from torch.distributed.fsdp.api import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from fullshard.compat.torch_fsdp.errors import KindError
from fullshard.compat.torch_fsdp.wrap import is_wrapper
from fullshard.core.engine import sharded_roots
from fullshard.errors import ConfigError, ShardingError

__all__ = ["OptimStateKeyType"]
__all__ += _theirs.__all__


class TrainingState(Enum):
    """What a wrapper does: torch's private enum of this name, for code that compares names."""

    IDLE = auto()
    FORWARD_BACKWARD = auto()
    SUMMON_FULL_PARAMS = auto()


_CLASSES: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}
_ATTRIBUTE = "_fullshard_state_dict_settings"


def set_state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """Set the kind of state dict of ``state_dict()``, ``load_state_dict()`` and ``optim_state_dict``.

    Any rank; no communication.

    Args:
        module: A wrapped or sharded model, a module inside one (the setting is the model's), or one that contains some.
        state_dict_type: The kind.
        state_dict_config: Settings of the model's state dict, of the kind's class; None: its defaults.
        optim_state_dict_config: Settings of the optimizer's state dict, of the kind's class; None: its defaults.

    Returns:
        The former settings.

    Raises:
        ConfigError: Settings are of another kind's class.
        ShardingError: There is no sharded model, or several have different settings.
    """
    former = get_state_dict_type(module)
    new = _settings(state_dict_type, state_dict_config, optim_state_dict_config)
    for root in sharded_roots(module):
        root.__dict__[_ATTRIBUTE] = new
    return former


def get_state_dict_type(module: nn.Module) -> StateDictSettings:
    """Return the settings of :func:`set_state_dict_type`; initially ``FULL_STATE_DICT`` with its defaults.

    Raises:
        ShardingError: There is no sharded model, or several have different settings.
    """
    roots = sharded_roots(module)
    found = [root.__dict__.get(_ATTRIBUTE) or _settings(StateDictType.FULL_STATE_DICT, None, None) for root in roots]
    if not found and any(map(is_wrapper, module.modules())):
        return _settings(StateDictType.FULL_STATE_DICT, None, None)  # all is ignored, and none of its values is a shard
    if not found:
        raise ShardingError(
            f"{type(module).__name__} has no state-dict type: it contains no sharded model. Wrap it first."
        )
    if any(one != found[0] for one in found):
        raise ShardingError(
            f"{type(module).__name__} contains {len(found)} sharded models with different state-dict settings: "
            f"{', '.join(sorted({one.state_dict_type.name for one in found}))}. Call set_state_dict_type on each."
        )
    return found[0]


@contextmanager
def state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> Iterator[None]:
    """Call :func:`set_state_dict_type` for a context; the former settings are restored, also after errors."""
    former = set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
    try:
        yield
    finally:
        set_state_dict_type(module, former.state_dict_type, former.state_dict_config, former.optim_state_dict_config)


def _settings(
    kind: StateDictType, of_model: StateDictConfig | None, of_optimizer: OptimStateDictConfig | None
) -> StateDictSettings:
    if kind not in _CLASSES:
        raise ConfigError(f"state_dict_type must be one of {', '.join(map(str, StateDictType))}; got {kind!r}.")
    classes = _CLASSES[kind]
    settings = StateDictSettings(
        kind, classes[0]() if of_model is None else of_model, classes[1]() if of_optimizer is None else of_optimizer
    )
    given = {
        "state_dict_config": settings.state_dict_config,
        "optim_state_dict_config": settings.optim_state_dict_config,
    }
    for (name, value), cls in zip(given.items(), classes, strict=True):
        if type(value) is not cls:
            raise KindError(f"Expected {name} of type {cls.__name__} with {kind}, but got a {type(value).__name__}.")
    return settings
