"""Parameter groups with and without weight decay, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from fullshard.core.layout.names import plain_name
from fullshard.core.optim.shards import by_comm, meta_of, require_model
from fullshard.errors import ConfigError

NoDecay = Callable[[str, nn.Parameter], bool] | Sequence[str]


def decay_groups(model: nn.Module, weight_decay: float, *, no_decay: NoDecay | None = None) -> list[dict[str, Any]]:
    """Return a model's trainable parameters as two groups, with and without weight decay.

    The groups are the same before and after ``fully_shard``, and on every rank, even where a rank holds no rows of a
    parameter::

        optimizer = torch.optim.AdamW(decay_groups(model, 0.1), lr=1e-3)
        optimizer = torch.optim.AdamW(decay_groups(model, 0.1, no_decay=["*norm*", "embed.weight"]), lr=1e-3)

    Args:
        model: Sharded or not; every rank calls it. Ranks communicate only to compare the results of a function.
        weight_decay: Weight decay of the first group.
        no_decay: Parameters without decay: names or shell patterns (``*``, ``?``, ``[…]``; any name of a tied
            parameter), or a function of the name and the parameter. After ``fully_shard`` the function receives this
            rank's rows: decide by ``param.ndim`` or ``param.shard_meta.global_shape``, never by ``param.shape``. Names
            are those without the wrappers of compiling, checkpointing and torch's FSDP. None: parameters with fewer
            than two dimensions unsharded (biases and norms).

    Returns:
        Groups for an optimizer, ``{"params": […], "weight_decay": …}``, the one with decay first, parameters in the
        model's order; empty groups are left out.

    Raises:
        ConfigError: ``model`` is not a module, ``weight_decay`` is negative, a pattern matches no parameter, no
            parameter is trainable, or a function returns different results on different ranks; the latter on every
            rank.
    """
    require_model(model, "decay_groups")
    if not weight_decay >= 0:
        raise ConfigError(f"weight_decay must be at least 0; got {weight_decay}.")
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(plain_name(name))
    excluded = _chooser(names, no_decay)
    groups: list[dict[str, Any]] = [{"params": [], "weight_decay": weight_decay}, {"params": [], "weight_decay": 0.0}]
    for param in names:
        if param.requires_grad:
            groups[excluded(param)]["params"].append(param)
    if callable(no_decay):
        _require_agreement(names, excluded)
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise ConfigError("The model has no trainable parameters to group.")
    return groups


def _require_agreement(names: dict[nn.Parameter, list[str]], excluded: Callable[[nn.Parameter], bool]) -> None:
    """Compare the choices of a function over ranks.

    Raises:
        ConfigError: They differ; on every rank.
    """
    for comm, params in by_comm(names):
        by_rank = comm.all_gather_object([names[param][0] for param in params if excluded(param)])
        for rank, chosen in enumerate(by_rank):
            apart = sorted(set(chosen) ^ set(by_rank[0]))
            if apart:
                more = f" and {len(apart) - 1} more" if len(apart) > 1 else ""
                raise ConfigError(
                    f"no_decay returned different results for {apart[0]}{more} on rank 0 and on rank {rank}: after "
                    "fully_shard a rank sees its own rows only. Decide by the name, by param.ndim or by "
                    "param.shard_meta.global_shape."
                )


def _chooser(names: dict[nn.Parameter, list[str]], no_decay: NoDecay | None) -> Callable[[nn.Parameter], bool]:
    """Return the function that is true of parameters without decay.

    Raises:
        ConfigError: A pattern matches no parameter.
    """
    if no_decay is None:
        return lambda param: len(meta_of(param).global_shape) < 2
    if callable(no_decay):
        predicate = no_decay
        return lambda param: bool(predicate(names[param][0], param))
    patterns = [no_decay] if isinstance(no_decay, str) else list(no_decay)
    every = [name for of_param in names.values() for name in of_param]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in every):
            near = get_close_matches(pattern, every, n=3, cutoff=0.0)
            inside = f"; {f'*{pattern}*'!r} would match" if any(pattern in name for name in every) else ""
            raise ConfigError(
                f"no_decay pattern {pattern!r} matches none of the model's {len(every)} parameter names{inside}; the "
                f"nearest names are {', '.join(near)}. A pattern must match the full name, with * for any part of it. "
                "Remove the pattern, or leave no_decay out: then vectors (biases, norms) do not decay."
            )
    return lambda param: any(fnmatchcase(name, pattern) for name in names[param] for pattern in patterns)
