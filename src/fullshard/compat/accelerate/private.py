"""Every private name of Accelerate that fullshard uses, in one place, and what breaks when it is gone.

A function raises a ConfigError with the name and the version if the installed Accelerate lacks one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from accelerate.state import AcceleratorState, PartialState

from fullshard.errors import private_name

_PREPARED = "_is_accelerate_prepared"
"""Mark on prepared objects. Gone: what is prepared twice is wrapped twice."""


@dataclass(frozen=True)
class Prepared:
    """Accelerate's own collections of what an Accelerator prepared; gone: ``prepare`` and ``save_state`` fail."""

    models: list[Any]
    optimizers: list[Any]
    schedulers: list[Any]
    dataloaders: list[Any]
    custom_objects: list[Any]  # those of register_for_checkpointing
    save_model_state_pre_hook: Mapping[Any, Callable[..., Any]]
    load_model_state_pre_hook: Mapping[Any, Callable[..., Any]]


def prepared_by(accelerator: Any) -> Prepared:
    """Return the collections of an Accelerator, not copies."""
    names = Prepared.__dataclass_fields__
    return Prepared(**{name: private_name(accelerator, f"_{name}", "accelerate") for name in names})


def prepare_one(accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    """Prepare one object, or leave it to the second pass. Gone: ``prepare`` fails."""
    return private_name(accelerator, "_prepare_one", "accelerate")(*args, **kwargs)


def is_prepared(one: Any) -> bool:
    """Return True if an Accelerator has prepared an object."""
    return getattr(one, _PREPARED, False)


def mark_prepared(one: Any) -> None:
    """Mark an object as prepared."""
    setattr(one, _PREPARED, True)


def shared_states() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what all ``PartialState`` and ``AcceleratorState`` of the process share. Gone: no Accelerator starts."""
    partial, state = (private_name(one, "_shared_state", "accelerate") for one in (PartialState, AcceleratorState))
    return partial, state


def forget_ranks() -> None:
    """Make the next ``PartialState`` join the ranks anew. Gone: as for :func:`shared_states`, after use of the CPU."""
    private_name(PartialState, "_reset_state", "accelerate")()
