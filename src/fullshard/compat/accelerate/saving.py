"""``save_state`` and ``load_state``: models and optimizers ours, all else by the accelerate library.

A directory has Accelerate's files: ``pytorch_model_fsdp_0/`` and ``optimizer_0/`` (SHARDED_STATE_DICT, torch's
distributed format), or ``pytorch_model_fsdp.bin`` and ``optimizer.bin`` (FULL_STATE_DICT), or
``pytorch_model_fsdp_rank0.bin`` and ``optimizer_0/`` (LOCAL_STATE_DICT). It is written under another name beside its
own (``….tmp``) and renamed when all of it is on the disk: a state is whole, or the one before is there.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from accelerate import checkpointing
from torch import nn

from fullshard.comm import together, together_in_background
from fullshard.compat.accelerate.prepare import is_sharded, unwrapped
from fullshard.compat.torch_fsdp.api import FullOptimStateDictConfig, FullStateDictConfig, StateDictType
from fullshard.compat.torch_fsdp.optim_state import optim_state_dict
from fullshard.compat.torch_fsdp.state_dict_type import state_dict_type
from fullshard.engine import full_state_dict, local_tensors
from fullshard.engine.full.state import load_full_state
from fullshard.errors import CheckpointError
from fullshard.saving import load_optimizer_state
from fullshard.saving.dcp import load_dcp, load_dcp_optimizer, save_dcp, save_dcp_optimizer
from fullshard.storage import commit, recover, sibling

_MODEL = "pytorch_model_fsdp"
_OPTIMIZER = "optimizer"
_STATE = re.compile(
    rf"{_MODEL}(_\d+)?(_rank\d+)?(\.bin)?|{_OPTIMIZER}(_\d+)?(\.bin)?|(scheduler|sampler|dl_state_dict)(_\d+)?\.bin|"
    r"random_states_\d+\.pkl|scaler\.pt|custom_checkpoint_\d+\.pkl"
)
"""Names of what a state consists of; what else is in its directory is the user's."""


def save_state(
    accelerator: Any, output_dir: str | os.PathLike[str] | None, *, safe_serialization: bool, options: dict[str, Any]
) -> Path:
    """Write the state of everything that was prepared or registered; every rank calls it.

    Hooks are given the directory that is being written, which has its own name only afterwards.

    Returns:
        The directory.
    """
    if options:
        raise CheckpointError(f"save_state has nothing to hand {', '.join(options)} to: they are DeepSpeed's.")
    final = together(accelerator._ranks, lambda: _new_directory(accelerator, output_dir))
    directory = sibling(final, "tmp")
    for number, model in enumerate(accelerator._models):
        _save_model(accelerator, unwrapped(model), directory, number)
    plain = []
    for number, optimizer in enumerate(accelerator._optimizers):
        if not _save_optimizer(accelerator, optimizer.optimizer, directory, number):
            plain.append(optimizer)
    for hook in accelerator._save_model_state_pre_hook.values():
        together(accelerator._ranks, functools.partial(hook, accelerator._models, [], str(directory)))
    on_each = accelerator.project_configuration.save_on_each_node

    def rest() -> None:
        checkpointing.save_accelerator_state(
            str(directory),
            [],
            plain,
            accelerator._schedulers,
            accelerator._dataloaders,
            accelerator.process_index,
            accelerator.step,
            accelerator.scaler,
            save_on_each_node=on_each,
            safe_serialization=safe_serialization,
        )
        for number, one in enumerate(accelerator._custom_objects):
            checkpointing.save_custom_state(one, str(directory), number, save_on_each_node=on_each)

    _together(accelerator, "written", directory, rest)
    _write(accelerator, final, lambda: accelerator.is_main_process and _replace(directory, final))
    _together(accelerator, "thinned out", final.parent, lambda: _drop_oldest(accelerator, final.parent))
    accelerator.project_configuration.iteration += 1
    return final


