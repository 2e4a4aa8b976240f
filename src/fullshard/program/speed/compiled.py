"""Compiled blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fullshard.program.models import blocks_of, compile_blocks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from fullshard.program.speed.way import Facts, Part


class Compile:
    """Compile each block with torch.compile."""

    name = "compile"
    purpose = "torch.compile of each block; evaluation is not compiled"
    part: Part = "blocks"
    exact = False

    def misfit(self, model: PreTrainedModel, facts: Facts) -> str | None:
        """See :meth:`Way.misfit`."""
        return None if blocks_of(model) else f"{type(model).__name__} has no blocks that can be compiled one by one"

    def apply(self, model: PreTrainedModel, facts: Facts) -> None:
        """See :meth:`Way.apply`."""
        compile_blocks(model, dynamic=True)  # lengths of rows vary
