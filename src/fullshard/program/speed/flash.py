"""Flash attention of an installed package, by transformers' names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.utils.import_utils import is_flash_attn_2_available, is_flash_attn_3_available, is_kernels_available

from fullshard.core.transformers_private import attentions
from fullshard.errors import ModelError
from fullshard.program.models import base_of
from fullshard.program.models.packing import PackedRows, mask_packed_rows, sliding_window
from fullshard.program.speed.varlen import HALF, rows_misfit

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from fullshard.program.speed.way import Facts, Part

_HOPPER = 9  # major version of the capability that flash attention 3 is for

_DROPS_LENGTHS = ("stablelm",)  # a test looks at every packable type

_DROPS_WINDOW = ("phimoe", "qwen2_moe")  # their layers' window is only in the mask, which flash attention does not read


class Flash:
    """Compute attention by transformers' flash attention."""

    name = "flash"
    purpose = "causal models' attention by flash attention 3 or 2, if a package has it"
    part: Part = "attention"
    exact = False

    def misfit(self, model: PreTrainedModel, facts: Facts) -> str | None:
        """See :meth:`Way.misfit`."""
        base = base_of(model)
        if "flash_attention_2" not in attentions(type(base)):
            return f"transformers' {type(base).__name__} has no flash attention"
        if facts.dtype not in HALF or facts.device.type != "cuda":
            computed = f"{str(facts.dtype).removeprefix('torch.')} on {facts.device.type}"
            return f"flash attention computes in bfloat16 and float16 on CUDA, and this run computes in {computed}"
        if _installed() is None:
            return "none of the packages flash-attn-3, flash-attn and kernels is installed (pip install kernels)"
        if base.config.is_encoder_decoder:
            return (
                "transformers' flash attention takes the padding of sources for that of targets, and "
                f"{base.config.model_type} has an encoder"
            )
        window = sliding_window(base.config)
        if window is not None and base.config.model_type in _DROPS_WINDOW:
            return f"transformers' {base.config.model_type} does not tell flash attention its window of {window} tokens"
        if facts.packing and base.config.model_type in _DROPS_LENGTHS:
            return f"transformers' {base.config.model_type} does not hand the lengths of packed rows to flash attention"
        return rows_misfit(model, facts) if facts.packing else None

    def apply(self, model: PreTrainedModel, facts: Facts) -> None:
        """See :meth:`Way.apply`."""
        name = _installed() or "flash_attention_2"
        try:
            base_of(model).set_attn_implementation(name)
        except (ImportError, ValueError) as error:  # such as a kernel that has to be downloaded, offline
            raise ModelError(f"speed.ways: flash does not apply: transformers refuses {name}: {error}") from error
        if facts.packing:
            mask_packed_rows(model, _lengths)


def _installed() -> str | None:
    if is_flash_attn_3_available() and torch.cuda.get_device_capability()[0] == _HOPPER:
        return "flash_attention_3"
    return "flash_attention_2" if is_flash_attn_2_available() or is_kernels_available() else None


def _lengths(*_: Any, rows: PackedRows, **__: Any) -> dict[str, Any]:
    """Return what transformers takes for packed rows in place of a mask."""
    lengths = {f"cu_seq_lens_{side}": rows.starts for side in "qk"} | {
        f"max_length_{side}": rows.longest for side in "qk"
    }
    return {"attention_mask": None, **lengths}