def load_state(
    accelerator: Any,
    input_dir: str | os.PathLike[str] | None,
    load_kwargs: dict[str, Any] | None,
    options: dict[str, Any],
) -> None:
    """Take over what :func:`save_state` wrote; every rank calls it."""
    directory = together(accelerator._ranks, lambda: _old_directory(accelerator, input_dir))
    for number, model in enumerate(accelerator._models):
        _load_model(accelerator, unwrapped(model), directory, number)
    plain = []
    for number, optimizer in enumerate(accelerator._optimizers):
        if not _load_optimizer(accelerator, optimizer.optimizer, directory, number):
            plain.append(optimizer)
    for hook in accelerator._load_model_state_pre_hook.values():
        together(accelerator._ranks, functools.partial(hook, [], str(directory)))

    def rest() -> None:
        overrides = checkpointing.load_accelerator_state(
            str(directory),
            [],
            plain,
            accelerator._schedulers,
            accelerator._dataloaders,
            accelerator.process_index,
            accelerator.scaler,
            options.pop("map_location", None) or "cpu",
            load_kwargs,
            **options,
        )
        accelerator.step = overrides.get("step", accelerator.step)
        found = [path for path in directory.iterdir() if re.fullmatch(r"custom_checkpoint_\d+\.pkl", path.name)]
        if len(found) != len(accelerator._custom_objects):
            raise CheckpointError(
                f"{directory} has the state of {len(found)} registered objects and here are "
                f"{len(accelerator._custom_objects)}. Call register_for_checkpointing with the same objects as the run "
                "that saved."
            )
        for number, one in enumerate(accelerator._custom_objects):
            checkpointing.load_custom_state(one, str(directory), number)

    _together(accelerator, "read", directory, rest)


def _together(accelerator: Any, verb: str, directory: Path, action: Any) -> None:
    """Do what may fail on the disk of any rank, so that all ranks are told."""
    together(accelerator._ranks, lambda: _with_reason(verb, directory, action))


def _write(accelerator: Any, path: Path, action: Any) -> None:
    """The same for what may take long to write: in a thread, and no collective lasts as long as it does."""
    together_in_background(accelerator._ranks, lambda: _with_reason("written", path, action))


def _with_reason(verb: str, path: Path, action: Any) -> None:
    try:
        action()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be {verb}: {error}.") from error


def _new_directory(accelerator: Any, output_dir: str | os.PathLike[str] | None) -> Path:
    """The name of the state; the first rank makes the directory that it is written to, beside it."""
    settings = accelerator.project_configuration
    if settings.automatic_checkpoint_naming:
        parent = Path(accelerator.project_dir) / "checkpoints"
        directory = parent / f"checkpoint_{settings.iteration}"
    elif output_dir is None:
        raise CheckpointError(
            "save_state takes output_dir, or ProjectConfiguration(project_dir=…, automatic_checkpoint_naming=True)."
        )
    else:
        parent, directory = None, Path(output_dir)
    directory = directory.expanduser().resolve()  # what a link points to is replaced, where it is
    if not accelerator.is_main_process:
        return directory
    try:
        if parent is not None and directory.exists():
            raise CheckpointError(
                f"{directory} exists already. Set accelerator.project_configuration.iteration to go on after it."
            )
        directory.parent.mkdir(parents=True, exist_ok=True)
        recover(directory)
        sibling(directory, "tmp").mkdir()
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be made: {error}.") from error
    return directory


def _replace(temporary: Path, final: Path) -> None:
    """Put the new state in the place of the one before; what else lies there stays."""
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
    """Keep as many checkpoints as are wanted, once the new one is whole; on the first rank."""
    settings = accelerator.project_configuration
    if settings.automatic_checkpoint_naming and settings.total_limit is not None and accelerator.is_main_process:
        for old in _numbered(parent)[: -max(1, settings.total_limit)]:
            shutil.rmtree(old)


def _numbered(parent: Path) -> list[Path]:
    """Checkpoints in order."""
    found = [path for path in parent.iterdir() if re.search(r"\d+$", path.name)]
    return sorted(found, key=lambda path: int(re.findall(r"\d+$", path.name)[0]))


def _old_directory(accelerator: Any, input_dir: str | os.PathLike[str] | None) -> Path:
    if input_dir is not None:
        directory = Path(input_dir).expanduser()
    elif accelerator.project_configuration.automatic_checkpoint_naming:
        parent = Path(accelerator.project_dir) / "checkpoints"
        found = _numbered(parent) if parent.is_dir() else []
        directory = found[-1] if found else parent
    else:
        raise CheckpointError(
            "load_state takes input_dir, or ProjectConfiguration(project_dir=…, automatic_checkpoint_naming=True)."
        )
    directory = directory.resolve()
    if not directory.exists() and sibling(directory, "old").is_dir():
        return sibling(directory, "old")  # a save was killed between its two renames
    if not directory.is_dir():
        raise CheckpointError(f"There is no state in {directory}: it is no directory.")
    return directory


def _file(directory: Path, stem: str, number: int, rank: int | None = None) -> Path:
    parts = [stem, *([str(number)] if number else []), *([] if rank is None else [f"rank{rank}"])]
    return directory / f"{'_'.join(parts)}.bin"


