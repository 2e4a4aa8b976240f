"""``fullshard.compat.accelerate`` has every public name and module of Accelerate, with ours in place of some."""

import importlib
import importlib.util
import inspect
import pkgutil
from types import ModuleType

import accelerate
import accelerate.accelerator
import accelerate.data_loader
import accelerate.logging
import accelerate.state
import accelerate.utils
import pytest
from fullshard.compat.accelerate.utils import FullyShardedDataParallelPlugin as by_utils
from fullshard.compat.accelerate.utils.dataclasses import FullyShardedDataParallelPlugin as by_file

import fullshard.compat.accelerate as face
from fullshard.compat.accelerate.accelerator import Accelerator
from fullshard.compat.accelerate.plugin import FullyShardedDataParallelPlugin
from fullshard.compat.accelerate.replaced import REPLACED
from support.releases import as_accelerate_1_15

OURS = "fullshard.compat.accelerate"


def ours_of(value):
    return next((ours for theirs, ours in REPLACED if theirs is value), value)


@pytest.mark.parametrize(
    "module", ["", ".utils", ".state", ".logging", ".data_loader", ".accelerator", ".utils.dataclasses", ".utils.other"]
)
def test_every_public_name_is_accelerates_or_ours(module):
    original, mine = importlib.import_module("accelerate" + module), importlib.import_module(OURS + module)
    for name in (name for name in vars(original) if not name.startswith("_")):
        value = getattr(original, name)
        if isinstance(value, ModuleType) and value.__name__.startswith("accelerate"):
            assert getattr(mine, name) is importlib.import_module(value.__name__.replace("accelerate", OURS, 1))
        else:
            assert getattr(mine, name) is ours_of(value), name


@pytest.mark.parametrize("info", [*pkgutil.iter_modules(accelerate.__path__)], ids=lambda info: info.name)
def test_every_module_is_found(info):
    assert importlib.util.find_spec(f"{OURS}.{info.name}") is not None


def test_what_is_replaced_comes_out_as_ours_from_wherever_it_is_imported():
    assert by_utils is by_file is face.utils.FullyShardedDataParallelPlugin is FullyShardedDataParallelPlugin
    assert face.accelerator.Accelerator is face.Accelerator is Accelerator
    assert face.state.PartialState is face.PartialState
    assert face.__version__ == accelerate.__version__


@as_accelerate_1_15
@pytest.mark.parametrize("theirs", [theirs for theirs, _ in REPLACED], ids=lambda theirs: theirs.__name__)
def test_what_is_replaced_is_called_as_accelerates(theirs):
    mine = inspect.signature(ours_of(theirs)).parameters
    if not any(one.kind is inspect.Parameter.VAR_POSITIONAL for one in mine.values()):
        assert list(mine) == list(inspect.signature(theirs).parameters)


def test_a_star_takes_every_name_of_a_module():
    names = {}
    exec(f"from {OURS}.state import *", names)
    assert names["AcceleratorState"] is accelerate.state.AcceleratorState
    assert names["PartialState"] is face.PartialState


def test_what_accelerate_lacks_is_an_import_error_with_our_name():
    with pytest.raises(ModuleNotFoundError, match=f"{OURS}.nothing"):
        importlib.import_module(f"{OURS}.nothing")
    with pytest.raises(AttributeError, match=f"{OURS}.utils' has no attribute 'nothing'"):
        _ = face.utils.nothing
    assert "set_seed" in dir(face.utils)
    assert "notebook_launcher" in dir(face)
