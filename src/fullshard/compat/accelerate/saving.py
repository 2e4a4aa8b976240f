"""``save_state`` and ``load_state``: models and optimizers here, everything else by the accelerate library.

The directory has Accelerate's files: ``pytorch_model_fsdp_0/`` and ``optimizer_0/`` (SHARDED_STATE_DICT, torch's
distributed format), or ``pytorch_model_fsdp.bin`` and ``optimizer.bin`` (FULL_STATE_DICT), or
``pytorch_model_fsdp_rank0.bin`` and ``optimizer_0/`` (LOCAL_STATE_DICT). It is written next to its final place
(``….tmp``) and renamed when it is complete, so that a killed save leaves the previous state.
"""

from __future__ import annotations

import functools
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import checkpointing
from accelerate.utils.modeling import is_peft_model
from accelerate.utils.other import TORCH_SAFE_GLOBALS
from torch import nn
from torch.optim import Optimizer

from fullshard.compat.accelerate.prepare import is_sharded, unwrapped
from fullshard.compat.accelerate.private import prepared_by
from fullshard.compat.torch_fsdp.api import StateDictType
from fullshard.compat.torch_fsdp.optim_state import full_optim_state_dict
from fullshard.core.comm import together, together_in_background
from fullshard.core.engine import full_state_dict, local_tensors, plain_name
from fullshard.core.engine.full.state import load_full_state
from fullshard.errors import CheckpointError
from fullshard.state.saving import load_optimizer_state
from fullshard.state.saving.dcp import load_dcp, load_dcp_optimizer, save_dcp, save_dcp_optimizer
from fullshard.state.storage import commit, load_plain, recover, sibling, why_refused

_MODEL = "pytorch_model_fsdp"
_OPTIMIZER = "optimizer"
_STATE = re.compile(
    rf"{_MODEL}(_\d+)?(_rank\d+)?(\.bin)?|{_OPTIMIZER}(_\d+)?(\.bin)?|(scheduler|sampler|dl_state_dict)(_\d+)?\.bin|"
    r"random_states_\d+\.pkl|scaler\.pt|custom_checkpoint_\d+\.pkl"
)
"""Names of the files of a state; other files in its directory are the user's and are kept."""


def save_state(
    accelerator: Any, output_dir: str | os.PathLike[str] | None, *, safe_serialization: bool, options: dict[str, Any]
) -> Path:
    """Write the state of all prepared and registered objects; every rank calls it.

    Hooks get the temporary directory; it is renamed to its final name at the end.

    Returns:
        The final directory.
    """
    if options:
        raise CheckpointError(f"save_state does not support {', '.join(options)}: they are for DeepSpeed.")
    final = together(accelerator._ranks, lambda: _new_directory(accelerator, output_dir))
    state = State(accelerator, sibling(final, "tmp"))
    directory = str(state.directory)
    for number, model in enumerate(state.models):
        state.save_model(model, number)
    plain = state.unsharded_optimizers(state.save_optimizer)
    for hook in state.prepared.save_model_state_pre_hook.values():
        together(accelerator._ranks, functools.partial(hook, state.prepared.models, [], directory))
    on_each = accelerator.project_configuration.save_on_each_node

    def save_rest() -> None:
        checkpointing.save_accelerator_state(
            directory,
            [],
            plain,
            state.prepared.schedulers,
            state.prepared.dataloaders,
            accelerator.process_index,
            accelerator.step,
            accelerator.scaler,
            save_on_each_node=on_each,
            safe_serialization=safe_serialization,
        )
        for number, one in enumerate(state.prepared.custom_objects):
            checkpointing.save_custom_state(one, directory, number, save_on_each_node=on_each)

    state.on_each_rank("written", state.directory, save_rest)
    state.write(final, lambda: accelerator.is_main_process and _replace(state.directory, final))
    state.on_each_rank("cleaned up", final.parent, lambda: _drop_oldest(accelerator, final.parent))
    accelerator.project_configuration.iteration += 1
    return final


