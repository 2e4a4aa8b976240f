"""Attention over full rows, for some heads on each rank: tokens are exchanged for heads before, and back after."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fullshard.core.comm import Split, even_split
from fullshard.core.sequence.rows import KEY, SharedRows
from fullshard.core.transformers_private import attention_function, register_attention
from fullshard.errors import InvariantError

_HEADS, _PLACES = 1, 2
"""Dimensions of queries, keys and values, (B, H, T, D). What attention returns is (B, T, H, D)."""

_REGISTERED = {"sdpa": "heads_of_shared_rows", "eager": "heads_of_shared_rows_eager"}
"""Names of the attention by that which computes it: transformers asks some models about a name with sdpa in it."""


def attention_for(plain: str) -> str:
    """Register the attention of shared rows that is computed by ``plain``, and return its name; any rank.

    ``plain`` is registered, or eager. Its masks are of full rows, (B, 1, 1 or T, S), or the numbers of queries and
    keys, (B, 1, 1, T + S) of whole numbers. A layer's ``bias_of_heads``, if it has one, takes the layer and returns
    what ``plain`` takes for a bias, with heads first; without gradients it gets the bias of all pairs.
    """
    name = _REGISTERED.setdefault(plain, f"heads_of_shared_rows_{plain}")

    def attend(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, Any]:
        compute = attention_function(plain, module)
        rows, bias = kwargs.pop(KEY, None), kwargs.get("position_bias")
        if bias is not None and not bias.dim():
            kwargs["position_bias"] = None
        if rows is None:  # rows that are not shared, as in generation
            return compute(module, query, key, value, attention_mask, **kwargs)
        return _attend(partial(compute, **kwargs), rows, module, (query, key, value), attention_mask)

    register_attention(name, attend, like=plain)
    return name


def is_registered(name: str) -> bool:
    """Return True for a name of :func:`attention_for`."""
    return name in _REGISTERED.values()


def plain_attentions() -> list[str]:
    """Return the attentions that shared rows may be computed by."""
    return list(_REGISTERED)


def _attend(
    compute: Callable[..., Any],
    rows: SharedRows,
    module: Any,
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers' functions do, with this rank's tokens; masks and biases are those of full rows.

    Args:
        compute: Attention of full rows; a bias that it was given is of this rank's heads.
        rows: The rows, inside the stack of the queries.
        module: The attention module.
        states: Queries, (B, H, own tokens, D), and of the keys' stack keys and values, (B, keys' heads, own tokens, D).
        mask: Broadcasts to (B, H, T, S) of full rows, or None.

    Returns:
        (B, own tokens, H, D), and None for the weights.
    """
    comm, name = rows.comm, type(module).__name__
    if not torch.compiler.is_compiling():  # with names, no two blocks would share a graph
        name = rows.names.get(module, name)
    # A decoder's attention that is not causal reads the encoder; torch's kernels rely on that too.
    crosses = "encoder" in rows.lengths and rows.stack == "decoder" and not module.is_causal
    queries, keys = rows.tokens(dim=_PLACES), rows.tokens("encoder" if crosses else None, dim=_PLACES)
    heads = even_split(_HEADS, states[0].shape[_HEADS], comm.size)
    read, repeats = _heads_read(heads, heads.total // states[1].shape[_HEADS], comm.rank)
    changes = ((queries, heads), (keys, read), (keys, read))
    query, key, value = rows.resplit(f"tokens for heads of {name}", states, changes)
    if isinstance(repeats, torch.Tensor):
        key, value = (one.index_select(_HEADS, repeats.to(one.device)) for one in (key, value))
        repeats = 1
    if mask is not None:
        _check_mask(mask, queries.total, keys.total, name)
        mask = mask if mask.shape[_HEADS] == 1 else heads.part(mask, comm.rank)
        mask = mask.to(query.dtype) if mask.is_floating_point() else mask  # autocast changes that of queries
    output, _ = compute(_OwnHeads(module, repeats), query, key, value, mask)
    back = (Split(2, heads.ranges), Split(1, queries.ranges))
    (output,) = rows.resplit(f"heads for tokens of {name}", (output,), (back,))
    return output, None


class _OwnHeads:
    """An attention module as its function sees it for one rank's heads."""

    def __init__(self, module: Any, repeats: int) -> None:
        """Show ``module``, with as many queries' heads to each of keys as this rank has."""
        self._module, self.num_key_value_groups = module, repeats

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _heads_read(heads: Split, group: int, rank: int) -> tuple[Split, int | torch.Tensor]:
    """Return the keys' heads that each rank's queries read, and how often this rank repeats its own.

    Args:
        heads: The queries' heads.
        group: Queries' heads to each of keys.
        rank: This rank.

    Returns:
        The split; ranks that read the same head each get it. And the number of queries' heads to each of keys, or where
        that is not the same for all, the index of the keys' head for each of the queries'.
    """
    read = tuple((start // group, (stop - 1) // group + 1) for start, stop in heads.ranges)
    (start, stop), (first, last) = heads.ranges[rank], read[rank]
    index = [head // group - first for head in range(start, stop)]
    times = len(index) // (last - first)
    if index == [place // times for place in range(len(index))]:
        return Split(_HEADS, read), times
    return Split(_HEADS, read), torch.tensor(index)


def _check_mask(mask: torch.Tensor, queries: int, keys: int, name: str) -> None:
    if mask.dim() == 4 and not mask.is_floating_point() and mask.shape[2:] == (1, queries + keys):
        return
    if mask.dim() != 4 or mask.shape[2] not in (1, queries) or mask.shape[3] != keys:
        raise InvariantError(
            f"attention of shared rows takes masks of full rows, (B, 1, {queries}, {keys}); {name} got "
            f"{tuple(mask.shape)}"
        )


def own_bias(layer: Any, rows: SharedRows) -> torch.Tensor:
    """Return the relative bias of T5's ``layer`` for full rows and this rank's heads, (1, h, T, T).

    Its gradient is that of these heads alone. It is made of each distance's bias, so that nothing of the size T x T is
    in memory but itself. A layer with ``bias_of_heads`` has another: see :func:`attention_for`.
    """
    start, stop = even_split(0, layer.n_heads, rows.comm.size).ranges[rows.comm.rank]
    of_heads = getattr(layer, "bias_of_heads", None)
    if of_heads is not None and torch.is_grad_enabled():
        return of_heads(layer)[start:stop]
    length = rows.lengths[rows.stack or ""]
    device = layer.relative_attention_bias.weight.device
    # The query at ``length - 1`` sees every distance, from 1 - length to length - 1.
    distances = layer.compute_bias(1, 2 * length - 1, device=device, past_seen_tokens=length - 1)[0, :, 0]
    # In fp32 at least, in which the gradients of up to T equal distances are added.
    summed_in = torch.promote_types(distances.dtype, torch.float32)
    by_place = distances[start:stop].to(summed_in).unfold(1, length, 1).flip(1)
    return by_place.to(distances.dtype)[None]
