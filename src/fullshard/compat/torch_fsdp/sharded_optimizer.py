"""``load_sharded_optimizer_state_dict`` of ``torch.distributed.checkpoint``, for parts that are uneven over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader

from fullshard.errors import CheckpointError
from fullshard.saving.shard_tensor import ShardTensor


def load_sharded_optimizer_state_dict(
    model_state_dict: Mapping[str, Any],
    optimizer_key: str,
    storage_reader: StorageReader,
    planner: LoadPlanner | None = None,
) -> dict[str, Any]:
    """Read an optimizer's state from a distributed checkpoint before the optimizer has any; every rank calls it.

    Args:
        model_state_dict: ``model.state_dict()`` under ``StateDictType.SHARDED_STATE_DICT``: what has a parameter's
            shape is read as far as this rank holds the parameter. Anything else is read whole.
        optimizer_key: What the state is called in the checkpoint, ``"optimizer"`` in torch's examples.
        storage_reader: Of the checkpoint.
        planner: How to read; None: as it is.

    Returns:
        ``{optimizer_key: {"state": …, "param_groups": …}}``, for ``FSDP.optim_state_dict_to_load``.

    Raises:
        CheckpointError: There is nothing under ``optimizer_key``.
    """
    metadata = storage_reader.read_metadata()
    paths = metadata.planner_data or {}
    wanted = {
        key: _room(entry, model_state_dict.get(_parameter(paths[key])))
        for key, entry in metadata.state_dict_metadata.items()
        if paths[key][0] == optimizer_key
    }
    if not wanted:
        known = ", ".join(sorted({str(path[0]) for path in paths.values()}))
        raise CheckpointError(f"The distributed checkpoint has nothing under {optimizer_key!r}; it has {known}.")
    load(wanted, storage_reader=storage_reader, planner=planner)
    return unflatten_state_dict(wanted, {key: paths[key] for key in wanted})


def _parameter(path: tuple[Any, ...]) -> str:
    """The parameter that a value at ``path`` is about: ``(optimizer_key, "state", name, key)``."""
    return str(path[2]) if len(path) > 2 and path[1] == "state" else ""


def _room(entry: Any, param: Any) -> Any:
    """Where a value goes: as much of it as of ``param``, the parameter's in the model's state dict."""
    if not isinstance(entry, TensorStorageMetadata):
        return None
    if isinstance(param, ShardTensor) and param.shape == entry.size:
        flat = torch.empty(param.flat.numel(), dtype=entry.properties.dtype, device=param.flat.device)
        return ShardTensor.of(entry.size, param.start, flat, comm=param.comm)
    device = param.device if isinstance(param, torch.Tensor) else "cpu"
    return torch.empty(entry.size, dtype=entry.properties.dtype, device=device)