def load_state(
    accelerator: Any,
    input_dir: str | os.PathLike[str] | None,
    load_kwargs: dict[str, Any] | None,
    options: dict[str, Any],
) -> None:
    """Load what :func:`save_state` wrote; every rank calls it."""
    state = State(accelerator, together(accelerator._ranks, lambda: _saved_directory(accelerator, input_dir)))
    directory = str(state.directory)
    for number, model in enumerate(state.models):
        state.load_model(model, number)
    plain = state.unsharded_optimizers(state.load_optimizer)
    for hook in state.prepared.load_model_state_pre_hook.values():
        together(accelerator._ranks, functools.partial(hook, [], directory))

    def load_rest() -> None:
        random_states = state.directory / f"random_states_{accelerator.process_index}.pkl"
        if random_states.exists():
            _plain_state(random_states, None)  # raises if unreadable, which Accelerate would silently ignore
        overrides = checkpointing.load_accelerator_state(
            directory,
            [],
            plain,
            state.prepared.schedulers,
            state.prepared.dataloaders,
            accelerator.process_index,
            accelerator.scaler,
            options.pop("map_location", None) or "cpu",
            load_kwargs,
            **options,
        )
        accelerator.step = overrides.get("step", accelerator.step)
        found = [path for path in state.directory.iterdir() if re.fullmatch(r"custom_checkpoint_\d+\.pkl", path.name)]
        registered = state.prepared.custom_objects
        if len(found) != len(registered):
            raise CheckpointError(
                f"{directory} has the state of {len(found)} registered objects, but {len(registered)} "
                "are registered now. Call register_for_checkpointing with the same objects as the run that saved."
            )
        for number, one in enumerate(registered):
            one.load_state_dict(_plain_state(state.directory / f"custom_checkpoint_{number}.pkl", load_kwargs))

    state.on_each_rank("read", state.directory, load_rest)


