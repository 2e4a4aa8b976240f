"""Data: reading rows from files, tokenizing them, and the batches of each rank."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fullshard.program.data.every import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """Import everything at the first use of a name: a launcher reads a table's columns without torch.

    Raises:
        AttributeError: There is no such name.
    """
    if not name.startswith("_") and hasattr(every := import_module("fullshard.program.data.every"), name):
        return globals().setdefault(name, getattr(every, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
