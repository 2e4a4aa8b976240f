"""fullshard trains PyTorch models that do not fit on one GPU."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fullshard.version import __version__ as __version__

if TYPE_CHECKING:
    from fullshard.library import *  # noqa: F403
    from fullshard.state.saving.dcp import load_dcp as load_dcp, save_dcp as save_dcp

_MODULES = ("compat", "optim")
_DCP = ("load_dcp", "save_dcp")  # by themselves: importing torch's checkpoint module takes a second


def __getattr__(name: str) -> Any:
    """Import the library at the first use of one of its names: the command line alone starts without torch.

    Raises:
        AttributeError: There is no such name.
    """
    if name in _MODULES:
        return import_module(f"fullshard.{name}")
    if name in _DCP:
        return getattr(import_module("fullshard.state.saving.dcp"), name)
    if name.startswith("_") and name != "__all__":
        raise AttributeError(f"module 'fullshard' has no attribute {name!r}")
    library = import_module("fullshard.library")
    globals().setdefault("__all__", sorted([*library.__all__, *_DCP]))
    for public in library.__all__:
        globals().setdefault(public, getattr(library, public))  # keeps a name that was set by the user
    if name not in globals():
        raise AttributeError(f"module 'fullshard' has no attribute {name!r}")
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *import_module("fullshard.library").__all__, *_DCP, *_MODULES})