class State:
    """State of an accelerator's models and optimizers in a directory; every rank calls every method."""

    def __init__(self, accelerator: Any, directory: Path) -> None:
        self.accelerator = accelerator
        self.directory = directory
        self.kind: StateDictType = accelerator.state.fsdp_plugin.state_dict_type
        self.adapter_only = False
        self.prepared = prepared_by(accelerator)
        self.models = [unwrapped(model) for model in self.prepared.models]

    def on_each_rank(self, verb: str, path: Path, action: Callable[[], object]) -> None:
        """Call ``action``; if it fails on one rank, all ranks raise."""
        together(self.accelerator._ranks, lambda: _with_reason(verb, path, action))

    def write(self, path: Path, action: Callable[[], object]) -> None:
        """Call ``action`` in a thread, so that no collective waits for a long write; if it fails, all ranks raise."""
        together_in_background(self.accelerator._ranks, lambda: _with_reason("written", path, action))

    def file(self, stem: str, number: int, rank: int | None = None) -> Path:
        """Return the path of an object's file; ``rank`` if each rank has its own."""
        parts = [stem, *([str(number)] if number else []), *([] if rank is None else [f"rank{rank}"])]
        return self.directory / f"{'_'.join(parts)}.bin"

    def save_model(self, model: nn.Module, number: int) -> None:
        """Write one model."""
        accelerator = self.accelerator
        frozen = self._takes_frozen(model)
        if not is_sharded(model) or self.kind is StateDictType.FULL_STATE_DICT:
            state = full_state_dict(model) if is_sharded(model) else model.state_dict()
            left_out = set() if frozen else _frozen_names(model)
            state = {name: value for name, value in state.items() if name not in left_out}
            path = self.file(_MODEL, number)
            self.write(path, lambda: accelerator.is_main_process and torch.save(state, path))
        elif self.kind is StateDictType.SHARDED_STATE_DICT:
            save_dcp(model, None, self.directory / f"{_MODEL}_{number}", frozen=frozen)
        else:
            path = self.file(_MODEL, number, accelerator.process_index)
            shards = {one.name: one.tensor for one in local_tensors(model)}
            self.write(path, lambda: torch.save({"world": accelerator.num_processes, "shards": shards}, path))

    def load_model(self, model: nn.Module, number: int) -> None:
        """Read one model."""
        if not is_sharded(model) or self.kind is StateDictType.FULL_STATE_DICT:
            path = self.file(_MODEL, number)
            self.on_each_rank("read", path, lambda: _load_full(model, path, frozen=self._takes_frozen(model)))
        elif self.kind is StateDictType.SHARDED_STATE_DICT:
            load_dcp(model, None, self.directory / f"{_MODEL}_{number}", frozen=self._takes_frozen(model))
        else:
            path = self.file(_MODEL, number, self.accelerator.process_index)
            self.on_each_rank("read", path, lambda: _load_local(model, path, self.accelerator.num_processes))

    def unsharded_optimizers(self, action: Callable[[nn.Module, Optimizer, int], None]) -> list[Any]:
        """Call ``action`` with each optimizer of a sharded model, that model and a number; return the others."""
        others = []
        for number, prepared in enumerate(self.prepared.optimizers):
            model = self._model_of(prepared.optimizer)
            if model is None:
                others.append(prepared)
            else:
                action(model, prepared.optimizer, number)
        return others

    def save_optimizer(self, model: nn.Module, optimizer: Optimizer, number: int) -> None:
        """Write the optimizer of a sharded model."""
        if self.kind is not StateDictType.FULL_STATE_DICT:
            save_dcp_optimizer(model, optimizer, self.directory / f"{_OPTIMIZER}_{number}")
            return
        state = full_optim_state_dict(model, optimizer, rank0_only=True)
        path = self.file(_OPTIMIZER, number)
        self.write(path, lambda: self.accelerator.is_main_process and torch.save(state, path))

    def load_optimizer(self, model: nn.Module, optimizer: Optimizer, number: int) -> None:
        """Read the optimizer of a sharded model."""
        if self.kind is StateDictType.FULL_STATE_DICT:
            load_optimizer_state(model, optimizer, self.file(_OPTIMIZER, number))
        else:
            load_dcp_optimizer(model, optimizer, self.directory / f"{_OPTIMIZER}_{number}")

    def _takes_frozen(self, model: nn.Module) -> bool:
        """Return True if frozen parameters are saved, and required for loading."""
        return not (self.adapter_only and is_peft_model(model))

    def _model_of(self, optimizer: Optimizer) -> nn.Module | None:
        stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
        sharded = [model for model in self.models if is_sharded(model)]
        models = [model for model in sharded if any(id(param) in stepped for param in model.parameters())]
        if len(models) > 1:
            raise CheckpointError(
                f"An optimizer has parameters of {len(models)} models, but its state is saved with one model. Create "
                "one optimizer per model."
            )
        return models[0] if models else None


def _with_reason(verb: str, path: Path, action: Callable[[], object]) -> None:
    try:
        action()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be {verb}: {error}.") from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"A file in {path} is not of tensors and plain values: {why_refused(error)}") from error


def _load_full(model: nn.Module, path: Path, *, frozen: bool) -> None:
    state, optional = load_plain(path, mmap=True), set() if frozen else _frozen_names(model)
    if is_sharded(model):
        load_full_state(model, state, strict=True, optional=optional)
    else:
        own = {name: value for name, value in model.state_dict().items() if name in optional}
        model.load_state_dict({**own, **state})


def _frozen_names(model: nn.Module) -> set[str]:
    named = model.named_parameters(remove_duplicate=False)
    return {plain_name(name) for name, param in named if not param.requires_grad}


def _load_local(model: nn.Module, path: Path, world: int) -> None:
    saved = load_plain(path)
    own = local_tensors(model)
    shapes = {one.name: tuple(one.tensor.shape) for one in own}
    if saved["world"] != world or {name: tuple(t.shape) for name, t in saved["shards"].items()} != shapes:
        raise CheckpointError(
            f"{path} was saved by {saved['world']} ranks or from another model; this run has {world} ranks. A "
            "LOCAL_STATE_DICT needs the same number of ranks; SHARDED_STATE_DICT and FULL_STATE_DICT work with any."
        )
    with torch.no_grad():
        for one in own:
            one.home.copy_(saved["shards"][one.name].view(one.home.shape))


