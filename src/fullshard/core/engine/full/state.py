"""A model's saved state: this rank's part of it, what is not sharded, and loading it from full tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fullshard.core.comm import Mesh, SoloComm
from fullshard.core.engine.parallel.parallel import everyone, is_distributed
from fullshard.core.engine.parallel.parallel_lane import ParallelParam
from fullshard.core.engine.registry import runtime_of
from fullshard.core.engine.step.param import ShardedParam
from fullshard.core.engine.step.runtime import Runtime
from fullshard.core.layout import Block
from fullshard.core.layout.names import plain_name
from fullshard.core.shards import on_rows, rows_of, run_of
from fullshard.errors import ShardingError


@dataclass(frozen=True)
class LocalTensor:
    """This rank's part of a tensor of a model's saved state.

    Attributes:
        name: First name of the parameter, or the name of the buffer.
        aliases: The parameter's other names, when it is tied.
        shape: Full shape.
        start: First element that this rank holds, in the flattened full tensor.
        tensor: This rank's elements, 1-D, possibly none: a view of ``home``, or a copy where that is not contiguous.
        home: The tensor that training uses.
        replica: Index of this copy among the copies of these elements.
        replicas: Number of ranks that hold a copy.
        param: The Parameter that an optimizer steps; None for a buffer.
        block: If tensor parallelism divides the parameter, the block of it whose elements ``start`` counts.
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    start: int
    tensor: torch.Tensor
    home: torch.Tensor
    replica: int
    replicas: int
    param: nn.Parameter | None
    block: Block | None = None

    @property
    def is_first(self) -> bool:
        """True for the first copy of the tensor's first element, if this rank has elements."""
        return self.start == 0 and self.replica == 0 and (self.block is None or self.block.index == 0)

    @property
    def is_frozen(self) -> bool:
        """True for a parameter that does not train."""
        return self.param is not None and not self.param.requires_grad


def local_tensors(model: nn.Module) -> list[LocalTensor]:
    """Return this rank's part of the model's saved state, in the same order on every rank; no communication.

    Sharded parameters unit by unit, then ignored parameters, then persistent buffers.
    """
    runtime = runtime_of(model)
    runtime.guard_shards(on=False)  # still on after a forward that was interrupted
    runtime.follow_changes()
    found, ranks, divided = list[LocalTensor](), ranks_of(runtime), _divided(runtime)
    blocks = SoloComm(ranks.device) if divided is None else divided.parallel.comm
    for _, param in runtime.all_params():
        meta, copies, shard = param.meta, param.lane.mesh.replica_group, param.sharded
        names = (meta.name, meta.aliases, meta.global_shape, meta.element_range[0])
        rank, size = copies.rank, copies.size
        if meta.block is None:  # the ranks that divide others have copies of it
            rank, size = blocks.rank * size + rank, blocks.size * size
        found.append(LocalTensor(*names, rows_of(shard).reshape(-1), shard, rank, size, shard, meta.block))
    rank, size = ranks.rank, ranks.size
    ignored = [(name, param, param) for name, param in left_out(model).items()]
    for name, tensor, param in [*ignored, *((name, buffer, None) for name, buffer in persistent_buffers(model))]:
        # The memory of lazily conjugated tensors holds other values.
        flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
        found.append(LocalTensor(name, (), tuple(tensor.shape), 0, flat, tensor, rank, size, param))
    return found


def require_one_state(model: nn.Module) -> None:
    """Refuse to save or load a model in which groups of ranks hold parameters of their own.

    Raises:
        ShardingError: There are such parameters.
    """
    runtime = runtime_of(model)
    own = [param.meta.name for _, param in runtime.all_params() if param.lane.mesh.size < runtime.mesh.size]
    if own:
        raise ShardingError(
            f"{own[0]} and {len(own) - 1} other parameters are sharded over some of the model's {runtime.mesh.size} "
            "ranks only (another mesh or process_group). Each group of ranks holds its own values, so what all ranks "
            "save together, or rank 0 alone, would have one group's. Save a full state dict on each rank, in a file "
            "of its own. Use StateDictType.FULL_STATE_DICT, or model.state_dict() inside `with unsharded(model):`."
        )


def ranks_of(runtime: Runtime) -> Mesh:
    """Return all ranks that hold parts of a model: those that share shards and, if it is tensor parallel, blocks."""
    divided = _divided(runtime)
    return everyone(runtime.mesh, None if divided is None else divided.parallel)


def divided_by(model: nn.Module) -> int | None:
    """Return the number of ranks that divide parameters of a tensor parallel model; None of any other; any rank."""
    divided = _divided(runtime_of(model))
    return None if divided is None or divided.parallel.comm.size == 1 else divided.parallel.comm.size


def _divided(runtime: Runtime) -> ParallelParam | None:
    return next((param for _, param in runtime.all_params() if isinstance(param, ParallelParam)), None)


