"""Saving and loading in torch's distributed-checkpoint format (DCP), which torch's ``fully_shard`` uses.

:class:`fullshard.state.saving.shard_tensor.ShardTensor` describes to DCP what a rank holds of a tensor.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult

from fullshard.core.comm import Mesh, together
from fullshard.core.engine import LocalTensor, local_tensors, mesh_of, plain_name, require_one_state
from fullshard.core.optim import load_parameter_states
from fullshard.errors import CheckpointError
from fullshard.state.saving.dcp_reader import MARKER, DcpPlanner, DcpReader, read_metadata
from fullshard.state.saving.load_plan import LoadPlan
from fullshard.state.saving.optimizer_state import named_groups
from fullshard.state.saving.parameter_state import ParameterState, Stepping, stepped
from fullshard.state.saving.shard_tensor import part_or_full, state_as_part
from fullshard.state.storage import Piece, TensorSpec


def save_dcp(model: nn.Module, optimizer: Stepping | None, path: str | Path, *, frozen: bool = True) -> None:
    """Write model and optimizer in torch's distributed-checkpoint format; every rank calls it.

    The names are those of torch's ``get_model_state_dict`` and ``get_optimizer_state_dict``, so that a run of torch's
    ``fully_shard`` (or DDP, or an unsharded one) loads it with::

        state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
        torch.distributed.checkpoint.load(state, checkpoint_id=path)

    A tied parameter is written once and can be read under each of its names. As in torch's own checkpoints, a parameter
    that never had a gradient has no optimizer state; a torch run that has state for it loads with
    ``DefaultLoadPlanner(allow_partial_load=True)``.

    Unlike with fullshard's own checkpoints, a kill during the save can leave an incomplete checkpoint, and the ranks
    wait for each other in torch's collectives while they write.

    Args:
        model: A model sharded over all ranks of the default process group, or over one rank.
        optimizer: Over its parameters; None: the checkpoint has no ``optim``.
        path: A directory that all ranks share, without a checkpoint in it.
        frozen: Whether to write frozen parameters; False: an adapter's checkpoint, of what trains and of buffers.

    Raises:
        CheckpointError: The checkpoint cannot be written, there is one already, or the optimizer's state cannot be cut;
            on every rank, with the same text.
    """
    path, mesh = Path(path), mesh_of(model)
    _require_all_ranks(model)

    def prepare() -> dict[str, Any]:
        if (path / MARKER).exists():
            raise CheckpointError(
                f"{path} already holds a distributed checkpoint. Remove it, or give another directory."
            )
        held = local_tensors(model)
        written = [one for one in held if frozen or not one.is_frozen]
        state: dict[str, Any] = {"model": {one.name: _part(one) for one in written}}
        return state if optimizer is None else {**state, "optim": {"state": _states(stepped(held, optimizer))}}

    state = together(mesh, prepare)
    if optimizer is not None:
        state["optim"]["param_groups"] = named_groups(model, optimizer)
    names = {first: others for first, others in _names(model).items() if first in state["model"]}
    with _as_checkpoint_error(f"The distributed checkpoint {path} cannot be written"):
        save(state, storage_writer=_Writer(path, names), no_dist=mesh.size == 1)


def load_dcp(model: nn.Module, optimizer: Stepping | None, path: str | Path, *, frozen: bool = True) -> None:
    """Load model and optimizer from torch's distributed-checkpoint format; every rank calls it.

    The checkpoint may be of any number of ranks and of any kind of model, saved as ``{"model":
    get_model_state_dict(…), "optim": get_optimizer_state_dict(…)}``: torch's ``fully_shard``, FSDP, DDP, an unsharded
    model, or :func:`save_dcp`. Each rank reads what overlaps its shards, into its shards. The optimizer's state and the
    hyperparameters of its groups (``lr``, ``betas``, …) are set. State of parameters that it does not step is not read.

    The format consists of Python pickles. Only what torch's writer writes is read, by name; anything else is refused
    before any code of it runs.

    Args:
        model: A model sharded over all ranks of the default process group, or over one rank.
        optimizer: Over its parameters, of the class that was saved; None: a saved optimizer is not read.
        path: The directory, which all ranks share.
        frozen: Whether frozen parameters must be in the checkpoint; False: those that are not there keep their values.

    Raises:
        CheckpointError: The checkpoint cannot be read, or does not fit; on every rank, with the same text. Nothing has
            changed then, unless reading the tensors failed midway.
    """
    _load(model, optimizer, Path(path), with_model=True, frozen=frozen)


def save_dcp_optimizer(model: nn.Module, optimizer: Stepping, path: str | Path) -> None:
    """Write an optimizer alone, under ``optimizer`` as Accelerate does; else as :func:`save_dcp`, on every rank."""
    path, mesh = Path(path), mesh_of(model)
    _require_all_ranks(model)
    states = together(mesh, lambda: _states(stepped(local_tensors(model), optimizer)))
    state = {"optimizer": {"state": states, "param_groups": named_groups(model, optimizer)}}
    with _as_checkpoint_error(f"The distributed checkpoint {path} cannot be written"):
        save(state, storage_writer=_Writer(path, {}), no_dist=mesh.size == 1)


def load_dcp_optimizer(model: nn.Module, optimizer: Stepping, path: str | Path) -> None:
    """Load an optimizer alone; otherwise as :func:`load_dcp`. Every rank calls it."""
    _load(model, optimizer, Path(path), with_model=False)


def _load(model: nn.Module, optimizer: Stepping | None, path: Path, *, with_model: bool, frozen: bool = True) -> None:
    mesh, plan = mesh_of(model), LoadPlan()
    _require_all_ranks(model)
    saved = together(mesh, lambda: _Saved(path))
    if with_model:
        names = _names(model)
        own = [replace(one, aliases=tuple(names.get(one.name, ())[1:])) for one in local_tensors(model)]
        held = [one for one in own if frozen or not one.is_frozen or {one.name, *one.aliases} & saved.model.keys()]
        together(mesh, lambda: plan.add_model(held, saved.model, f"The distributed checkpoint {path}"))
    if optimizer is not None:
        values = together(mesh, saved.optimizer_values)
        _read(mesh, saved, values)
        together(mesh, lambda: saved.add_optimizer(plan, stepped(local_tensors(model), optimizer), values))
        if any(mesh.all_gather_object(bool(plan.constants))):
            # Before anything is read into place, so that a mismatch changes nothing.
            _read_pieces(mesh, saved, [piece for piece, _ in plan.constants])
            together(mesh, plan.compare)
    _read_pieces(mesh, saved, plan.pieces)
    plan.finish()
    if optimizer is not None:
        load_parameter_states(optimizer, plan.loaded)


class _Writer(FileSystemWriter):
    """Writes tied tensors once, and records their place under all their names."""

    def __init__(self, path: Path, names: Mapping[str, list[str]]) -> None:
        """Write to ``path``; ``names`` holds all names of each of the model's tensors by its first name."""
        super().__init__(path, overwrite=False)
        self._aliases = {f"model.{first}": others for first, (_, *others) in names.items() if others}

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata, last and on one rank."""
        for key, others in self._aliases.items():
            for name in others:
                metadata.state_dict_metadata[f"model.{name}"] = metadata.state_dict_metadata[key]
                metadata.planner_data[f"model.{name}"] = ("model", name)
        again = [
            replace(result, index=replace(result.index, fqn=f"model.{name}"))
            for of_rank in results
            for result in of_rank
            for name in self._aliases.get(result.index.fqn, ())
        ]
        super().finish(metadata, [*results, again])


class _Saved:
    """The metadata of a distributed checkpoint, by the paths that torch records: from a name to the checkpoint's key.

    Attributes:
        model: The model's tensors, by name.
        state: The checkpoint's key of each value of the optimizer's state, by parameter name and the state's key.
        groups: The checkpoint's key of each option of the optimizer's groups, by the group's number and the option.
        unknown: Keys of everything else.
        metadata: The metadata by which DCP itself reads the files.
    """

    def __init__(self, path: Path) -> None:
        """Read the metadata of the checkpoint in ``path``.

        Raises:
            CheckpointError: There is none, or it cannot be read.
        """
        self.metadata = metadata = read_metadata(path)
        self.path = path
        self._specs = {
            key: TensorSpec(key, tuple(entry.size), entry.properties.dtype)
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self.model: dict[str, TensorSpec] = {}
        self.state: dict[str, dict[str, str]] = {}
        self.groups: dict[int, dict[str, str]] = {}
        self.unknown: list[str] = []
        for key, place in (metadata.planner_data or {}).items():
            match place:
                case ("model", str(name)):
                    if key in self._specs:
                        self.model[name] = self._specs[key]
                case ("optim" | "optimizer", "state", str(name), str(what)):
                    self.state.setdefault(name, {})[what] = key
                case ("optim" | "optimizer", "param_groups", int(number), str(what)):
                    self.groups.setdefault(number, {})[what] = key
                case _:
                    self.unknown.append(key)

    def optimizer_values(self) -> dict[str, Any]:
        """Return placeholders for all values of the optimizer except the tensors of its state, by key.

        Raises:
            CheckpointError: There is no optimizer's state, or not as a name, a key and a value.
        """
        if not self.groups:
            hint = f"; it has {', '.join(self.unknown[:3])}, …" if self.unknown else ""
            raise CheckpointError(
                f"The distributed checkpoint {self.path} has no optimizer under 'optim' as torch's "
                f"get_optimizer_state_dict returns it without flatten_optimizer_state_dict{hint}. Load the model alone "
                "with optimizer=None."
            )
        nested = [key for key in self.unknown if key.startswith(("optim.", "optimizer."))]
        if nested:
            raise CheckpointError(
                f"Optimizer state can be cut if it is a tensor or a single value for each parameter; {nested[0]} of "
                f"the distributed checkpoint {self.path} is nested deeper."
            )
        values = {key: None for keys in self.state.values() for key in keys.values() if key not in self._specs}
        options = [key for keys in self.groups.values() for key in keys.values()]
        return values | {
            key: torch.empty(spec.shape, dtype=spec.dtype) if (spec := self._specs.get(key)) else None
            for key in options
        }

    def add_optimizer(self, plan: LoadPlan, own: Sequence[ParameterState], values: Mapping[str, Any]) -> None:
        """Add this rank's runs of the optimizer's state to ``plan``.

        Args:
            plan: What is read.
            own: The parameters that the optimizer steps on this rank.
            values: The filled placeholders of :meth:`optimizer_values`.

        Raises:
            CheckpointError: Parameters, groups or shapes do not fit.
        """
        groups = [{what: values[key] for what, key in keys.items()} for keys in self.groups.values()]
        states = {
            name: {what: self._specs[key] if key in self._specs else values[key] for what, key in keys.items()}
            for name, keys in self.state.items()
        }
        plan.add_optimizer(own, states, groups)


def _part(one: LocalTensor | Piece) -> torch.Tensor:
    """Return the tensor by which DCP writes and reads the memory of ``one``."""
    return part_or_full(one.shape, one.start, one.tensor, block=one.block)


def _names(model: nn.Module) -> dict[str, list[str]]:
    """Return all names of each parameter and persistent buffer in torch's ``state_dict``, by its first name."""
    names: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None and key not in module._non_persistent_buffers_set:
                names.setdefault(id(tensor), []).append(plain_name(f"{path}.{key}" if path else key))
    return {of_tensor[0]: of_tensor for of_tensor in names.values()}