def _plain_state(path: Path, load_kwargs: dict[str, Any] | None) -> Any:
    """Load the state of a registered object, or a rank's random state.

    Accelerate unpickles objects without restriction; here ``load_kwargs={"weights_only": False}`` is needed for that.
    """
    if (load_kwargs or {}).get("weights_only") is False:
        return torch.load(path, map_location="cpu", weights_only=False)
    with torch.serialization.safe_globals(TORCH_SAFE_GLOBALS):
        return load_plain(path)


def _new_directory(accelerator: Any, output_dir: str | os.PathLike[str] | None) -> Path:
    """Return the final directory of a new state; rank 0 creates the temporary one next to it."""
    settings = accelerator.project_configuration
    if settings.automatic_checkpoint_naming:
        parent = Path(accelerator.project_dir) / "checkpoints"
        directory = parent / f"checkpoint_{settings.iteration}"
    elif output_dir is None:
        raise CheckpointError(
            "save_state needs output_dir, or ProjectConfiguration(project_dir=…, automatic_checkpoint_naming=True)."
        )
    else:
        parent, directory = None, Path(output_dir)
    directory = directory.expanduser().resolve()  # of a link, the target is replaced
    if not accelerator.is_main_process:
        return directory
    try:
        if parent is not None and directory.exists():
            raise CheckpointError(
                f"{directory} already exists. Set accelerator.project_configuration.iteration to the next number."
            )
        directory.parent.mkdir(parents=True, exist_ok=True)
        recover(directory)
        sibling(directory, "tmp").mkdir()
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be created: {error}.") from error
    return directory


def _replace(temporary: Path, final: Path) -> None:
    """Replace the previous state in ``final`` with that in ``temporary``; keep other files."""
    for kept in final.iterdir() if final.is_dir() else ():
        target = temporary / kept.name
        if _STATE.fullmatch(kept.name) or target.exists():
            continue
        if kept.is_dir() and not kept.is_symlink():
            shutil.copytree(kept, target, symlinks=True)
        else:
            shutil.copy2(kept, target, follow_symlinks=False)
    commit(temporary, final)


def _drop_oldest(accelerator: Any, parent: Path) -> None:
    """Delete checkpoints beyond ``total_limit``, after the new one is complete; on rank 0."""
    settings = accelerator.project_configuration
    if settings.automatic_checkpoint_naming and settings.total_limit is not None and accelerator.is_main_process:
        for old in _numbered(parent)[: -max(1, settings.total_limit)]:
            shutil.rmtree(old)


def _numbered(parent: Path) -> list[Path]:
    """Return the checkpoints in ``parent`` in order."""
    found = [path for path in parent.iterdir() if re.search(r"\d+$", path.name)]
    return sorted(found, key=lambda path: int(re.findall(r"\d+$", path.name)[0]))


def _saved_directory(accelerator: Any, input_dir: str | os.PathLike[str] | None) -> Path:
    """Return the directory to load: ``input_dir``, or the newest checkpoint."""
    if input_dir is not None:
        directory = Path(input_dir).expanduser()
    elif accelerator.project_configuration.automatic_checkpoint_naming:
        parent = Path(accelerator.project_dir) / "checkpoints"
        found = _numbered(parent) if parent.is_dir() else []
        directory = found[-1] if found else parent
    else:
        raise CheckpointError(
            "load_state needs input_dir, or ProjectConfiguration(project_dir=…, automatic_checkpoint_naming=True)."
        )
    directory = directory.resolve()
    if not directory.exists() and sibling(directory, "old").is_dir():
        return sibling(directory, "old")  # a save was killed between its two renames
    if not directory.is_dir():
        raise CheckpointError(f"There is no state to load: {directory} is not a directory.")
    return directory