def _save_model(accelerator: Any, model: nn.Module, directory: Path, number: int) -> None:
    kind = accelerator.state.fsdp_plugin.state_dict_type
    if not is_sharded(model) or kind is StateDictType.FULL_STATE_DICT:
        state = full_state_dict(model) if is_sharded(model) else model.state_dict()
        path = _file(directory, _MODEL, number)
        _write(accelerator, path, lambda: accelerator.is_main_process and torch.save(state, path))
    elif kind is StateDictType.SHARDED_STATE_DICT:
        save_dcp(model, None, directory / f"{_MODEL}_{number}")
    else:
        path = _file(directory, _MODEL, number, accelerator.process_index)
        shards = {one.name: one.tensor for one in local_tensors(model)}
        _write(accelerator, path, lambda: torch.save({"world": accelerator.num_processes, "shards": shards}, path))


def _load_model(accelerator: Any, model: nn.Module, directory: Path, number: int) -> None:
    kind = accelerator.state.fsdp_plugin.state_dict_type
    if not is_sharded(model) or kind is StateDictType.FULL_STATE_DICT:
        path = _file(directory, _MODEL, number)
        _together(accelerator, "read", path, lambda: _load_full(model, path))
    elif kind is StateDictType.SHARDED_STATE_DICT:
        load_dcp(model, None, directory / f"{_MODEL}_{number}")
    else:
        path = _file(directory, _MODEL, number, accelerator.process_index)
        _together(accelerator, "read", path, lambda: _load_local(model, path, accelerator.num_processes))


def _load_full(model: nn.Module, path: Path) -> None:
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if is_sharded(model):
        load_full_state(model, state, strict=True)
    else:
        model.load_state_dict(state)


def _load_local(model: nn.Module, path: Path, world: int) -> None:
    saved = torch.load(path, map_location="cpu", weights_only=True)
    own = local_tensors(model)
    shapes = {one.name: tuple(one.tensor.shape) for one in own}
    if saved["world"] != world or {name: tuple(t.shape) for name, t in saved["shards"].items()} != shapes:
        raise CheckpointError(
            f"{path} is of {saved['world']} ranks, and this run has {world}, or of another model. LOCAL_STATE_DICT is "
            "read by as many ranks as wrote it; SHARDED_STATE_DICT and FULL_STATE_DICT by any number."
        )
    with torch.no_grad():
        for one in own:
            one.home.copy_(saved["shards"][one.name].view(one.home.shape))


def _models_of(accelerator: Any, optimizer: torch.optim.Optimizer) -> list[nn.Module]:
    """The sharded models that an optimizer steps parameters of."""
    stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
    models = [unwrapped(model) for model in accelerator._models]
    return [model for model in models if is_sharded(model) and any(id(p) in stepped for p in model.parameters())]


def _save_optimizer(accelerator: Any, optimizer: torch.optim.Optimizer, directory: Path, number: int) -> bool:
    """Write an optimizer's state; False if it is of no sharded model."""
    model = _its_model(accelerator, optimizer)
    if model is None:
        return False
    plugin = accelerator.state.fsdp_plugin
    if plugin.state_dict_type is not StateDictType.FULL_STATE_DICT:
        save_dcp_optimizer(model, optimizer, directory / f"{_OPTIMIZER}_{number}")
        return True
    model_config, optim_config = _whole(FullStateDictConfig), _whole(FullOptimStateDictConfig)
    with state_dict_type(model, StateDictType.FULL_STATE_DICT, model_config, optim_config):
        state = optim_state_dict(model, optimizer)
    path = _file(directory, _OPTIMIZER, number)
    _write(accelerator, path, lambda: accelerator.is_main_process and torch.save(state, path))
    return True


def _load_optimizer(accelerator: Any, optimizer: torch.optim.Optimizer, directory: Path, number: int) -> bool:
    model = _its_model(accelerator, optimizer)
    if model is None:
        return False
    if accelerator.state.fsdp_plugin.state_dict_type is StateDictType.FULL_STATE_DICT:
        load_optimizer_state(model, optimizer, _file(directory, _OPTIMIZER, number))
    else:
        load_dcp_optimizer(model, optimizer, directory / f"{_OPTIMIZER}_{number}")
    return True


def _whole(config: Any) -> Any:
    return config(offload_to_cpu=True, rank0_only=True)


def _its_model(accelerator: Any, optimizer: torch.optim.Optimizer) -> nn.Module | None:
    models = _models_of(accelerator, optimizer)
    if len(models) > 1:
        raise CheckpointError(
            f"An optimizer steps parameters of {len(models)} models, and its state is saved with one. Make one for "
            "each."
        )
    return models[0] if models else None