def _states(own: Sequence[ParameterState]) -> dict[str, dict[str, Any]]:
    """Return this rank's part of the optimizer's state by parameter name and key."""
    states = {
        one.local.name: {
            said.key: said.value if said.part is None else state_as_part(said.part, said.value) for said in one.values()
        }
        for one in own
    }
    return {name: state for name, state in states.items() if state}


def _read_pieces(mesh: Mesh, saved: _Saved, pieces: Sequence[Piece]) -> None:
    """Have DCP fill ``pieces``; every rank calls it."""
    _read(mesh, saved, {one.name: _part(one) for one in pieces})


def _read(mesh: Mesh, saved: _Saved, wanted: dict[str, Any]) -> None:
    """Have DCP fill ``wanted``, by key; every rank calls it."""
    reader, planner = DcpReader(saved.path, saved.metadata), DcpPlanner(saved.path)
    with _as_checkpoint_error(f"The distributed checkpoint {saved.path} cannot be read"):
        load(wanted, storage_reader=reader, planner=planner, no_dist=mesh.size == 1)


@contextmanager
def _as_checkpoint_error(what: str) -> Iterator[None]:
    """Raise torch's error of the first rank that failed as a CheckpointError, the same on every rank."""
    try:
        with warnings.catch_warnings():
            # torch warns when there is no process group, which a single rank does not need.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        raise CheckpointError(f"{what}: rank {rank} raised {type(cause).__name__}: {cause}") from error


def _require_all_ranks(model: nn.Module) -> None:
    require_one_state(model)
    mesh = mesh_of(model)
    size = dist.get_world_size() if dist.is_initialized() else 1
    if mesh.size not in (1, size):
        raise CheckpointError(
            f"All ranks of the default process group write and read torch's distributed checkpoints, here {size}; the "
            f"model is sharded over {mesh.size}. Shard it over all of them."
        )
