"""The run file's ``speed`` section: the ways in which the model's own code is run."""

from __future__ import annotations

from typing import Annotated, Literal, Self, get_args

from pydantic import model_validator

from fullshard.program.config.section import ConfigSection, Option

AttentionWay = Literal["t5_attention", "bias_sdpa", "flex", "varlen"]
KernelsWay = Literal["liger"]
BlocksWay = Literal["compile"]
WayName = AttentionWay | KernelsWay | BlocksWay


class SpeedConfig(ConfigSection):
    """Ways to run the model's own code faster."""

    ways: Annotated[Literal["auto"] | tuple[WayName, ...], Option("same", before=())] = "auto"
    """[Ways](#ways) to use, at most one of each kind. auto: on GPUs t5_attention for T5's family, and compile where the
    planned steps repay it; on CPUs none; a resumed run keeps the choice. Attention: t5_attention, bias_sdpa, flex,
    varlen; kernels: liger; blocks: compile, which is Hugging Face's training.torch_compile. Empty: the model computes
    as in transformers."""

    @model_validator(mode="after")
    def _one_of_each_kind(self) -> Self:
        if self.ways == "auto":
            return self
        for kind in (AttentionWay, KernelsWay, BlocksWay):
            found = [name for name in self.ways if name in get_args(kind)]
            if len(found) > 1:
                raise ValueError(f"ways has {' and '.join(found)}, which change the same part of the model; give one")
        return self
