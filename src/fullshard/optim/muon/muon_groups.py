"""Which parameters Muon steps and which AdamW, and the parameter groups of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fullshard.errors import ConfigError
from fullshard.optim.shards import meta_of, require_model


def muon_groups(
    model: nn.Module,
    *,
    weight_decay: float = 0.1,
    adamw_lr: float | None = None,
    adamw_weight_decay: float | None = None,
) -> list[dict[str, Any]]:
    """Parameter groups for :class:`~fullshard.optim.muon.muon.Muon`: hidden matrices to Muon, all else to AdamW.

    Works before and after ``fully_shard``: it goes by the unsharded shapes. Every rank calls it; no communication.

    To AdamW go

    - embeddings: weights of ``nn.Embedding``, also where they are another module's weight too (tied);
    - the output head: what ``model.get_output_embeddings()`` says, as transformers' models do; else the last
      ``nn.Linear`` whose weight has the shape of an embedding's;
    - everything that has not two dimensions: norms, biases, convolutions, stacked experts.

    Norms, biases and single numbers (fewer than two dimensions) are not decayed.

    Args:
        model: Any module.
        weight_decay: Of the matrices that Muon steps.
        adamw_lr: Learning rate of AdamW's groups; None: the optimizer's ``lr``, which fits with
            ``adjust_lr_fn="match_rms_adamw"``.
        adamw_weight_decay: Of what AdamW steps and is decayed; None: ``weight_decay``.

    Returns:
        At most three groups, in this order: Muon's, AdamW's with weight decay, AdamW's without; none is empty.

    Raises:
        ConfigError: It is no model.
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
    """The ids of the weights that are no hidden matrices."""
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    says: Callable[[], nn.Module | None] = getattr(model, "get_output_embeddings", lambda: None)
    head = says()
    if head is None:
        shapes = {(one.num_embeddings, one.embedding_dim) for one in embeddings}
        linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
        head = next((one for one in reversed(linear) if (one.out_features, one.in_features) in shapes), None)
    apart = [*embeddings, head]
    return {id(module.weight) for module in apart if isinstance(getattr(module, "weight", None), nn.Parameter)}  # type: ignore[union-attr]


def split_group(
    group: dict[str, Any], muon_options: dict[str, Any], adamw_options: dict[str, Any]
) -> list[dict[str, Any]]:
    """A parameter group as given by the user, as groups that one of the two optimizers steps; the same on every rank.

    Args:
        group: ``params``, a list; perhaps ``use_muon``; options of either optimizer, and any other keys, which both
            parts get.
        muon_options: Muon's, with their defaults.
        adamw_options: AdamW's.

    Returns:
        One group, or two, Muon's first, where ``use_muon`` is not said and there are parameters for both.

    Raises:
        ConfigError: Muon was asked to step what is no matrix, or an option does not belong to the optimizer.
    """
    kinds = ((True, muon_options, adamw_options), (False, adamw_options, muon_options))
    if "use_muon" in group:
        use_muon, options, others = kinds[not group["use_muon"]]
        if use_muon:
            _require_matrices(group)
        if foreign := sorted(group.keys() & others.keys() - options.keys()):
            raise ConfigError(
                f"A parameter group with use_muon={use_muon} has options of the other optimizer: {', '.join(foreign)}. "
                f"Leave them out; the options of this one are {', '.join(options)}."
            )
        return [{**options, **group, "use_muon": use_muon}]
    if "eps" in group:
        raise ConfigError(
            "eps means one thing to Muon and another to AdamW. Say use_muon=True or use_muon=False in a parameter "
            "group that has an eps of its own."
        )
    parts = []
    for use_muon, options, others in kinds:
        kept = {key: value for key, value in group.items() if key in options or key not in others}
        params = [entry for entry in group["params"] if _is_matrix(entry) == use_muon]
        parts.append({**options, **kept, "params": params, "use_muon": use_muon})
    return [part for part in parts if part["params"]] or parts[1:]


def _tensor_of(entry: Any) -> Any:
    """The parameter of an entry of ``params``, which may be ``(name, parameter)``."""
    return entry[1] if isinstance(entry, tuple) else entry


def _is_matrix(entry: Any) -> bool:
    tensor = _tensor_of(entry)
    # What is no tensor goes where torch refuses it.
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
