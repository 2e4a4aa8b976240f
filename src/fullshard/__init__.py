"""fullshard trains PyTorch models that do not fit on one GPU."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fullshard.version import __version__ as __version__

if TYPE_CHECKING:
    from fullshard.library import *  # noqa: F403

_ROOMS = (
    *("comm", "compat", "data", "engine", "errors", "layout", "models", "optim"),
    *("policy", "saving", "shards", "storage"),
)


def __getattr__(name: str) -> Any:
    """Import the library at the first use of one of its names: the command line alone starts without torch.

    Raises:
        AttributeError: There is no such name.
    """
    if name in _ROOMS:
        return import_module(f"fullshard.{name}")
    if name.startswith("_") and name != "__all__":
        raise AttributeError(f"module 'fullshard' has no attribute {name!r}")
    library = import_module("fullshard.library")
    for one in ("__all__", *library.__all__):
        globals().setdefault(one, getattr(library, one))  # keeps a name that was set by the user
    if name not in globals():
        raise AttributeError(f"module 'fullshard' has no attribute {name!r}")
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *import_module("fullshard.library").__all__, *_ROOMS})
