"""The training state as pieces of named tensors: model, optimizer, gradients, average, random state of each rank."""

from __future__ import annotations

import base64
import json
import platform
import random
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import isnan
from typing import Any

import numpy as np
import torch
from torch import nn

from fullshard.core.comm import Mesh, device_of, together
from fullshard.core.engine import LocalTensor, divided_by, local_tensors, mesh_of, require_one_state, units, unreduced
from fullshard.core.optim.average import ExponentialMovingAverage
from fullshard.core.shards import on_rows
from fullshard.errors import CheckpointError
from fullshard.state.saving.parameter_state import ParameterState, StateValue, Stepping, stepped
from fullshard.state.storage import Base, Index, Keep, Piece, SaveJob, SavePlan, as_json
from fullshard.version import __version__


def rng_bytes(device: torch.device) -> torch.Tensor:
    """Return this rank's current random state, on CUDA with its generator: JSON as uint8, (bytes,), on the CPU."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    values: dict[str, Any] = {
        "torch": _encode(torch.get_rng_state()),
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
    }
    if device.type == "cuda":
        values["cuda"] = _encode(torch.cuda.get_rng_state(device))
    return torch.frombuffer(bytearray(json.dumps(values).encode()), dtype=torch.uint8)


def restore_rng(state: torch.Tensor, device: torch.device) -> None:
    """Restore the random state that :func:`rng_bytes` returned.

    Raises:
        CheckpointError: The bytes are not such a state.
    """
    try:
        values = json.loads(bytes(state.tolist()))
        torch.set_rng_state(_decode(values["torch"]))
        version, keys, gauss = values["python"]
        random.setstate((version, tuple(keys), gauss))
        kind, words, *rest = values["numpy"]
        np.random.set_state((kind, np.array(words, dtype=np.uint32), *rest))
        if device.type == "cuda" and "cuda" in values:
            torch.cuda.set_rng_state(_decode(values["cuda"]), device)
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"The checkpoint's random state cannot be read: {error!r}. Check it with `fullshard verify`, or load an "
            "earlier checkpoint."
        ) from error


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.tolist())).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def rng_name(rank: int) -> str:
    """Return the name of a rank's random state among a checkpoint's tensors."""
    return f"rank/{rank:05d}/rng"


def rng_piece(rank: int, device: torch.device) -> Piece:
    """Return this rank's current random state, as a checkpoint holds it."""
    state = rng_bytes(device)
    return Piece(rng_name(rank), tuple(state.shape), 0, state)


MODEL, OPTIMIZER, GRADIENT, AVERAGE = "model/", "optimizer/", "gradient/", "average/"

UPDATES = "averaged"
"""Name of the number of updates of the weights' average."""

_SPLIT_NUMEL = 1 << 14
"""Size from which on the ranks that hold copies of a tensor each write a share, in elements."""


_PART_BYTES = 1 << 26
"""Bytes of frozen parameters that a digest has in host memory at a time."""


def index_of(
    model: nn.Module, step: int, values: Mapping[str, Any], metric: float | None, keep: Keep, base: Base | None = None
) -> Index:
    """Return a checkpoint's index without its tensors; any rank, no communication.

    Raises:
        CheckpointError: JSON cannot hold ``values``.
    """
    if metric is not None:
        metric = None if isnan(metric) else float(metric)
    versions = {"fullshard": __version__, "torch": torch.__version__, "python": platform.python_version()}
    table = [f"{row.unit}: {row.kind}, {row.tensors} tensors" for row in units(model).rows]
    greater = None if metric is None else keep.greater_is_better
    plain = as_json(values)
    written = Index(step, mesh_of(model).size, metric, plain, (), {}, versions, table)
    return replace(written, greater_is_better=greater, base=base, divided_by=divided_by(model))


@on_rows
def frozen_digest(model: nn.Module) -> str:
    """Return a digest of the frozen parameters that this rank holds; no communication."""
    digest = 0
    for local in local_tensors(model):
        if local.is_frozen and local.tensor.numel():
            for part in local.tensor.detach().reshape(-1).view(torch.uint8).split(_PART_BYTES):
                digest = zlib.crc32(part.cpu().numpy().data, digest)
    return f"crc32 {digest:08x}"


