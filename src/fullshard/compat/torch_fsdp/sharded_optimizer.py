"""``load_sharded_optimizer_state_dict`` of ``torch.distributed.checkpoint``, for parts of unequal size."""

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
    """Read an optimizer's state from a distributed checkpoint before its first step; every rank calls it.

    Args:
        model_state_dict: ``model.state_dict()`` under ``StateDictType.SHARDED_STATE_DICT``. Of a tensor with a
            parameter's shape, the elements are read that this rank holds of the parameter. Other tensors are read in
            full.
        optimizer_key: Key of the state in the checkpoint, ``"optimizer"`` in torch's examples.
        storage_reader: Reader of the checkpoint.
        planner: Plan of the read; None: torch's default.

    Returns:
        ``{optimizer_key: {"state": …, "param_groups": …}}``, for ``FSDP.optim_state_dict_to_load``.

    Raises:
        CheckpointError: The checkpoint has no ``optimizer_key``.
    """
    metadata = storage_reader.read_metadata()
    paths = metadata.planner_data or {}
    state = {
        key: _empty(entry, model_state_dict.get(_parameter(paths[key])))
        for key, entry in metadata.state_dict_metadata.items()
        if paths[key][0] == optimizer_key
    }
    if not state:
        known = ", ".join(sorted({str(path[0]) for path in paths.values()}))
        raise CheckpointError(f"The distributed checkpoint has no key {optimizer_key!r}; it has {known}.")
    load(state, storage_reader=storage_reader, planner=planner)
    return unflatten_state_dict(state, {key: paths[key] for key in state})


def _parameter(path: tuple[Any, ...]) -> str:
    """Return the name of the parameter whose state is at ``path``: ``(optimizer_key, "state", name, key)``."""
    return str(path[2]) if len(path) > 2 and path[1] == "state" else ""


def _empty(entry: Any, param: Any) -> Any:
    """Return memory for reading a value: the same share of it as ``param`` is of its parameter."""
    if not isinstance(entry, TensorStorageMetadata):
        return None
    if isinstance(param, ShardTensor) and param.shape == entry.size:
        flat = torch.empty(param.flat.numel(), dtype=entry.properties.dtype, device=param.flat.device)
        return ShardTensor.of(entry.size, param.start, flat, comm=param.comm)
    device = param.device if isinstance(param, torch.Tensor) else "cpu"
    return torch.empty(entry.size, dtype=entry.properties.dtype, device=device)
