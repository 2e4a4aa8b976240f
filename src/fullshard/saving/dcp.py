"""torch's distributed-checkpoint format (DCP): what torch's ``fully_shard`` writes and reads, written and read here.

A shard is a run of rows or elements, uneven over ranks, which torch's DTensor cannot say. DCP asks any tensor that has
three methods which boxes of the whole it holds: :class:`_Shard` answers.
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
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult

from fullshard.comm import Mesh, together
from fullshard.engine import LocalTensor, local_tensors, mesh_of
from fullshard.errors import CheckpointError
from fullshard.layout import boxes
from fullshard.optim import StepInBackward, load_parameter_states, local_state_key_is_elementwise
from fullshard.saving.optimizer_state import Stepped, saved_options, stepped
from fullshard.saving.pieces import Stepping

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
        state["optim"]["param_groups"] = _groups(mesh, model, optimizer)
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
    _read(mesh, path, tensors)
    if optimizer is not None:
        load_parameter_states(optimizer, loaded)


class _Shard(torch.Tensor):
    """A tensor of the whole's shape, without its memory, that tells DCP what this rank holds of it, and where."""

    flat: torch.Tensor
    start: int

    @staticmethod
    def of(shape: Sequence[int], start: int, flat: torch.Tensor) -> _Shard:
        """The elements ``flat``, (numel,), from element ``start`` on, of a whole of ``shape``."""
        shard = flat.new_empty(()).expand(tuple(shape)).as_subclass(_Shard)
        shard.flat, shard.start = flat, start
        return shard

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.flat)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in self._boxes()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        box = next(box for box in self._boxes() if box.offsets == index.offset)
        return self.flat[box.start - self.start :][: box.numel].view(box.sizes)

    def _boxes(self) -> list[Any]:
        return boxes(self.shape, self.start, self.start + self.flat.numel())


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
        for key, place in (metadata.planner_data or {}).items():
            match place:
                case ("model", str(name)):
                    self.model[name] = key
                case ("optim", "state", str(name), str(what)):
                    self.state.setdefault(name, {})[what] = key
                case ("optim", "param_groups", int(number), str(what)):
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
        nested = [key for key in self.unknown if key.startswith("optim.")]
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
            (self._state(one, values, tensors), its_options)
            for one, its_options in zip(own, saved_options(own, options), strict=True)
        ]

    def _state(self, one: Stepped, values: Mapping[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
        if not one.param.numel():  # its steps would not be counted on
            return one.state
        state: dict[str, Any] = {}
        for what, key in self.state.get(one.saved_name(self.state), {}).items():
            entry = self.entries[key]
            if isinstance(entry, TensorStorageMetadata):
                state[what], elementwise = one.room(what, entry.size, entry.properties.dtype)
                tensors[key] = _as_torch_has_it(one.local, state[what]) if elementwise else state[what]
            else:
                state[what] = values[key]
        return state


def _as_torch_has_it(local: LocalTensor, tensor: torch.Tensor) -> torch.Tensor:
    """What DCP is given for a tensor with an element for each that this rank holds: it reads and writes that memory."""
    if tuple(tensor.shape) == local.shape:
        return tensor.detach()
    return _Shard.of(local.shape, local.start, tensor.detach().view(-1))


def _names(model: nn.Module) -> dict[str, list[str]]:
    """All names of each parameter and persistent buffer by the first one, as torch's ``state_dict`` has them."""
    names: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None and key not in module._non_persistent_buffers_set:
                names.setdefault(id(tensor), []).append(f"{path}.{key}" if path else key)
    return {of_tensor[0]: of_tensor for of_tensor in names.values()}


def _states(own: Sequence[Stepped]) -> dict[str, dict[str, Any]]:
    """The optimizer's state by parameter and key.

    Raises:
        CheckpointError: A tensor of it is neither by element nor one number.
    """
    states: dict[str, dict[str, Any]] = {}
    for one in own:
        # A rank without elements of a parameter does not count its steps.
        for what, value in one.state.items() if one.param.numel() else ():
            if local_state_key_is_elementwise(one.param, what, value):
                value = _as_torch_has_it(one.local, value)
            elif isinstance(value, torch.Tensor) and value.ndim > 0:
                raise CheckpointError(
                    f"Optimizer state can be cut where it is one number or has the parameter's shape; {what!r} of "
                    f"{one.local.name} has shape {tuple(value.shape)} and this rank's shard {tuple(one.param.shape)}. "
                    "Use an optimizer whose state is by element, or save the model alone with optimizer=None."
                )
            states.setdefault(one.local.name, {})[what] = value
    return states


def _groups(mesh: Mesh, model: nn.Module, optimizer: Stepping) -> list[dict[str, Any]]:
    """The optimizer's groups with names for parameters; every rank calls it and gets the same.

    Optimizers that step in backward have one parameter each, of which this rank may hold nothing: those with the same
    hyperparameters are one group.
    """
    by_id = {id(one.param): one.local.name for one in stepped(model, optimizer)}
    if not isinstance(optimizer, StepInBackward):
        return [
            {**group, "params": [by_id[id(param)] for param in group["params"]]} for group in optimizer.param_groups
        ]
    mine = {
        by_id[id(param)]: {key: value for key, value in group.items() if key != "params"}
        for one in optimizer.optimizers.values()
        for group in one.param_groups
        for param in group["params"]
    }
    options = {name: group for of_rank in mesh.all_gather_object(mine) for name, group in of_rank.items()}
    groups: list[dict[str, Any]] = []
    for name in (local.name for local in local_tensors(model) if local.name in options):
        like = next((group for group in groups if _same(group, options[name])), None)
        if like is None:
            groups.append({**options[name], "params": [name]})
        else:
            like["params"].append(name)
    return groups


def _same(group: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    """Whether a group has these hyperparameters."""

    def plain(values: Mapping[str, Any]) -> dict[str, Any]:
        return {
            key: value.tolist() if isinstance(value, torch.Tensor) else value
            for key, value in values.items()
            if key not in ("params", "param_names")
        }

    return plain(group) == plain(options)


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