def require_between_steps(ranks: Mesh, model: nn.Module, step: int) -> None:
    """Check that the model is between two steps and on these ranks; no communication.

    Raises:
        CheckpointError: The state cannot be saved as it is.
    """
    if ranks.size != mesh_of(model).size:
        raise CheckpointError(
            f"The model is on {mesh_of(model).size} ranks and these checkpoints are on {ranks.size}. Pass the "
            "same ranks to both."
        )
    waiting = unreduced(model)
    if waiting:
        raise CheckpointError(
            f"Gradients of {len(waiting)} units are not reduced yet (no_sync or no_all_reduce), the first is "
            f"{waiting[0]}; a checkpoint would lose them. Save after the optimizer's step."
        )
    if not isinstance(step, int) or step < 0:
        raise CheckpointError(f"step must be a number of optimizer steps, an int of at least 0; got {step!r}.")


@on_rows
def plan_save(
    model: nn.Module,
    optimizer: Stepping | None,
    *,
    gradients: bool,
    average: ExponentialMovingAverage | None = None,
    frozen: bool = True,
    everything: bool = False,
) -> SavePlan:
    """Return what this rank writes of a training state; together the ranks write each element once. No communication.

    Args:
        model: A sharded model.
        optimizer: Over its parameters; None: it is not written.
        gradients: Whether ``.grad`` of the shards is written too.
        average: The average of the weights to write too; None: none is.
        frozen: Whether parameters that are not trained are written.
        everything: Whether this rank writes all that it holds, replicas and empty parts included, for itself.

    Returns:
        Views of the memory that training uses.

    Raises:
        CheckpointError: The optimizer has parameters of another model, or state that cannot be cut by rows.
    """
    if not everything:
        require_one_state(model)
    plan = SavePlan()
    held = local_tensors(model)
    averages = {} if average is None else average.averages
    for local in held:
        left_out = local.is_frozen and not frozen
        gradient = local.param.grad if gradients and local.param is not None and not left_out else None
        low, high = _share(local, local.tensor.numel(), everything=everything)
        named = {MODEL: None if left_out else local.tensor, GRADIENT: gradient, AVERAGE: averages.get(local.name)}
        plan.pieces += [
            Piece(kind + local.name, local.shape, local.start + low, tensor.detach().reshape(-1)[low:high], local.block)
            for kind, tensor in named.items()
            if tensor is not None and (high > low or everything)
        ]
    if average is not None and (everything or mesh_of(model).rank == 0):
        plan.pieces.append(Piece(UPDATES, (), 0, torch.tensor([average.updates])))
    if optimizer is not None:
        own = stepped(held, optimizer)
        known = {one.local.name for one in own}
        for one in own:
            for said in one.values():
                _add_state(plan, one.local, said, known, everything=everything)
        plan.groups += groups_as_plain(own)
    return plan


def _share(local: LocalTensor, numel: int, *, everything: bool = False) -> tuple[int, int]:
    """Return which of ``numel`` elements this rank writes: all, or its share if other ranks hold copies of them."""
    if everything:
        return 0, numel
    # Buffers may differ between ranks (running statistics): shares of each would combine into no rank's buffer.
    if local.replicas > 1 and (local.param is None or numel < _SPLIT_NUMEL):
        return (0, numel) if local.replica == 0 else (0, 0)
    return numel * local.replica // local.replicas, numel * (local.replica + 1) // local.replicas


def split_state_name(name: str, known: Collection[str]) -> tuple[str, str]:
    """Split the name of a tensor of optimizer state into its parameter, the longest that is ``known``, and its key.

    Raises:
        CheckpointError: No known parameter begins it.
    """
    rest = name.removeprefix(OPTIMIZER)
    ends = [at for at, letter in enumerate(rest) if letter == "/" and rest[:at] in known]
    if not ends:
        raise CheckpointError(f"{name} is state of a parameter that is in no group of the saved optimizer.")
    return rest[: ends[-1]], rest[ends[-1] + 1 :]


