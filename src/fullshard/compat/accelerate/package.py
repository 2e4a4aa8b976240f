"""Accelerate's modules under our name: ``fullshard.compat.accelerate.utils`` is ``accelerate.utils``, and so on.

A finder answers for every module of Accelerate for which this package has no file. Such a module has Accelerate's
names, with our objects in place of some (``replaced.REPLACED``).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from accelerate.utils import other

from fullshard.compat.accelerate.replaced import REPLACED, extract_model_from_parallel

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