def require_undivided(model: nn.Module, what: str) -> None:
    """Refuse what is not there for a model that is tensor parallel; any rank.

    Raises:
        ShardingError: It is.
    """
    found = _divided(runtime_of(model))
    if found is not None:
        raise ShardingError(
            f"{what} is not supported for a model that is tensor parallel, as {found.meta.name} "
            f"{found.meta.global_shape} is, over {found.parallel.comm.size} ranks. Use fullshard.Checkpoints for "
            "checkpoints, fullshard.save or fullshard.full_state_dict for the full model, and "
            "model.load_state_dict(full tensors)."
        )


def left_out(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return parameters that are not sharded, by their first name.

    Raises:
        ShardingError: One is a DTensor.
    """
    sharded = {id(m._parameters.get(key)) for _, param in runtime_of(model).all_params() for m, key in param.slots}
    found = {plain_name(name): param for name, param in model.named_parameters() if id(param) not in sharded}
    for name, param in found.items():
        if is_distributed(param):
            raise _not_whole(name, param)
    return found


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and value of each buffer in the model's saved state; any rank.

    Of a DTensor of which every rank has all, as ``parallelize_module`` makes them, it is the plain tensor.

    Raises:
        ShardingError: A buffer is a DTensor of which ranks have parts.
    """
    for path, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and key not in module._non_persistent_buffers_set:
                name = plain_name(f"{path}.{key}" if path else key)
                yield name, _whole(name, buffer) if is_distributed(buffer) else buffer


def _whole(name: str, dtensor: Any) -> torch.Tensor:
    if all(place.is_replicate() for place in dtensor.placements):
        return dtensor.detach().to_local()
    raise _not_whole(name, dtensor)


def _not_whole(name: str, dtensor: Any) -> ShardingError:
    return ShardingError(
        f"{name} {tuple(dtensor.shape)} is a DTensor placed {tuple(map(str, dtensor.placements))} that fullshard does "
        "not shard: it is neither saved nor averaged as one that each rank has. Leave a parameter out of "
        "ignored_params; register a buffer with persistent=False, or make it a plain tensor."
    )


@on_rows
def load_full_state(
    model: nn.Module, state: Mapping[str, torch.Tensor], *, strict: bool, optional: Collection[str] = ()
) -> tuple[list[str], list[str]]:
    """Copy this rank's rows of full tensors into the shards, and full buffers; every rank, with equal tensors.

    Args:
        model: The sharded model.
        state: Full tensors by name, on any device, of any floating dtype; a tied parameter under any of its names.
        strict: Whether names must match exactly.
        optional: Names that may be missing in any case; those tensors keep their values.

    Returns:
        Names missing in ``state``, and names unknown to the model.

    Raises:
        ShardingError: Names do not match (if strict), or a shape does not; nothing has been copied.
    """
    targets, missing, used = _targets(model, state)
    unexpected = sorted(set(state) - used)
    required = [name for name in missing if name not in optional]
    problems = [f"it lacks {', '.join(required)}"] if required else []
    problems += [f"the model has no {', '.join(unexpected)}"] if unexpected else []
    problems = problems if strict else []
    for name, (_, shape) in targets.items():
        if tuple(state[name].shape) != shape:
            problems.append(f"{name} has shape {tuple(state[name].shape)} where the model has {shape}")
    if problems:
        raise ShardingError(f"This state dict does not fit {type(model).__name__}: {'; '.join(problems)}.")
    with torch.no_grad():
        for name, (target, _) in targets.items():
            if isinstance(target, ShardedParam):
                rows = run_of(state[name], target.meta.block, *target.meta.element_range)
                target.sharded.copy_(rows.view(target.meta.local_shape))
            else:
                target.copy_(state[name])
    return missing, unexpected


def _targets(
    model: nn.Module, state: Mapping[str, torch.Tensor]
) -> tuple[dict[str, tuple[ShardedParam | torch.Tensor, tuple[int, ...]]], list[str], set[str]]:
    """Return the target and required shape of each name in ``state``, the missing names, and the known names."""
    runtime = runtime_of(model)
    runtime.follow_changes()
    targets: dict[str, tuple[ShardedParam | torch.Tensor, tuple[int, ...]]] = {}
    missing: list[str] = []
    known: set[str] = set()
    for _, param in runtime.all_params():
        names = (param.meta.name, *param.meta.aliases)
        known.update(names)
        given = next((name for name in names if name in state), None)
        if given is None:
            missing.append(param.meta.name)
        else:
            targets[given] = param, param.meta.global_shape
    for name, tensor in [*left_out(model).items(), *persistent_buffers(model)]:
        known.add(name)
        if name in state:
            targets[name] = tensor, tuple(tensor.shape)
        else:
            missing.append(name)
    return targets, missing, known & set(state)