def _add_state(
    plan: SavePlan, local: LocalTensor, said: StateValue, known: Collection[str], *, everything: bool
) -> None:
    """Add one value of a parameter's optimizer state to what this rank writes."""
    name = f"{OPTIMIZER}{local.name}/{said.key}"
    if split_state_name(name, known) != (local.name, said.key):
        raise CheckpointError(
            f"State {said.key!r} of {local.name} would be saved under a name of another parameter's state. Give the "
            "optimizer a key without a slash."
        )
    if said.part is not None and everything:
        part = said.part
        plan.pieces.append(Piece(name, part.shape, part.held[0], said.value.detach().reshape(-1), part.block))
    elif said.part is not None:
        low, high = _share(local, said.run.numel())
        if high > low:
            part = said.part
            plan.pieces.append(Piece(name, part.shape, part.written[0] + low, said.run[low:high], part.block))
    elif everything or local.is_first:
        if isinstance(said.value, torch.Tensor):
            plan.pieces.append(Piece(name, (), 0, said.value.detach().reshape(1)))
        else:
            require_plain(f"state {said.key!r} of {local.name}", said.value)
            plan.scalars.setdefault(local.name, {})[said.key] = said.value


def groups_as_plain(own: Sequence[ParameterState]) -> list[dict[str, Any]]:
    """Return the options of the optimizer's groups as JSON holds them, with parameter names under ``params``."""
    groups: dict[int, dict[str, Any]] = {}
    for one in own:
        if id(one.group) not in groups:
            groups[id(one.group)] = {"params": []}
            for name, value in one.group.items():
                if name not in ("params", "param_names"):
                    plain = value.item() if isinstance(value, torch.Tensor) else value
                    require_plain(f"option {name!r} of the optimizer's group", plain)
                    groups[id(one.group)][name] = list(plain) if isinstance(plain, tuple) else plain
        groups[id(one.group)]["params"].append(one.local.name)
    return list(groups.values())


def require_plain(what: str, value: Any) -> None:
    """Raise a CheckpointError unless a value is a number, a text, None, or several of them."""
    values = value if isinstance(value, (tuple, list)) else (value,)
    if not all(one is None or isinstance(one, (bool, int, float, str)) for one in values):
        raise CheckpointError(f"The {what} is a {type(value).__name__}; checkpoints hold numbers, texts and tensors.")


class HostCopies:
    """Host memory of one rank for the pieces that a thread writes while training changes them; reused between saves."""

    def __init__(self, ranks: Mesh) -> None:
        """Start without memory."""
        self._ranks = ranks
        self._host: dict[int, torch.Tensor] = {}

    def take(self, job: SaveJob) -> SaveJob:
        """Return the job with its pieces copied; every rank calls it."""
        return copied(self._ranks, job, together(self._ranks, lambda: self.pairs(job.plan.pieces)))

    def clear(self) -> None:
        """Free the memory."""
        self._host = {}

    def pairs(self, pieces: Sequence[Piece]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return host memory for each piece, paired with the piece's own; the last save's if it fits. Any rank."""
        device, pinned = device_of(self._ranks.device), self._ranks.device.type == "cuda"
        pairs, used = [], {}
        for number, piece in enumerate(pieces):
            # Kept between saves: 1.3 GB take 3.8 s to copy into new memory (page faults), then 0.3 to 0.8 s.
            host = self._host.get(number)
            if host is None or (host.dtype, host.shape) != (piece.tensor.dtype, piece.tensor.shape):
                host = device.empty_host(piece.tensor.numel(), piece.tensor.dtype, pinned=pinned)
            used[number] = host
            pairs.append((host, piece.tensor))
        self._host = used
        return pairs


def copied(ranks: Mesh, job: SaveJob, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> SaveJob:
    """Return the job with its pieces copied to the host memory of ``pairs``; no communication."""
    ready = device_of(ranks.device).copy_to_host(pairs)
    copies = [replace(piece, tensor=host) for piece, (host, _) in zip(job.plan.pieces, pairs, strict=True)]
    return replace(job, plan=replace(job.plan, pieces=copies), ready=ready)
