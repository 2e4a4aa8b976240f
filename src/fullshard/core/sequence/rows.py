"""Which part of a row's tokens each rank of a group holds, during one forward."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from fullshard.core.comm import Resplit, Split, even_split

KEY = "shared_rows"
"""The keyword by which a model's forward hands :class:`SharedRows` to its blocks and their attention.

No state of the model says so, because blocks may be computed again in backward, after further forwards.
"""

TOKENS = 1
"""Dimension of tokens in hidden states, (B, T, d)."""


class SharedRows:
    """The rows of one forward.

    Attributes:
        resplit: The exchanges of the ranks that share them.
        comm: These ranks.
        names: Names of modules, for messages.
        lengths: Tokens of a full row in each stack: ``decoder``, and ``encoder`` if the model has one.
        stack: The stack that a block belongs to; None outside of blocks.
        begun: Exchanges before the forward.
        projected: Tokens whose hidden states the output layer got.
    """

    def __init__(self, resplit: Resplit, names: Mapping[Any, str], lengths: Mapping[str, int]) -> None:
        """Describe rows, outside of blocks."""
        self.resplit, self.names, self.lengths = resplit, names, lengths
        self.comm, self.begun = resplit.comm, resplit.count
        self.stack: str | None = None
        self.projected = 0
        self._added: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def inside(self, stack: str) -> SharedRows:
        """Return the same rows for the blocks of ``stack``."""
        rows = copy.copy(self)
        rows.stack = stack
        return rows

    def tokens(self, stack: str | None = None, dim: int = TOKENS) -> Split:
        """Return how the tokens of a stack, by default the blocks' own, are split along ``dim``."""
        return even_split(dim, self.lengths[stack or self.stack or ""], self.comm.size)

    def own(self, tensor: torch.Tensor, stack: str | None = None, dim: int = TOKENS) -> torch.Tensor:
        """Return a view of this rank's part of ``tensor``, whose dimension ``dim`` are a full row's tokens."""
        return self.tokens(stack, dim).part(tensor, self.comm.rank)

    def added(self, mask: Any, dtype: torch.dtype) -> Any:
        """Return what a boolean mask adds to scores, 0 or -inf, the same for every block; other values as they are."""
        # Each call of torch's attention would make one, of the size of tokens squared, and keep it until backward.
        if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool or mask.dim() != 4:
            return mask
        kept = self._added.get(id(mask))
        if kept is None:
            added = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, float("-inf"))
            kept = self._added[id(mask)] = (mask, added)  # with the mask, or another could get its id
        return kept[1]
