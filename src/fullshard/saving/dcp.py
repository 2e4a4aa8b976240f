"""torch's distributed-checkpoint format (DCP): what torch's ``fully_shard`` writes and reads, written and read here.

What a rank holds of a tensor is told to DCP by :class:`fullshard.saving.shard_tensor.ShardTensor`.
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
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult

from fullshard.comm import Mesh, together
from fullshard.engine import LocalTensor, local_tensors, mesh_of, plain_name
from fullshard.errors import CheckpointError
from fullshard.optim import load_parameter_states
from fullshard.optim.walk import require_same_values
from fullshard.saving.full_optimizer import named_groups
from fullshard.saving.optimizer_state import Stepped, saved_options, stepped
from fullshard.saving.pieces import Stepping
from fullshard.saving.shard_tensor import part_or_whole, state_as_part

_MARKER = ".metadata"
"""The file that torch writes last."""


def save_dcp(model: nn.Module, optimizer: Stepping | None, path: str | Path) -> None:
    """Write model and optimizer in torch's distributed-checkpoint format; every rank calls it.

    The names are those of torch's ``get_model_state_dict`` and ``get_optimizer_state_dict``, so that a run of torch's
    ``fully_shard`` (or DDP, or an unsharded one) loads it with::

        state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
        torch.distributed.checkpoint.load(state, checkpoint_id=path)

    A tied parameter is written once and can be read under each of its names. As in torch's own checkpoints, a parameter
    that never had a gradient has no optimizer state; where a torch run has some, it loads with
    ``DefaultLoadPlanner(allow_partial_load=True)``.

    Unlike fullshard's own checkpoints, this is not proof against a kill in the middle, and the ranks wait for each
    other in torch's collectives while they write.

    Args:
        model: A model sharded over all ranks of the default process group, or over one rank.
        optimizer: Over its parameters; None: the checkpoint has no ``optim``.
        path: A directory that all ranks see, without a checkpoint in it.

    Raises:
        CheckpointError: It cannot be written, there is one, or the optimizer's state cannot be cut; on every rank, with
            the same text.
    """
    path, mesh = Path(path), mesh_of(model)
    _require_default_group(mesh)

    def prepare() -> dict[str, Any]:
        if (path / _MARKER).exists():
            raise CheckpointError(
                f"{path} holds a distributed checkpoint already. Remove it, or give another directory."
            )
        state = {"model": {local.name: _as_torch_has_it(local, local.home) for local in local_tensors(model)}}
        return state if optimizer is None else {**state, "optim": {"state": _states(stepped(model, optimizer))}}

    state = together(mesh, prepare)
    if optimizer is not None:
        state["optim"]["param_groups"] = named_groups(model, optimizer)
    with _our_errors(f"The distributed checkpoint {path} cannot be written"):
        save(state, storage_writer=_Writer(path, _names(model)), no_dist=mesh.size == 1)


def load_dcp(model: nn.Module, optimizer: Stepping | None, path: str | Path) -> None:
    """Fill model and optimizer from torch's distributed-checkpoint format; every rank calls it.

    Of any number of ranks, and of any kind of model that saved ``{"model": get_model_state_dict(…), "optim":
    get_optimizer_state_dict(…)}``: torch's ``fully_shard``, FSDP, DDP, an unsharded one, or :func:`save_dcp`. Each rank
    reads what overlaps its shards, into its shards; a fresh optimizer is given its state, and the hyperparameters of
    its groups (``lr``, ``betas``, …) are taken over. State of parameters that it does not step is not read.

    The format is made of Python pickles, which can run code: load only what you trust like a program.

    Args:
        model: A model sharded over all ranks of the default process group, or over one rank.
        optimizer: Over its parameters, of the class that was saved; None: what was saved of one is not read.
        path: The directory, which all ranks see.

    Raises:
        CheckpointError: It cannot be read, or does not fit; on every rank, with the same text. Nothing has changed
            then, unless reading the tensors failed halfway.
    """
    path, mesh = Path(path), mesh_of(model)
    _require_default_group(mesh)
    saved = together(mesh, lambda: _Saved(path))
    tensors = together(mesh, lambda: saved.tensors_of_model(model))
    loaded: list[tuple[dict[str, Any], dict[str, Any]]] = []
    if optimizer is not None:
        values = together(mesh, saved.optimizer_values)
        _read(mesh, path, values)
        loaded = together(mesh, lambda: saved.states(stepped(model, optimizer), values, tensors))
        saved.compare(mesh)
    _read(mesh, path, tensors)
    if optimizer is not None:
        load_parameter_states(optimizer, loaded)


def save_dcp_optimizer(model: nn.Module, optimizer: Stepping, path: str | Path) -> None:
    """Write an optimizer alone, under ``optimizer`` as Accelerate names it; else as :func:`save_dcp`, every rank."""
    path, mesh = Path(path), mesh_of(model)
    _require_default_group(mesh)
    state: dict[str, Any] = together(mesh, lambda: {"optimizer": {"state": _states(stepped(model, optimizer))}})
    state["optimizer"]["param_groups"] = named_groups(model, optimizer)
    with _our_errors(f"The distributed checkpoint {path} cannot be written"):
        save(state, storage_writer=_Writer(path, {}), no_dist=mesh.size == 1)


def load_dcp_optimizer(model: nn.Module, optimizer: Stepping, path: str | Path) -> None:
    """Fill an optimizer alone; else as :func:`load_dcp`, every rank."""
    path, mesh = Path(path), mesh_of(model)
    _require_default_group(mesh)
    saved = together(mesh, lambda: _Saved(path))
    values = together(mesh, saved.optimizer_values)
    _read(mesh, path, values)
    tensors: dict[str, Any] = {}
    loaded = together(mesh, lambda: saved.states(stepped(model, optimizer), values, tensors))
    saved.compare(mesh)
    _read(mesh, path, tensors)
    load_parameter_states(optimizer, loaded)


class _Writer(FileSystemWriter):
    """Writes tied tensors once, and notes the place under all their names."""

    def __init__(self, path: Path, names: Mapping[str, list[str]]) -> None:
        """Write to ``path``; ``names`` gives all names of a tensor of the model by its first one."""
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
    """What a distributed checkpoint holds, by the paths that torch gives: from a name to the key in the checkpoint."""

    def __init__(self, path: Path) -> None:
        """Read the metadata of the checkpoint in ``path``.

        Raises:
            CheckpointError: There is none, or it cannot be read.
        """
        try:
            metadata = FileSystemReader(path).read_metadata()
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{path} is no whole distributed checkpoint: it has no file {_MARKER}, which is written last."
            ) from error
        except Exception as error:  # unpickling damaged bytes can raise nearly anything
            raise CheckpointError(
                f"The metadata of the distributed checkpoint {path} cannot be read: {error}."
            ) from error
        self.path = path
        self.entries = metadata.state_dict_metadata
        self.model: dict[str, str] = {}
        self.state: dict[str, dict[str, str]] = {}
        self.groups: dict[int, dict[str, str]] = {}
        self.unknown: list[str] = []
        self._constants: dict[str, torch.Tensor] = {}
        for key, place in (metadata.planner_data or {}).items():
            match place:
                case ("model", str(name)):
                    self.model[name] = key
                case ("optim" | "optimizer", "state", str(name), str(what)):
                    self.state.setdefault(name, {})[what] = key
                case ("optim" | "optimizer", "param_groups", int(number), str(what)):
                    self.groups.setdefault(number, {})[what] = key
                case _:
                    self.unknown.append(key)

    def tensors_of_model(self, model: nn.Module) -> dict[str, Any]:
        """What of the model's shards and buffers DCP is to fill, by key.

        Raises:
            CheckpointError: Names or shapes do not fit.
        """
        tensors: dict[str, Any] = {}
        names_of = _names(model)
        entries = [(name, self.entries[key]) for name, key in self.model.items()]
        stored = {name: tuple(entry.size) for name, entry in entries if isinstance(entry, TensorStorageMetadata)}
        left = set(stored)
        missing, misshaped = [], []
        for local in local_tensors(model):
            names = names_of.get(local.name, [local.name])
            name = next((name for name in names if name in left), None)
            left.difference_update(names)
            if name is None:
                missing.append(local.name)
            elif stored[name] != local.shape:
                misshaped.append(f"{name} {stored[name]} instead of {local.shape}")
            else:
                tensors[self.model[name]] = _as_torch_has_it(local, local.home)
        problems = [
            f"{len(found)} {what}: {', '.join(found[:5])}{', …' if len(found) > 5 else ''}"
            for what, found in (
                ("missing", missing),
                ("not in the model", sorted(left)),
                ("of another shape", misshaped),
            )
            if found
        ]
        if problems:
            raise CheckpointError(
                f"The distributed checkpoint {self.path} does not fit the model, whose tensors it must have under "
                f"'model'. Tensors {'; '.join(problems)}."
            )
        return tensors

    def optimizer_values(self) -> dict[str, Any]:
        """Room for all that is no tensor of a parameter, by key.

        Raises:
            CheckpointError: There is no optimizer's state, or not as a name, a key and a value.
        """
        if not self.groups:
            hint = f"; it has {', '.join(self.unknown[:3])}, …" if self.unknown else ""
            raise CheckpointError(
                f"The distributed checkpoint {self.path} has no optimizer under 'optim' as torch's "
                f"get_optimizer_state_dict gives it without flatten_optimizer_state_dict{hint}. Load the model alone "
                "with optimizer=None."
            )
        nested = [key for key in self.unknown if key.startswith(("optim.", "optimizer."))]
        if nested:
            raise CheckpointError(
                f"Optimizer state can be cut where it is a tensor or one value for each parameter; {nested[0]} of the "
                f"distributed checkpoint {self.path} is nested deeper."
            )
        of_states = [key for keys in self.state.values() for key in keys.values()]
        plain = [key for key in of_states if not isinstance(self.entries[key], TensorStorageMetadata)]
        values: dict[str, Any] = dict.fromkeys(plain)
        for keys in self.groups.values():
            for key in keys.values():
                entry = self.entries[key]
                is_tensor = isinstance(entry, TensorStorageMetadata)
                values[key] = torch.empty(entry.size, dtype=entry.properties.dtype) if is_tensor else None
        return values

    def states(
        self, own: Sequence[Stepped], values: Mapping[str, Any], tensors: dict[str, Any]
    ) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """The new state and hyperparameters of each parameter; what DCP is to fill of them is added to ``tensors``.

        Raises:
            CheckpointError: Parameters, groups or shapes do not fit.
        """
        options: dict[str, Mapping[str, Any]] = {}
        for keys in self.groups.values():
            group = {what: values[key] for what, key in keys.items()}
            options |= dict.fromkeys(group["params"], group)
        return [
            (self._state(one, its_options, values, tensors), its_options)
            for one, its_options in zip(own, saved_options(own, options), strict=True)
        ]

    def compare(self, mesh: Mesh) -> None:
        """Read what must be saved as the optimizer has it, before anything is read into place; every rank calls it.

        Raises:
            CheckpointError: It is something else; on every rank.
        """
        if not any(mesh.all_gather_object(bool(self._constants))):
            return
        found = {key: torch.empty_like(known, device="cpu") for key, known in self._constants.items()}
        _read(mesh, self.path, found)

        def judge() -> None:
            for key, known in self._constants.items():
                require_same_values(key, found[key], known)

        together(mesh, judge)

    def _state(
        self, one: Stepped, options: Mapping[str, Any], values: Mapping[str, Any], tensors: dict[str, Any]
    ) -> dict[str, Any]:
        keys = self.state.get(one.saved_name(self.state), {})
        entries = {what: self.entries[key] for what, key in keys.items()}
        of_tensors = {what: entry for what, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
        for what, entry in of_tensors.items():
            one.part_of_saved(what, entry.size)
        kinds = {what: of_tensors[what].properties.dtype if what in of_tensors else values[keys[what]] for what in keys}
        constants = one.require_same_kind(options, kinds)
        if not one.param.numel():  # its steps would not be counted on
            return one.state
        state: dict[str, Any] = {}
        for what, key in keys.items():
            if what in constants:
                # One tensor may be every parameter's: it is compared and kept, never read into.
                state[what] = self._constants[key] = constants[what]
            elif what in of_tensors:
                state[what], part = one.room(what, of_tensors[what].size, of_tensors[what].properties.dtype)
                tensors[key] = state[what] if part is None else state_as_part(part, state[what])
            else:
                state[what] = values[key]
        return state


def _as_torch_has_it(local: LocalTensor, tensor: torch.Tensor) -> torch.Tensor:
    """What DCP is given for a tensor with an element for each that this rank holds: it reads and writes that memory."""
    return part_or_whole(local.shape, local.start, tensor.detach().view(-1))


def _names(model: nn.Module) -> dict[str, list[str]]:
    """All names of each parameter and persistent buffer by the first one, as torch's ``state_dict`` has them."""
    names: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None and key not in module._non_persistent_buffers_set:
                names.setdefault(id(tensor), []).append(plain_name(f"{path}.{key}" if path else key))
    return {of_tensor[0]: of_tensor for of_tensor in names.values()}


