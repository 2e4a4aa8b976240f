"""What a call of a model with shared rows may not have, and the check that ranks were given the same rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fullshard.core.comm import Comm, settle
from fullshard.core.sequence.rows import SharedRows
from fullshard.core.transformers_private import own_loss
from fullshard.errors import MismatchError, ShardingError

_IGNORED = -100

_REFUSED = {
    "past_key_values": "a cache holds keys of full rows",
    "encoder_outputs": "the encoder computes them of this rank's tokens",
    "encoder_hidden_states": "they would be of full rows",
    "output_attentions": "each rank has some heads",
    "output_hidden_states": "each rank has some tokens",
    "output_router_logits": "the routers' loss needs full rows",
    "logits_to_keep": "they are the last of a full row",
    "shift_labels": "labels are shifted here",
}
"""Arguments of a forward that rows cannot be split with, and why. A model's configuration may set some for all."""

_COMPARED = (
    *("input_ids", "attention_mask", "position_ids", "token_type_ids", "labels"),
    *("decoder_input_ids", "decoder_attention_mask", "inputs_embeds", "decoder_inputs_embeds"),
    "num_items_in_batch",
)


def refuse_arguments(model: Any, given: dict[str, Any]) -> None:
    """Raise if a call with labels has an argument that rows cannot be split with; drop those that ask for nothing.

    Raises:
        ShardingError: It has, or the model has a loss of its own; any rank, before anything is sent.
    """
    if own_loss(model) is not None or given.pop("ignore_index", _IGNORED) != _IGNORED:
        raise ShardingError(
            "Ranks share this model's rows, whose loss is the cross-entropy of their labels other than "
            f"{_IGNORED}; {type(model).__name__} has a loss_function of its own, or the call another ignore_index. "
            "Leave it out, or train without sequence_parallel."
        )
    for name, why in _REFUSED.items():
        value = given.pop(name, None)
        value = getattr(model.config, name, None) if value is None else value
        if value is not None and (not isinstance(value, int) or value):
            raise ShardingError(
                f"Ranks share this model's rows, and {name} cannot be used in a call with labels: {why}. Leave it out, "
                "or call without labels in evaluation, which does not split rows."
            )
    given.pop("use_cache", None)  # nothing reads a cache here


def require_same_batch(comm: Comm, given: Mapping[str, Any]) -> None:
    """Raise unless every rank was given the same rows; every rank calls it.

    Compared are the shapes of tensors, and the values of those of ids and of the labels' number: they are read, so a
    GPU is waited for.

    Raises:
        MismatchError: They differ; on every rank, with the same text.
    """
    numbers = torch.tensor([_described(given.get(name)) for name in _COMPARED])
    mine = numbers.flatten().to(comm.device)
    of_all = mine.new_empty(comm.size * mine.numel())
    comm.announce("comparison of shared rows")
    work = comm.all_gather(of_all, mine)
    work.wait()
    settle(work)
    by_rank = of_all.view(comm.size, len(_COMPARED), -1).tolist()
    for rank, described in enumerate(by_rank):
        for name, here, first in zip(_COMPARED, described, by_rank[0], strict=True):
            if here != first:
                raise MismatchError(
                    f"Ranks that share rows must be given the same batch, and {name} of rank {rank} of the group is "
                    f"{_shown(here, first)}. Use one sampler for all ranks of a group."
                )


def tokens_of(given: Mapping[str, Any], prefix: str) -> int:
    """Return the tokens of a full row in the inputs of a stack, whose arguments' names begin with ``prefix``."""
    ids = given.get(f"{prefix}input_ids")
    return (given[f"{prefix}inputs_embeds"] if ids is None else ids).shape[1]


def require_tokens(rows: SharedRows, labels: torch.Tensor | None) -> None:
    """Raise if a rank would get no token of a row, which modules cannot shape, or if labels do not fit the rows.

    Raises:
        ShardingError: It would, or they do not; on every rank, with the same text.
    """
    if labels is not None and labels.shape[1] != rows.lengths["decoder"]:
        raise ShardingError(
            f"Labels belong to the decoder's tokens: there are {labels.shape[1]} labels a row for "
            f"{rows.lengths['decoder']} tokens. Pass as many."
        )
    for stack, length in rows.lengths.items():
        if length < rows.comm.size:
            raise ShardingError(
                f"{rows.comm.size} ranks share rows of at least {rows.comm.size} tokens; those of the {stack} have "
                f"{length}. Pad rows (labels with -100) to that length, or use a smaller group."
            )


def _described(value: Any) -> list[int]:
    """Return the dimensions, the length of the first two and the last, and a checksum of a tensor's ids."""
    if isinstance(value, int | float):
        value = torch.tensor(int(value))
    if not isinstance(value, torch.Tensor):
        return [-1] * 5
    first = [*value.shape[:2], 0, 0][:2]
    checksum = 0
    if value.dim() <= 2 and not value.is_floating_point():
        flat = value.detach().flatten().to(torch.int64)
        checksum = int((flat * torch.arange(1, len(flat) + 1, device=flat.device)).sum())
    return [value.dim(), *first, value.shape[-1] if value.dim() else 0, checksum]


def _shown(here: list[int], first: list[int]) -> str:
    if here[:-1] == first[:-1]:
        return "another than that of rank 0: their values differ"
    shapes = ["missing" if one[0] < 0 else f"{one[1]} x {one[2]}" for one in (here, first)]
    return f"{shapes[0]}, that of rank 0 {shapes[1]}"
