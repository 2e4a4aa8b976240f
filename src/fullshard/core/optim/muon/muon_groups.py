"""Parameter groups for Muon and AdamW."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fullshard.core.optim.shards import meta_of, require_model
from fullshard.errors import ConfigError


def muon_groups(
    model: nn.Module,
    *,
    weight_decay: float = 0.1,
    adamw_lr: float | None = None,
    adamw_weight_decay: float | None = None,
) -> list[dict[str, Any]]:
    """Return parameter groups for ``Muon``: hidden matrices to Muon, the rest to AdamW.

    The choice uses unsharded shapes, so it is the same before and after ``fully_shard``. Every rank calls it; no
    communication. AdamW's are

    - embeddings: weights of ``nn.Embedding``, also when tied to another module;
    - the output head: ``model.get_output_embeddings()`` as transformers' models have it; else the last ``nn.Linear``
      whose weight has the shape of an embedding's;
    - parameters without exactly two dimensions: norms, biases, convolutions, stacked experts.

    Norms, biases and single numbers (fewer than two dimensions) are not decayed.

    Args:
        model: Any module.
        weight_decay: Of the matrices that Muon steps.
        adamw_lr: Learning rate of AdamW's groups; None: the optimizer's ``lr``, which fits with
            ``adjust_lr_fn="match_rms_adamw"``.
        adamw_weight_decay: Of AdamW's parameters that decay; None: ``weight_decay``.

    Returns:
        At most three groups, in this order: Muon's, AdamW's with weight decay, AdamW's without; none is empty.

    Raises:
        ConfigError: ``model`` is not a module.
    """
    require_model(model, "muon_groups")
    apart = _embeddings_and_head(model)
    hidden, decayed, plain = [], [], []
    for param in model.parameters():
        dims = len(meta_of(param).global_shape)
        (plain if dims < 2 else hidden if dims == 2 and id(param) not in apart else decayed).append(param)
    lr = {} if adamw_lr is None else {"lr": adamw_lr}
    decay = weight_decay if adamw_weight_decay is None else adamw_weight_decay
    groups = [
        {"params": hidden, "use_muon": True, "weight_decay": weight_decay},
        {"params": decayed, "use_muon": False, "weight_decay": decay, **lr},
        {"params": plain, "use_muon": False, "weight_decay": 0.0, **lr},
    ]
    return [group for group in groups if group["params"]]


def _embeddings_and_head(model: nn.Module) -> set[int]:
    """Return the ids of the weights of embeddings and of the output head."""
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    get_head: Callable[[], nn.Module | None] = getattr(model, "get_output_embeddings", lambda: None)
    head = get_head()
    if head is None:
        shapes = {(one.num_embeddings, one.embedding_dim) for one in embeddings}
        linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
        head = next((one for one in reversed(linear) if (one.out_features, one.in_features) in shapes), None)
    apart = [*embeddings, head]
    return {id(module.weight) for module in apart if isinstance(getattr(module, "weight", None), nn.Parameter)}  # type: ignore[union-attr]


def split_group(
    group: dict[str, Any], muon_options: dict[str, Any], adamw_options: dict[str, Any]
) -> list[dict[str, Any]]:
    """Split a user's parameter group into groups of which each is stepped by one of the two optimizers.

    Args:
        group: ``params``, a list; ``use_muon``, optional; options of either optimizer, and any other keys, which both
            parts get.
        muon_options: Muon's options with their defaults.
        adamw_options: AdamW's options with their defaults.

    Returns:
        One group, or two, Muon's first, if ``use_muon`` is not set and there are parameters for both.

    Raises:
        ConfigError: ``use_muon`` is set for a parameter that is not a matrix, or an option belongs to the other
            optimizer.
    """
    kinds = ((True, muon_options, adamw_options), (False, adamw_options, muon_options))
    if "use_muon" in group:
        use_muon, options, others = kinds[not group["use_muon"]]
        if use_muon:
            _require_matrices(group)
        if foreign := sorted(group.keys() & others.keys() - options.keys()):
            raise ConfigError(
                f"A parameter group with use_muon={use_muon} has options of the other optimizer: "
                f"{', '.join(foreign)}. Remove them; the options of this one are {', '.join(options)}."
            )
        return [{**options, **group, "use_muon": use_muon}]
    if "eps" in group:
        raise ConfigError(
            "eps has different meanings in Muon and AdamW. Set use_muon=True or use_muon=False in a parameter group "
            "that sets eps."
        )
    parts = []
    for use_muon, options, others in kinds:
        kept = {key: value for key, value in group.items() if key in options or key not in others}
        params = [entry for entry in group["params"] if _is_matrix(entry) == use_muon]
        parts.append({**options, **kept, "params": params, "use_muon": use_muon})
    return [part for part in parts if part["params"]] or parts[1:]


def _tensor_of(entry: Any) -> Any:
    """Return the parameter of an entry of ``params``, which may be ``(name, parameter)``."""
    return entry[1] if isinstance(entry, tuple) else entry


def _is_matrix(entry: Any) -> bool:
    tensor = _tensor_of(entry)
    # An entry that is not a tensor stays in AdamW's group, where torch refuses it.
    return isinstance(tensor, torch.Tensor) and len(meta_of(tensor).global_shape) == 2 and not tensor.is_complex()  # type: ignore[arg-type]


def _require_matrices(group: dict[str, Any]) -> None:
    for number, entry in enumerate(group["params"]):
        if not _is_matrix(entry):
            meta = meta_of(_tensor_of(entry))
            name = entry[0] if isinstance(entry, tuple) else meta.name or f"number {number} of its group"
            raise ConfigError(
                f"Muon steps real matrices, of two dimensions when unsharded; parameter {name} has shape "
                f"{meta.global_shape}. Put it in a group with use_muon=False, or leave use_muon out."
            )
