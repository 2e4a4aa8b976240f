"""Which part of a row's tokens each rank of a group holds, during one forward."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from fullshard.core.comm import Comm, Split, even_split

KEY = "shared_rows"
"""The keyword by which a model's forward hands :class:`SharedRows` to its blocks and their attention.

No state of the model says so, because blocks may be computed again in backward, after further forwards.
"""

TOKENS = 1
"""Dimension of tokens in hidden states, (B, T, d)."""


class SharedRows:
    """The rows of one forward.

    Attributes:
        comm: The ranks that share them.
        names: Names of modules, for messages.
        lengths: Tokens of a full row in each stack: ``decoder``, and ``encoder`` if the model has one.
        stack: The stack that a block belongs to; None outside of blocks.
        attended: Attention modules that exchanged tokens.
        projected: Tokens whose hidden states the output layer got.
    """

    def __init__(self, comm: Comm, names: Mapping[Any, str], lengths: Mapping[str, int]) -> None:
        """Describe rows, outside of blocks."""
        self.comm, self.names, self.lengths = comm, names, lengths
        self.stack: str | None = None
        self.attended: set[Any] = set()
        self.projected = 0

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
