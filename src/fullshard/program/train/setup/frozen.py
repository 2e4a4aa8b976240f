"""Freezing by name: ``model.freeze`` and ``model.train``."""

from __future__ import annotations

import difflib
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch import nn

from fullshard.errors import ConfigError
from fullshard.program.config import RunConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def freeze(model: PreTrainedModel, config: RunConfig) -> None:
    """Freeze the parameters that the settings name, in place; any rank, before sharding.

    A tied parameter is named by each of its names. A parameter that the model itself freezes stays so.

    Raises:
        ConfigError: A pattern matches no parameter, or nothing is left to train, or not the rows of new tokens.
    """
    chosen = {id(param) for found in _matches(model, config).values() for param in found}
    for param in model.parameters() if config.model.freeze or config.model.train else ():
        if (id(param) in chosen) == bool(config.model.freeze):
            param.requires_grad = False
    if not any(param.requires_grad for param in model.parameters()):
        raise ConfigError(f"model.{_option(config)} leaves no parameter to train. Change its patterns.")
    if config.model.new_tokens and not model.get_input_embeddings().weight.requires_grad:
        raise ConfigError(
            f"model.{_option(config)} leaves the table of embeddings untrained, and so the rows of model.new_tokens. A "
            "tied table is named by each of its names. Change the patterns, or leave new_tokens out."
        )


def frozen_notes(model: nn.Module, config: RunConfig) -> tuple[str, ...]:
    """Return lines for the user on what is frozen, of a model that is not sharded yet; any rank."""
    found = _matches(model, config)
    if not found:
        return ()
    option, total = _option(config), sum(param.numel() for param in model.parameters())
    trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
    first = {id(param): name for name, param in model.named_parameters()}
    lines = []
    for pattern, params in found.items():
        line = (
            f"model.{option}: {pattern} names {len(params):,} tensors of {sum(p.numel() for p in params):,} parameters"
        )
        tied = [first[id(param)] for param in params if not fnmatchcase(first[id(param)], pattern)]
        lines.append(f"{line}, also {', '.join(tied)}, which is tied to one of them" if tied else line)
    return (*lines, f"{trained:,} of {total:,} parameters are trained ({trained / total:.3%})")


def _option(config: RunConfig) -> str:
    return "freeze" if config.model.freeze else "train"


def _matches(model: nn.Module, config: RunConfig) -> dict[str, list[nn.Parameter]]:
    """Return the parameters that each pattern names."""
    named = list(model.named_parameters(remove_duplicate=False))
    found = {}
    for pattern in config.model.freeze or config.model.train:
        params = {id(param): param for name, param in named if fnmatchcase(name, pattern)}
        if not params:
            raise ConfigError(f"model.{_option(config)}: {pattern} matches no parameter.{_hint(model, pattern)}")
        found[pattern] = list(params.values())
    return found


def _hint(model: nn.Module, pattern: str) -> str:
    """Return names that are near a pattern: of modules, all of whose parameters it may mean, and of parameters."""
    modules = [f"{name}.*" for name, module in model.named_modules() if name and any(True for _ in module.parameters())]
    names = [*modules, *(name for name, _ in model.named_parameters(remove_duplicate=False))]
    near = [name for name in names if name in (f"{pattern}.*", f"{pattern.rstrip('.')}.*")]
    near = (
        near or difflib.get_close_matches(pattern, names, n=3) or [name for name in names if name.count(".") == 1][:5]
    )
    return f" Did you mean {' or '.join(near)}?"