def _states(own: Sequence[Stepped]) -> dict[str, dict[str, Any]]:
    """The optimizer's state by parameter and key.

    Raises:
        CheckpointError: It is not known of a tensor what part of the unsharded optimizer's it is.
    """
    states: dict[str, dict[str, Any]] = {}
    for one in own:
        # A rank without elements of a parameter does not count its steps.
        for what, value in one.state.items() if one.param.numel() else ():
            part = one.part(what, value)
            value = value if part is None else state_as_part(part, value)
            states.setdefault(one.local.name, {})[what] = value
    return states


def _read(mesh: Mesh, path: Path, wanted: dict[str, Any]) -> None:
    """Have DCP fill ``wanted``, by key; every rank calls it."""
    with _our_errors(f"The distributed checkpoint {path} cannot be read"):
        load(wanted, storage_reader=FileSystemReader(path), no_dist=mesh.size == 1)


@contextmanager
def _our_errors(what: str) -> Iterator[None]:
    """Say what failed on the first rank where something did, as torch has told every rank."""
    try:
        with warnings.catch_warnings():
            # One rank needs no process group, and torch wonders.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        raise CheckpointError(f"{what}: rank {rank} met {type(cause).__name__}: {cause}") from error


def _require_default_group(mesh: Mesh) -> None:
    size = dist.get_world_size() if dist.is_initialized() else 1
    if mesh.size not in (1, size):
        raise CheckpointError(
            f"torch's distributed checkpoints are written and read by all ranks of the default process group, here "
            f"{size}; the model is sharded over {mesh.size}. Shard it over all of them."
        )
