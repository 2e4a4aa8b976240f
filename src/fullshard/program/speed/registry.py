"""All ways by name, and applying those that a run names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, get_args

from fullshard.errors import ModelError
from fullshard.program.speed.bias import BiasSdpa
from fullshard.program.speed.compiled import Compile
from fullshard.program.speed.flex import Flex
from fullshard.program.speed.liger import Liger
from fullshard.program.speed.t5_attention.way import T5Attention
from fullshard.program.speed.varlen import Varlen
from fullshard.program.speed.way import Facts, Part, Way

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ALL: tuple[Way, ...] = (Liger(), T5Attention(), BiasSdpa(), Flex(), Varlen(), Compile())

WAYS: Mapping[str, Way] = {way.name: way for way in _ALL}
"""Every way by its name."""


def apply_ways(model: PreTrainedModel, names: Sequence[str], facts: Facts) -> None:
    """Apply ways to a model in place, before it is sharded; every rank calls it with the same names.

    ``names`` are of :data:`WAYS`, at most one for each part.

    Raises:
        ModelError: A way does not apply to the model; the text says why.
    """
    parts = get_args(Part)
    for way in sorted((WAYS[name] for name in names), key=lambda way: parts.index(way.part)):
        reason = way.misfit(model, facts)
        if reason is not None:
            raise ModelError(f"speed.ways: {way.name} does not apply: {reason}. Remove it from the run file.")
        way.apply(model, facts)
