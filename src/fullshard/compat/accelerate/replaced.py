"""Accelerate's modules under our name: ``fullshard.compat.accelerate.utils`` is ``accelerate.utils``, and so on.

A finder answers for every module of Accelerate for which this package has no file. Such a module has Accelerate's
names, with our objects in place of some (:data:`REPLACED`): those for models that fullshard sharded.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import accelerate
import torch
from accelerate import utils
from accelerate.state import PartialState as _PartialState
from accelerate.utils import other
from torch import nn

from fullshard.compat.accelerate.accelerator import Accelerator
from fullshard.compat.accelerate.plugin import FullyShardedDataParallelPlugin
from fullshard.compat.accelerate.prepare import unwrapped
from fullshard.compat.accelerate.saving import State
from fullshard.errors import ConfigError


class PartialState(_PartialState):
    """Accelerate's, which on a machine without a GPU joins torchrun's ranks; there each would be a single process."""

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:  # noqa: FBT001, FBT002 (Accelerate's signature)
        """Join the ranks, unless an earlier state of this process did."""
        super().__init__(cpu or not torch.cuda.is_available(), **kwargs)


_extract = utils.extract_model_from_parallel


def extract_model_from_parallel(model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """Return the module inside the wrappers; it stays sharded."""
    return _extract(unwrapped(model), *args, **kwargs)


def _one_of_state(name: str) -> Callable[..., None]:
    """Return our function in place of Accelerate's ``{save,load}_fsdp_{model,optimizer}``, with its arguments.

    It writes or reads one model, or the optimizer of one, as ``save_state`` and ``load_state`` do; every rank calls it.
    With ``adapter_only``, these are only the trained parameters and buffers of a PEFT model, under the model's names;
    frozen ones that are not in the file keep their values.
    """
    theirs = getattr(utils, name)
    verb, _, what = name.split("_")

    @functools.wraps(theirs)
    def call(*args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(theirs).bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        if not given.get("use_dcp", True):  # earlier versions have no such argument
            raise ConfigError(
                "fullshard saves and loads models and optimizers in torch's distributed format or as one file; got "
                "use_dcp=False. Leave it out."
            )
        directory = Path(given["output_dir" if verb == "save" else "input_dir"])
        directory.mkdir(parents=True, exist_ok=True)
        state = State(given["accelerator"], directory)
        state.kind = given["fsdp_plugin"].state_dict_type
        state.adapter_only = given.get("adapter_only", False)
        number = given[f"{what}_index"]
        if what == "model":
            getattr(state, f"{verb}_model")(unwrapped(given["model"]), number)
        else:
            optimizer = getattr(given["optimizer"], "optimizer", given["optimizer"])
            getattr(state, f"{verb}_optimizer")(unwrapped(given["model"]), optimizer, number)

    return call


save_fsdp_model, load_fsdp_model = _one_of_state("save_fsdp_model"), _one_of_state("load_fsdp_model")
save_fsdp_optimizer, load_fsdp_optimizer = _one_of_state("save_fsdp_optimizer"), _one_of_state("load_fsdp_optimizer")

REPLACED: list[tuple[Any, Any]] = [
    (accelerate.Accelerator, Accelerator),
    (accelerate.FullyShardedDataParallelPlugin, FullyShardedDataParallelPlugin),
    (_PartialState, PartialState),
    *(
        (getattr(utils, ours.__name__), ours)
        for ours in (
            extract_model_from_parallel,
            save_fsdp_model,
            load_fsdp_model,
            save_fsdp_optimizer,
            load_fsdp_optimizer,
        )
    ),
]
"""Objects of Accelerate, compared by identity, each with its replacement."""


OURS = "fullshard.compat.accelerate"
THEIRS = "accelerate"


def name_of(module: str, name: str) -> Any:
    """Return the value of ``name`` in our module that replaces Accelerate's ``module``.

    Raises:
        AttributeError: Accelerate's module has no such name.
    """
    try:
        value = getattr(sys.modules[module], name)
    except AttributeError:
        raise AttributeError(f"module {OURS + module.removeprefix(THEIRS)!r} has no attribute {name!r}") from None
    if isinstance(value, ModuleType) and value.__name__.startswith(f"{THEIRS}."):
        return importlib.import_module(OURS + value.__name__.removeprefix(THEIRS))
    return next((ours for theirs, ours in REPLACED if theirs is value), value)


class _Finder(MetaPathFinder, Loader):
    """Finds and makes our modules in place of Accelerate's."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Return the spec of a module that Accelerate has and this package has no file of."""
        if not fullname.startswith(f"{OURS}."):
            return None
        theirs = importlib.util.find_spec(THEIRS + fullname.removeprefix(OURS))
        if theirs is None:
            return None
        return ModuleSpec(fullname, self, is_package=theirs.submodule_search_locations is not None)

    def exec_module(self, module: ModuleType) -> None:
        """Import Accelerate's module and take over its names."""
        name = THEIRS + module.__name__.removeprefix(OURS)
        original = importlib.import_module(name)
        module.__doc__ = original.__doc__
        for key, value in list(vars(original).items()):
            if key == "__all__" or not (key.startswith("__") or isinstance(value, ModuleType)):
                setattr(module, key, name_of(name, key))
        # Modules, and names that Accelerate's module gets later.
        vars(module)["__getattr__"] = functools.partial(name_of, name)


def install() -> None:
    """Install the finder last, so that the files of this package come first; call it once."""
    sys.meta_path.append(_Finder())
    # The one module that both have a file of: other names of Accelerate's.
    vars(sys.modules[f"{OURS}.accelerator"])["__getattr__"] = functools.partial(name_of, f"{THEIRS}.accelerator")
    # Accelerate's is_peft_model looks this up at each call; it would not see the model inside our wrapper.
    other.extract_model_from_parallel = extract_model_from_parallel
